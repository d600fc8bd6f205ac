"""The budget of saving: what open jobs hold, and whether another may start.

Jobs hold blocks of the engine until every rank has staged them, and the workers' staging memory
until they end. A store that is full or gone gets no jobs for a while, then one at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvtide.core.back_off import BackOff
from kvtide.core.coordinator import Coordinator
from kvtide.core.jobs import JobEnd, StoreJob
from kvtide.core.open_jobs import OpenJob, OpenJobs
from kvtide.core.requests import SaveProgress
from kvtide.core.save_limits import SaveLimits
from kvtide.core.transfer import PlannedStore


class SaveBudget:
    """Counts the open jobs against the limits, and keeps the back-off of the pool."""

    def __init__(
        self, coordinator: Coordinator, limits: SaveLimits, jobs: OpenJobs, counters: Counter[str]
    ) -> None:
        self._coordinator = coordinator
        self._limits = limits
        self._jobs = jobs
        self._counters = counters
        self._blocks_per_unit = max(1, coordinator.max_stored_per_unit)
        # States are offered for one step only: the next boundary's find room.
        self._max_held_blocks = limits.max_pinned_blocks - coordinator.num_state_groups
        self._pool_back_off = BackOff(limits.delays)

    def must_wait(self, now_s: float) -> bool:
        """Judge the pool's back-off; after it, one job at a time until one succeeds."""
        back_off = self._pool_back_off
        return back_off.has_failed and (back_off.is_waiting(now_s) or bool(self._jobs))

    def room_tokens(self, *, may_queue: bool = False) -> int:
        """Return how many tokens the next job may cover: at least a unit when nothing is pinned.

        A job that ``may_queue`` needs no room in staging yet (:meth:`num_sendable`).
        """
        coordinator, limits, jobs = self._coordinator, self._limits, self._jobs
        unit = coordinator.lcm_block_size
        num_free = self._max_held_blocks - jobs.num_pinned_blocks
        room = num_free // self._blocks_per_unit * unit
        if room <= 0 and not jobs.num_pinned_blocks:
            room = unit
        staging_room = coordinator.aligned(limits.max_open_tokens - jobs.num_tokens)
        largest = max(unit, coordinator.aligned(limits.max_job_tokens))
        if may_queue:
            return max(0, min(room, largest))
        return max(0, min(room, staging_room, largest))

    def num_sendable(self, queue: Sequence[PlannedStore]) -> int:
        """Return how many of the open jobs that wait in a queue staging has room for.

        At least one where no other is open: what cannot be staged ends as refused.
        """
        sizes = [_num_tokens(one) for one in queue]
        room = self._limits.max_open_tokens - (self._jobs.num_tokens - sum(sizes))
        num_sent = 0
        for size in sizes:
            if size > room and (num_sent or len(self._jobs) > len(queue)):
                break
            room -= size
            num_sent += 1
        return num_sent

    def may_open(self, planned: PlannedStore, now_s: float) -> bool:
        """Tell whether a job beside the offsets may start now."""
        if self.must_wait(now_s):
            return False
        num_pinned = self._jobs.num_pinned_blocks
        room = self._limits.max_pinned_blocks - num_pinned
        return len(planned.pinned_block_ids) <= room or not num_pinned

    def open(self, planned: PlannedStore, progress: SaveProgress | None) -> None:
        """Count a job from now on; one beside the offsets has no ``progress``."""
        self._jobs.open(planned, progress)
        if planned.num_null:
            self._counters["skipped_null_chunks"] += planned.num_null

    def note_end(self, job: OpenJob, now_s: float) -> None:
        """Learn from how a job ended what the store can take."""
        if job.failures & {JobEnd.NO_SPACE, JobEnd.LOST}:
            self._pool_back_off.fail(now_s)
            self._counters["pool_back_offs"] += 1
        elif not job.failures:
            self._pool_back_off.succeed()


def _num_tokens(planned: PlannedStore) -> int:
    """Return the tokens of a job, none for one beside the offsets."""
    job = planned.job
    return job.end_token - job.start_token if isinstance(job, StoreJob) else 0
