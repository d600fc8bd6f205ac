"""The agenda: who is looked at in a step, and how much of a decode is worth a job."""

from __future__ import annotations

import pytest

from kvtide.core.agenda import MAX_STEP_JOBS, Agenda
from kvtide.core.back_off import BackOff, Delays
from kvtide.core.coordinator import Coordinator
from kvtide.core.groups import ChunkedLocal, FullAttention, Group, Mamba, SlidingWindow
from kvtide.core.requests import RequestTracker, SaveProgress
from kvtide.core.save_limits import SavePolicy
from kvtide.core.transfer import Scheduled
from kvtide.testing.requests import RecordingRequest, fake_hashes

FULL = FullAttention(16)


def agenda(*groups: Group, decode: bool = True, unsettled: int = 0) -> Agenda:
    """An agenda whose portions are of 64 tokens."""
    policy = SavePolicy(decode=decode, num_unsettled_tokens=unsettled)
    return Agenda(Coordinator(groups or (FULL,), 16), policy, 64)


def tracker(num_admitted: int, saved: int) -> RequestTracker:
    """A request that was admitted with so many tokens, of which some are saved."""
    one = RequestTracker("r", 0, num_admitted)
    one.progress = SaveProgress(saved, saved, BackOff(Delays(1.0, 4.0)))
    return one


def due_token(one: Agenda, request: RequestTracker, certain: int) -> int:
    """After a step that made so many tokens certain: with how many it is looked at again."""
    one.put_off(request, certain)
    return next(num for num in range(1000) if one.is_due("r", num))


def test_a_request_nobody_has_looked_at_is_due() -> None:
    """Nothing is known of it."""
    assert agenda().is_due("r", 1)


def test_a_prefill_is_due_with_its_next_unit_and_a_decode_with_its_next_portion() -> None:
    """The unit in which the prompt ends is the decode's."""
    assert due_token(agenda(), tracker(100, 48), 50) == 64
    assert due_token(agenda(), tracker(60, 48), 50) == 48 + 64


def test_a_decode_that_nobody_saves_is_never_due_again() -> None:
    """Whatever it comes to."""
    one = agenda(decode=False)
    one.put_off(tracker(60, 48), 50)
    assert not one.is_due("r", 1 << 40)


def test_tokens_that_may_be_written_once_more_are_waited_for() -> None:
    """A draft model of several modules does that."""
    assert due_token(agenda(unsettled=3), tracker(60, 48), 50) == 48 + 64 + 3


def test_what_could_not_be_saved_in_its_step_is_due_in_the_next() -> None:
    """For want of room, or after a failure."""
    assert due_token(agenda(), tracker(100, 48), 64) == 0
    failed = tracker(60, 48)
    assert failed.progress is not None
    failed.progress.must_rewind = True
    assert due_token(agenda(), failed, 50) == 0


def test_a_proof_that_is_owed_is_due_when_it_is_computed() -> None:
    """Long before a portion; and the next unit, which has the proof, is not put off."""
    one = agenda(FULL, FullAttention(16, proof_tokens=16))
    owing = tracker(50, 48)
    assert owing.progress is not None
    owing.progress.owed_proofs[48] = 48
    assert one.least_job_tokens(owing, owing.progress) == 16
    assert due_token(one, owing, 50) == 64


@pytest.mark.parametrize(
    "group, waits",
    [
        (FULL, True),
        (SlidingWindow(16, 34), True),
        (SlidingWindow(16, 33), False),
        (ChunkedLocal(16, 1024), False),
        (Mamba(16), False),
    ],
)
def test_in_a_crowded_step_decodes_wait_where_the_engine_keeps_their_blocks(
    group: Group, *, waits: bool
) -> None:
    """Twice as long as a unit takes; a prefill never waits."""
    view = RecordingRequest(num_tokens=40, hashes=fake_hashes(2))
    one, request = agenda(FULL, group), tracker(40, 16)
    decode, prefill = Scheduled(view, 40, 1, False), Scheduled(view, 24, 16, False)
    assert one.has_turn(request, decode, MAX_STEP_JOBS - 1)
    assert one.has_turn(request, decode, MAX_STEP_JOBS) is not waits
    assert one.has_turn(request, prefill, MAX_STEP_JOBS)


def test_after_a_failure_everybody_is_looked_at() -> None:
    """A job that many shared does not know whose it was."""
    one = agenda()
    one.put_off(tracker(60, 48), 50)
    assert not one.is_due("r", 60)
    one.forget_all()
    assert one.is_due("r", 60)
