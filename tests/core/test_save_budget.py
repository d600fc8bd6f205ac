"""The budget: how much a job may hold, and when none may start."""

from __future__ import annotations

from collections import Counter

import pytest

from kvtide.core.back_off import BackOff, Delays
from kvtide.core.coordinator import Coordinator
from kvtide.core.groups import FullAttention, Mamba
from kvtide.core.jobs import BoundaryJob, JobEnd, JobReport, StoreJob
from kvtide.core.keys import BlockHashes
from kvtide.core.open_jobs import OpenJobs
from kvtide.core.requests import SaveProgress
from kvtide.core.save_budget import SaveBudget
from kvtide.core.save_limits import SaveLimits
from kvtide.core.transfer import PlannedStore

UNIT = 16
PLAIN = Coordinator((FullAttention(UNIT),), UNIT)


class Till:
    """A budget over jobs of one request."""

    def __init__(
        self,
        coordinator: Coordinator = PLAIN,
        *,
        blocks: int = 100,
        job_tokens: int = 1 << 20,
        open_tokens: int = 1 << 20,
    ) -> None:
        self.jobs = OpenJobs(num_ranks=1)
        self.counters: Counter[str] = Counter()
        limits = SaveLimits(blocks, job_tokens, open_tokens, Delays(1.0, 4.0))
        self.budget = SaveBudget(coordinator, limits, self.jobs, self.counters)
        self.progress = SaveProgress(0, 0, BackOff(Delays(1.0, 4.0)))
        self._next_id = 0

    def planned(self, num_blocks: int, *, num_null: int = 0) -> PlannedStore:
        """A job of so many units, a block each."""
        self._next_id += 1
        end = num_blocks * UNIT
        job = StoreJob(self._next_id, 0, 0, end, BlockHashes.pack(()), (0,), (b"",))
        return PlannedStore(job, list(range(1, num_blocks + 1)), num_null)

    def open(self, num_blocks: int, *, num_null: int = 0) -> int:
        """Open a job of so many units."""
        planned = self.planned(num_blocks, num_null=num_null)
        self.budget.open(planned, self.progress)
        return planned.job.job_id

    def end(self, job_id: int, end: JobEnd, now_s: float = 0.0) -> None:
        """End a job."""
        report = JobReport()
        report.end(job_id, end)
        _, ended = self.jobs.take(report)
        for job in ended:
            self.budget.note_end(job, now_s)


def boundary(num_blocks: int) -> PlannedStore:
    """A job beside the offsets."""
    return PlannedStore(BoundaryJob(9, 0, (), ()), list(range(1, num_blocks + 1)), 0)


def test_a_job_may_cover_what_is_left_of_each_limit() -> None:
    """Of blocks, of staging memory, and of one job."""
    assert Till(blocks=10).budget.room_tokens() == 10 * UNIT
    assert Till(job_tokens=3 * UNIT + 5).budget.room_tokens() == 3 * UNIT
    assert Till(open_tokens=5 * UNIT + 5).budget.room_tokens() == 5 * UNIT
    till = Till(blocks=10, open_tokens=8 * UNIT)
    till.open(4)
    assert till.budget.room_tokens() == 4 * UNIT
    till.open(4)
    assert till.budget.room_tokens() == 0


def test_where_nothing_is_held_a_unit_may_start_whatever_the_limits() -> None:
    """Or a small budget would save nothing for ever."""
    till = Till(blocks=0, job_tokens=0)
    assert till.budget.room_tokens() == UNIT
    till.open(1)
    assert till.budget.room_tokens() == 0


def test_what_may_queue_needs_no_room_in_staging() -> None:
    """It goes out when there is some: the oldest first, and one where nothing else is under way."""
    till = Till(open_tokens=4 * UNIT)
    first = till.open(3)
    assert till.budget.room_tokens() == UNIT
    assert till.budget.room_tokens(may_queue=True) == (100 - 3) * UNIT
    queue = [till.planned(2), till.planned(1), till.planned(9)]
    for one in queue:
        till.budget.open(one, till.progress)
    assert till.budget.room_tokens() == 0
    assert till.budget.num_sendable(queue) == 0
    till.end(first, JobEnd.STORED)
    assert till.budget.num_sendable(queue) == 2
    for one in queue[:2]:
        till.end(one.job.job_id, JobEnd.STORED)
    assert till.budget.num_sendable(queue[2:]) == 1, "it would wait for ever"
    assert till.budget.num_sendable([]) == 0


def test_room_is_left_for_the_states_of_a_boundary() -> None:
    """They are offered for one step only."""
    till = Till(Coordinator((FullAttention(UNIT), Mamba(UNIT)), UNIT), blocks=10)
    assert till.budget.room_tokens() == 9 * UNIT
    till.open(9)
    assert till.budget.may_open(boundary(1), 0.0)
    assert not till.budget.may_open(boundary(2), 0.0)


def test_a_job_beside_the_offsets_may_start_alone_whatever_its_size() -> None:
    """As a unit may."""
    assert Till(blocks=1).budget.may_open(boundary(5), 0.0)


@pytest.mark.parametrize("end", [JobEnd.NO_SPACE, JobEnd.LOST])
def test_a_store_that_is_full_or_gone_gets_no_jobs_for_a_while_then_one(end: JobEnd) -> None:
    """Until one has succeeded."""
    till = Till()
    till.end(till.open(1), end)
    assert till.counters["pool_back_offs"] == 1
    assert till.budget.must_wait(0.5)
    assert not till.budget.may_open(boundary(1), 0.5)
    assert not till.budget.must_wait(1.0)
    probe = till.open(1)
    assert till.budget.must_wait(1.0)
    till.end(probe, JobEnd.STORED, 1.0)
    assert not till.budget.must_wait(1.0)


@pytest.mark.parametrize("end", [JobEnd.FAILED, JobEnd.REFUSED])
def test_other_failures_are_their_requests_own(end: JobEnd) -> None:
    """The pool goes on."""
    till = Till()
    till.end(till.open(1), end)
    assert not till.budget.must_wait(0.0)
    assert not till.counters["pool_back_offs"]


def test_what_the_engine_had_freed_is_counted() -> None:
    """It was worth storing."""
    till = Till()
    till.open(2, num_null=3)
    assert till.counters["skipped_null_chunks"] == 3
