"""The scheduler side of the pool: engine events in; step plans, pins and unpins out.

Theory of operation. All per-request state lives here, on one thread, without locks; workers know
only jobs. Three rules keep it right:

* **Only certain tokens are saved.** After a step, ``min(computed + scheduled, hashed)`` tokens of
  a request are final: hashes exist only for accepted tokens, so drafts and rejections are covered.
  Whenever that passes a multiple of ``lcm_block_size``, one job covers
  ``[scheduled_offset, aligned)`` and nothing below it is touched.
* **A job's blocks are pinned until every rank has staged them**, within a budget. A job is cut to
  the budget, never refused for its size; what is left follows on any later step.
* **An offset moves only on success.** ``scheduled_offset`` moves when a job is emitted,
  ``saved_offset`` when the last rank has reported success. A failed job puts its request (for
  no-space or a lost store: the whole pool) into back-off, after which saving starts again at the
  saved offset. A job holds the :class:`SaveProgress` of the life of its request that emitted it,
  so a report about an earlier life changes nothing but its own pins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtide.core.admission import Admission, AdmissionLimits, Lookups
from kvtide.core.coordinator import Coordinator
from kvtide.core.jobs import JobEnd, JobReport, LoadJob, StepPlan, StoreJob
from kvtide.core.keys import BlockHashes, PrefixTable
from kvtide.core.requests import RequestEvent, RequestState, RequestTracker, SaveProgress
from kvtide.core.transfer import RequestView, plan_load, plan_store

UNKNOWN_PREFIX_ID = -1
"""No worker ever learns a namespace for it."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What the scheduler may hold at once, and how it waits after a failure.

    ``max_pinned_blocks`` bounds the engine's blocks that jobs hold; ``max_job_tokens`` bounds one
    job (a job must fit into a worker's staging memory).
    """

    max_pinned_blocks: int
    max_job_tokens: int
    first_delay_s: float = 0.5
    max_delay_s: float = 30.0


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """Which tokens an engine of this role saves."""

    prefill: bool = True
    decode: bool = False

    @property
    def any(self) -> bool:
        """Whether anything is saved at all."""
        return self.prefill or self.decode


class Scheduled(NamedTuple):
    """One request of a step: ``num_computed_tokens`` before it, ``num_scheduled_tokens`` in it.

    ``is_admission`` says that the engine (re)admits the request in this step.
    """

    view: RequestView
    num_computed_tokens: int
    num_scheduled_tokens: int
    is_admission: bool


@dataclass(frozen=True, slots=True)
class StepEvents:
    """What the engine decided in one step; preemptions are applied first."""

    preempted: Sequence[RequestView] = ()
    scheduled: Iterable[Scheduled] = ()


class StepOutcome(NamedTuple):
    """The plan for the workers, and the blocks to pin before the step runs."""

    plan: StepPlan
    pin_block_ids: list[int]


@dataclass(slots=True)
class _OpenJob:
    """A store job that not every rank has ended yet."""

    progress: SaveProgress
    start_token: int
    end_token: int
    pinned_block_ids: list[int]
    num_staged: int = 0
    ends: Counter[JobEnd] = field(default_factory=Counter)


@dataclass(slots=True)
class _PoolBackOff:
    """Back-off of the whole pool; after it, one job at a time until one succeeds."""

    active: bool = False
    retry_at_s: float = 0.0
    delay_s: float = 0.0

    def fail(self, now_s: float, limits: SchedulerLimits) -> None:
        self.active = True
        self.delay_s = min(limits.max_delay_s, self.delay_s * 2 or limits.first_delay_s)
        self.retry_at_s = now_s + self.delay_s

    def succeed(self) -> None:
        self.active = False
        self.delay_s = 0.0

    def blocks(self, now_s: float, num_open_jobs: int) -> bool:
        return self.active and (now_s < self.retry_at_s or num_open_jobs > 0)


class PoolScheduler:
    """Decides what to save and load; one object per engine, called from one thread.

    Times are passed in, in seconds of any steady clock. ``lookups`` runs lookups elsewhere and
    never blocks. ``num_ranks`` is how many reports end a job.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        lookups: Lookups,
        *,
        limits: SchedulerLimits,
        admission: AdmissionLimits | None = None,
        saves: SavePolicy | None = None,
        num_ranks: int = 1,
    ) -> None:
        self.coordinator = coordinator
        self.counters: Counter[str] = Counter()
        self._limits = limits
        self._saves = saves or SavePolicy()
        self._num_ranks = num_ranks
        self._admission = Admission(
            coordinator, lookups, admission or AdmissionLimits(), self.counters
        )
        self._prefixes = PrefixTable()
        self._trackers: dict[str, RequestTracker] = {}
        self._jobs: dict[int, _OpenJob] = {}
        self._pending_loads: list[LoadJob] = []
        self._failed_loads: dict[str, int] = {}
        """Loads that failed on some rank and have not ended on all: the first unproven token."""
        self._pool_back_off = _PoolBackOff()
        self._num_pinned = 0
        self._next_job_id = 0

    def __repr__(self) -> str:
        states = Counter(tracker.state.value for tracker in self._trackers.values())
        counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        head = f"{len(self._trackers)} requests" + (f": {counts}" if counts else "")
        return (
            f"<PoolScheduler [{head} | {len(self._jobs)} jobs, {self._num_pinned} blocks pinned]>"
        )

    @property
    def has_pins(self) -> bool:
        """Whether a job still reads the engine's blocks, so that the engine must keep stepping."""
        return self._num_pinned > 0

    @property
    def num_pinned_blocks(self) -> int:
        """How many of the engine's blocks jobs hold; a block pinned twice counts twice."""
        return self._num_pinned

    @property
    def num_open_jobs(self) -> int:
        """How many store jobs have not ended on every rank."""
        return len(self._jobs)

    @property
    def num_inquiries(self) -> int:
        """How many lookups are under way or waiting to be used."""
        return self._admission.num_inquiries

    @property
    def num_loads(self) -> int:
        """How many loads are under way."""
        return self._admission.num_loads

    # ------------------------------------------------------------------ arrival and lookup

    def on_new_request(
        self, view: RequestView, namespace: str | None, now_s: float, *, may_load: bool = True
    ) -> None:
        """Track a request that arrived; ``namespace`` ``None`` means: neither save nor load.

        An id that is tracked already is replaced: all we knew belonged to another life.
        ``may_load`` is False for requests that must compute their whole prompt.
        """
        self._forget(view.request_id)
        prefix_id = None if namespace is None else self._prefixes.id_for(namespace)
        self._trackers[view.request_id] = RequestTracker(
            view.request_id, prefix_id, view.num_tokens, may_load=may_load
        )
        if namespace is not None and may_load:
            self._admission.inquire(view, namespace, now_s, sentinels=self._saves.prefill)

    def match(self, view: RequestView, num_computed_tokens: int, now_s: float) -> int | None:
        """Return how many tokens can be loaded beyond ``num_computed_tokens``; ``None``: ask again.

        Free of side effects on the request: the engine repeats it while allocation fails.
        """
        tracker = self._trackers.get(view.request_id)
        if tracker is None or tracker.prefix_id is None or not tracker.may_load:
            return 0
        if tracker.state is RequestState.RUNNING:
            # The engine asks for a request that we believe to be computing: it was preempted in
            # this very scheduling pass, and the step that says so has not been built yet.
            self._preempt(view, now_s)
        namespace = self._prefixes.name_of(tracker.prefix_id)
        return self._admission.match(view, tracker, namespace, num_computed_tokens, now_s)

    def on_allocated(self, view: RequestView, num_external_tokens: int) -> None:
        """Plan the load of what the engine granted, which may be less than was promised."""
        granted = self._admission.granted(view.request_id, num_external_tokens)
        if not num_external_tokens:
            return
        tracker = self._trackers.get(view.request_id)
        self._admission.load_started(view.request_id, num_external_tokens)
        if granted is None or tracker is None or tracker.prefix_id is None:
            self._pending_loads.append(self._refused_load(view, num_external_tokens))
            return
        num_computed_tokens, hit_token = granted
        tracker.advance(RequestEvent.LOAD_STARTED)
        self.counters["load_jobs"] += 1
        job = plan_load(
            view,
            self.coordinator,
            job_id=self._take_job_id(),
            prefix_id=tracker.prefix_id,
            num_computed_tokens=num_computed_tokens,
            hit_token=hit_token,
        )
        self._pending_loads.append(job)

    def _refused_load(self, view: RequestView, num_tokens: int) -> LoadJob:
        """Return a load that fails on every rank, for tokens that were granted but never promised.

        The engine waits for a report in any case; a failed load makes it recompute.
        """
        self.counters["refused_loads"] += 1
        num_groups = len(self.coordinator.groups)
        return LoadJob(
            job_id=self._take_job_id(),
            request_id=view.request_id,
            prefix_id=UNKNOWN_PREFIX_ID,
            start_token=0,
            end_token=num_tokens,
            hashes=BlockHashes.pack(()),
            first_chunks=(0,) * num_groups,
            block_ids=(b"",) * num_groups,
        )

    def on_finished(self, request_id: str) -> None:
        """Forget a request; its open jobs and loads still report and give back what is theirs.

        Call it when the engine ends the request, not in a later step: the id may be reused.
        """
        self._forget(request_id)

    # ------------------------------------------------------------------ one step

    def step(self, events: StepEvents, now_s: float) -> StepOutcome:
        """Apply a step's events and return what the workers have to do for it."""
        for view in events.preempted:
            self._preempt(view, now_s)
        stores: list[StoreJob] = []
        pins: list[int] = []
        for scheduled in events.scheduled:
            tracker = self._trackers.get(scheduled.view.request_id)
            if tracker is None:
                continue
            self._on_scheduled(tracker, scheduled)
            if self._saves.any and tracker.prefix_id is not None:
                self._emit(tracker, scheduled, now_s, stores, pins)
        loads, self._pending_loads = tuple(self._pending_loads), []
        plan = StepPlan({}, tuple(stores), loads)
        if stores or loads:
            plan = StepPlan(self._prefixes.take_new(), plan.stores, plan.loads)
        return StepOutcome(plan, pins)

    def _on_scheduled(self, tracker: RequestTracker, scheduled: Scheduled) -> None:
        """Begin a life where the engine admits the request, and find where its first job starts."""
        if scheduled.is_admission and tracker.state is RequestState.RUNNING:
            tracker.advance(RequestEvent.ARRIVED)  # resumed without a preemption notice
            tracker.adopt_next_prefix()
        tracker.advance(RequestEvent.SCHEDULED)
        if tracker.progress is not None:
            return
        self._admission.drop(tracker.request_id)
        tracker.num_admitted_tokens = scheduled.view.num_tokens
        start = scheduled.num_computed_tokens
        if tracker.repair:
            start = 0
            self.counters["repairs"] += 1
        if not self._saves.prefill:
            start = max(start, tracker.num_admitted_tokens)
        tracker.progress = SaveProgress.starting_at(self._aligned(start))

    def _emit(
        self,
        tracker: RequestTracker,
        scheduled: Scheduled,
        now_s: float,
        stores: list[StoreJob],
        pins: list[int],
    ) -> None:
        """Emit the next job of a request, if something new is certain and the budget allows."""
        progress = tracker.progress
        assert progress is not None
        certain = min(
            scheduled.num_computed_tokens + scheduled.num_scheduled_tokens,
            scheduled.view.num_hashes * self.coordinator.hash_block_size,
        )
        if not self._saves.decode:
            certain = min(certain, tracker.num_admitted_tokens)
        aligned = self._aligned(certain)
        if aligned <= progress.scheduled_offset and not progress.failed:
            return
        assert tracker.prefix_id is not None
        if self._pool_back_off.blocks(now_s, len(self._jobs)) or not progress.may_emit(now_s):
            return
        start = progress.scheduled_offset
        end = min(aligned, start + self._job_budget_tokens())
        if end <= start:
            return
        planned = plan_store(
            scheduled.view,
            self.coordinator,
            job_id=self._take_job_id(),
            prefix_id=tracker.prefix_id,
            start_token=start,
            end_token=end,
        )
        progress.scheduled_offset = end
        lost = self.coordinator.num_chunks(start, end) - len(planned.pinned_block_ids)
        self.counters["skipped_null_chunks"] += lost
        progress.num_open_jobs += 1
        self._jobs[planned.job.job_id] = _OpenJob(progress, start, end, planned.pinned_block_ids)
        self._num_pinned += len(planned.pinned_block_ids)
        self.counters["store_jobs"] += 1
        stores.append(planned.job)
        pins.extend(planned.pinned_block_ids)

    def _job_budget_tokens(self) -> int:
        """Return how many tokens the next job may cover: at least a unit when nothing is pinned."""
        unit = self.coordinator.lcm_block_size
        blocks_per_unit = self.coordinator.num_chunks(0, unit)
        room = (self._limits.max_pinned_blocks - self._num_pinned) // blocks_per_unit * unit
        if room <= 0 and not self._num_pinned:
            room = unit
        return max(0, min(room, max(unit, self._aligned(self._limits.max_job_tokens))))

    # ------------------------------------------------------------------ reports

    def on_report(self, report: JobReport, now_s: float) -> list[int]:
        """Take in what the ranks report and return the blocks to unpin, in the order to free them.

        Reversed, so that the engine evicts the end of a chain first.
        """
        unpinned: list[int] = []
        self.counters.update(report.counters)
        for job_id, num_ranks in report.staged.items():
            job = self._jobs.get(job_id)
            if job is not None:
                job.num_staged += num_ranks
                if job.num_staged >= self._num_ranks:
                    unpinned.extend(self._unpin(job))
        for job_id, ends in report.ended.items():
            job = self._jobs.get(job_id)
            if job is not None:
                job.ends.update(ends)
                if job.ends.total() >= self._num_ranks:
                    unpinned.extend(self._unpin(job))
                    del self._jobs[job_id]
                    self._on_job_ended(job, now_s)
        for request_id, token in report.failed_loads.items():
            self._on_load_failed(request_id, token, now_s, lost=request_id in report.lost_loads)
        return unpinned

    def on_load_finished(self, request_id: str) -> None:
        """Note that a load ended on every rank; call it after the report that came with it."""
        num_tokens = self._admission.load_ended(request_id)
        failed_token = self._failed_loads.pop(request_id, None)
        if failed_token is not None:
            self.counters["failed_loads"] += 1
        tracker = self._trackers.get(request_id)
        if tracker is None or tracker.state is not RequestState.LOADING:
            return
        tracker.advance(RequestEvent.LOAD_ENDED)
        if failed_token is None:
            tracker.holds_loaded = True
            self.counters["loaded_tokens"] += num_tokens
            self._admission.resume()
            return
        tracker.adopt_next_prefix()  # it starts over
        tracker.num_failed_loads += 1
        known = tracker.load_limit_token
        tracker.load_limit_token = failed_token if known is None else min(known, failed_token)

    def _on_load_failed(self, request_id: str, token: int, now_s: float, *, lost: bool) -> None:
        """Note where a rank's load failed; it counts once every rank has ended the load."""
        if lost:
            self.counters["lost_loads"] += 1
            self._suspend_loads(now_s)
        known = self._failed_loads.get(request_id)
        self._failed_loads[request_id] = token if known is None else min(known, token)

    def _suspend_loads(self, now_s: float) -> None:
        self._admission.suspend(
            now_s, first_delay_s=self._limits.first_delay_s, max_delay_s=self._limits.max_delay_s
        )

    def _on_job_ended(self, job: _OpenJob, now_s: float) -> None:
        failures = [end for end in job.ends if not end.is_success]
        if not failures:
            self._pool_back_off.succeed()
        elif JobEnd.NO_SPACE in failures or JobEnd.LOST in failures:
            self._pool_back_off.fail(now_s, self._limits)
            self.counters["pool_back_offs"] += 1
        progress = job.progress
        progress.num_open_jobs -= 1
        if not failures:
            progress.record_saved(job.start_token, job.end_token)
            progress.delay_s = 0.0
        else:
            progress.back_off(
                now_s,
                first_delay_s=self._limits.first_delay_s,
                max_delay_s=self._limits.max_delay_s,
            )

    def _unpin(self, job: _OpenJob) -> list[int]:
        """Give a job's blocks back, once."""
        block_ids, job.pinned_block_ids = job.pinned_block_ids, []
        self._num_pinned -= len(block_ids)
        return block_ids[::-1]

    # ------------------------------------------------------------------ ends and resets

    def reset(self, namespace_of: Callable[[str], str | None]) -> None:
        """Move to other namespaces, because the weights changed.

        ``namespace_of`` gives a request's new one. Requests that have not computed anything move
        along. What is computed or loading holds KV cache of the old weights: it neither saves nor
        loads until it is admitted anew.
        """
        self.counters["resets"] += 1
        for tracker in self._trackers.values():
            self._admission.drop(tracker.request_id)
            # Also for those that wait for an earlier reset's name: it stands for other weights.
            namespace = namespace_of(tracker.request_id)
            tracker.next_prefix_id = None if namespace is None else self._prefixes.id_for(namespace)
            is_clean = tracker.state is RequestState.WAITING and not tracker.holds_loaded
            tracker.prefix_id = tracker.next_prefix_id if is_clean else None

    def _preempt(self, view: RequestView, now_s: float) -> None:
        tracker = self._trackers.get(view.request_id)
        if tracker is None or tracker.state is not RequestState.RUNNING:
            return
        tracker.advance(RequestEvent.PREEMPTED)
        tracker.adopt_next_prefix()
        if tracker.prefix_id is not None and tracker.may_load:
            namespace = self._prefixes.name_of(tracker.prefix_id)
            self._admission.inquire(view, namespace, now_s, sentinels=self._saves.prefill)

    def _forget(self, request_id: str) -> None:
        self._admission.drop(request_id)
        tracker = self._trackers.pop(request_id, None)
        if tracker is not None:
            tracker.advance(RequestEvent.FINISHED)

    def check_integrity(self) -> None:
        """Recount everything from scratch; raises ``AssertionError`` on a bug of ours."""
        pinned = sum(len(job.pinned_block_ids) for job in self._jobs.values())
        assert pinned == self._num_pinned, f"{pinned} blocks are pinned, counted {self._num_pinned}"
        for tracker in self._trackers.values():
            progress = tracker.progress
            if progress is None:
                continue
            open_jobs = sum(job.progress is progress for job in self._jobs.values())
            assert open_jobs == progress.num_open_jobs, f"{tracker.request_id}: {open_jobs} open"
            assert progress.saved_offset <= progress.scheduled_offset, f"{tracker}"

    def _aligned(self, num_tokens: int) -> int:
        unit = self.coordinator.lcm_block_size
        return num_tokens // unit * unit

    def _take_job_id(self) -> int:
        self._next_job_id += 1
        return self._next_job_id
