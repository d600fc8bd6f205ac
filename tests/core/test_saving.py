"""Saving by offsets: what is saved when, and what a request that ends leaves."""

from __future__ import annotations

from kvtide.core.coordinator import Coordinator
from kvtide.core.groups import FullAttention, Mamba
from kvtide.core.jobs import BoundaryPut, JobEnd, StoreJob
from kvtide.core.save_limits import SavePolicy
from kvtide.core.transfer import HandOff
from kvtide.testing.requests import fake_hashes
from tests.core.desk import Desk, puts_of

STATES = Coordinator((FullAttention(16), Mamba(16)), 16)


def test_tokens_that_are_not_settled_are_saved_some_steps_later() -> None:
    """Two modules of a draft model: the last token's KV cache is written once more."""
    policy = SavePolicy(prefill=True, decode=False, num_unsettled_tokens=2)
    desk = Desk(Coordinator((FullAttention(8),), 4), 16, policy=policy)
    (job,) = desk.emit(desk.scheduled(0, 16))
    assert isinstance(job.job, StoreJob)
    assert job.job.end_token == 8
    desk.rest(desk.scheduled(0, 16))
    assert [n for n in (16, 17, 18, 19) if desk.saving.agenda.is_due("r", n)] == [18, 19]
    (rest,) = desk.emit(desk.scheduled(17, 1))
    assert isinstance(rest.job, StoreJob)
    assert (rest.job.start_token, rest.job.end_token) == (8, 16)
    desk.rest(desk.scheduled(17, 1))
    assert not desk.saving.agenda.is_due("r", 1000)


def test_what_another_connector_loaded_is_saved() -> None:
    """The engine held 16 tokens itself, and computes from 32: between, somebody else loaded."""
    desk = Desk(Coordinator((FullAttention(8),), 4), 48)
    desk.tracker.held_token = 16
    desk.saving.begin(desk.tracker, desk.scheduled(32, 16))
    assert desk.tracker.progress is not None
    assert desk.tracker.progress.scheduled_offset == desk.tracker.progress.first_token == 16
    desk.tracker.holds_loaded = True
    desk.saving.begin(desk.tracker, desk.scheduled(32, 16))
    assert desk.tracker.progress.scheduled_offset == 32


def test_it_tells_what_is_open_and_held() -> None:
    """For whoever looks at an engine that waits."""
    assert repr(Desk(STATES, 64).saving) == "<Saving [0 jobs, 0 blocks pinned]>"


def test_a_request_that_ends_leaves_its_states_first() -> None:
    """Then what its last steps completed; and after that nothing, however often it is told."""
    desk = Desk(STATES, 40)
    first, second = desk.saving.finish(desk.tracker, desk.view, [HandOff(1, 9, 32)], 40, 0.0)
    assert puts_of(first) == (BoundaryPut(1, 1, 32, 9),)
    assert isinstance(second.job, StoreJob)
    assert (second.job.start_token, second.job.end_token) == (0, 32)
    assert desk.saving.finish(desk.tracker, desk.view, (), 40, 0.0) == []


def test_a_request_that_ends_before_it_computed_anything_leaves_nothing() -> None:
    """It has no blocks."""
    desk = Desk(STATES, 40)
    desk.tracker.progress = None
    assert desk.saving.finish(desk.tracker, desk.view, [HandOff(1, 9, 32)], 40, 0.0) == []


def test_of_a_request_that_ends_no_more_is_saved_than_the_role_saves() -> None:
    """What it decoded only where decodes are saved."""
    desk = Desk(STATES, 16, policy=SavePolicy(decode=False))
    desk.view.block_hashes = fake_hashes(3)
    [only] = desk.saving.finish(desk.tracker, desk.view, (), 48, 0.0)
    assert isinstance(only.job, StoreJob)
    assert only.job.end_token == 16


def test_what_there_is_no_room_for_at_the_end_is_given_up_and_counted() -> None:
    """Nobody has its blocks any more; so is what a job that failed had not saved."""
    desk = Desk(STATES, 100, max_pinned_blocks=3)
    desk.emit(desk.scheduled(0, 20))
    assert desk.saving.num_pinned_blocks == 1
    [rest] = desk.saving.finish(desk.tracker, desk.view, (), 100, 0.0)
    assert isinstance(rest.job, StoreJob)
    assert (rest.job.start_token, rest.job.end_token) == (16, 32)
    assert desk.counters["given_up_tokens"] == 96 - 32


def test_a_request_that_ends_tries_once_more_what_failed_whatever_its_back_off() -> None:
    """It has no other time; what is still under way then is given up if it fails."""
    desk = Desk(STATES, 40)
    [planned] = desk.emit(desk.scheduled(0, 40))
    desk.end(planned.job.job_id, JobEnd.FAILED)
    assert desk.emit(desk.scheduled(40, 0)) == []
    [again] = desk.saving.finish(desk.tracker, desk.view, (), 40, 0.0)
    assert isinstance(again.job, StoreJob)
    assert (again.job.start_token, again.job.end_token) == (0, 32)
    assert not desk.counters["given_up_tokens"]


def test_in_the_pools_back_off_the_end_of_a_request_is_given_up() -> None:
    """A store that is full takes nothing of anybody."""
    desk = Desk(STATES, 40)
    [planned] = desk.emit(desk.scheduled(0, 40))
    desk.end(planned.job.job_id, JobEnd.NO_SPACE)
    assert desk.saving.finish(desk.tracker, desk.view, (), 40, 0.0) == []
    assert desk.counters["given_up_tokens"] == 32


def test_with_the_end_of_a_request_goes_the_proof_of_its_last_boundary() -> None:
    """Where the draft's blocks are smaller than a unit."""
    drafts = Coordinator((FullAttention(64), FullAttention(16, proof_tokens=16)), 16)
    desk = Desk(drafts, 32)
    desk.view.block_hashes = fake_hashes(10)
    store, proof = desk.saving.finish(desk.tracker, desk.view, (), 160, 0.0)
    assert isinstance(store.job, StoreJob)
    assert store.job.end_token == 128
    assert [(put.group_id, put.end_token) for put in puts_of(proof)] == [(1, 144)]


def test_what_a_draft_model_may_write_again_is_not_saved_with_the_end() -> None:
    """Not its blocks, nor states behind it."""
    policy = SavePolicy(decode=True, num_unsettled_tokens=2)
    desk = Desk(Coordinator((FullAttention(16),), 16), 64, policy=policy)
    [only] = desk.saving.finish(desk.tracker, desk.view, (), 64, 0.0)
    assert isinstance(only.job, StoreJob)
    assert only.job.end_token == 48


def test_where_nothing_is_put_off_an_end_holds_no_blocks() -> None:
    """So a reset of the engine's cache right after it succeeds."""
    desk = Desk(STATES, 40, decode_job_tokens=0)
    assert desk.saving.finish(desk.tracker, desk.view, (), 40, 0.0) == []
    assert desk.saving.num_pinned_blocks == 0
