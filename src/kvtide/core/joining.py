"""Joining: of the save jobs of one step the small ones, which decodes make, become one.

Each job costs two store calls, two threads' wake-ups and a report, however few blocks it has; so
64 requests that complete a block in the same step are one job, and not 64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from kvtide.core.coordinator import Coordinator
from kvtide.core.jobs import (
    NULL_BLOCK_ID,
    JoinedJob,
    SaveJob,
    StoreJob,
    pack_ints,
    unpack_ints,
)
from kvtide.core.keys import BlockHashes
from kvtide.core.open_jobs import OpenJobs
from kvtide.core.transfer import PlannedStore

MAX_SMALL_UNITS = 8
"""A job of at most so many units is small."""


class Joining:
    """Joins small jobs that have one key prefix, up to ``max_job_tokens`` each.

    Jobs that are joined share their fate. A request whose last job failed is left alone with its
    next: what fails again must not fail others with it.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        jobs: OpenJobs,
        *,
        max_job_tokens: int,
        take_job_id: Callable[[], int],
    ) -> None:
        self._coordinator = coordinator
        self._jobs = jobs
        self._small_tokens = MAX_SMALL_UNITS * coordinator.lcm_block_size
        self._max_job_tokens = max_job_tokens
        self._take_job_id = take_job_id

    def joined(self, planned: Iterable[PlannedStore]) -> Iterator[SaveJob]:
        """Yield a step's jobs: first those that stay as they are."""
        small: dict[int, list[StoreJob]] = {}
        for job, _, _ in planned:
            if isinstance(job, StoreJob) and self._is_small(job):
                small.setdefault(job.prefix_id, []).append(job)
            else:
                yield job
        for jobs in small.values():
            for part in self._cut(jobs):
                yield self._join(part)

    def _is_small(self, job: StoreJob) -> bool:
        num_tokens = job.end_token - job.start_token
        return num_tokens <= self._small_tokens and not self._jobs.is_retry(job.job_id)

    def _cut(self, jobs: Iterable[StoreJob]) -> Iterator[list[StoreJob]]:
        """Yield the jobs in parts that workers have room for."""
        part: list[StoreJob] = []
        num_left = self._max_job_tokens
        for job in jobs:
            num_tokens = job.end_token - job.start_token
            if part and num_tokens > num_left:
                yield part
                part, num_left = [], self._max_job_tokens
            part.append(job)
            num_left -= num_tokens
        yield part

    def _join(self, jobs: Sequence[StoreJob]) -> SaveJob:
        if len(jobs) == 1:
            return jobs[0]
        joined = join_stores(jobs, self._coordinator, job_id=self._take_job_id())
        self._jobs.join([job.job_id for job in jobs], joined.job_id)
        return joined


def join_stores(jobs: Sequence[StoreJob], coordinator: Coordinator, *, job_id: int) -> JoinedJob:
    """Return one job for store jobs of one key prefix, which may be of different requests.

    Nulls are left out.
    """
    names: list[bytes] = []
    all_chunks: list[bytes] = []
    tables: list[bytes] = []
    for group_id, group in enumerate(coordinator.groups):
        ratio = group.block_size // coordinator.hash_block_size
        chunks: list[int] = []
        block_ids: list[int] = []
        for job in jobs:
            table = unpack_ints(job.block_ids[group_id])
            for chunk, block_id in enumerate(table, job.first_chunks[group_id]):
                if block_id != NULL_BLOCK_ID:
                    chunks.append(chunk)
                    block_ids.append(block_id)
                    names.append(job.hashes[(chunk + 1) * ratio - 1])
        all_chunks.append(pack_ints(chunks))
        tables.append(pack_ints(block_ids))
    hashes = BlockHashes.pack(names)
    return JoinedJob(job_id, jobs[0].prefix_id, hashes, tuple(all_chunks), tuple(tables))
