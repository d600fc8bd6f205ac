"""Saving beside the offsets: the states that engines hand off, and proofs that come later."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvtide.core.coordinator import Coordinator
from kvtide.core.groups import FullAttention, Mamba
from kvtide.core.jobs import BoundaryPut, JobEnd, StoreJob
from kvtide.core.save_limits import SavePolicy
from kvtide.core.transfer import HandOff
from kvtide.testing.requests import fake_hashes
from tests.core.desk import Desk, puts_of

STATES = Coordinator((FullAttention(16), Mamba(16)), 16)
CUT = Coordinator((FullAttention(16), Mamba(16)), 4, partial_hits=True)
DRAFTS = Coordinator(
    (FullAttention(16), Mamba(16), FullAttention(16, proof_tokens=4)), 4, partial_hits=True
)


def test_each_boundary_that_is_offered_is_one_job() -> None:
    """Two groups' states at one boundary go together."""
    two = Coordinator((FullAttention(16), Mamba(16), Mamba(16)), 16)
    desk = Desk(two, 100)
    planned = desk.saving.publishing.publish(
        desk.tracker,
        desk.view,
        [HandOff(1, 30, 32), HandOff(1, 31, 16), HandOff(2, 40, 32)],
        96,
        0.0,
    )
    assert [puts_of(one) for one in planned] == [
        (BoundaryPut(1, 0, 16, 31),),
        (BoundaryPut(1, 1, 32, 30), BoundaryPut(2, 1, 32, 40)),
    ]
    assert desk.saving.num_pinned_blocks == 3
    assert desk.counters["boundary_jobs"] == 2


def test_what_was_loaded_or_held_is_not_saved_again() -> None:
    """The engine offers it like its own."""
    desk = Desk(STATES, 100, num_computed=32)
    assert desk.publish(HandOff(1, 30, 32), HandOff(1, 31, 48)) == [48]


def test_states_where_no_request_can_resume_are_not_saved() -> None:
    """Between the units of a model whose groups have blocks of different sizes."""
    desk = Desk(Coordinator((FullAttention(32), Mamba(16)), 16), 100)
    assert desk.publish(HandOff(1, 30, 16), HandOff(1, 31, 32)) == [32]


@pytest.mark.parametrize(
    "policy, saved",
    [
        (SavePolicy(prefill=True, decode=True), [64, 80]),
        (SavePolicy(prefill=True, decode=False), [64]),
        (SavePolicy(prefill=False, decode=True), [80]),
        (SavePolicy(prefill=False, decode=False), []),
    ],
)
def test_prefill_and_decode_are_told_apart_by_the_length_at_admission(
    policy: SavePolicy, saved: list[int]
) -> None:
    """As they are for attention."""
    desk = Desk(STATES, 70, policy=policy)
    desk.view.block_hashes += fake_hashes(2)
    assert desk.publish(HandOff(1, 30, 64), HandOff(1, 31, 80)) == saved


def test_an_offer_in_the_null_block_is_no_job() -> None:
    """There is nothing to write."""
    desk = Desk(STATES, 100)
    assert desk.publish(HandOff(1, 0, 32)) == []
    assert desk.saving.num_open_jobs == 0


def test_offers_beyond_the_budget_are_lost_and_counted() -> None:
    """One is taken in any case where nothing is pinned; the next waits for nobody."""
    desk = Desk(STATES, 100, max_pinned_blocks=0)
    assert desk.publish(HandOff(1, 30, 32), HandOff(1, 31, 48)) == [32]
    assert desk.counters["lost_boundaries"] == 1


def test_offers_during_the_pools_back_off_are_lost_and_counted() -> None:
    """A full store takes nothing of anybody; after the wait one job probes it."""
    desk = Desk(STATES, 100)
    assert desk.publish(HandOff(1, 30, 16)) == [16]
    assert desk.end(desk.jobs[0].job_id, JobEnd.NO_SPACE) == [30]
    assert desk.publish(HandOff(1, 31, 32)) == []
    assert desk.counters["lost_boundaries"] == 2
    assert desk.publish(HandOff(1, 32, 48), HandOff(1, 33, 64), now_s=100.0) == [48]


def test_a_request_that_has_not_computed_anything_has_nothing_to_hand_off() -> None:
    """It ended while it waited."""
    desk = Desk(STATES, 100)
    desk.tracker.progress = None
    assert desk.publish(HandOff(1, 30, 32)) == []


# ------------------------------------------------------------------ proofs that come later


def owing() -> Desk:
    """A request of 20 tokens whose boundary at 16 was handed off before its proof was computed."""
    desk = Desk(DRAFTS, 20)
    assert desk.publish(HandOff(1, 30, 16), certain=16) == [16]
    assert len(desk.emit(desk.scheduled(0, 16))) == 1
    return desk


def test_a_proof_follows_in_the_step_that_computes_it() -> None:
    """Nothing else is due there: the unit is not complete."""
    desk = owing()
    desk.rest(desk.scheduled(0, 16))
    assert not desk.saving.agenda.is_due("r", 19)
    assert desk.saving.agenda.is_due("r", 20)
    assert desk.settle_proofs(desk.scheduled(16, 3)) == []
    (planned,) = desk.settle_proofs(desk.scheduled(16, 4))
    assert puts_of(planned) == (BoundaryPut(2, 1, 20, 2),)
    assert desk.settle_proofs(desk.scheduled(16, 4)) == []


def test_a_proof_that_a_store_job_covers_is_not_saved_by_itself() -> None:
    """The whole block has a name that lookups of the boundary ask for, too."""
    desk = owing()
    desk.view.block_hashes += fake_hashes(4)
    assert desk.settle_proofs(desk.scheduled(16, 16)) == []
    [planned] = desk.emit(desk.scheduled(16, 16))
    assert isinstance(planned.job, StoreJob)
    assert planned.job.first_chunks == (1, 0, 1)


def test_a_boundary_whose_proof_is_known_owes_nothing() -> None:
    """It was all in one job."""
    desk = Desk(DRAFTS, 20)
    planned = desk.saving.publishing.publish(desk.tracker, desk.view, [HandOff(1, 30, 16)], 20, 0.0)
    assert [len(puts_of(one)) for one in planned] == [2]
    assert desk.tracker.progress is not None
    assert not desk.tracker.progress.owed_proofs


def drafting(num_tokens: int, **limits: int) -> Desk:
    """A request of a model whose units have 8 tokens and whose draft model's blocks have 4."""
    groups = (FullAttention(8), FullAttention(4, proof_tokens=4))
    return Desk(Coordinator(groups, 4), num_tokens, **limits)


def settled(desk: Desk, computed: int, num_tokens: int) -> list[Sequence[BoundaryPut]]:
    """What a step writes of proofs."""
    scheduled = desk.scheduled(computed, num_tokens)
    return [puts_of(one) for one in desk.settle_proofs(scheduled)]


def test_the_last_range_of_a_prefill_is_proven_at_its_end() -> None:
    """The unit behind it never fills, but for the draft model's block. Before, the next may."""
    desk = drafting(22)
    assert len(desk.emit(desk.scheduled(0, 16))) == 1
    assert settled(desk, 0, 16) == []
    desk.rest(desk.scheduled(0, 16))
    assert not desk.saving.agenda.is_due("r", 21)
    assert desk.saving.agenda.is_due("r", 22)
    assert settled(desk, 20, 2) == [(BoundaryPut(1, 4, 20, 5),)]
    assert settled(desk, 22, 1) == []


@pytest.mark.parametrize("num_tokens", range(17, 33))
def test_a_proof_is_saved_for_any_length_of_prompt(num_tokens: int) -> None:
    """Seen as an engine sees it that leaves out what is not due: 16 tokens a step."""
    desk = drafting(num_tokens)
    written = []
    for computed in range(0, num_tokens, 16):
        scheduled = desk.scheduled(computed, min(16, num_tokens - computed))
        if desk.saving.agenda.is_due("r", computed + scheduled.num_scheduled_tokens):
            desk.emit(scheduled)
            written += settled(desk, computed, scheduled.num_scheduled_tokens)
            desk.rest(scheduled)
    last = num_tokens // 8 * 8
    has_proof = num_tokens % 8 >= 4
    chunk = last // 4
    expected = [(BoundaryPut(1, chunk, last + 4, chunk + 1),)] if has_proof else []
    assert written == expected


def test_a_proof_waits_for_the_budget() -> None:
    """It is not lost as a state would be: its block stays."""
    desk = drafting(14, max_pinned_blocks=3)
    (job,) = desk.emit(desk.scheduled(0, 8))
    assert settled(desk, 8, 6) == []
    desk.end(job.job.job_id, JobEnd.STORED)
    assert len(settled(desk, 14, 1)) == 1


def test_a_proof_whose_block_is_gone_is_given_up_and_counted() -> None:
    """The engine has freed it, or never filled it."""
    desk = drafting(22)
    assert len(desk.emit(desk.scheduled(0, 16))) == 1
    desk.view.tables[1][4] = 0
    assert settled(desk, 16, 6) == []
    assert desk.counters["skipped_null_chunks"] == 1
    assert desk.tracker.progress is not None
    assert not desk.tracker.progress.owed_proofs


def test_a_decode_owes_no_proof() -> None:
    """Its next unit proves the last; where there is none, a last boundary is lost."""
    desk = drafting(14)
    desk.view.block_hashes += fake_hashes(8)
    assert len(desk.emit(desk.scheduled(8, 8))) == 1
    assert desk.tracker.progress is not None
    assert not desk.tracker.progress.owed_proofs
