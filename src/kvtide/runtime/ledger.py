"""The ledger: every open job of this rank, what phase it is in, and what is yet to be reported.

Threads, deadlines and shutdown all want to end jobs; whoever comes first under the ledger's lock
does, and everyone else learns it from the answer. That makes "exactly one end report" a property
of this file alone.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TypeVar

from kvtide.core.batch import Batch
from kvtide.core.jobs import JobEnd, JobReport, LoadJob, SaveJob
from kvtide.runtime.memory import Fence
from kvtide.runtime.slab import Rows


class Phase(Enum):
    """Where a job is. Only ``COPYING`` touches the engine's blocks."""

    WAITING = auto()
    """Not begun: for its fence, or in the load queue."""
    COPYING = auto()
    """Blocks are being read or written: it cannot be ended from outside."""
    QUEUED = auto()
    """Staged, in the put queue."""
    IN_STORE = auto()
    """Its keys are in a store call."""
    ENDED = auto()


@dataclass(eq=False, slots=True)
class StoreTask:
    """One store job on this rank; ``rows`` are the staging rows that hold its values.

    ``keys[i]`` names the value at ``addresses[i]`` of ``sizes[i]`` bytes, tag included, which is
    one segment; ``order`` has the absolute chunk indexes.
    """

    job: SaveJob
    deadline_s: float
    phase: Phase = Phase.WAITING
    rows: list[Rows] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    addresses: list[tuple[int]] = field(default_factory=list)
    sizes: list[tuple[int]] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    num_bytes: int = 0
    """The bytes of all its values."""

    def add(
        self, keys: Sequence[str], addresses: Sequence[int], size: int, order: Sequence[int]
    ) -> None:
        """Take note of staged values, all of ``size`` bytes."""
        self.keys += keys
        self.addresses += zip(addresses, strict=True)
        self.sizes += [(size,)] * len(keys)
        self.order += order
        self.num_bytes += size * len(keys)

    def batch(self) -> Batch:
        """Return the staged values."""
        return Batch(self.keys, self.addresses, self.sizes, self.order)


@dataclass(eq=False, slots=True)
class LoadTask:
    """One load job on this rank; ``unproven_token`` is the first token not proven loaded.

    ``deadline_s`` moves with every part that any load proves, up to ``limit_s``: a receiver that
    is busy is not one that hangs. Its blocks may be written only after ``fence``: the engine may
    have issued work on them before it gave them to this request (a device zeroes blocks in its
    own time).
    """

    job: LoadJob
    deadline_s: float
    unproven_token: int
    phase: Phase = Phase.WAITING
    fence: Fence | None = None
    limit_s: float = math.inf


class Ledger:
    """The open jobs and the report; any thread may call, and no call blocks on work."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._settled = threading.Condition(self._lock)
        self._stores: dict[StoreTask, None] = {}
        self._loads: dict[LoadTask, None] = {}
        self._report = JobReport()
        self._finished_loads: set[str] = set()
        self._failed_loads: set[str] = set()
        self._is_sender_stuck = False
        self._is_receiver_stuck = False

    # ------------------------------------------------------------------------------- opening

    def open_store(self, task: StoreTask) -> None:
        """Take note of a store job: from here on it ends exactly once."""
        with self._lock:
            self._stores[task] = None

    def open_load(self, task: LoadTask) -> None:
        """Take note of a load job: from here on it ends exactly once."""
        with self._lock:
            self._loads[task] = None

    # -------------------------------------------------------------------------------- phases

    def advance(self, task: StoreTask | LoadTask, phase: Phase) -> bool:
        """Move an open job to ``phase``; False if it has ended, and must not be touched again."""
        with self._lock:
            if task.phase is Phase.ENDED:
                return False
            task.phase = phase
            return True

    def any_open(self, tasks: Iterable[StoreTask]) -> bool:
        """Tell whether some of ``tasks`` has not ended."""
        with self._lock:
            return any(task.phase is not Phase.ENDED for task in tasks)

    @property
    def is_sender_stuck(self) -> bool:
        """Whether a put call outlived the deadline of a job in it, and has not returned."""
        return self._is_sender_stuck

    @property
    def is_receiver_stuck(self) -> bool:
        """Whether a get call outlived the deadline of its job, and has not returned."""
        return self._is_receiver_stuck

    # -------------------------------------------------------------------------------- ending

    def mark_staged(self, task: StoreTask) -> None:
        """Report that the engine's blocks of this job are no longer read."""
        with self._lock:
            self._report.staged[task.job.job_id] += 1

    def end_store(self, task: StoreTask, end: JobEnd) -> bool:
        """End a job; False if it had ended already, in which case nothing is reported."""
        with self._lock:
            return self._end_store(task, end)

    def end_sending(self, ends: Mapping[StoreTask, JobEnd]) -> None:
        """End the jobs of a store call that returned; the sender is not stuck any more.

        One step: a deadline that passes in between must not call the sender stuck for good.
        """
        with self._lock:
            self._is_sender_stuck = False
            for task, end in ends.items():
                self._end_store(task, end)

    def _end_store(self, task: StoreTask, end: JobEnd) -> bool:
        if task.phase is Phase.ENDED:
            return False
        task.phase = Phase.ENDED
        self._stores.pop(task, None)
        self._report.end(task.job.job_id, end)
        self._report.counters[f"{end.value}_jobs"] += 1
        self._settled.notify_all()
        return True

    def end_load(self, task: LoadTask, fail_token: int | None, *, lost: bool = False) -> bool:
        """End a load: whole where ``fail_token`` is None, else failed from that token on.

        The failure enters the report under the lock that makes the request finished, so no one
        sees the second without the first. False if it had ended already.
        """
        with self._lock:
            return self._end_load(task, fail_token, lost=lost)

    def end_receiving(self, task: LoadTask, fail_token: int | None, *, lost: bool = False) -> None:
        """End a load as its receiver; the receiver is not stuck any more."""
        with self._lock:
            self._is_receiver_stuck = False
            self._end_load(task, fail_token, lost=lost)

    def _end_load(self, task: LoadTask, fail_token: int | None, *, lost: bool) -> bool:
        if task.phase is Phase.ENDED:
            return False
        task.phase = Phase.ENDED
        self._loads.pop(task, None)
        request_id = task.job.request_id
        if fail_token is not None:
            self._report.fail_load(request_id, fail_token, lost=lost)
            self._failed_loads.add(request_id)
        self._finished_loads.add(request_id)
        self._settled.notify_all()
        return True

    def note_progress(self, deadline_s: float) -> None:
        """Give every open load until ``deadline_s``, but no load more than its limit."""
        with self._lock:
            for task in self._loads:
                task.deadline_s = max(task.deadline_s, min(deadline_s, task.limit_s))

    def cancel_loads(self, job_ids: Collection[int]) -> int:
        """End loads that nobody wants any more, but for those being copied; return how many."""
        with self._lock:
            cancelled = [
                task
                for task in self._loads
                if task.job.job_id in job_ids and task.phase is not Phase.COPYING
            ]
            for task in cancelled:
                self._end_load(task, task.unproven_token, lost=False)
            self._report.counters["cancelled_loads"] += len(cancelled)
        return len(cancelled)

    def expire(self, now_s: float) -> tuple[list[StoreTask], int]:
        """End what is past its deadline.

        Returns the store jobs whose rows may be freed now, and how many loads ended.

        Jobs in a store call are ended although the call still runs: the sender frees their rows
        when it returns. Jobs whose blocks are being copied are left alone.
        """
        freed: list[StoreTask] = []
        if not self._stores and not self._loads:  # most polls: not worth a lock
            return freed, 0
        with self._lock:
            for task in _expired(self._stores, now_s):
                if task.phase is Phase.IN_STORE:
                    self._end_store(task, JobEnd.LOST)
                    self._is_sender_stuck = True
                else:
                    self._end_store(task, JobEnd.FAILED)
                    freed.append(task)
                self._report.counters["expired_jobs"] += 1
            loads = _expired(self._loads, now_s)
            for load in loads:
                if load.phase is Phase.IN_STORE:
                    self._is_receiver_stuck = True
                self._end_load(load, load.unproven_token, lost=True)
                self._report.counters["expired_loads"] += 1
        return freed, len(loads)

    # ------------------------------------------------------------------------------- reports

    def count(self, counters: Mapping[str, int]) -> None:
        """Add to the counters of the report."""
        if not counters:  # most steps: not worth a lock
            return
        with self._lock:
            for name, amount in counters.items():
                if amount:
                    self._report.counters[name] += amount

    def report_keys(self, *, bad: Iterable[str] = (), mended: Iterable[str] = ()) -> None:
        """Report keys that do not verify and could not be removed, and keys that are whole again.

        A report has a key on one side only: the last word counts.
        """
        with self._lock:
            for key in bad:
                self._report.bad_keys.add(key)
                self._report.mended_keys.discard(key)
            for key in mended:
                self._report.mended_keys.add(key)
                self._report.bad_keys.discard(key)

    def take_loads(self) -> tuple[set[str], set[str]]:
        """Return the requests whose load ended since the last call, and those of them it failed."""
        with self._lock:
            # New sets even where these are empty: a set that the caller holds must never change,
            # or a load that ends just now would be told twice, and the engine would stop.
            taken = self._finished_loads, self._failed_loads
            self._finished_loads, self._failed_loads = set(), set()
            return taken

    def take_report(self) -> JobReport | None:
        """Return what happened since the last call, ``None`` if nothing did."""
        if not self._report:  # most steps: not worth a lock
            return None
        with self._lock:
            taken, self._report = self._report, JobReport()
            return taken

    # ------------------------------------------------------------------------------ shutdown

    def wait_for_stores(self, timeout_s: float) -> bool:
        """Block until no store job is open; False if ``timeout_s`` passed first.

        Gives up at once where the sender is stuck: nothing will come of waiting.
        """
        with self._settled:
            self._settled.wait_for(
                lambda: not self._stores or self._is_sender_stuck, max(0.0, timeout_s)
            )
            return not self._stores

    def open_counts(self) -> Counter[str]:
        """Return how many jobs are open, by kind."""
        with self._lock:
            return Counter(stores=len(self._stores), loads=len(self._loads))


_Task = TypeVar("_Task", StoreTask, LoadTask)


def _expired(tasks: Mapping[_Task, None], now_s: float) -> list[_Task]:
    """Return the tasks past their deadline that may be ended."""
    return [task for task in tasks if task.deadline_s <= now_s and task.phase is not Phase.COPYING]
