"""Staging copies what was computed, holds blocks no longer than it must, and asks no store."""

from __future__ import annotations

import threading

import pytest

from kvtide.core.jobs import BoundaryPut, StepPlan
from kvtide.core.topology import WHOLE, ParallelSizes, RankRole, Split, StoreShare, Topology
from kvtide.runtime import staging
from kvtide.runtime.service import KEYS_PER_BURST
from kvtide.runtime.tags import TAG_BYTES, verify
from kvtide.runtime.values import TaggedValues
from kvtide.stores.memory_buffer import ByteArray
from tests.runtime_harness import WAIT_S, Rank, hashes_of


def test_copy_waits_for_the_engines_work() -> None:
    """Blocks are read only after the writes that were issued before the fence are done."""
    rank = Rank(threaded=True)
    rank.fill("old", [3])
    new = bytes(range(100))
    rank.blocks.issue(0, 3, new)
    job = rank.store_job("a", 0, 4, [3])
    rank.step(job, run=False)
    assert rank.blocks.reads == []
    assert rank.ends(job) == []
    rank.blocks.complete()
    rank.collect_until(lambda: rank.ends(job) == ["stored"])
    assert rank.scripted.values[rank.key("a", 0)][:100] == new
    rank.worker.close()


def test_blocks_reused_after_the_staged_report_do_not_change_what_is_stored() -> None:
    """Once staged, the blocks are the engine's again: what it writes there is not stored."""
    rank = Rank()
    contents = rank.fill("a", [1, 2])
    job = rank.store_job("a", 0, 8, [1, 2])
    rank.step(job, run=False)
    rank.worker.staging.run_pending()
    rank.collect()
    assert rank.report.staged == {job.job_id: 1}
    rank.fill("b", [1, 2])
    rank.worker.run_pending()
    rank.collect()
    assert rank.ends(job) == ["stored"]
    assert [rank.scripted.values[rank.key("a", i)][:100] for i in (0, 1)] == contents


def test_a_fence_that_fails_fails_its_jobs() -> None:
    """Where the engine's work is not known to be done, its blocks are not stored."""
    rank = Rank()

    class BrokenFence:
        def wait(self) -> None:
            raise RuntimeError("device lost")

    rank.blocks.record = BrokenFence  # type: ignore[assignment,method-assign]
    jobs = [rank.store_job("a", 0, 4, [1]), rank.store_job("b", 0, 4, [2])]
    rank.step(*jobs)
    assert [rank.ends(job) for job in jobs] == [["failed"], ["failed"]]
    assert rank.scripted.values == {}
    rank.worker.check_idle()


def test_what_nobody_fenced_is_fenced_at_the_next_step() -> None:
    """Some runners never say that saving is due; the next step then does."""
    rank = Rank()
    job = rank.store_job("a", 0, 4, [1])
    rank.worker.take_over(StepPlan(stores=(job,)))
    rank.worker.run_pending()
    rank.collect()
    assert rank.ends(job) == []
    rank.worker.take_over(StepPlan())
    rank.worker.run_pending()
    rank.collect()
    assert rank.ends(job) == ["stored"]


def test_null_blocks_are_skipped_and_do_not_fail_the_job() -> None:
    """Block 0 is nobody's memory: its chunk is not stored, the others are."""
    rank = Rank()
    rank.fill("a", [7])
    job = rank.store_job("a", 0, 12, [0, 0, 7])
    rank.step(job)
    assert rank.ends(job) == ["stored"]
    assert list(rank.scripted.values) == [rank.key("a", 2)]
    assert rank.blocks.reads == [(0, (7,))]


@pytest.mark.parametrize("block_ids", [[0, 0], []])
def test_a_job_with_nothing_to_store_ends_all_the_same(block_ids: list[int]) -> None:
    """Nothing to do is a success, reported once, without a store call."""
    rank = Rank()
    job = rank.store_job("a", 0, 8, block_ids)
    rank.step(job)
    assert rank.ends(job) == ["stored"]
    assert rank.report.staged == {job.job_id: 1}
    assert rank.scripted.calls == []
    rank.worker.check_idle()


def test_each_group_is_stored_from_its_own_first_chunk() -> None:
    """Chunks between nulls keep their names, whatever lies before them in the job."""
    rank = Rank(groups=[(4, 100), (4, 50)])
    rank.step(rank.store_job("a", 8, 20, [1, 0, 3], [4, 5, 6]))
    assert rank.blocks.reads == [(0, (1, 3)), (1, (4, 5, 6))]
    assert set(rank.scripted.values) == {
        *(rank.key("a", chunk) for chunk in (2, 4)),
        *(rank.key("a", chunk, 1) for chunk in (2, 3, 4)),
    }


def test_a_boundary_job_stores_each_block_under_the_hash_it_is_given() -> None:
    """A state of group 1 and a cut chunk of group 0, both at token 6 of blocks of 4 tokens."""
    rank = Rank(groups=[(4, 100), (4, 50)], hash_block_size=2)
    job = rank.boundary_job("a", BoundaryPut(0, 1, 6, 3), BoundaryPut(1, 1, 6, 7))
    rank.step(job)
    assert rank.ends(job) == ["stored"]
    assert rank.blocks.reads == [(0, (3,)), (1, (7,))]
    name = hashes_of("a", 3)[2]
    assert set(rank.scripted.values) == {parts[0].key_for(name) for parts in rank.databases[0]}


def test_ranks_with_equal_bytes_share_the_chunks_by_absolute_index() -> None:
    """Whatever range a job starts at, a chunk belongs to the same one of the ranks."""
    stored: list[str] = []
    for put_step_rank in (0, 1, 2):
        share = StoreShare(put_step=3, put_step_rank=put_step_rank)
        rank = Rank(role=RankRole(put_step_rank, 3, ((WHOLE,),), (share,)))
        rank.step(rank.store_job("a", 4, 28, [1, 2, 3, 4, 5, 6]))
        assert list(rank.scripted.values) == [
            rank.key("a", chunk) for chunk in range(1, 7) if chunk % 3 == put_step_rank
        ]
        stored += rank.scripted.values
    assert len(stored) == len(set(stored)) == 6


def test_each_part_of_a_block_is_a_value_under_its_own_key() -> None:
    """Two shards of heads on one rank, which has no layers of the other group."""
    splits = (Split(2), Split(1, stages=(1,)))
    rank = Rank(groups=[(4, 100), (4, 50)], role=Topology(ParallelSizes(pp_size=2), splits).role(0))
    contents = rank.fill("a", [1, 2])
    job = rank.store_job("a", 0, 8, [1, 2], [1, 2])
    put = rank.boundary_job("b", BoundaryPut(0, 0, 4, 1), BoundaryPut(1, 0, 4, 1))
    rank.step(job, put)
    assert (rank.ends(job), rank.ends(put)) == (["stored"], ["stored"])
    assert len(rank.scripted.values) == 6
    assert rank.scripted.orders == [[0, 0, 1, 1, 0, 0]]
    for chunk, content in enumerate(contents):
        for number, half in enumerate((content[:100], content[100:])):
            assert rank.scripted.values[rank.key("a", chunk, 0, number)][:100] == half


def test_rows_of_a_group_are_read_at_once() -> None:
    """One vectorised copy per group where staging has a run of rows for it."""
    rank = Rank(groups=[(4, 100), (8, 5000)])
    rank.step(rank.store_job("a", 0, 16, [4, 3, 2, 1], [9, 8]))
    assert rank.blocks.reads == [(0, (4, 3, 2, 1)), (1, (9, 8))]


def test_fragmented_staging_stores_the_same() -> None:
    """Where the rows of a group lie apart, every chunk still gets its own block's bytes."""
    rank = Rank(staging_bytes=6 * 4096)
    slab = rank.worker._send_slab
    (rows,) = slab.reserve([(4096, 6)], timeout_s=0) or [[]]
    slab.release(rows)
    singles = slab.reserve([(4096, 1)] * 6, timeout_s=0) or []
    for index in (0, 2, 3, 5):
        slab.release(singles[index])
    contents = rank.fill("a", [1, 2, 3, 4])
    rank.step(rank.store_job("a", 0, 16, [1, 2, 3, 4]))
    assert len(rank.blocks.reads) == 3
    assert [rank.scripted.values[rank.key("a", i)][:100] for i in range(4)] == contents


def test_every_stored_value_carries_its_tag() -> None:
    """What is in the store proves itself under its own key."""
    rank = Rank(groups=[(4, 100), (8, 4096)])
    rank.fill("a", [1, 2])
    rank.fill("a", [3], 1)
    rank.step(rank.store_job("a", 0, 8, [1, 2], [3]))
    assert len(rank.scripted.values) == 3
    for key, value in rank.scripted.values.items():
        assert verify(memoryview(value), key, len(value) - TAG_BYTES)


def test_no_room_refuses_the_job_before_reading_blocks() -> None:
    """A refused job gives its blocks back at once; nothing was copied for nothing."""
    rank = Rank(staging_bytes=2 * 4096)
    first, second = rank.store_job("a", 0, 8, [1, 2]), rank.store_job("b", 0, 4, [3])
    rank.step(first, second)
    assert rank.ends(first) == ["stored"]
    assert rank.ends(second) == ["refused"]
    assert rank.report.staged == {first.job_id: 1}
    assert rank.blocks.reads == [(0, (1, 2))]
    rank.worker.check_idle()


def test_a_job_larger_than_staging_is_refused_without_waiting() -> None:
    """No amount of waiting would make room."""
    rank = Rank(staging_bytes=2 * 4096, stage_wait_s=1000.0)
    job = rank.store_job("a", 0, 12, [1, 2, 3])
    rank.step(job)
    assert rank.ends(job) == ["refused"]


def test_a_full_put_queue_refuses_before_reading_blocks() -> None:
    """The queue is bounded in jobs too."""
    rank = Rank(max_queued_puts=1)
    first, second = rank.store_job("a", 0, 4, [1]), rank.store_job("b", 0, 4, [2])
    rank.step(first, second)
    assert rank.ends(first) == ["stored"]
    assert rank.ends(second) == ["refused"]
    assert rank.blocks.reads == [(0, (1,))]
    rank.worker.check_idle()


@pytest.mark.parametrize("fault", ["read", "prefix", "hashes"])
def test_a_fault_in_staging_ends_the_job(fault: str) -> None:
    """Whatever goes wrong, the job fails, its rows are free, and the next job works."""

    def broken(*_args: object) -> None:
        raise RuntimeError("broken")

    rank = Rank()
    read = rank.blocks.read
    if fault == "read":
        rank.blocks.read = broken  # type: ignore[method-assign]
    job = rank.store_job("a", 0, 8, [1, 2], prefix_id=99 if fault == "prefix" else 0)
    if fault == "hashes":
        job = rank.store_job("a", 0, 8, [1, 2, 3])
    rank.step(job)
    assert rank.ends(job) == ["failed"]
    rank.worker.check_idle()
    rank.blocks.read = read  # type: ignore[method-assign]
    after = rank.store_job("b", 0, 4, [1])
    rank.step(after)
    assert rank.ends(after) == ["stored"]


def test_recording_that_fails_costs_the_jobs_not_the_step() -> None:
    """The engine's step goes on where its own fence cannot be recorded."""
    rank = Rank()

    def broken() -> None:
        raise RuntimeError("no events left")

    rank.blocks.record = broken  # type: ignore[assignment,method-assign]
    job = rank.store_job("a", 0, 4, [1])
    rank.step(job)
    assert rank.ends(job) == ["failed"]
    rank.worker.check_idle()


def test_a_job_that_expired_before_its_fence_is_never_read() -> None:
    """Its blocks belong to the engine again."""
    rank = Rank()
    job = rank.store_job("a", 0, 4, [1])
    rank.step(job, run=False)
    rank.collect(rank.clock.now_s + 30.0)
    assert rank.ends(job) == ["failed"]
    rank.worker.run_pending()
    rank.collect()
    assert rank.ends(job) == ["failed"]
    assert rank.blocks.reads == []
    rank.worker.check_idle()


def test_a_job_is_not_ended_while_its_blocks_are_read() -> None:
    """A deadline that passes during the copy waits for it: the blocks are still in use."""
    rank = Rank(threaded=True)
    reading, go_on = threading.Event(), threading.Event()
    read = rank.blocks.read

    def slow_read(*args: object) -> None:
        reading.set()
        assert go_on.wait(WAIT_S)
        read(*args)  # type: ignore[arg-type]

    rank.blocks.read = slow_read  # type: ignore[method-assign]
    job = rank.store_job("a", 0, 4, [1])
    rank.step(job, run=False)
    assert reading.wait(WAIT_S)
    rank.collect(rank.clock.now_s + 100.0)
    assert rank.ends(job) == []
    go_on.set()
    rank.collect_until(lambda: bool(rank.ends(job)))
    rank.worker.close()
    rank.worker.check_idle()


def test_few_values_are_made_between_two_chances_for_the_engine_to_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """I8: each costs some microseconds of Python, and a job may have hundreds."""
    rank = Rank(num_blocks=300, staging_bytes=300 * 4096)
    bursts = [0]
    monkeypatch.setattr(staging, "let_others_run", lambda: bursts.append(0))
    seal = TaggedValues.seal

    def counted_seal(values: TaggedValues, row: ByteArray, key: str, payload_bytes: int) -> None:
        bursts[-1] += 1
        seal(values, row, key, payload_bytes)

    monkeypatch.setattr(TaggedValues, "seal", counted_seal)
    num_chunks = 2 * KEYS_PER_BURST + 5
    jobs = [
        rank.store_job(name, 0, 4 * num_chunks, list(range(1, num_chunks + 1))) for name in "ab"
    ]
    rank.step(*jobs)
    assert [rank.ends(job) for job in jobs] == [["stored"], ["stored"]]
    assert bursts == [KEYS_PER_BURST, KEYS_PER_BURST, 5, KEYS_PER_BURST, KEYS_PER_BURST, 5, 0]
