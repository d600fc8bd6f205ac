"""The sender asks once, puts what is missing, and ends every job once, whatever the store does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvtide.core.jobs import StoreJob
from kvtide.errors import StoreClosedError, StoreLostError
from kvtide.stores.base import Status
from tests.runtime_harness import WAIT_S, Hang, Rank


def raising(error: Exception) -> Callable[[Sequence[str]], Any]:
    """A hook that raises."""

    def hook(_keys: Sequence[str]) -> Any:
        raise error

    return hook


def test_jobs_share_one_check_and_one_put() -> None:
    """What is queued goes in one batch, with the chunks' absolute indexes as its order."""
    rank = Rank()
    jobs = [rank.store_job("a", 8, 16, [1, 2]), rank.store_job("b", 0, 4, [3])]
    rank.step(*jobs)
    assert [method for method, _ in rank.scripted.calls] == ["exists", "put"]
    assert rank.scripted.orders == [[2, 3, 0]]
    assert [rank.ends(job) for job in jobs] == [["stored"], ["stored"]]


def test_only_what_is_missing_is_put() -> None:
    """Chunks another engine stored meanwhile cost a check and no bytes."""
    rank = Rank()
    rank.step(rank.store_job("a", 0, 8, [1, 2]))
    rank.scripted.calls.clear()
    before = rank.report.counters["saved_bytes"]
    job = rank.store_job("a", 0, 12, [1, 2, 3])
    rank.step(job)
    assert rank.scripted.keys_of("put") == [rank.key("a", 2)]
    assert rank.ends(job) == ["stored"]
    assert rank.report.counters["existing_chunks"] == 2
    assert rank.report.counters["saved_chunks"] == 3
    assert rank.report.counters["saved_bytes"] - before == 132


def test_a_store_that_finds_out_by_itself_is_not_asked() -> None:
    """Where a put of a present key moves nothing, one call does; nothing is known to be there."""
    rank = Rank()
    rank.scripted.checks_before_put = False
    jobs = [rank.store_job("a", 0, 8, [1, 2]), rank.store_job("a", 0, 12, [1, 2, 3])]
    rank.step(jobs[0])
    rank.step(jobs[1])
    assert [method for method, _ in rank.scripted.calls] == ["put", "put"]
    assert [rank.ends(job) for job in jobs] == [["stored"], ["stored"]]
    assert rank.report.counters["existing_chunks"] == 0
    assert rank.report.counters["saved_chunks"] == 5


def test_what_the_store_counted_is_reported_once() -> None:
    """Its counters travel with the rank's own."""
    rank = Rank()
    rank.scripted.counters["store_outages"] = 2
    rank.step(rank.store_job("a", 0, 4, [1]))
    rank.collect()
    assert rank.report.counters["store_outages"] == 2


def test_a_store_that_cannot_tell_its_counters_costs_no_report() -> None:
    """The rank's own counters are reported all the same."""
    rank = Rank()

    def take_counters() -> Counter[str]:
        raise RuntimeError("bug")

    rank.scripted.take_counters = take_counters  # type: ignore[method-assign]
    job = rank.store_job("a", 0, 4, [1])
    rank.step(job)
    assert rank.ends(job) == ["stored"]
    assert rank.report.counters["saved_chunks"] == 1


def test_all_present_ends_stored_without_a_put() -> None:
    """A job whose chunks all exist ends like any other."""
    rank = Rank()
    rank.step(rank.store_job("a", 0, 8, [1, 2]))
    rank.scripted.calls.clear()
    again = rank.store_job("a", 0, 8, [4, 5])
    rank.step(again)
    assert [method for method, _ in rank.scripted.calls] == ["exists"]
    assert rank.ends(again) == ["stored"]


def test_a_chunk_of_two_jobs_is_asked_and_put_once() -> None:
    """Requests that share a prefix in one step do not send it twice."""
    rank = Rank()
    jobs = [rank.store_job("a", 0, 8, [1, 2]), rank.store_job("a", 0, 8, [3, 4])]
    rank.step(*jobs)
    assert len(rank.scripted.keys_of("exists")) == len(rank.scripted.keys_of("put")) == 2
    assert [rank.ends(job) for job in jobs] == [["stored"], ["stored"]]


def test_batches_are_bounded_in_keys_and_bytes() -> None:
    """No call carries more than its bounds, except one value that is larger than them."""
    rank = Rank(max_batch_keys=3)
    jobs = [rank.store_job(name, 0, 8, [1, 2]) for name in "abcd"]
    jobs.append(rank.store_job("e", 0, 28, [1, 2, 3, 4, 5, 6, 7]))
    rank.step(*jobs)
    assert max(len(keys) for _, keys in rank.scripted.calls) == 3
    assert all(rank.ends(job) == ["stored"] for job in jobs)
    small = Rank(max_batch_bytes=1)
    small.step(small.store_job("a", 0, 8, [1, 2]))
    assert [len(keys) for method, keys in small.scripted.calls if method == "put"] == [1, 1]


FAULTS: list[tuple[str, Callable[[Sequence[str]], Any], str]] = [
    ("exists", raising(StoreLostError("gone")), "lost"),
    ("exists", raising(StoreClosedError("closed")), "lost"),
    ("exists", raising(RuntimeError("bug")), "failed"),
    ("exists", lambda keys: [False] * (len(keys) - 1), "failed"),
    ("exists", lambda keys: [], "failed"),
    ("exists", lambda keys: [True] * (len(keys) + 1), "failed"),
    ("put", raising(StoreLostError("gone")), "lost"),
    ("put", raising(RuntimeError("bug")), "failed"),
    ("put", lambda keys: [Status.OK] * (len(keys) - 1), "failed"),
    ("put", lambda keys: [], "failed"),
    ("put", lambda keys: [Status.OK, Status.NO_SPACE], "no_space"),
    ("put", lambda keys: [Status.FAILED, Status.OK], "failed"),
    ("put", lambda keys: [Status.FAILED, Status.NO_SPACE], "no_space"),
    ("put", lambda keys: [Status.MISSING, Status.OK], "failed"),
]


@pytest.mark.parametrize("method, hook, end", FAULTS)
def test_every_fault_ends_the_job_once(
    method: str, hook: Callable[[Sequence[str]], Any], end: str
) -> None:
    """One end report, no staging kept, and the next job is stored."""
    rank = Rank()
    rank.scripted.hooks[method] = hook
    job = rank.store_job("a", 0, 8, [1, 2])
    rank.step(job)
    assert rank.ends(job) == [end]
    rank.worker.check_idle()
    rank.scripted.hooks.clear()
    after = rank.store_job("b", 0, 4, [3])
    rank.step(after)
    assert rank.ends(after) == ["stored"]
    assert rank.report.counters["saved_bytes"] > 0


def test_a_full_store_fails_only_the_jobs_it_had_no_room_for() -> None:
    """Answers are mapped back to the jobs their keys came from."""
    rank = Rank()
    rank.scripted.hooks["put"] = lambda keys: [Status.OK, Status.OK, Status.NO_SPACE]
    fits, refused = rank.store_job("a", 0, 8, [1, 2]), rank.store_job("b", 0, 4, [3])
    rank.step(fits, refused)
    assert (rank.ends(fits), rank.ends(refused)) == (["stored"], ["no_space"])
    assert rank.report.counters["saved_chunks"] == 2


def make_bad(rank: Rank, name: str) -> str:
    """Store a chunk, spoil it, and let a load find out while nothing can be removed."""
    rank.fill(name, [1])
    rank.step(rank.store_job(name, 0, 4, [1]))
    key = rank.key(name, 0)
    rank.scripted.values[key] = rank.scripted.values[key][:-1] + b"\x00"
    rank.scripted.hooks["remove"] = lambda keys: [Status.FAILED] * len(keys)
    rank.step(rank.load_job(name, 0, 4, [9]))
    assert rank.report.bad_keys == {key}
    rank.scripted.hooks.clear()
    rank.scripted.calls.clear()
    return key


@pytest.mark.parametrize("checks", [True, False], ids=["asked", "not asked"])
def test_a_bad_value_is_replaced_by_the_next_save(checks: bool) -> None:
    """Though it exists, it is removed and put again, and reported whole."""
    rank = Rank()
    key = make_bad(rank, "a")
    rank.scripted.checks_before_put = checks
    (content,) = rank.fill("a", [2])
    job = rank.store_job("a", 0, 4, [2])
    rank.step(job)
    asked = ["exists"] if checks else []
    assert [method for method, _ in rank.scripted.calls] == [*asked, "remove", "put"]
    assert rank.ends(job) == ["stored"]
    assert rank.report.mended_keys == {key}
    assert rank.scripted.values[key][:100] == content
    rank.step(rank.load_job("a", 0, 4, [10], request_id="again"))
    assert rank.failed == ["a"]
    assert rank.blocks.content(0, 10) == content


@pytest.mark.parametrize("checks", [True, False], ids=["asked", "not asked"])
def test_a_bad_value_that_cannot_be_removed_is_not_called_stored(checks: bool) -> None:
    """A put would answer OK and leave the wrong bytes: the chunk is not in the store."""
    rank = Rank()
    key = make_bad(rank, "a")
    rank.scripted.checks_before_put = checks
    rank.scripted.hooks["remove"] = lambda keys: [Status.FAILED] * len(keys)
    job = rank.store_job("a", 0, 4, [2])
    rank.step(job)
    assert rank.ends(job) == ["failed"]
    assert rank.scripted.keys_of("put") == []
    assert rank.report.mended_keys == set()
    assert key in rank.worker.bad_keys


def test_a_bad_value_that_vanished_is_put_like_any_other() -> None:
    """What is not there need not be removed, and is whole again once put."""
    rank = Rank()
    key = make_bad(rank, "a")
    del rank.scripted.values[key]
    job = rank.store_job("a", 0, 4, [2])
    rank.step(job)
    assert [method for method, _ in rank.scripted.calls] == ["exists", "put"]
    assert rank.ends(job) == ["stored"]
    assert rank.report.mended_keys == {key}


def test_queued_jobs_expire_and_free_their_rows() -> None:
    """Deadlines hold for what waits, and no one puts it afterwards."""
    rank = Rank()
    job = rank.store_job("a", 0, 8, [1, 2])
    rank.step(job, run=False)
    rank.worker.staging.run_pending()
    rank.collect(rank.clock.now_s + 30.0)
    assert rank.ends(job) == ["failed"]
    rank.worker.check_idle()
    rank.worker.run_pending()
    assert rank.scripted.calls == []


def stuck_rank(method: str) -> tuple[Rank, Hang, StoreJob]:
    """A rank whose sender hangs in a store call past the deadline of its job."""
    rank = Rank(threaded=True)
    hang = Hang()
    rank.scripted.hooks[method] = hang
    rank.fill("a", [1, 2])
    job = rank.store_job("a", 0, 8, [1, 2])
    rank.step(job, run=False)
    assert hang.entered.wait(WAIT_S)
    rank.clock.now_s += 30.0
    rank.collect()
    return rank, hang, job


@pytest.mark.parametrize("method", ["exists", "put"])
def test_a_call_that_hangs_loses_its_jobs_but_keeps_their_rows(method: str) -> None:
    """The job ends at its deadline; its memory is freed only when nothing can read it."""
    rank, hang, job = stuck_rank(method)
    assert rank.ends(job) == ["lost"]
    assert rank.worker.usage()["staging_bytes"] == 2 * 4096
    hang.released.set()
    rank.collect_until(lambda: not +rank.worker.usage())
    assert rank.ends(job) == ["lost"]
    rank.worker.close()
    assert rank.scripted.num_closes == 1


def test_while_the_sender_is_stuck_new_jobs_are_refused_uncopied() -> None:
    """A store that hangs costs the engine nothing: no copy, no blocks held."""
    rank, hang, _ = stuck_rank("put")
    num_reads = len(rank.blocks.reads)
    refused = rank.store_job("b", 0, 4, [3])
    rank.step(refused, run=False)
    rank.collect_until(lambda: bool(rank.ends(refused)))
    assert rank.ends(refused) == ["refused"]
    assert len(rank.blocks.reads) == num_reads
    hang.released.set()
    rank.collect_until(lambda: not +rank.worker.usage())
    rank.scripted.hooks.clear()
    after = rank.store_job("c", 0, 4, [3])
    rank.step(after, run=False)
    rank.collect_until(lambda: bool(rank.ends(after)))
    assert rank.ends(after) == ["stored"]
    rank.worker.close()


def test_a_reused_request_does_not_disturb_an_old_job() -> None:
    """Workers know jobs: two lives of one request end each their own job."""
    rank = Rank()
    first, second = rank.store_job("a", 0, 4, [1]), rank.store_job("a", 0, 8, [2, 3])
    rank.step(first, run=False)
    rank.step(second)
    assert (rank.ends(first), rank.ends(second)) == (["stored"], ["stored"])
    rank.worker.check_idle()
