"""Transfer plans read only the range at hand."""

from kvtide.core.coordinator import Coordinator
from kvtide.core.groups import FullAttention
from kvtide.core.jobs import NULL_BLOCK_ID, unpack_block_ids
from kvtide.core.transfer import plan_load, plan_store
from kvtide.testing.requests import RecordingRequest, fake_hashes

COORDINATOR = Coordinator((FullAttention(16),), 16)


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
    assert list(unpack_block_ids(planned.job.block_ids[0])) == list(range(938, 1000))
    assert planned.pinned_block_ids == list(range(938, 1000))


def test_null_entries_are_neither_pinned_nor_sources() -> None:
    """A block that the engine has freed already is skipped, not misread."""
    view = RecordingRequest(hashes=fake_hashes(3), tables=[[0, 0, 7]])
    planned = plan_store(view, COORDINATOR, job_id=1, prefix_id=0, start_token=0, end_token=48)
    assert planned.pinned_block_ids == [7]
    assert list(unpack_block_ids(planned.job.block_ids[0])) == [0, 0, 7]


def test_a_load_covers_the_hit_beyond_what_the_engine_holds() -> None:
    """Chunks 2 to 4 of a request whose first two are local."""
    hashes = fake_hashes(6)
    view = RecordingRequest(hashes=hashes)
    job = plan_load(view, COORDINATOR, job_id=3, prefix_id=1, num_computed_tokens=32, hit_token=80)
    assert (job.request_id, job.start_token, job.end_token) == ("r", 32, 80)
    assert job.first_chunks == (2,)
    assert list(unpack_block_ids(job.block_ids[0])) == [3, 4, 5]
    assert list(job.hashes) == hashes[2:5]
    assert view.hash_reads == [range(2, 5)]


def test_a_target_that_somebody_may_read_is_replaced_by_the_null_block() -> None:
    """The worker then reports the load as failed instead of overwriting another's blocks."""
    view = RecordingRequest(hashes=fake_hashes(3))
    view.cached_blocks.add(2)
    job = plan_load(view, COORDINATOR, job_id=1, prefix_id=0, num_computed_tokens=0, hit_token=48)
    assert list(unpack_block_ids(job.block_ids[0])) == [1, NULL_BLOCK_ID, 3]


def test_a_missing_target_is_a_null_block() -> None:
    """A table shorter than the hit must not shift or shorten the load."""
    view = RecordingRequest(hashes=fake_hashes(3), tables=[[4, 5]])
    job = plan_load(view, COORDINATOR, job_id=1, prefix_id=0, num_computed_tokens=0, hit_token=48)
    assert list(unpack_block_ids(job.block_ids[0])) == [4, 5, NULL_BLOCK_ID]
