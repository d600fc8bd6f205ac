"""Saving: which store jobs a step emits, what they pin, and what their reports mean.

Theory of operation. These rules keep it right:

* **Only certain tokens are saved.** After a step, ``min(computed + scheduled, hashed)`` tokens of
  a request are final: hashes exist only for accepted tokens, so drafts and rejections are covered.
  Jobs cover ``[scheduled_offset, aligned)``, in whole ``lcm_block_size``, and nothing below it is
  touched.
* **Decodes are saved in portions** of several units where that is asked for, and the rest with the
  request's end (``agenda``).
* **States are saved when the engine hands them off**, beside the offsets (``publishing``).
* **Small jobs are joined.** Of a step's jobs the small ones, which decodes make, go to the workers
  as one (``joining``).
* **A job's blocks are pinned until every rank has staged them**, within a budget
  (``save_budget``). A job is cut to the budget, never refused for its size; what is left follows
  on any later step.
* **An offset moves only on success.** ``scheduled_offset`` moves when a job is emitted,
  ``saved_offset`` when the last rank has reported success. A failed job puts its request (for
  no-space or a lost store: the whole pool) into back-off, after which saving starts again at the
  saved offset.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvtide.core.agenda import Agenda
from kvtide.core.back_off import BackOff
from kvtide.core.coordinator import Coordinator
from kvtide.core.jobs import BoundaryJob, JobReport, SaveJob
from kvtide.core.joining import Joining
from kvtide.core.open_jobs import OpenJob, OpenJobs
from kvtide.core.publishing import Publishing
from kvtide.core.requests import RequestTracker, SaveProgress
from kvtide.core.save_budget import SaveBudget
from kvtide.core.save_limits import SaveLimits, SavePolicy
from kvtide.core.transfer import HandOff, PlannedStore, RequestView, Scheduled, plan_store


class Saving:
    """Follows requests by their offsets, and keeps the open store jobs.

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
        self.agenda = Agenda(coordinator, policy, limits.decode_job_tokens)
        self._coordinator = coordinator
        self._limits = limits
        self._counters = counters
        self._take_job_id = take_job_id
        self._jobs = OpenJobs(num_ranks)
        self._budget = SaveBudget(coordinator, limits, self._jobs, counters)
        self._queue: list[PlannedStore] = []
        """Jobs of requests that ended, which no worker has yet; their blocks are pinned."""
        self._joining = Joining(
            coordinator, self._jobs, max_job_tokens=limits.max_job_tokens, take_job_id=take_job_id
        )
        self.publishing = Publishing(
            coordinator, policy, self._budget, counters=counters, take_job_id=take_job_id
        )

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
        if tracker.repair:
            start = 0
            self._counters["repairs"] += 1
        if not self.policy.prefill:  # what it decoded before a preemption is no prefill
            start = max(start, scheduled.view.num_prompt_tokens)
        offset = self._coordinator.aligned(start)
        tracker.progress = SaveProgress(
            offset,
            offset,
            BackOff(self._limits.delays),
            first_token=held,
        )

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

    def save(
        self,
        tracker: RequestTracker,
        scheduled: Scheduled,
        hand_offs: Sequence[HandOff],
        num_planned: int,
        now_s: float,
    ) -> Iterator[PlannedStore]:
        """Yield a step's jobs for a request, before which the step has ``num_planned``."""
        certain = self.certain_token(tracker, scheduled)
        if hand_offs:  # first, since an offer that is not taken now is lost
            yield from self.publishing.publish(tracker, scheduled.view, hand_offs, certain, now_s)
        if not self.agenda.has_turn(tracker, scheduled, num_planned):
            return
        yield from self.emit(tracker, scheduled.view, certain, now_s)
        yield from self.publishing.settle_proofs(tracker, scheduled, certain, now_s)
        self.agenda.put_off(tracker, certain)

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
        kept = self.publishing.kept(tracker, view)
        certain = self._coordinator.aligned(num_certain_tokens)
        least = 1 if is_last else self.agenda.least_job_tokens(tracker, progress)
        if certain < progress.scheduled_offset + least and not progress.must_rewind:
            return
        end = None
        while (next_end := self._next_end(progress, certain, now_s, is_last=is_last)) is not None:
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
                self._budget.open(planned, progress)
                yield planned
            else:  # states alone, or all freed: nothing of this range can be saved any more
                self._counters["skipped_null_chunks"] += planned.num_null
                progress.pass_over(end)
        # A decode that goes on proves this unit with its next one.
        if end is None or (end > tracker.num_admitted_tokens and not is_last):
            return
        if self._coordinator.owes_proof(end, kept):
            progress.owed_proofs[end] = end

    def _next_end(
        self, progress: SaveProgress, certain: int, now_s: float, *, is_last: bool
    ) -> int | None:
        """Return where the next job of a request ends, ``None`` if there is none for now.

        ``certain`` tokens, in whole units, are to be saved. The last time, a request waits for
        nothing that is over by itself: its own back-off, and room in staging.
        """
        if certain <= progress.scheduled_offset and not progress.must_rewind:
            return None
        if self._budget.must_wait(now_s) or not progress.may_emit(math.inf if is_last else now_s):
            return None
        start = progress.scheduled_offset
        end = min(certain, start + self._budget.room_tokens(may_queue=is_last))
        return end if end > start else None

    def joined(self, planned: Sequence[PlannedStore]) -> Sequence[SaveJob]:
        """Return a step's jobs as workers get them: small ones joined."""
        jobs = list(self._joining.joined(planned))
        self._counters["store_jobs"] += sum(not isinstance(job, BoundaryJob) for job in jobs)
        return jobs

    def finish(
        self,
        tracker: RequestTracker,
        view: RequestView,
        hand_offs: Sequence[HandOff],
        num_computed_tokens: int,
        now_s: float,
    ) -> list[PlannedStore]:
        """Return the jobs of a request that ends: states, what was put off, and proofs owed.

        They may wait for room in staging (:meth:`queued`). An engine that hands states off with
        the end tells of it twice, at last without any: what the pins' budget or the pool's back-off
        forbids by then is given up, and counted.
        """
        progress = tracker.progress
        if progress is None:
            return []
        ended = Scheduled(view, num_computed_tokens, 0, is_admission=False)
        certain = self.certain_token(tracker, ended)
        planned = self.publishing.publish(tracker, view, hand_offs, certain, now_s)
        if self._limits.decode_job_tokens:  # else nothing is put off, and an end holds no blocks
            planned += self.emit(tracker, view, certain, now_s, is_last=True)
            planned += self.publishing.settle_proofs(tracker, ended, certain, now_s)
        reached = progress.saved_offset if progress.must_rewind else progress.scheduled_offset
        num_left = self._coordinator.aligned(certain) - reached
        if num_left > 0 and not hand_offs:
            self._counters["given_up_tokens"] += num_left
        self._queue += planned
        return planned

    def queued(self) -> list[PlannedStore]:
        """Return the jobs of requests that ended for which staging has room, the oldest first."""
        if not self._queue:  # nearly always
            return []
        num_sent = self._budget.num_sendable(self._queue)
        sent, self._queue = self._queue[:num_sent], self._queue[num_sent:]
        return sent

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
        self._budget.note_end(job, now_s)
        if not job.ranges:
            self._counters["lost_boundaries"] += bool(failures)
        elif failures:
            self.agenda.forget_all()  # rare, and the job does not know whose it was
        for progress, start_token, end_token in job.ranges:
            progress.num_open_jobs -= 1
            if failures:
                progress.record_failed(now_s)
            else:
                progress.record_saved(start_token, end_token)

    def check_integrity(self, trackers: Iterable[RequestTracker]) -> None:
        """Recount everything from scratch; raises ``AssertionError`` on a bug of ours."""
        self._jobs.check_integrity(trackers)
