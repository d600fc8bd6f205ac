"""A request's life as the pool sees it: one table of transitions and one small record.

The states say only what the pool needs to know. Every change goes through
:meth:`RequestTracker.advance`; the table is data, and the docs draw their diagram from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvtide.core.back_off import BackOff


class RequestState(Enum):
    """Where a request is."""

    WAITING = "waiting"
    """Known, not computing: new, preempted, or ready again after a load."""
    LOADING = "loading"
    """The engine holds blocks for it that a load job fills."""
    RUNNING = "running"
    """The engine computes it, and what becomes certain is saved."""
    GONE = "gone"
    """Finished; late reports find nobody."""


class RequestEvent(Enum):
    """What happens to a request."""

    ARRIVED = "arrived"
    LOAD_STARTED = "load started"
    LOAD_ENDED = "load ended"
    SCHEDULED = "scheduled"
    PREEMPTED = "preempted"
    FINISHED = "finished"


_S, _E = RequestState, RequestEvent

TRANSITIONS: dict[RequestState, dict[RequestEvent, RequestState]] = {
    _S.WAITING: {
        _E.ARRIVED: _S.WAITING,  # a streaming session brings a new input under an old id
        _E.LOAD_STARTED: _S.LOADING,
        _E.SCHEDULED: _S.RUNNING,
        _E.PREEMPTED: _S.WAITING,
        _E.FINISHED: _S.GONE,
    },
    _S.LOADING: {  # the engine never preempts a request that waits for its load
        _E.LOAD_ENDED: _S.WAITING,
        _E.FINISHED: _S.GONE,
    },
    _S.RUNNING: {
        _E.ARRIVED: _S.WAITING,
        _E.SCHEDULED: _S.RUNNING,
        _E.PREEMPTED: _S.WAITING,
        _E.FINISHED: _S.GONE,
    },
    _S.GONE: {},
}
"""What each event does in each state; an event that is missing here leaves the state alone."""

NEW_LIFE = frozenset({RequestEvent.ARRIVED, RequestEvent.PREEMPTED, RequestEvent.FINISHED})
"""Events after which nothing that is still under way belongs to the request any more."""


@dataclass(slots=True)
class SaveProgress:
    """How far one life of a request is saved. Offsets are tokens, multiples of ``lcm_block_size``.

    A store job holds on to the progress of the life that emitted it. A preempted or replaced
    request gets a new object, so a late report updates one that nobody reads any more.

    ::

        0 ....... saved_offset ....... scheduled_offset ....... certain tokens
          in the store        jobs under way           next job starts here
    """

    saved_offset: int
    scheduled_offset: int
    back_off: BackOff
    first_token: int = 0
    """What the engine held, or had loaded, when this life began to compute."""
    done: dict[int, int] = field(default_factory=dict)
    """Ranges that are stored but do not yet join ``saved_offset``: start to end."""
    owed_proofs: dict[int, int] = field(default_factory=dict)
    """Boundaries saved before their proof was computed, and what was certain then."""
    num_open_jobs: int = 0
    must_rewind: bool = False
    """A job failed: once the open ones have ended, saving starts again at ``saved_offset``."""

    def record_saved(self, start_token: int, end_token: int) -> None:
        """Note that a range is stored and move the saved offset over what is contiguous."""
        self.back_off.succeed()
        self._join(start_token, end_token)

    def pass_over(self, end_token: int) -> None:
        """Note that there is nothing to save from the scheduled offset to ``end_token``."""
        self._join(self.scheduled_offset, end_token)
        self.scheduled_offset = end_token

    def _join(self, start_token: int, end_token: int) -> None:
        self.done[start_token] = end_token
        while (end := self.done.pop(self.saved_offset, None)) is not None:
            self.saved_offset = end

    def record_failed(self, now_s: float) -> None:
        """Note a failed job: the next one waits, and starts again at the saved offset."""
        self.must_rewind = True
        self.back_off.fail(now_s)

    def may_emit(self, now_s: float) -> bool:
        """Tell whether the next job may start, rewinding to the saved offset after a failure."""
        if not self.must_rewind:
            return True
        if self.num_open_jobs or self.back_off.is_waiting(now_s):
            return False
        self.must_rewind = False
        self.scheduled_offset = self.saved_offset
        self.done.clear()
        return True


@dataclass(slots=True)
class RequestTracker:
    """What the scheduler side remembers of one request.

    ``prefix_id`` is ``None`` for a request that must neither save nor load; ``may_load`` is False
    for one that must compute its whole prompt. ``num_admitted_tokens`` is the length at
    (re)admission: tokens below it are prefill.
    """

    request_id: str
    prefix_id: int | None
    num_admitted_tokens: int
    may_load: bool = True
    state: RequestState = RequestState.WAITING
    next_prefix_id: int | None = None
    """The prefix to use from the next admission on, after the weights changed."""
    progress: SaveProgress | None = None
    """``None`` until the engine first schedules this life of the request."""
    shared_token: int = 0
    """Up to here others began alike, but nobody left all that resuming there needs; 0: unknown."""
    repair: bool = False
    """The store lacks part of what the engine holds: the first job starts at 0."""
    held_token: int | None = None
    """What the engine held itself when it asked last; ``None``: it has not asked in this life."""
    holds_loaded: bool = False
    """Its blocks hold what a load brought, though it has not computed anything yet."""
    load_limit_token: int | None = None
    """A load failed at this token: no later answer reaches past it."""
    num_failed_loads: int = 0
    saved_token: int | None = None
    """How far an earlier life was saved that the next one may go on from; ``None``: none was."""

    def advance(self, event: RequestEvent) -> None:
        """Apply an event to the state and, where a new life begins, forget the old one."""
        self.state = TRANSITIONS[self.state].get(event, self.state)
        if event in NEW_LIFE:
            if self.progress is not None:
                self.saved_token = self.progress.saved_offset
            self.progress = None
            self.repair = False
            self.holds_loaded = False
            self.held_token = None

    def adopt_next_prefix(self) -> None:
        """Take over the prefix of the new weights: what is computed from now on is theirs."""
        if self.prefix_id is None and self.next_prefix_id is not None:
            self.prefix_id, self.next_prefix_id = self.next_prefix_id, None
