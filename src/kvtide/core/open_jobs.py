"""The store jobs that not every rank has ended, and the engine's blocks that they hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtide.core.jobs import JobEnd, JobReport, StoreJob
from kvtide.core.requests import RequestTracker, SaveProgress
from kvtide.core.transfer import PlannedStore


class JobRange(NamedTuple):
    """The tokens that a job saves of one request, in the life of it that emitted the job.

    A report about an earlier life changes nothing but the job's own pins.
    """

    progress: SaveProgress
    start_token: int
    end_token: int


@dataclass(slots=True)
class OpenJob:
    """One of them; a job beside the offsets has no ``ranges``, one that was joined several."""

    ranges: list[JobRange]
    pinned_block_ids: list[int]
    num_staged: int = 0
    num_ended: int = 0
    failures: set[JobEnd] = field(default_factory=set)
    """How the job failed, on whatever rank."""

    @property
    def num_tokens(self) -> int:
        """The tokens of all its ranges."""
        return sum(end_token - start_token for _, start_token, end_token in self.ranges)


class OpenJobs:
    """Follows jobs from their emission to the last rank's end; ``num_ranks`` reports end one."""

    def __init__(self, num_ranks: int) -> None:
        self.num_pinned_blocks = 0
        """A block that is pinned twice counts twice."""
        self.num_tokens = 0
        self._num_ranks = num_ranks
        self._jobs: dict[int, OpenJob] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def open(self, planned: PlannedStore, progress: SaveProgress | None) -> None:
        """Follow a job from now on, and count its blocks as pinned."""
        job, pinned, _ = planned
        ranges: list[JobRange] = []
        if progress is not None:
            assert isinstance(job, StoreJob)
            start, end = job.start_token, job.end_token
            progress.scheduled_offset = end
            progress.num_open_jobs += 1
            ranges.append(JobRange(progress, start, end))
            self.num_tokens += end - start
        self._jobs[job.job_id] = OpenJob(ranges, pinned)
        self.num_pinned_blocks += len(pinned)

    def is_retry(self, job_id: int) -> bool:
        """Tell whether a job is the first of its request after one that failed."""
        return any(one.progress.back_off.has_failed for one in self._jobs[job_id].ranges)

    def join(self, job_ids: Sequence[int], job_id: int) -> None:
        """Follow several jobs, none of which any rank knows, as the one that stands for them."""
        joined = self._jobs[job_id] = OpenJob([], [])
        for one_id in job_ids:
            job = self._jobs.pop(one_id)
            joined.ranges += job.ranges
            joined.pinned_block_ids += job.pinned_block_ids

    def take(self, report: JobReport) -> tuple[list[int], list[OpenJob]]:
        """Take a report in; return the blocks to unpin, and the jobs that ended on every rank.

        Blocks come reversed, so that the engine evicts the end of a chain first.
        """
        unpinned: list[int] = []
        ended: list[OpenJob] = []
        for job_id, num_ranks in report.staged.items():
            job = self._jobs.get(job_id)
            if job is not None:
                job.num_staged += num_ranks
                if job.num_staged >= self._num_ranks:
                    unpinned.extend(self._unpin(job))
        for job_id, ends in report.ended.items():
            job = self._jobs.get(job_id)
            if job is not None:
                for end, num_ranks in ends.items():
                    job.num_ended += num_ranks
                    if not end.is_success:
                        job.failures.add(end)
                if job.num_ended >= self._num_ranks:
                    unpinned.extend(self._unpin(job))
                    del self._jobs[job_id]
                    self.num_tokens -= job.num_tokens
                    ended.append(job)
        return unpinned, ended

    def _unpin(self, job: OpenJob) -> list[int]:
        """Give a job's blocks back, once."""
        block_ids, job.pinned_block_ids = job.pinned_block_ids, []
        self.num_pinned_blocks -= len(block_ids)
        return block_ids[::-1]

    def check_integrity(self, trackers: Iterable[RequestTracker]) -> None:
        """Recount everything from scratch; raises ``AssertionError`` on a bug of ours."""
        jobs = self._jobs.values()
        pinned = sum(len(job.pinned_block_ids) for job in jobs)
        assert pinned == self.num_pinned_blocks, f"{pinned} pinned, not {self.num_pinned_blocks}"
        tokens = sum(job.num_tokens for job in jobs)
        assert tokens == self.num_tokens, f"{tokens} tokens are open, counted {self.num_tokens}"
        lives = [one.progress for job in jobs for one in job.ranges]
        for tracker in trackers:
            progress = tracker.progress
            if progress is None:
                continue
            open_jobs = sum(life is progress for life in lives)
            assert open_jobs == progress.num_open_jobs, f"{tracker.request_id}: {open_jobs} open"
            assert progress.saved_offset <= progress.scheduled_offset, f"{tracker}"
