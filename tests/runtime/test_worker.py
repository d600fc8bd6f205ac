"""A rank as the engine sees it: plans in, finished loads and reports out, and a way to stop."""

from __future__ import annotations

import threading

import pytest

from kvtide.core.jobs import JobReport, StepPlan
from kvtide.errors import StoreLostError
from kvtide.runtime.prefixes import PrefixDatabases
from kvtide.runtime.worker import PoolWorker
from kvtide.stores.memory import MemoryStore
from kvtide.testing.blocks import FakeBlocks, byte_layout
from tests.runtime_harness import WAIT_S, Hang, Rank


def threads_of_the_pool() -> set[threading.Thread]:
    """Kvtide's threads that are alive."""
    return {t for t in threading.enumerate() if t.name.startswith("kvtide-")}


def test_bytes_loaded_equal_bytes_stored() -> None:
    """What was stored comes back into other blocks, byte for byte."""
    rank = Rank()
    contents = rank.fill("a", [5, 9, 7])
    job = rank.store_job("a", 0, 12, [5, 9, 7])
    rank.step(job)
    assert rank.ends(job) == ["stored"]
    assert rank.report.staged == {job.job_id: 1}
    assert rank.report.counters["saved_bytes"] > 0
    rank.step(rank.load_job("a", 0, 12, [20, 22, 21]))
    assert (rank.finished, rank.failed) == (["a"], [])
    assert [rank.blocks.content(0, block) for block in (20, 22, 21)] == contents
    rank.worker.check_idle()


def test_works_with_threads_and_a_real_store() -> None:
    """The same through three threads, with many jobs at once."""
    rank = Rank(threaded=True, store=MemoryStore(), staging_bytes=256 * 4096)
    names = [f"r{i}" for i in range(12)]
    contents = {}
    jobs = []
    for index, name in enumerate(names):
        blocks = list(range(1 + 5 * index, 6 + 5 * index))
        contents[name] = rank.fill(name, blocks)
        jobs.append(rank.store_job(name, 0, 20, blocks))
    rank.step(*jobs, run=False)
    rank.collect_until(lambda: all(rank.ends(job) for job in jobs))
    assert {end for job in jobs for end in rank.ends(job)} == {"stored"}
    for data in rank.blocks.data:
        data[:] = 0
    rank.step(
        *(
            rank.load_job(name, 0, 20, range(1 + 5 * i, 6 + 5 * i))
            for i, name in enumerate(reversed(names))
        ),
        run=False,
    )
    rank.collect_until(lambda: len(rank.finished) == len(names))
    assert rank.failed == []
    for index, name in enumerate(reversed(names)):
        blocks = range(1 + 5 * index, 6 + 5 * index)
        assert [rank.blocks.content(0, block) for block in blocks] == contents[name]
    rank.worker.close()
    rank.worker.check_idle()


def test_slabs_are_adopted_and_registered_before_any_job() -> None:
    """The engine can pin them, and the store knows them, from the start."""
    rank = Rank()
    assert [len(buffer) for buffer in rank.blocks.adopted] == [64 * 4096, 16 * 4096]
    assert [region.num_bytes for region in rank.scripted.regions] == [64 * 4096, 16 * 4096]


def test_a_store_that_refuses_the_memory_is_an_error_at_start() -> None:
    """Not a line in a log, and not a surprise at the first put."""

    class Refusing(MemoryStore):
        def register(self, region: object) -> None:
            raise StoreLostError("no such memory")

    with pytest.raises(StoreLostError):
        PoolWorker(FakeBlocks(byte_layout((4, 100)), 4), Refusing(), PrefixDatabases([4], 4))


def test_what_another_rank_has_made_whole_is_bad_no_more() -> None:
    """Also where the step brings no job."""
    rank = Rank()
    rank.worker.bad_keys.add(["a", "b"])
    rank.worker.take_over(StepPlan(mended_keys=("a", "unknown")))
    assert rank.worker.bad_keys.among(["a", "b"]) == {"b"}


def test_an_empty_step_does_nothing() -> None:
    """Most steps bring nothing: no thread is started, nothing is reported."""
    before = threads_of_the_pool()
    rank = Rank(threaded=True)
    for _ in range(3):
        rank.worker.take_over(StepPlan())
        rank.worker.fence()
        results = rank.worker.poll()
        assert (results.finished_loads, results.failed_loads) == (set(), set())
        assert rank.worker.take_report() is None
    assert threads_of_the_pool() <= before
    rank.worker.close()


def test_a_failed_load_is_reported_no_later_than_finished() -> None:
    """Whoever polls and then takes the report knows where every finished load failed."""
    rank = Rank()
    rank.step(rank.load_job("a", 0, 8, [1, 2]), run=False)
    rank.worker.run_pending()
    results = rank.worker.poll()
    report = rank.worker.take_report() or JobReport()
    assert results.failed_loads == {"a"}
    assert report.failed_loads == {"a": 0}


def test_repr_and_usage_show_what_is_open() -> None:
    """Somebody who looks at a stuck engine sees where the jobs are."""
    rank = Rank()
    rank.step(rank.store_job("a", 0, 8, [1, 2]), run=False)
    rank.worker.staging.run_pending()
    assert "stores=1" in repr(rank.worker)
    assert "to_put=1" in repr(rank.worker)
    with pytest.raises(AssertionError, match="not idle"):
        rank.worker.check_idle()


def test_close_stores_what_is_staged() -> None:
    """Leaving loses nothing that the store still takes in time."""
    rank = Rank(threaded=True)
    fenced, unfenced = rank.store_job("a", 0, 4, [1]), rank.store_job("b", 0, 4, [2])
    rank.step(fenced, run=False)
    rank.worker.take_over(StepPlan(stores=(unfenced,)))
    rank.worker.close()
    rank.collect()
    assert (rank.ends(fenced), rank.ends(unfenced)) == (["stored"], ["stored"])
    assert rank.scripted.num_closes == 1
    rank.worker.close()
    assert rank.scripted.num_closes == 1


@pytest.mark.parametrize("method", ["exists", "put"])
def test_close_leaves_a_store_that_hangs(method: str) -> None:
    """It returns in bounded time, ends every job, and does not close the store under the call."""
    rank = Rank(threaded=True, flush_timeout_s=0.2)
    hang = Hang()
    rank.scripted.hooks[method] = hang
    jobs = [rank.store_job("a", 0, 4, [1]), rank.store_job("b", 0, 4, [2])]
    for job in jobs:
        rank.step(job, run=False)
        assert hang.entered.wait(WAIT_S)
    rank.worker.close()
    rank.collect()
    assert all(len(rank.ends(job)) == 1 for job in jobs)
    assert rank.scripted.num_closes == 0
    hang.released.set()
    rank.collect_until(lambda: not +rank.worker.usage())
    assert all(len(rank.ends(job)) == 1 for job in jobs)


def test_close_ends_a_load_that_hangs() -> None:
    """Loads are reported too, queued ones and the one in the call."""
    rank = Rank(threaded=True, flush_timeout_s=0.2)
    hang = Hang()
    rank.scripted.hooks["get"] = hang
    rank.step(rank.load_job("a", 0, 4, [1]), rank.load_job("b", 0, 4, [2]), run=False)
    assert hang.entered.wait(WAIT_S)
    rank.worker.close()
    rank.collect()
    assert sorted(rank.failed) == ["a", "b"]
    assert rank.scripted.num_closes == 0
    hang.released.set()


def test_jobs_after_close_end_at_once() -> None:
    """A late step is answered, not queued for threads that are gone."""
    rank = Rank(threaded=True)
    rank.worker.close()
    job = rank.store_job("a", 0, 4, [1])
    rank.step(job, rank.load_job("b", 0, 4, [2]), run=False)
    rank.worker.fence()
    rank.collect()
    assert rank.ends(job) == ["failed"]
    assert rank.failed == ["b"]
    rank.worker.check_idle()


def test_no_thread_outlives_close() -> None:
    """After any history the threads are gone."""
    before = threads_of_the_pool()
    rank = Rank(threaded=True)
    job = rank.store_job("a", 0, 4, [1])
    rank.step(job, rank.load_job("b", 0, 4, [2]), run=False)
    rank.collect_until(lambda: bool(rank.ends(job)) and rank.finished == ["b"])
    assert {thread.name for thread in threads_of_the_pool() - before} == {
        "kvtide-staging",
        "kvtide-sender",
        "kvtide-receiver",
    }
    rank.worker.close()
    assert threads_of_the_pool() <= before


def test_a_worker_that_was_idle_still_works() -> None:
    """Threads wait without a limit: nothing is declared dead for having had nothing to do."""
    rank = Rank(threaded=True)
    first = rank.store_job("a", 0, 4, [1])
    rank.step(first, run=False)
    rank.collect_until(lambda: rank.ends(first) == ["stored"])
    rank.clock.now_s += 1e6
    rank.collect()
    second = rank.load_job("a", 0, 4, [2])
    rank.step(second, run=False)
    rank.collect_until(lambda: rank.finished == ["a"])
    assert rank.failed == []
    rank.worker.close()


def test_a_step_never_calls_the_store() -> None:
    """Plans, fences, polls and reports are safe on the engine's thread while the store hangs."""
    rank = Rank(threaded=True)
    callers: set[str] = set()

    def note(_keys: object) -> None:
        callers.add(threading.current_thread().name)

    for method in ("exists", "put", "get", "remove"):
        rank.scripted.hooks[method] = note
    job = rank.store_job("a", 0, 4, [1])
    rank.step(job, rank.load_job("b", 0, 4, [2]), run=False)
    rank.collect_until(lambda: bool(rank.ends(job)) and rank.finished == ["b"])
    assert callers <= {"kvtide-sender", "kvtide-receiver"}
    rank.worker.close()


def test_reports_add_up_over_many_steps() -> None:
    """Nothing is reported twice, and nothing is lost between two reports."""
    rank = Rank()
    jobs = [rank.store_job(f"r{i}", 0, 4, [1 + i]) for i in range(20)]
    for job in jobs:
        rank.step(job, run=False)
        if job.job_id % 3 == 0:
            rank.worker.run_pending()
    rank.worker.run_pending()
    rank.collect()
    assert all(rank.ends(job) == ["stored"] for job in jobs)
    assert all(count == 1 for count in rank.report.staged.values())
    assert rank.report.counters["stored_jobs"] == 20
