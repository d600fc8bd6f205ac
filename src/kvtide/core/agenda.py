"""The agenda of saving: which requests have to be looked at in a step, and how much is worth a job.

Of a thousand requests that decode, few complete a block in a step; and a job costs the engine and
the store nearly the same, whether it has one block or eight. So a request that decodes may
be left alone until it has completed several, and where very many have at once, some wait for the
next steps. That takes an engine which keeps the blocks for so long: windows are freed behind a
decode.
"""

from __future__ import annotations

import math

from kvtide.core.coordinator import Coordinator
from kvtide.core.requests import RequestTracker, SaveProgress
from kvtide.core.save_limits import SavePolicy
from kvtide.core.transfer import Scheduled

MAX_STEP_JOBS = 64
"""After so many store jobs a step plans no more for requests that decode, each of which costs the
engine's thread 10 us or so: they stay due, and their turn comes in the next steps."""


class Agenda:
    """Remembers from which token on each request has something to save.

    A decode's jobs have ``decode_job_tokens`` or more, down to whole units.
    """

    def __init__(
        self, coordinator: Coordinator, policy: SavePolicy, decode_job_tokens: int
    ) -> None:
        self._coordinator = coordinator
        self._policy = policy
        self._due_tokens: dict[str, float] = {}
        """By request: below this many tokens a step has nothing to save. May lack any of them."""
        unit = coordinator.lcm_block_size
        # Half of what the engine keeps: the rest is for steps in which others have their turn.
        slack = coordinator.slack_tokens / 2
        self._may_lag = slack >= unit
        self._decode_job_tokens = max(unit, coordinator.aligned(int(min(decode_job_tokens, slack))))

    def is_due(self, request_id: str, num_tokens: int) -> bool:
        """Tell whether a step that brings a request to ``num_tokens`` may have something to save.

        One look-up and one comparison, for each request of a step.
        """
        return num_tokens >= self._due_tokens.get(request_id, 0)

    def has_turn(self, tracker: RequestTracker, scheduled: Scheduled, num_planned: int) -> bool:
        """Tell whether a request may have jobs in a step that has ``num_planned`` already.

        A prefill always may: the engine bounds how many a step has.
        """
        if num_planned < MAX_STEP_JOBS or not self._may_lag:
            return True
        return scheduled.num_computed_tokens < tracker.num_admitted_tokens

    def least_job_tokens(self, tracker: RequestTracker, progress: SaveProgress) -> int:
        """Return how many tokens the next job of a request has at least.

        Of a decode that is several units, unless a proof is owed, which the next unit brings.
        """
        unit = self._coordinator.lcm_block_size
        is_decode = progress.scheduled_offset + unit > tracker.num_admitted_tokens
        return self._decode_job_tokens if is_decode and not progress.owed_proofs else unit

    def put_off(self, tracker: RequestTracker, num_certain_tokens: int) -> None:
        """Note from where on a request has to be looked at again, once its step is dealt with."""
        progress = tracker.progress
        assert progress is not None
        certain = self._coordinator.aligned(num_certain_tokens)
        least = self.least_job_tokens(tracker, progress)
        if certain < progress.scheduled_offset + least and not progress.must_rewind:
            self._due_tokens[tracker.request_id] = self._due_token(tracker, progress, least)
        else:
            self.forget(tracker.request_id)

    def _due_token(self, tracker: RequestTracker, progress: SaveProgress, least: int) -> float:
        """Return the token count from which a request has to be looked at again."""
        due = progress.scheduled_offset + least
        if progress.owed_proofs:
            proven = min(progress.owed_proofs) + self._coordinator.max_proof_tokens
            due = min(due, max(proven, tracker.num_admitted_tokens))
        if not self._policy.decode and due > tracker.num_admitted_tokens:
            return math.inf
        return due + self._policy.num_unsettled_tokens

    def forget(self, request_id: str) -> None:
        """Look at a request again in its next step: its life changed."""
        self._due_tokens.pop(request_id, None)

    def forget_all(self) -> None:
        """Look at every request again: a job failed, which does not know whose it was."""
        self._due_tokens.clear()
