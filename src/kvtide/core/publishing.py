"""Publishing boundaries: jobs for what resuming somewhere needs beside whole units.

States are saved when the engine hands them off, or never: their place in a block table says
nothing. A hand-off becomes a job of its own, beside the offsets; with it go the chunks of other
groups that no store job covers but a request resuming at that boundary needs. A proof that is
computed only after its boundary follows when it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from kvtide.core.coordinator import Coordinator
from kvtide.core.requests import RequestTracker, SaveProgress
from kvtide.core.save_budget import SaveBudget
from kvtide.core.save_limits import SavePolicy
from kvtide.core.transfer import (
    HandOff,
    PlannedStore,
    RequestView,
    Scheduled,
    plan_boundary,
)


class Publishing:
    """Plans boundary jobs within the budget; what an offer's one step forbids is lost."""

    def __init__(
        self,
        coordinator: Coordinator,
        policy: SavePolicy,
        budget: SaveBudget,
        *,
        counters: Counter[str],
        take_job_id: Callable[[], int],
    ) -> None:
        self._coordinator = coordinator
        self._policy = policy
        self._budget = budget
        self._counters = counters
        self._take_job_id = take_job_id

    def kept(self, tracker: RequestTracker, view: RequestView) -> tuple[int, ...]:
        """Return the boundaries of a request that are kept beside the regular ones."""
        if self._coordinator.retention_interval is None:
            return ()
        shared = (tracker.shared_token, view.shared_token)
        return self._coordinator.kept_boundaries(view.num_prompt_tokens, shared)

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
            if not self._budget.may_open(planned, now_s):
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
                    if not self._budget.may_open(planned, now_s):
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
            kept=self.kept(tracker, view),
        )

    def _open_boundary(self, planned: PlannedStore) -> PlannedStore:
        self._budget.open(planned, None)
        self._counters["boundary_jobs"] += 1
        return planned

    def _is_to_be_saved(
        self, tracker: RequestTracker, progress: SaveProgress, boundary: int
    ) -> bool:
        """Tell whether this role saves the tokens before ``boundary``, and did not load them."""
        if boundary <= progress.first_token or boundary % self._coordinator.alignment:
            return False
        is_prefill = boundary <= tracker.num_admitted_tokens
        return self._policy.prefill if is_prefill else self._policy.decode
