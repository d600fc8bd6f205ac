"""A request's life: the table of transitions, and how far it is saved."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.core.back_off import BackOff, Delays
from kvtide.core.requests import (
    NEW_LIFE,
    TRANSITIONS,
    RequestEvent,
    RequestState,
    RequestTracker,
    SaveProgress,
)

S, E = RequestState, RequestEvent


def progress_at(offset: int) -> SaveProgress:
    """The progress of a life whose first job starts at ``offset``."""
    return SaveProgress(offset, offset, BackOff(Delays(1.0, 3.0)))


@pytest.mark.parametrize("state", list(RequestState))
@pytest.mark.parametrize("event", list(RequestEvent))
def test_every_event_in_every_state_does_what_the_table_says(
    state: RequestState, event: RequestEvent
) -> None:
    """An event the table does not name leaves the state alone; none is an error."""
    tracker = RequestTracker("r", 0, 10, state=state, progress=progress_at(0))
    tracker.advance(event)
    assert tracker.state is TRANSITIONS[state].get(event, state)
    assert (tracker.progress is None) == (event in NEW_LIFE)


def test_a_finished_request_never_comes_back() -> None:
    """Late reports find a state without transitions."""
    assert TRANSITIONS[S.GONE] == {}


def test_a_load_is_never_cut_short_by_a_preemption() -> None:
    """The engine does not preempt a request that waits for its load."""
    assert E.PREEMPTED not in TRANSITIONS[S.LOADING]


@given(st.permutations(range(6)))
def test_the_saved_offset_moves_over_what_is_contiguous(order: list[int]) -> None:
    """Jobs may end in any order; the offset is the first token not yet known to be stored."""
    progress = progress_at(64)
    done: set[int] = set()
    for number in order:
        progress.record_saved(64 + number * 16, 64 + (number + 1) * 16)
        done.add(number)
        contiguous = next(n for n in range(7) if n not in done)
        assert progress.saved_offset == 64 + contiguous * 16
    assert not progress.done


def test_after_a_failure_saving_starts_again_at_the_saved_offset() -> None:
    """But only once the open jobs have ended and the back-off is over."""
    progress = progress_at(0)
    progress.scheduled_offset = 96
    progress.num_open_jobs = 1
    progress.record_saved(0, 32)
    progress.record_saved(64, 96)
    progress.record_failed(10.0)
    assert not progress.may_emit(20.0)
    progress.num_open_jobs = 0
    assert not progress.may_emit(10.5)
    assert progress.may_emit(11.0)
    assert (progress.scheduled_offset, progress.saved_offset) == (32, 32)
    assert progress.done == {}


def test_new_weights_are_adopted_by_the_next_life_only() -> None:
    """What was computed with the old ones must not be saved under the new name."""
    tracker = RequestTracker("r", None, 10, next_prefix_id=7)
    tracker.adopt_next_prefix()
    assert (tracker.prefix_id, tracker.next_prefix_id) == (7, None)
    tracker.adopt_next_prefix()
    assert tracker.prefix_id == 7
