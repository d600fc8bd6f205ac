"""The worker side of the pool on one rank: plans in, finished loads and reports out.

Everything here is called on the engine's thread and returns at once; the work is done by three
threads that hand jobs on: staging, sending, receiving.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kvtide.core.jobs import JobEnd, JobReport, StepPlan
from kvtide.core.topology import RankRole
from kvtide.runtime.context import RankContext
from kvtide.runtime.ledger import LoadTask, Phase, StoreTask
from kvtide.runtime.limits import WorkerLimits
from kvtide.runtime.loading import first_token
from kvtide.runtime.memory import BlockMemory
from kvtide.runtime.prefixes import PrefixDatabases
from kvtide.runtime.slab import Slab
from kvtide.runtime.staging import FencedTasks, Staging
from kvtide.runtime.store_counters import counters_of
from kvtide.runtime.threads import KVCacheStoreRecvingThread, KVCacheStoreSendingThread
from kvtide.runtime.values import TAGGED, ValueFormat
from kvtide.stores.base import Store
from kvtide.stores.memory_buffer import region_of

LOAD_LIMIT_TIMEOUTS = 10
"""A load that makes progress may take this many times ``load_timeout_s``, and no longer."""


@dataclass(frozen=True, slots=True)
class WorkerResults:
    """Requests whose load ended since the last poll; ``failed_loads`` are among the finished."""

    finished_loads: set[str]
    failed_loads: set[str]


class PoolWorker:
    """Carries out the jobs of one rank.

    ``memory`` is the engine's, ``store`` is closed by :meth:`close`, ``databases`` name
    the rank's chunks, ``role`` says what it holds and stores of them (default: everything),
    ``values`` in which form. Jobs' deadlines are read off ``clock``. With ``threaded=False``
    nothing runs until :meth:`run_pending`.

    Raises:
        StoreError: the store refused the staging memory.
        OSError: there is no memory for staging.
    """

    def __init__(
        self,
        memory: BlockMemory,
        store: Store,
        databases: PrefixDatabases,
        *,
        limits: WorkerLimits | None = None,
        role: RankRole | None = None,
        values: ValueFormat = TAGGED,
        clock: Callable[[], float] = time.monotonic,
        threaded: bool = True,
    ) -> None:
        limits = limits if limits is not None else WorkerLimits()
        role = role if role is not None else RankRole.alone(len(memory.layout.groups))
        context = RankContext(memory, store, databases, limits, role, values, clock, threaded)
        self._memory = memory
        self._store = store
        self._databases = databases
        self._limits = limits
        self._clock = clock
        self._threaded = threaded
        self._ledger = context.ledger
        self.bad_keys = context.bad_keys
        self._unfenced: list[StoreTask] = []
        self._unstarted: list[LoadTask] = []
        self._is_closed = False
        self._send_slab = self._adopted_slab(limits.staging_bytes)
        self._load_slab = self._adopted_slab(limits.load_staging_bytes)
        self.sender = KVCacheStoreSendingThread(context, self._send_slab)
        self.receiver = KVCacheStoreRecvingThread(context, self._load_slab)
        self.staging = Staging(context, self._send_slab, self.sender)

    def _adopted_slab(self, num_bytes: int) -> Slab:
        slab = Slab(num_bytes)
        self._memory.adopt(slab.buffer)
        self._store.register(region_of(slab.buffer))
        return slab

    # ---------------------------------------------------------------------------- every step

    def take_over(self, plan: StepPlan) -> None:
        """Take over a step's jobs: loads wait for :meth:`start_loads`, stores for :meth:`fence`.

        What an earlier step left unfenced or not started is so first. Cheap with an empty plan.
        """
        if self._unstarted or self._unfenced:
            self.start_loads()
            self.fence()
        if not plan:
            return
        self._databases.learn(plan.prefixes)
        self.bad_keys.discard(plan.mended_keys)
        now_s = self._clock()
        for load in plan.loads:
            unproven = first_token(load, self._databases.block_sizes)
            load_task = LoadTask(
                load,
                now_s + self._limits.load_timeout_s,
                unproven,
                limit_s=now_s + LOAD_LIMIT_TIMEOUTS * self._limits.load_timeout_s,
            )
            self._ledger.open_load(load_task)
            self._unstarted.append(load_task)
        for store in plan.stores:
            task = StoreTask(store, now_s + self._limits.save_timeout_s)
            self._ledger.open_store(task)
            self._unfenced.append(task)
        if plan.cancelled_loads and self._ledger.cancel_loads(plan.cancelled_loads):
            self._unstarted = [task for task in self._unstarted if task.phase is not Phase.ENDED]
            self.receiver.drop_ended()

    def start_loads(self) -> None:
        """Queue the loads taken over; they write only after the work issued so far is done."""
        if not self._unstarted:
            return
        tasks, self._unstarted = self._unstarted, []
        try:
            fence = self._memory.record()
        except Exception:  # noqa: BLE001 - logged there; the engine's step must go on
            self.receiver.faults.exception("marking the engine's work failed")
            for task in tasks:
                self._ledger.end_load(task, task.unproven_token)
            return
        for task in tasks:
            task.fence = fence
            self.receiver.offer(task)

    def fence(self) -> None:
        """Hand the unfenced stores to staging, to be copied once the work issued so far is done."""
        if not self._unfenced:
            return
        tasks, self._unfenced = tuple(self._unfenced), []
        try:
            if self.staging.submit(FencedTasks(self._memory.record(), tasks)):
                return
        except Exception:  # noqa: BLE001 - logged there; the engine's step must go on
            self.staging.faults.exception("marking the engine's work failed")
        for task in tasks:
            self._ledger.end_store(task, JobEnd.FAILED)

    def poll(self, now_s: float | None = None) -> WorkerResults:
        """Return the loads that ended since the last call, after ending what is past its deadline.

        How they failed is in the next :meth:`take_report`, or was in an earlier one. Loads that
        nobody started are started: some runners never call the hook for it.
        """
        self.start_loads()
        self.expire(self._clock() if now_s is None else now_s)
        return WorkerResults(*self._ledger.take_loads())

    def expire(self, now_s: float) -> None:
        """End the jobs past their deadline, even those in a store call that hangs."""
        freed, num_loads = self._ledger.expire(now_s)
        for task in freed:
            self._send_slab.release(task.rows)
        if freed:
            self.sender.drop_ended()
        if num_loads:
            self.receiver.drop_ended()

    def take_report(self) -> JobReport | None:
        """Return what happened since the last call, ``None`` if nothing did."""
        self._ledger.count(counters_of(self._store))
        return self._ledger.take_report()

    # ------------------------------------------------------------------------------ shutdown

    def flush(self, timeout_s: float) -> bool:
        """Fence and store what was taken over; False if ``timeout_s`` passed first."""
        self.fence()
        if not self._threaded:
            self.run_pending()
        return self._ledger.wait_for_stores(timeout_s)

    def close(self) -> None:
        """Flush, end the threads and close the store, within ``flush_timeout_s`` in all.

        A store call that hangs is abandoned: its thread is a daemon, and the store is not closed
        under it. Every job has ended afterwards, but for a load that was being copied into the
        engine's blocks: it ends with its copy. Closing twice is harmless.
        """
        if self._is_closed:
            return
        self._is_closed = True
        give_up_s = time.monotonic() + self._limits.flush_timeout_s
        self.start_loads()
        for load in self.receiver.clear():
            self._ledger.end_load(load, load.unproven_token, lost=True)
        self.flush(0.75 * self._limits.flush_timeout_s)
        services = (self.staging, self.sender, self.receiver)
        for service in services:
            service.close()
        self.expire(float("inf"))
        # A list, not a generator: every thread is waited for, whatever became of the one before.
        have_ended = [service.join(give_up_s - time.monotonic()) for service in services]
        if all(have_ended):
            try:
                self._store.close()
            except Exception:  # noqa: BLE001 - logged there; the engine is on its way out
                self.sender.faults.exception("closing the store failed")

    # ----------------------------------------------------------------------------- for tests

    def run_pending(self) -> None:
        """Do everything that is queued in the caller's thread (with ``threaded=False``)."""
        self.start_loads()
        self.staging.run_pending()
        self.sender.run_pending()
        self.receiver.run_pending()

    def usage(self) -> Counter[str]:
        """Return what is open, queued and held: all zero once every job has ended."""
        counts = self._ledger.open_counts()
        counts["unfenced"] = len(self._unfenced)
        counts["unstarted"] = len(self._unstarted)
        counts["to_stage"] = len(self.staging)
        counts["to_put"] = len(self.sender)
        counts["to_load"] = len(self.receiver)
        counts["staging_bytes"] = self._send_slab.used_bytes
        return counts

    def check_idle(self) -> None:
        """Do nothing if nothing is open, queued or held.

        Raises:
            AssertionError: something is; the message says what.
        """
        left = +self.usage()
        if left:
            raise AssertionError(f"not idle: {dict(left)}")

    def __repr__(self) -> str:
        threads = sum(s.is_running for s in (self.staging, self.sender, self.receiver))
        state = " ".join(f"{name}={count}" for name, count in self.usage().items() if count)
        return f"<PoolWorker {'closed' if self._is_closed else 'open'} threads={threads} {state}>"
