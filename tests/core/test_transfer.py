"""Transfer plans read only the range at hand."""

from kvtide.core.coordinator import Coordinator
from kvtide.core.groups import FullAttention, Mamba, SlidingWindow
from kvtide.core.jobs import NULL_BLOCK_ID, BoundaryJob, BoundaryPut, StoreJob, unpack_ints
from kvtide.core.transfer import HandOff, plan_boundary, plan_load, plan_store
from kvtide.testing.requests import RecordingRequest, fake_hashes

COORDINATOR = Coordinator((FullAttention(16),), 16)
CUT = Coordinator((FullAttention(16), SlidingWindow(8, window=10), Mamba(16)), 4, partial_hits=True)
"""Requests of this model may resume at every fourth token."""


def test_a_store_reads_only_its_own_hashes_and_block_table_entries() -> None:
    """Nothing below the scheduled offset is touched, however long the request is."""
    hashes = fake_hashes(1000)
    view = RecordingRequest(num_tokens=16000, hashes=hashes)
    planned = plan_store(
        view, COORDINATOR, job_id=1, prefix_id=0, start_token=15000 // 16 * 16, end_token=15984
    )
    assert view.hash_reads == [range(937, 999)]
    assert view.block_reads == [(0, 937, 999)]
    assert list(planned.job.hashes) == hashes[937:999]
    assert list(unpack_ints(planned.job.block_ids[0])) == list(range(938, 1000))
    assert planned.pinned_block_ids == list(range(938, 1000))


def test_null_entries_are_neither_pinned_nor_sources() -> None:
    """A block that the engine has freed already is skipped, not misread."""
    view = RecordingRequest(hashes=fake_hashes(3), tables=[[0, 0, 7]])
    planned = plan_store(view, COORDINATOR, job_id=1, prefix_id=0, start_token=0, end_token=48)
    assert planned.pinned_block_ids == [7]
    assert list(unpack_ints(planned.job.block_ids[0])) == [0, 0, 7]


def test_a_load_covers_the_hit_beyond_what_the_engine_holds() -> None:
    """Chunks 2 to 4 of a request whose first two are local."""
    hashes = fake_hashes(6)
    view = RecordingRequest(hashes=hashes)
    job = plan_load(view, COORDINATOR, job_id=3, prefix_id=1, num_computed_tokens=32, hit_token=80)
    assert (job.request_id, job.start_token, job.end_token) == ("r", 32, 80)
    assert job.first_chunks == (2,)
    assert list(unpack_ints(job.block_ids[0])) == [3, 4, 5]
    assert list(job.hashes) == hashes[2:5]
    assert view.hash_reads == [range(2, 5)]


def test_a_target_that_somebody_may_read_is_replaced_by_the_null_block() -> None:
    """The worker then reports the load as failed instead of overwriting another's blocks."""
    view = RecordingRequest(hashes=fake_hashes(3))
    view.cached_blocks.add(2)
    job = plan_load(view, COORDINATOR, job_id=1, prefix_id=0, num_computed_tokens=0, hit_token=48)
    assert list(unpack_ints(job.block_ids[0])) == [1, NULL_BLOCK_ID, 3]


def test_a_missing_target_is_a_null_block() -> None:
    """A table shorter than the hit must not shift or shorten the load."""
    view = RecordingRequest(hashes=fake_hashes(3), tables=[[4, 5]])
    job = plan_load(view, COORDINATOR, job_id=1, prefix_id=0, num_computed_tokens=0, hit_token=48)
    assert list(unpack_ints(job.block_ids[0])) == [4, 5, NULL_BLOCK_ID]


def test_a_store_of_a_window_leaves_out_what_no_boundary_needs() -> None:
    """Units of 32 tokens, a window of 10: of four chunks the last two; no state."""
    groups = (FullAttention(32), SlidingWindow(8, window=10), Mamba(32))
    coordinator = Coordinator(groups, 8)
    view = RecordingRequest(hashes=fake_hashes(8), tables=[[1, 2], list(range(11, 19)), [30, 31]])
    planned = plan_store(view, coordinator, job_id=1, prefix_id=0, start_token=32, end_token=64)
    assert isinstance(planned.job, StoreJob)
    assert [list(unpack_ints(ids)) for ids in planned.job.block_ids] == [[2], [17, 18], []]
    assert planned.job.first_chunks == (1, 6, 0)
    assert planned.pinned_block_ids == [2, 17, 18]
    assert view.block_reads == [(0, 1, 2), (1, 6, 8)]


def test_a_store_has_null_for_what_lies_between_two_boundaries() -> None:
    """Two units in one job: the gap in the middle is neither read from nor pinned."""
    coordinator = Coordinator((FullAttention(32), SlidingWindow(8, window=10)), 8)
    view = RecordingRequest(hashes=fake_hashes(8), tables=[[1, 2], list(range(11, 19))])
    planned = plan_store(view, coordinator, job_id=1, prefix_id=0, start_token=0, end_token=64)
    assert isinstance(planned.job, StoreJob)
    assert list(unpack_ints(planned.job.block_ids[1])) == [13, 14, 0, 0, 17, 18]
    assert planned.job.first_chunks == (0, 2)
    assert planned.num_null == 0


def test_a_boundary_is_its_states_and_what_it_cuts() -> None:
    """At 28 of 4-token hashes: the state there, the cut block of each other group, and the window.

    The window needs tokens 19 to 27, of which those from 24 on lie past the last whole unit, 16.
    """
    hashes = fake_hashes(8)
    view = RecordingRequest(hashes=hashes, tables=[[1, 2], [0, 0, 13, 14], [0, 99]])
    planned = plan_boundary(
        view,
        CUT,
        [HandOff(2, 30, 28)],
        job_id=5,
        prefix_id=1,
        boundary=28,
        certain_span=(0, 28),
    )
    assert isinstance(planned.job, BoundaryJob)
    assert planned.job.puts == (
        BoundaryPut(2, 1, 28, 30),
        BoundaryPut(0, 1, 28, 2),
        BoundaryPut(1, 2, 24, 13),
        BoundaryPut(1, 3, 28, 14),
    )
    assert planned.job.hashes == (hashes[6], hashes[6], hashes[5], hashes[6])
    assert planned.pinned_block_ids == [30, 2, 13, 14]
    assert all(group_id != 2 for group_id, _, _ in view.block_reads)


def test_the_null_block_is_no_source_of_a_boundary() -> None:
    """Neither a state that is offered in it nor a block that its window has left behind."""
    view = RecordingRequest(hashes=fake_hashes(8), tables=[[1, 2], [0, 0, 0, 14], []])
    planned = plan_boundary(
        view,
        CUT,
        [HandOff(2, NULL_BLOCK_ID, 28)],
        job_id=5,
        prefix_id=1,
        boundary=28,
        certain_span=(0, 28),
    )
    assert planned.pinned_block_ids == [2, 14]
    assert planned.num_null == 2


def test_a_boundary_takes_of_its_proof_what_has_become_certain_since() -> None:
    """First the state, and once the proof is computed that alone."""
    coordinator = Coordinator((Mamba(16), FullAttention(16, proof_tokens=4)), 4, partial_hits=True)
    view = RecordingRequest(hashes=fake_hashes(5), tables=[[9], [1, 2]])
    found = []
    for states, span in (([HandOff(0, 9, 16)], (0, 16)), ([], (16, 20))):
        planned = plan_boundary(
            view, coordinator, states, job_id=1, prefix_id=0, boundary=16, certain_span=span
        )
        assert isinstance(planned.job, BoundaryJob)
        found.append(planned.job.puts)
    assert found == [(BoundaryPut(0, 0, 16, 9),), (BoundaryPut(1, 1, 20, 2),)]


def test_a_load_of_a_mixed_model_covers_what_each_group_requires() -> None:
    """Up to 28: both blocks of attention, the window's last two, and the one state."""
    hashes = fake_hashes(8)
    view = RecordingRequest(hashes=hashes, tables=[[1, 2], [0, 0, 13, 14], [0, 9]])
    job = plan_load(
        view,
        CUT,
        job_id=1,
        prefix_id=0,
        num_computed_tokens=0,
        hit_token=28,
        tail_tokens=(32, 28, 28),
    )
    assert job.first_chunks == (0, 2, 1)
    assert [list(unpack_ints(ids)) for ids in job.block_ids] == [[1, 2], [13, 14], [9]]
    assert job.tail_tokens == (32, 28, 28)
    assert list(job.hashes) == hashes
