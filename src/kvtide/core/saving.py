"""Saving: which store jobs a step emits, what they pin, and what their reports mean.

Theory of operation. These rules keep it right:

* **Only certain tokens are saved.** After a step, ``min(computed + scheduled, hashed)`` tokens of
  a request are final: hashes exist only for accepted tokens, so drafts and rejections are covered.
  Whenever that passes a multiple of ``lcm_block_size``, one job covers
  ``[scheduled_offset, aligned)`` and nothing below it is touched.
* **States are saved when the engine hands them off**, or never: their place in a block table says
  nothing. A hand-off becomes a job of its own, beside the offsets; with it go the chunks of other
  groups that no store job covers but a request resuming at that boundary needs.
* **Decodes are saved in portions** of several units, and with the request's end: a job costs the
  engine and the store nearly the same, whether it has one block or eight. Only where the engine
  keeps the blocks for so long.
* **Small jobs are joined.** Of a step's jobs the small ones, which decodes make, go to the workers
  as one (``joining``).
* **A job's blocks are pinned until every rank has staged them**, within a budget. A job is cut to
  the budget, never refused for its size; what is left follows on any later step.
* **An offset moves only on success.** ``scheduled_offset`` moves when a job is emitted,
  ``saved_offset`` when the last rank has reported success. A failed job puts its request (for
  no-space or a lost store: the whole pool) into back-off, after which saving starts again at the
  saved offset.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtide.core.back_off import BackOff, Delays
from kvtide.core.coordinator import Coordinator
from kvtide.core.jobs import BoundaryJob, JobEnd, JobReport, SaveJob
from kvtide.core.joining import Joining
from kvtide.core.open_jobs import OpenJob, OpenJobs
from kvtide.core.requests import RequestTracker, SaveProgress
from kvtide.core.transfer import (
    HandOff,
    PlannedStore,
    RequestView,
    plan_boundary,
    plan_store,
)

MAX_STEP_JOBS = 64
"""After so many store jobs a step plans no more for requests that decode, each of which costs the
engine's thread 10 us or so: they stay due, and their turn comes in the next steps."""


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """Which tokens an engine of this role saves.

    The last ``num_unsettled_tokens`` that are computed are left for later: a draft model of several
    modules may write their KV cache once more.
    """

    prefill: bool = True
    decode: bool = False
    num_unsettled_tokens: int = 0

    @property
    def any(self) -> bool:
        """Whether anything is saved at all."""
        return self.prefill or self.decode


@dataclass(frozen=True, slots=True)
class SaveLimits:
    """What saving may hold at once, and how it waits after a failure.

    ``max_pinned_blocks`` bounds the engine's blocks that jobs hold; ``max_job_tokens`` bounds one
    job, and ``max_open_tokens`` all that have not ended: what lies in a worker's staging memory.
    Of a request that decodes a job has ``decode_job_tokens`` or more, down to whole units, but for
    the rest at its end.
    """

    max_pinned_blocks: int
    max_job_tokens: int
    max_open_tokens: int = 1 << 62
    delays: Delays = field(default_factory=Delays)
    decode_job_tokens: int = 0


class Scheduled(NamedTuple):
    """One request of a step: ``num_computed_tokens`` before it, ``num_scheduled_tokens`` in it.

    ``is_admission`` says that the engine (re)admits the request in this step.
    """

    view: RequestView
    num_computed_tokens: int
    num_scheduled_tokens: int
    is_admission: bool


class Saving:
    """Keeps the open store jobs, their pins and the back-off of the pool.

    ``num_ranks`` is how many reports end a job; ``take_job_id`` returns ids that never repeat.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        policy: SavePolicy,
        limits: SaveLimits,
        *,
        num_ranks: int,
        counters: Counter[str],
        take_job_id: Callable[[], int],
    ) -> None:
        self.policy = policy
        self._coordinator = coordinator
        self._limits = limits
        self._counters = counters
        self._take_job_id = take_job_id
        self._jobs = OpenJobs(num_ranks)
        self._joining = Joining(
            coordinator, self._jobs, max_job_tokens=limits.max_job_tokens, take_job_id=take_job_id
        )
        self._blocks_per_unit = max(1, coordinator.max_stored_per_unit)
        unit = coordinator.lcm_block_size
        # Half of what the engine keeps: the rest is for steps in which others have their turn.
        slack = coordinator.slack_tokens / 2
        self._may_lag = slack >= unit
        self._decode_job_tokens = max(
            unit, coordinator.aligned(int(min(limits.decode_job_tokens, slack)))
        )
        # States are offered for one step only: the next boundary's find room.
        self._max_held_blocks = limits.max_pinned_blocks - coordinator.num_state_groups
        self._pool_back_off = BackOff(limits.delays)
        self._due_tokens: dict[str, float] = {}
        """By request: below this many tokens a step has nothing to save. May lack any of them."""

    def __repr__(self) -> str:
        return f"<Saving [{len(self._jobs)} jobs, {self.num_pinned_blocks} blocks pinned]>"

    @property
    def num_open_jobs(self) -> int:
        """How many store jobs have not ended on every rank."""
        return len(self._jobs)

    @property
    def num_pinned_blocks(self) -> int:
        """How many of the engine's blocks jobs hold; a block pinned twice counts twice."""
        return self._jobs.num_pinned_blocks

    # ------------------------------------------------------------------ one step

    def is_due(self, request_id: str, num_tokens: int) -> bool:
        """Tell whether a step that brings a request to ``num_tokens`` may have something to save.

        One look-up and one comparison: of a thousand requests that decode, few complete a block.
        """
        return num_tokens >= self._due_tokens.get(request_id, 0)

    def rest(self, tracker: RequestTracker, num_certain_tokens: int) -> None:
        """Note from where on a request has to be looked at again, once its step is dealt with."""
        progress = tracker.progress
        assert progress is not None
        certain = self._coordinator.aligned(num_certain_tokens)
        least = self._least_job_tokens(tracker, progress)
        if certain < progress.scheduled_offset + least and not progress.must_rewind:
            self._due_tokens[tracker.request_id] = self._next_due_token(tracker, progress)
        else:
            self.forget(tracker.request_id)

    def _next_due_token(self, tracker: RequestTracker, progress: SaveProgress) -> float:
        """Return the token count from which a request has to be looked at again."""
        due = progress.scheduled_offset + self._least_job_tokens(tracker, progress)
        if progress.owed_proofs:
            proven = min(progress.owed_proofs) + self._coordinator.max_proof_tokens
            due = min(due, max(proven, tracker.num_admitted_tokens))
        if not self.policy.decode and due > tracker.num_admitted_tokens:
            return math.inf
        return due + self.policy.num_unsettled_tokens

    def forget(self, request_id: str) -> None:
        """Look at a request again in its next step: its life changed, or a job failed."""
        self._due_tokens.pop(request_id, None)

    def has_turn(self, tracker: RequestTracker, scheduled: Scheduled, num_planned: int) -> bool:
        """Tell whether a request may have jobs in a step that has ``num_planned`` already.

        A prefill always may: the engine bounds how many a step has.
        """
        if num_planned < MAX_STEP_JOBS or not self._may_lag:
            return True
        return scheduled.num_computed_tokens < tracker.num_admitted_tokens

    def _least_job_tokens(self, tracker: RequestTracker, progress: SaveProgress) -> int:
        """Return how many tokens the next job of a request has at least.

        Of a decode that is several units, unless a proof is owed, which the next unit brings.
        """
        unit = self._coordinator.lcm_block_size
        is_decode = progress.scheduled_offset + unit > tracker.num_admitted_tokens
        return self._decode_job_tokens if is_decode and not progress.owed_proofs else unit

    def begin(self, tracker: RequestTracker, scheduled: Scheduled) -> None:
        """Find where the first job of a request's life starts: where the engine computes from.

        What is below was held or loaded, so it is in the store, but for what an earlier life had
        not saved yet. Where lookups found it lacking there, the first job starts at 0.
        """
        tracker.num_admitted_tokens = scheduled.view.num_tokens
        held = scheduled.num_computed_tokens
        if tracker.held_token is not None and not tracker.holds_loaded:
            held = min(held, tracker.held_token)  # the rest came from another connector
        start = held
        if tracker.saved_token is not None:
            start = min(start, tracker.saved_token)
            tracker.saved_token = None
        if tracker.repair:
            start = 0
            self._counters["repairs"] += 1
        if not self.policy.prefill:
            start = max(start, tracker.num_admitted_tokens)
        offset = self._coordinator.aligned(start)
        tracker.progress = SaveProgress(
            offset,
            offset,
            BackOff(self._limits.delays),
            first_token=held,
        )

    def emit(
        self,
        tracker: RequestTracker,
        view: RequestView,
        num_certain_tokens: int,
        now_s: float,
        *,
        is_last: bool = False,
    ) -> Iterator[PlannedStore]:
        """Yield the next jobs of a request, as far as tokens are certain and the budget allows.

        The last time, whatever is complete.
        """
        progress = tracker.progress
        assert progress is not None
        assert tracker.prefix_id is not None
        kept = self._kept_boundaries(tracker, view)
        certain = self._coordinator.aligned(num_certain_tokens)
        end = None
        unit = self._coordinator.lcm_block_size
        while True:
            least = unit if is_last else self._least_job_tokens(tracker, progress)
            next_end = self._next_end(progress, certain, least, now_s)
            if next_end is None:
                break
            end = next_end
            planned = plan_store(
                view,
                self._coordinator,
                job_id=self._take_job_id(),
                prefix_id=tracker.prefix_id,
                start_token=progress.scheduled_offset,
                end_token=end,
                kept=kept,
            )
            if planned.pinned_block_ids:
                self._open(planned, progress)
                yield planned
            else:  # states alone, or all freed: nothing of this range can be saved any more
                self._counters["skipped_null_chunks"] += planned.num_null
                progress.pass_over(end)
        # A decode goes on, and its next unit proves this one.
        if end is None or end > tracker.num_admitted_tokens:
            return
        if self._coordinator.owes_proof(end, kept):
            progress.owed_proofs[end] = end

    def joined(self, planned: Sequence[PlannedStore]) -> Sequence[SaveJob]:
        """Return a step's jobs as workers get them: small ones joined."""
        jobs = list(self._joining.joined(planned))
        self._counters["store_jobs"] += sum(not isinstance(job, BoundaryJob) for job in jobs)
        return jobs

    def _kept_boundaries(self, tracker: RequestTracker, view: RequestView) -> tuple[int, ...]:
        """Return the boundaries of a request that are kept beside the regular ones."""
        if self._coordinator.retention_interval is None:
            return ()
        shared = (tracker.shared_token, view.shared_token)
        return self._coordinator.kept_boundaries(view.num_prompt_tokens, shared)

    def _next_end(
        self, progress: SaveProgress, certain: int, least_tokens: int, now_s: float
    ) -> int | None:
        """Return where the next job of a request ends, ``None`` if there is none for now.

        ``certain`` tokens, in whole units, are to be saved; fewer than ``least_tokens`` can wait.
        """
        if certain < progress.scheduled_offset + least_tokens and not progress.must_rewind:
            return None
        if self._must_wait(now_s) or not progress.may_emit(now_s):
            return None
        start = progress.scheduled_offset
        end = min(certain, start + self._budget_tokens())
        return end if end > start else None

    def finish(
        self,
        tracker: RequestTracker,
        view: RequestView,
        hand_offs: Sequence[HandOff],
        num_computed_tokens: int,
        now_s: float,
    ) -> list[PlannedStore]:
        """Return the jobs of a request that ends: states, what was put off, and proofs owed."""
        if tracker.progress is None:
            return []
        computed = num_computed_tokens - self.policy.num_unsettled_tokens
        planned = self.publish(tracker, view, hand_offs, computed, now_s)
        ended = Scheduled(view, num_computed_tokens, 0, is_admission=False)
        certain = self.certain_token(tracker, ended)
        planned += self.emit(tracker, view, certain, now_s, is_last=True)
        planned += self.settle_proofs(tracker, ended, certain, now_s)
        return planned

    def publish(
        self,
        tracker: RequestTracker,
        view: RequestView,
        hand_offs: Sequence[HandOff],
        num_certain_tokens: int,
        now_s: float,
    ) -> list[PlannedStore]:
        """Return the jobs that save the states the engine handed off, one per boundary.

        An offer holds for one step: what the budget or a back-off forbids now is lost, and counted.
        """
        progress = tracker.progress
        if progress is None:
            return []
        by_boundary: dict[int, list[HandOff]] = {}
        named_token = view.num_hashes * self._coordinator.hash_block_size
        for hand_off in hand_offs:
            is_named = hand_off.boundary <= named_token
            if is_named and self._is_to_be_saved(tracker, progress, hand_off.boundary):
                by_boundary.setdefault(hand_off.boundary, []).append(hand_off)
        planned_jobs: list[PlannedStore] = []
        for boundary, states in sorted(by_boundary.items()):
            span = (0, num_certain_tokens)
            planned = self._plan_boundary(tracker, view, states, boundary, span)
            if not planned.pinned_block_ids:
                continue
            if not self._may_open(planned, now_s):
                self._counters["lost_boundaries"] += 1
                continue
            planned_jobs.append(self._open_boundary(planned))
            proven_token = boundary + self._coordinator.max_proof_tokens
            if num_certain_tokens < proven_token and boundary <= tracker.num_admitted_tokens:
                progress.owed_proofs[boundary] = num_certain_tokens
        return planned_jobs

    def settle_proofs(
        self, tracker: RequestTracker, scheduled: Scheduled, certain: int, now_s: float
    ) -> Iterator[PlannedStore]:
        """Yield the jobs that save proofs which were not computed yet with their boundaries.

        Only of the last boundary of a prefill: before, the next unit's store job covers the proof.
        """
        progress = tracker.progress
        assert progress is not None
        if not progress.owed_proofs:
            return
        computed = scheduled.num_computed_tokens + scheduled.num_scheduled_tokens
        for boundary, after_token in list(progress.owed_proofs.items()):
            is_covered = self._coordinator.aligned(certain) > boundary
            if not is_covered:
                proven_token = boundary + self._coordinator.max_proof_tokens
                if certain < proven_token or computed < tracker.num_admitted_tokens:
                    continue
                span = (after_token, certain)
                planned = self._plan_boundary(tracker, scheduled.view, (), boundary, span)
                if planned.pinned_block_ids:
                    if not self._may_open(planned, now_s):
                        continue
                    yield self._open_boundary(planned)
                else:
                    self._counters["skipped_null_chunks"] += planned.num_null
            del progress.owed_proofs[boundary]

    def _plan_boundary(
        self,
        tracker: RequestTracker,
        view: RequestView,
        states: Sequence[HandOff],
        boundary: int,
        certain_span: tuple[int, int],
    ) -> PlannedStore:
        """Plan what a boundary needs; ``certain_span`` became certain since the last look at it."""
        assert tracker.prefix_id is not None
        return plan_boundary(
            view,
            self._coordinator,
            states,
            job_id=self._take_job_id(),
            prefix_id=tracker.prefix_id,
            boundary=boundary,
            certain_span=certain_span,
            kept=self._kept_boundaries(tracker, view),
        )

    def _open_boundary(self, planned: PlannedStore) -> PlannedStore:
        self._open(planned, None)
        self._counters["boundary_jobs"] += 1
        return planned

    def _may_open(self, planned: PlannedStore, now_s: float) -> bool:
        """Tell whether a job beside the offsets may start now."""
        if self._must_wait(now_s):
            return False
        num_pinned = self._jobs.num_pinned_blocks
        room = self._limits.max_pinned_blocks - num_pinned
        return len(planned.pinned_block_ids) <= room or not num_pinned

    def _is_to_be_saved(
        self, tracker: RequestTracker, progress: SaveProgress, boundary: int
    ) -> bool:
        """Tell whether this role saves the tokens before ``boundary``, and did not load them."""
        if boundary <= progress.first_token or boundary % self._coordinator.alignment:
            return False
        is_prefill = boundary <= tracker.num_admitted_tokens
        return self.policy.prefill if is_prefill else self.policy.decode

    def certain_token(self, tracker: RequestTracker, scheduled: Scheduled) -> int:
        """Return up to where a request's tokens are final after this step and to be saved."""
        certain = min(
            scheduled.num_computed_tokens
            + scheduled.num_scheduled_tokens
            - self.policy.num_unsettled_tokens,
            scheduled.view.num_hashes * self._coordinator.hash_block_size,
        )
        if not self.policy.decode:
            certain = min(certain, tracker.num_admitted_tokens)
        return certain

    def _must_wait(self, now_s: float) -> bool:
        """Judge the pool's back-off; after it, one job at a time until one succeeds."""
        back_off = self._pool_back_off
        return back_off.has_failed and (back_off.is_waiting(now_s) or bool(self._jobs))

    def _budget_tokens(self) -> int:
        """Return how many tokens the next job may cover: at least a unit when nothing is pinned."""
        coordinator, limits, jobs = self._coordinator, self._limits, self._jobs
        unit = coordinator.lcm_block_size
        num_free = self._max_held_blocks - jobs.num_pinned_blocks
        room = num_free // self._blocks_per_unit * unit
        if room <= 0 and not jobs.num_pinned_blocks:
            room = unit
        staging_room = coordinator.aligned(limits.max_open_tokens - jobs.num_tokens)
        largest = max(unit, coordinator.aligned(limits.max_job_tokens))
        return max(0, min(room, staging_room, largest))

    def _open(self, planned: PlannedStore, progress: SaveProgress | None) -> None:
        self._jobs.open(planned, progress)
        if planned.num_null:
            self._counters["skipped_null_chunks"] += planned.num_null

    # ------------------------------------------------------------------ reports

    def on_report(self, report: JobReport, now_s: float) -> list[int]:
        """Take in what the ranks report and return the blocks to unpin, in the order to free them.

        Reversed, so that the engine evicts the end of a chain first.
        """
        unpinned, ended = self._jobs.take(report)
        for job in ended:
            self._on_ended(job, now_s)
        return unpinned

    def _on_ended(self, job: OpenJob, now_s: float) -> None:
        failures = job.failures
        if failures & {JobEnd.NO_SPACE, JobEnd.LOST}:
            self._pool_back_off.fail(now_s)
            self._counters["pool_back_offs"] += 1
        elif not failures:
            self._pool_back_off.succeed()
        if not job.ranges:
            self._counters["lost_boundaries"] += bool(failures)
        elif failures:
            self._due_tokens.clear()  # rare, and the job does not know whose it was
        for progress, start_token, end_token in job.ranges:
            progress.num_open_jobs -= 1
            if failures:
                progress.record_failed(now_s)
            else:
                progress.record_saved(start_token, end_token)

    def check_integrity(self, trackers: Iterable[RequestTracker]) -> None:
        """Recount everything from scratch; raises ``AssertionError`` on a bug of ours."""
        self._jobs.check_integrity(trackers)
