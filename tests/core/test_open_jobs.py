"""Open jobs: every block comes back once, when the last rank is through with it."""

import pytest

from kvtide.core.back_off import BackOff, Delays
from kvtide.core.jobs import BoundaryJob, JobEnd, JobReport, StoreJob
from kvtide.core.keys import BlockHashes
from kvtide.core.open_jobs import OpenJobs
from kvtide.core.requests import RequestTracker, SaveProgress
from kvtide.core.transfer import PlannedStore


def store(job_id: int, start: int, end: int, pinned: list[int]) -> PlannedStore:
    """A planned store job."""
    job = StoreJob(job_id, 0, start, end, BlockHashes.pack(()), (), ())
    return PlannedStore(job, pinned, 0)


def staged(job_id: int, num_ranks: int = 1) -> JobReport:
    """A report that ranks have staged a job."""
    report = JobReport()
    report.staged[job_id] = num_ranks
    return report


def ended(job_id: int, end: JobEnd = JobEnd.STORED) -> JobReport:
    """A report that one rank has ended a job."""
    report = JobReport()
    report.end(job_id, end)
    return report


def progress() -> SaveProgress:
    """A life that has saved nothing."""
    return SaveProgress(0, 0, BackOff(Delays()))


def test_blocks_come_back_reversed_once_every_rank_has_staged_them() -> None:
    """And not a second time when the job ends."""
    jobs = OpenJobs(2)
    jobs.open(store(1, 0, 32, [5, 6, 7]), progress())
    assert jobs.take(staged(1)) == ([], [])
    assert jobs.take(staged(1)) == ([7, 6, 5], [])
    assert jobs.num_pinned_blocks == 0
    assert jobs.num_tokens == 32
    assert jobs.take(ended(1)) == ([], [])
    unpinned, (job,) = jobs.take(ended(1, JobEnd.FAILED))
    assert unpinned == []
    assert job.failures == {JobEnd.FAILED}
    assert (len(jobs), jobs.num_tokens) == (0, 0)


def test_joined_jobs_are_followed_as_one() -> None:
    """Their blocks come back together, and the end is every request's."""
    jobs = OpenJobs(1)
    lives = progress(), progress()
    jobs.open(store(1, 0, 16, [5]), lives[0])
    jobs.open(store(2, 32, 48, [6]), lives[1])
    jobs.join([1, 2], 3)
    assert (len(jobs), jobs.num_tokens, jobs.num_pinned_blocks) == (1, 32, 2)
    assert jobs.take(staged(1)) == jobs.take(ended(2)) == ([], [])
    assert jobs.take(staged(3)) == ([6, 5], [])
    _, (job,) = jobs.take(ended(3, JobEnd.LOST))
    assert [one[1:] for one in job.ranges] == [(0, 16), (32, 48)]
    assert [one.progress for one in job.ranges] == list(lives)
    assert (len(jobs), jobs.num_tokens, jobs.num_pinned_blocks) == (0, 0, 0)


def test_blocks_of_a_job_that_was_never_staged_come_back_with_its_end() -> None:
    """A refused job ends at once."""
    jobs = OpenJobs(1)
    jobs.open(store(1, 0, 32, [5, 6]), progress())
    unpinned, (job,) = jobs.take(ended(1, JobEnd.REFUSED))
    assert unpinned == [6, 5]
    assert [one[1:] for one in job.ranges] == [(0, 32)]


def test_a_job_beside_the_offsets_pins_blocks_and_counts_no_tokens() -> None:
    """It moves nobody's offset either."""
    jobs = OpenJobs(1)
    jobs.open(PlannedStore(BoundaryJob(1, 0, (), ()), [9], 0), None)
    assert (jobs.num_pinned_blocks, jobs.num_tokens) == (1, 0)
    assert jobs.take(ended(1))[0] == [9]


def test_reports_of_jobs_that_nobody_knows_are_ignored() -> None:
    """As those of a rank that reports twice."""
    jobs = OpenJobs(1)
    assert jobs.take(staged(7)) == ([], [])
    assert jobs.take(ended(7)) == ([], [])


def test_a_miscount_is_found() -> None:
    """The check recounts from scratch."""
    jobs = OpenJobs(1)
    life = progress()
    jobs.open(store(1, 0, 32, [5]), life)
    tracker = RequestTracker("r", 0, 40)
    jobs.check_integrity([tracker])
    tracker.progress = life
    jobs.check_integrity([tracker])
    life.num_open_jobs = 2
    with pytest.raises(AssertionError, match="1 open"):
        jobs.check_integrity([tracker])
