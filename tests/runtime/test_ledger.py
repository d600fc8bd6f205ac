"""Whoever comes first ends a job; everyone else learns that it has ended."""

from __future__ import annotations

import pytest

from kvtide.core.jobs import JobEnd, LoadJob, StoreJob
from kvtide.runtime.ledger import Ledger, LoadTask, Phase, StoreTask
from tests.runtime_harness import hashes_of


def store_task(job_id: int = 1, deadline_s: float = 10.0) -> StoreTask:
    """An open job."""
    return StoreTask(StoreJob(job_id, 0, 0, 4, hashes_of("a", 1), (0,), (b"",)), deadline_s)


def load_task(request_id: str = "r", deadline_s: float = 10.0, job_id: int = 1) -> LoadTask:
    """An open load from token 8 on."""
    job = LoadJob(job_id, request_id, 0, 8, 16, hashes_of("a", 4), (2,), (16,), (b"",))
    return LoadTask(job, deadline_s, 8)


def test_a_job_ends_once() -> None:
    """The second end is refused and not reported."""
    ledger, task = Ledger(), store_task()
    ledger.open_store(task)
    assert ledger.end_store(task, JobEnd.FAILED)
    assert not ledger.end_store(task, JobEnd.STORED)
    ledger.end_sending({task: JobEnd.STORED})
    assert not ledger.advance(task, Phase.COPYING)
    report = ledger.take_report()
    assert report is not None
    assert report.ended == {1: {JobEnd.FAILED: 1}}
    assert not +ledger.open_counts()


def test_a_failed_load_is_in_the_report_no_later_than_it_is_finished() -> None:
    """The scheduler must know where a load failed before the engine asks again."""
    ledger, task = Ledger(), load_task()
    ledger.open_load(task)
    assert ledger.take_loads() == (set(), set())
    ledger.end_load(task, 8, lost=True)
    report = ledger.take_report()
    assert report is not None
    assert report.failed_loads == {"r": 8}
    assert report.lost_loads == {"r"}
    assert ledger.take_loads() == ({"r"}, {"r"})
    assert ledger.take_loads() == (set(), set())
    assert ledger.take_report() is None


@pytest.mark.parametrize(
    "phase, end, is_freed",
    [
        (Phase.WAITING, JobEnd.FAILED, True),
        (Phase.QUEUED, JobEnd.FAILED, True),
        (Phase.IN_STORE, JobEnd.LOST, False),
        (Phase.COPYING, None, False),
    ],
)
def test_deadline_of_a_store(phase: Phase, end: JobEnd | None, is_freed: bool) -> None:
    """Past the deadline a job ends, unless its blocks are being read.

    Its rows are freed then, unless a store call may still read them.
    """
    ledger, task = Ledger(), store_task()
    ledger.open_store(task)
    ledger.advance(task, phase)
    assert ledger.expire(9.9) == ([], 0)
    assert ledger.expire(10.0) == ([task] if is_freed else [], 0)
    report = ledger.take_report()
    assert (None if report is None else list(report.ended[1])) == (None if end is None else [end])
    assert ledger.is_sender_stuck == (phase is Phase.IN_STORE)


@pytest.mark.parametrize(
    "phase, is_ended",
    [(Phase.WAITING, True), (Phase.IN_STORE, True), (Phase.COPYING, False)],
)
def test_deadline_of_a_load(phase: Phase, is_ended: bool) -> None:
    """Past the deadline a load fails as lost, unless the engine's blocks are being written."""
    ledger, task = Ledger(), load_task()
    ledger.open_load(task)
    ledger.advance(task, phase)
    assert ledger.expire(10.0) == ([], int(is_ended))
    assert ledger.take_loads() == (({"r"}, {"r"}) if is_ended else (set(), set()))
    assert ledger.is_receiver_stuck == (phase is Phase.IN_STORE)


def test_stuck_ends_when_the_call_returns() -> None:
    """A deadline that passes while the sender is leaving must not leave it stuck for good."""
    ledger, task = Ledger(), store_task()
    ledger.open_store(task)
    ledger.advance(task, Phase.IN_STORE)
    ledger.expire(10.0)
    assert ledger.is_sender_stuck
    ledger.end_sending({task: JobEnd.STORED})
    assert not ledger.is_sender_stuck
    ledger.expire(11.0)
    assert not ledger.is_sender_stuck


def test_jobs_that_cannot_be_ended_hide_no_others() -> None:
    """A job that is being copied does not keep later ones from expiring."""
    ledger = Ledger()
    first, second, third = store_task(1, 10.0), store_task(2, 11.0), store_task(3, 20.0)
    for task in (first, second, third):
        ledger.open_store(task)
    ledger.advance(first, Phase.COPYING)
    assert ledger.expire(12.0) == ([second], 0)


def test_a_key_is_reported_bad_or_mended_never_both() -> None:
    """The last word counts: merged sets could not tell which came first."""
    ledger = Ledger()
    ledger.report_keys(bad=["k"])
    ledger.report_keys(mended=["k"])
    report = ledger.take_report()
    assert report is not None
    assert (report.bad_keys, report.mended_keys) == (set(), {"k"})


def test_what_was_taken_does_not_change_afterwards() -> None:
    """A load that ends right after a poll is told by the next one, and by no other."""
    ledger = Ledger()
    finished, failed = ledger.take_loads()
    task = load_task()
    ledger.open_load(task)
    ledger.end_load(task, 0)
    assert (finished, failed) == (set(), set())
    assert ledger.take_loads() == ({"r"}, {"r"})
    assert ledger.take_loads() == (set(), set())


def test_a_cancelled_load_ends_unless_its_blocks_are_being_written() -> None:
    """The engine gets back what nobody waits for; a copy under way must end first."""
    ledger, waiting, copied = Ledger(), load_task("waiting"), load_task("copied", job_id=2)
    for task in (waiting, copied):
        ledger.open_load(task)
    ledger.advance(copied, Phase.COPYING)
    assert ledger.cancel_loads([waiting.job.job_id, 99]) == 1
    assert ledger.take_loads() == ({"waiting"}, {"waiting"})
    assert not ledger.advance(waiting, Phase.IN_STORE)


def test_progress_of_any_load_postpones_the_deadline_of_all_up_to_their_limits() -> None:
    """Who waits behind a busy receiver is not behind one that hangs."""
    ledger, one, other = Ledger(), load_task("one"), load_task("other")
    other.limit_s = 12.0
    for task in (one, other):
        ledger.open_load(task)
    ledger.note_progress(15.0)
    assert ledger.expire(11.9) == ([], 0)
    assert ledger.expire(12.0) == ([], 1)
    assert ledger.expire(15.0) == ([], 1)
