"""The scheduler side of the pool: engine events in; step plans, pins and unpins out.

All per-request state lives here, on one thread, without locks; workers know only jobs. What to
save is decided in ``saving``, what to load in ``admission``; this file follows each request
through its life and hands it to both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtide.core.admission import Admission, AdmissionLimits, Lookups
from kvtide.core.coordinator import Coordinator
from kvtide.core.jobs import JobReport, LoadJob, StepPlan
from kvtide.core.keys import BlockHashes, PrefixTable
from kvtide.core.requests import RequestEvent, RequestState, RequestTracker
from kvtide.core.save_limits import SaveLimits, SavePolicy
from kvtide.core.saving import Saving
from kvtide.core.transfer import HandOff, PlannedStore, RequestView, Scheduled, plan_load

UNKNOWN_PREFIX_ID = -1
"""No worker ever learns a namespace for it."""


@dataclass(frozen=True, slots=True)
class StepEvents:
    """What the engine decided in one step; preemptions are applied first.

    ``hand_offs`` has, by request, the states that the engine offers in this very step; its requests
    are among the scheduled ones, or the offer is not taken.
    """

    preempted: Sequence[RequestView] = ()
    scheduled: Iterable[Scheduled] = ()
    hand_offs: Mapping[str, Sequence[HandOff]] = field(default_factory=dict)


class StepOutcome(NamedTuple):
    """The plan for the workers, and the blocks to pin before the step runs."""

    plan: StepPlan
    pin_block_ids: list[int]


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
        limits: SaveLimits,
        admission: AdmissionLimits | None = None,
        saves: SavePolicy | None = None,
        num_ranks: int = 1,
    ) -> None:
        self.coordinator = coordinator
        self.counters: Counter[str] = Counter()
        self._next_job_id = 0
        self._saving = Saving(
            coordinator,
            saves or SavePolicy(),
            limits,
            num_ranks=num_ranks,
            counters=self.counters,
            take_job_id=self._take_job_id,
        )
        self._admission = Admission(
            coordinator, lookups, admission or AdmissionLimits(), self.counters
        )
        self._prefixes = PrefixTable()
        self._trackers: dict[str, RequestTracker] = {}
        self._pending_loads: list[LoadJob] = []
        self._load_jobs: dict[str, int] = {}
        self._cancelled_loads: list[int] = []
        self._failed_loads: dict[str, int] = {}
        """Loads that failed on some rank and have not ended on all: the first unproven token."""
        self._num_ranks = num_ranks
        self._mended_keys: set[str] = set()
        """What ranks have told to be whole again since the last step, for all ranks."""

    def __repr__(self) -> str:
        states = Counter(tracker.state.value for tracker in self._trackers.values())
        counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        head = f"{len(self._trackers)} requests" + (f": {counts}" if counts else "")
        return (
            f"<PoolScheduler [{head} | {self.num_open_jobs} jobs, "
            f"{self.num_pinned_blocks} blocks pinned]>"
        )

    @property
    def has_pins(self) -> bool:
        """Whether a job still reads the engine's blocks, so that the engine must keep stepping."""
        return self._saving.num_pinned_blocks > 0

    @property
    def num_pinned_blocks(self) -> int:
        """How many of the engine's blocks jobs hold; a block pinned twice counts twice."""
        return self._saving.num_pinned_blocks

    @property
    def num_open_jobs(self) -> int:
        """How many store jobs have not ended on every rank."""
        return self._saving.num_open_jobs

    @property
    def num_inquiries(self) -> int:
        """How many lookups are under way or waiting to be used."""
        return self._admission.num_inquiries

    @property
    def num_wanted_blocks(self) -> int:
        """How many blocks requests want that load, or have loaded and do not compute yet."""
        return self._admission.room.num_wanted_blocks

    @property
    def num_loads(self) -> int:
        """How many loads are under way."""
        return self._admission.num_loads

    @property
    def is_awaited(self) -> bool:
        """Whether a request waits for a lookup or a load."""
        return bool(self._admission.num_loads or self._admission.num_inquiries)

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
        if namespace is None:
            self.counters["unnamed_requests"] += 1
        self._trackers[view.request_id] = RequestTracker(
            view.request_id, prefix_id, view.num_tokens, may_load=may_load
        )
        if namespace is not None and may_load:
            self._inquire(view, self._trackers[view.request_id], namespace, now_s)

    def _inquire(
        self, view: RequestView, tracker: RequestTracker, namespace: str, now_s: float
    ) -> None:
        sentinels = self._saving.policy.prefill
        self._admission.inquire(view, tracker, namespace, now_s, sentinels=sentinels)

    def match(self, view: RequestView, num_computed_tokens: int, now_s: float) -> int | None:
        """Return how many tokens can be loaded beyond ``num_computed_tokens``; ``None``: ask again.

        The engine repeats it while allocation fails. It may note a preemption that no step has told
        of yet, submit a lookup, and make or withdraw a promise; nothing is loaded or saved by it.
        """
        tracker = self._trackers.get(view.request_id)
        if tracker is None or tracker.prefix_id is None or not tracker.may_load:
            return 0
        if tracker.state is RequestState.RUNNING:
            # The engine asks for a request that we believe to be computing: it was preempted in
            # this very scheduling pass, and the step that says so has not been built yet.
            self._preempt(view, now_s)
        tracker.held_token = num_computed_tokens
        namespace = self._prefixes.name_of(tracker.prefix_id)
        return self._admission.match(view, tracker, namespace, num_computed_tokens, now_s)

    def shared_token(self, request_id: str) -> int:
        """Return up to where others began like this request, if a hit there lacks something.

        An engine that computes the request does well to leave its states there. 0: nowhere.
        """
        tracker = self._trackers.get(request_id)
        return tracker.shared_token if tracker is not None else 0

    def on_allocated(self, view: RequestView, num_external_tokens: int) -> None:
        """Plan the load of what the engine granted, which may be less than was promised."""
        granted = self._admission.granted(view.request_id, num_external_tokens)
        if not num_external_tokens:
            return
        tracker = self._trackers.get(view.request_id)
        self._admission.load_started(view, num_external_tokens, granted)
        if granted is None or tracker is None or tracker.prefix_id is None:
            self._pending_loads.append(self._refused_load(view, num_external_tokens))
            return
        tracker.advance(RequestEvent.LOAD_STARTED)
        self.counters["load_jobs"] += 1
        job = plan_load(
            view,
            self.coordinator,
            job_id=self._take_job_id(),
            prefix_id=tracker.prefix_id,
            num_computed_tokens=granted.num_computed_tokens,
            hit_token=granted.hit_token,
            tail_tokens=granted.tail_tokens,
        )
        self._load_jobs[view.request_id] = job.job_id
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
            tail_tokens=(0,) * num_groups,
            block_ids=(b"",) * num_groups,
        )

    def on_finishing(
        self,
        view: RequestView,
        hand_offs: Sequence[HandOff],
        num_computed_tokens: int,
        now_s: float,
    ) -> list[int]:
        """Save what is left of a request that ends, and return the blocks to pin for it.

        That is what saving had put off, and ``hand_offs``, the states that the engine offers with
        the end. Call it before :meth:`on_finished`, while the request has its blocks; the jobs go
        out with the next steps.
        """
        tracker = self._trackers.get(view.request_id)
        if tracker is None or tracker.prefix_id is None or not self._saving.policy.any:
            return []
        planned = self._saving.finish(tracker, view, hand_offs, num_computed_tokens, now_s)
        return [block_id for one in planned for block_id in one.pinned_block_ids]

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
        planned: list[PlannedStore] = []
        for scheduled in events.scheduled:
            tracker = self._trackers.get(scheduled.view.request_id)
            if tracker is None:
                continue
            self._on_scheduled(tracker, scheduled)
            if self._saving.policy.any and tracker.prefix_id is not None:
                hand_offs = events.hand_offs.get(tracker.request_id, ())
                planned += self._saving.save(tracker, scheduled, hand_offs, len(planned), now_s)
        pins: list[int] = []
        for one in planned:
            pins += one.pinned_block_ids
        stores = self._saving.joined([*self._saving.queued(), *planned])
        loads, self._pending_loads = tuple(self._pending_loads), []
        cancelled, self._cancelled_loads = tuple(self._cancelled_loads), []
        prefixes = self._prefixes.take_new() if stores or loads else {}
        mended, self._mended_keys = tuple(self._mended_keys), set()
        plan = StepPlan(prefixes, tuple(stores), loads, cancelled, mended)
        return StepOutcome(plan, pins)

    def is_due(self, request_id: str, num_tokens: int) -> bool:
        """Tell whether :meth:`step` must be told of a request that goes on to ``num_tokens``.

        An engine may leave out of a step's events what is not due; admissions always are.
        """
        return self._saving.agenda.is_due(request_id, num_tokens)

    def _on_scheduled(self, tracker: RequestTracker, scheduled: Scheduled) -> None:
        """Begin a life where the engine admits the request, and find where its first job starts."""
        if tracker.state is RequestState.RUNNING and not scheduled.is_admission:
            return  # nearly always
        if scheduled.is_admission and tracker.state is RequestState.RUNNING:
            # The next turn of a session, or resumed without a preemption notice.
            tracker.advance(RequestEvent.ARRIVED)
            tracker.adopt_next_prefix()
        tracker.advance(RequestEvent.SCHEDULED)
        if tracker.progress is not None:
            return
        self._admission.drop(tracker.request_id)
        self._admission.room.leave(tracker.request_id)
        self._saving.agenda.forget(tracker.request_id)
        self._saving.begin(tracker, scheduled)

    # ------------------------------------------------------------------ reports

    def on_report(self, report: JobReport, now_s: float) -> list[int]:
        """Take in what the ranks report and return the blocks to unpin, in the order to free them.

        Reversed, so that the engine evicts the end of a chain first.
        """
        if report.counters:
            self.counters.update(report.counters)
        if self._num_ranks > 1 and report.mended_keys:
            # Only these: a rank that cannot read must not make others replace what is whole.
            self._mended_keys |= report.mended_keys - report.bad_keys
        for request_id, token in report.failed_loads.items():
            self._on_load_failed(request_id, token, now_s, lost=request_id in report.lost_loads)
        return self._saving.on_report(report, now_s)

    def on_load_finished(self, request_id: str) -> None:
        """Note that a load ended on every rank; call it after the report that came with it."""
        num_tokens = self._admission.load_ended(request_id)
        failed_token = self._failed_loads.pop(request_id, None)
        self._load_jobs.pop(request_id, None)
        tracker = self._trackers.get(request_id)
        if tracker is None or tracker.state is not RequestState.LOADING:
            self._admission.room.leave(request_id)
            return
        tracker.advance(RequestEvent.LOAD_ENDED)
        if failed_token is None:
            tracker.holds_loaded = True
            self.counters["loaded_tokens"] += num_tokens
            self._admission.resume()
            return
        self.counters["failed_loads"] += 1
        self._admission.room.leave(request_id)
        tracker.adopt_next_prefix()  # it starts over
        tracker.num_failed_loads += 1
        known = tracker.load_limit_token
        tracker.load_limit_token = failed_token if known is None else min(known, failed_token)

    def _on_load_failed(self, request_id: str, token: int, now_s: float, *, lost: bool) -> None:
        """Note where a rank's load failed; it counts once every rank has ended the load."""
        if lost:
            self.counters["lost_loads"] += 1
            self._admission.suspend(now_s)
        known = self._failed_loads.get(request_id)
        self._failed_loads[request_id] = token if known is None else min(known, token)

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
            self._inquire(view, tracker, self._prefixes.name_of(tracker.prefix_id), now_s)

    def _forget(self, request_id: str) -> None:
        self._admission.drop(request_id)
        self._saving.agenda.forget(request_id)
        tracker = self._trackers.pop(request_id, None)
        if tracker is None:
            return
        if tracker.state is RequestState.LOADING and request_id in self._load_jobs:
            # The engine holds the blocks until the load has ended, and cannot pause before that.
            self._cancelled_loads.append(self._load_jobs[request_id])
        else:
            self._admission.room.leave(request_id)
        tracker.advance(RequestEvent.FINISHED)

    def check_integrity(self) -> None:
        """Recount everything from scratch; raises ``AssertionError`` on a bug of ours."""
        self._saving.check_integrity(self._trackers.values())

    def _take_job_id(self) -> int:
        self._next_job_id += 1
        return self._next_job_id
