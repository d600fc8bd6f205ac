"""Histories of mixed models that have gone wrong elsewhere, each named after what must happen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvtide.core import scheduler as core_scheduler
from kvtide.core.groups import FullAttention, Mamba, SlidingWindow
from kvtide.core.jobs import LoadJob, pack_ints, unpack_ints
from kvtide.core.save_limits import SavePolicy
from kvtide.core.scheduler import StepEvents, StepOutcome
from kvtide.core.transfer import plan_load
from kvtide.runtime.limits import WorkerLimits
from kvtide.stores.memory import MemoryStore
from kvtide.testing import Fault, FaultKind, FaultyStore
from kvtide.testing.engine import ScriptedEngine
from kvtide.testing.engine_checks import check_engine, check_idle, check_store
from kvtide.testing.engine_requests import EngineState
from kvtide.testing.engine_setup import EngineSetup
from tests.engine_models import HYBRIDS, best_hit
from tests.invariants.test_hybrids import run

PROMPT = list(range(100))
STATE = EngineSetup(groups=(FullAttention(4), Mamba(4)), max_tokens_per_step=16)


# ------------------------------------------------------------------ blocks that hold something else


def test_only_chunks_that_still_have_a_block_are_written() -> None:
    """Two chunks behind the window are null when their job may go out: it writes the third alone.

    A put that fails makes saving start anew from 0, when the window has moved on.
    """
    window = SlidingWindow(4, window=6)
    faulty = FaultyStore(MemoryStore(), [Fault(FaultKind.FAILED, "put")])
    engine = ScriptedEngine(faulty, EngineSetup(groups=(window,), max_tokens_per_step=4))
    request = engine.add("r", range(12), max_tokens=20)
    while request.num_computed < 14:
        engine.step()
        check_engine(engine)
    assert request.tables[0][:3] == [0, 0, request.tables[0][2]]
    faulty.script = ()
    engine.clock.now_s += 10.0  # type: ignore[attr-defined]
    for _ in range(2):  # it is planned in one step and carried out in the next
        engine.step()
        check_engine(engine)
    assert engine.scheduler.counters["skipped_null_chunks"] == 2
    assert check_store(engine, faulty.inner) == 1
    engine.run()


def test_a_state_is_stored_from_its_hand_off_and_never_from_its_place_in_the_table() -> None:
    """With the tables of states replaced by nonsense, the same right states are stored."""
    memory = MemoryStore()
    engine = ScriptedEngine(memory, replace(STATE, num_drafts=2))
    request = engine.add("r", range(30), max_tokens=20, accepts=(1, 2, 0))
    read = request.block_ids

    def shuffled(group_id: int, first: int, end: int) -> Any:
        assert group_id != 1, "the table of states was read"
        return read(group_id, first, end)

    request.block_ids = shuffled  # type: ignore[method-assign]
    engine.run()
    for _ in range(4):
        engine.step()
    num_full = (30 + 20 - 1) // 4
    assert num_full < check_store(engine, memory) <= 2 * num_full


def test_a_running_state_that_goes_on_changing_is_stored_as_it_was_handed_off() -> None:
    """The prompt's last boundary lies inside a block, whose state the next tokens change in place.

    The copying is held back until the request has gone on for several steps.
    """
    memory = MemoryStore()
    setup = HYBRIDS["state, cut blocks"].setup(num_blocks=100)
    engine = ScriptedEngine(memory, setup)
    engine.add("r", range(30), max_tokens=12)
    engine.run_lookups()
    for _ in range(8):
        engine.step(run_pool=False)
        check_engine(engine)
    assert engine.scheduler.num_open_jobs > 2
    engine.run()
    for _ in range(4):
        engine.step()
    check_store(engine, memory)
    engine.pool.drop_cached()
    assert run(engine, list(range(30)), "again", max_tokens=12).num_loaded_tokens == 28


def test_a_state_left_behind_right_at_its_boundary_is_saved_with_the_requests_end() -> None:
    """No later step copies it: it goes out with the step after the abort."""
    memory = MemoryStore()
    engine = ScriptedEngine(memory, HYBRIDS["state, cut blocks"].setup())
    request = engine.add("r", range(29), max_tokens=5)
    while request.num_computed < 28:
        engine.step()
    assert request.num_computed == 28
    engine.abort("r")
    assert engine.scheduler.has_pins
    assert engine.pool.num_free < engine.setup.num_blocks - 1
    for _ in range(3):
        engine.step()
    check_idle(engine)
    engine.pool.drop_cached()
    assert run(engine, list(range(29)), "again").num_loaded_tokens == 28


def test_a_bad_state_is_removed_and_written_anew() -> None:
    """What exists is not written again, so a value that does not verify must go first."""
    faulty = FaultyStore(MemoryStore())
    engine = ScriptedEngine(faulty, STATE)
    run(engine, PROMPT)
    engine.pool.drop_cached()
    databases = engine.databases()
    request = engine.add("bad", PROMPT, max_tokens=3)
    key = databases[1][0].key_for(request.block_hashes[23])
    faulty.script = (Fault(FaultKind.FLIPPED, "get", keys=key.__eq__),)
    engine.run()
    assert engine.outputs["bad"] == engine.model.generate(PROMPT, 3)
    assert request.num_loaded_tokens < 96
    faulty.script = ()
    engine.pool.drop_cached()
    assert run(engine, PROMPT, "again").num_loaded_tokens == 96


# ------------------------------------------------------------------ hits that groups disagree on


@pytest.mark.parametrize("saves", [True, False])
def test_groups_that_hold_different_lengths_resume_where_all_can(saves: bool) -> None:
    """Attention is held up to 32, the state up to 16: then 16, or 32 with the pool's state."""
    policy = SavePolicy(prefill=saves, decode=False)
    engine = ScriptedEngine(MemoryStore(), replace(STATE, saves=policy))
    run(engine, list(range(33)))
    engine.records.clear()
    request = engine.add("r", range(33), max_tokens=3)
    for chunk in range(4, 8):
        block_id = engine.pool.find(1, request.block_hashes[chunk])
        if block_id is not None:
            engine.pool.unname(block_id)
    assert engine.cache.find(33, request.block_hashes).num_tokens == 16
    engine.run()
    assert request.num_external == (16 if saves else 0)
    first = next(r for r in engine.records if r.num_tokens.get("r"))
    assert first.num_computed["r"] == (32 if saves else 16)
    assert engine.outputs["r"] == engine.model.generate(list(range(33)), 3)


@pytest.mark.parametrize("missing_group", [0, 1, 2])
def test_a_hit_is_what_every_group_can_load(missing_group: int) -> None:
    """One group's chunk vanishes: the hit ends where that group can still resume."""
    memory = MemoryStore()
    groups = (FullAttention(4), SlidingWindow(4, window=6), Mamba(4))
    engine = ScriptedEngine(memory, EngineSetup(groups=groups, max_tokens_per_step=4))
    request = run(engine, list(range(33)))
    database = engine.databases()[missing_group][0]
    assert memory.remove([database.key_for(request.block_hashes[7])])
    engine.pool.drop_cached()
    again = run(engine, list(range(33)), "again")
    assert again.num_loaded_tokens == 28
    assert again.num_loads == 1


def test_a_value_that_vanishes_behind_the_hit_costs_one_failed_load() -> None:
    """In the window or the state, between promise and read: the next answer ends before it."""
    memory = MemoryStore()
    engine = ScriptedEngine(memory, HYBRIDS["window and state"].setup(max_tokens_per_step=8))
    first = run(engine, PROMPT)
    engine.pool.drop_cached()
    request = engine.add("r", PROMPT, max_tokens=3)
    engine.run_lookups()
    engine.step(run_pool=False)
    assert request.state is EngineState.LOADING
    database = engine.databases()[2][0]
    memory.remove([database.key_for(first.block_hashes[23])])
    engine.run()
    assert request.num_loads == 2
    assert request.num_loaded_tokens == 88
    assert engine.outputs["r"] == engine.model.generate(PROMPT, 3)


# ------------------------------------------------------------------ what is saved


@pytest.mark.parametrize("name", HYBRIDS)
def test_every_prefill_step_is_saved_and_not_only_the_first(name: str) -> None:
    """The tell-tale of saving one step only: a hit rate of step budget by prompt length."""
    limits = WorkerLimits(staging_bytes=4 << 20, load_staging_bytes=1 << 20, stage_wait_s=0.0)
    setup = HYBRIDS[name].setup(num_blocks=600, max_tokens_per_step=160, worker=limits)
    engine = ScriptedEngine(MemoryStore(), setup)
    prompt = list(range(700))
    run(engine, prompt)
    engine.pool.drop_cached()
    assert run(engine, prompt, "again").num_loaded_tokens == best_hit(setup, 700)


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["window and state", "state, cut blocks", "window and drafts"])
def test_drafted_tokens_are_saved_only_once_they_are_accepted(name: str, accepted: int) -> None:
    """Every value is right at any time, and the next turn finds what was decoded."""
    memory = MemoryStore()
    engine = ScriptedEngine(memory, HYBRIDS[name].setup(num_drafts=3))
    request = engine.add("r", range(30), max_tokens=20, accepts=(accepted,))
    while engine.has_work:
        certain = len(request.tokens)
        engine.step()
        check_engine(engine)
        assert check_store(engine, memory) <= sum(
            certain // min(group.block_size, engine.setup.alignment)
            for group in engine.setup.groups
        )
    assert engine.outputs["r"] == engine.model.generate(range(30), 20)
    assert engine.scheduler.counters["saved_chunks"] > 0


def test_a_loaded_state_that_is_offered_again_is_not_saved_again() -> None:
    """The engine names what a load brought, and offers it like its own."""
    engine = ScriptedEngine(MemoryStore(), STATE)
    run(engine, PROMPT)
    engine.pool.drop_cached()
    rank = engine.ranks.ranks[0]
    rank.store.times_asked["exists"].clear()
    request = run(engine, [*PROMPT, 7, 7], "again")
    assert request.num_loaded_tokens == 96 + 4
    assert not rank.store.times_asked["exists"]


# ------------------------------------------------------------------ controls: bugs that must show


MIXED = EngineSetup(
    groups=(FullAttention(4), SlidingWindow(4, window=6), Mamba(4)), max_tokens_per_step=4
)


def check_that_a_repetition_is_wrong(engine: ScriptedEngine) -> None:
    """Load ``PROMPT`` and see that the tokens, and the check of the blocks, show the bug."""
    engine.pool.drop_cached()
    request = engine.add("r", PROMPT, max_tokens=20)
    engine.run()
    assert request.num_loaded_tokens == 96
    assert engine.outputs["r"] != engine.model.generate(PROMPT, 20)
    with pytest.raises(AssertionError, match="wrong KV"):
        check_engine(engine)


@pytest.mark.parametrize("group_id", [0, 1, 2])
def test_a_load_into_the_wrong_blocks_shows_in_the_tokens(
    group_id: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of attention in reversed order; for the state, that of one block earlier."""
    engine = ScriptedEngine(MemoryStore(), MIXED)
    run(engine, PROMPT)

    def plan_wrongly(*what: Any, **how: Any) -> LoadJob:
        job = plan_load(*what, **how)
        tables, firsts, tails = list(job.block_ids), list(job.first_chunks), list(job.tail_tokens)
        if group_id == 2:
            firsts[group_id] -= 1
            tails[group_id] -= 4
        tables[group_id] = pack_ints(unpack_ints(tables[group_id])[::-1])
        return job._replace(
            block_ids=tuple(tables), first_chunks=tuple(firsts), tail_tokens=tuple(tails)
        )

    monkeypatch.setattr(core_scheduler, "plan_load", plan_wrongly)
    check_that_a_repetition_is_wrong(engine)


def test_a_window_that_is_loaded_one_block_short_shows_in_the_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the pool requires is compared with what the engine reads, not with itself."""
    engine = ScriptedEngine(MemoryStore(), MIXED)
    run(engine, PROMPT)
    required = SlidingWindow.required
    monkeypatch.setattr(
        SlidingWindow, "required", lambda group, n: required(group, n)[1:], raising=True
    )
    check_that_a_repetition_is_wrong(engine)


def test_a_state_that_is_saved_one_block_off_shows_in_the_store() -> None:
    """As one would that is taken from its place in the table."""
    memory = MemoryStore()
    engine = ScriptedEngine(memory, MIXED)
    step = engine.scheduler.step

    def step_wrongly(events: StepEvents, now_s: float) -> StepOutcome:
        hand_offs = {
            request_id: [offer._replace(boundary=offer.boundary - 4) for offer in offers]
            for request_id, offers in events.hand_offs.items()
        }
        return step(replace(events, hand_offs=hand_offs), now_s)

    engine.scheduler.step = step_wrongly  # type: ignore[method-assign]
    run(engine, PROMPT)
    with pytest.raises(AssertionError, match="names other bytes"):
        check_store(engine, memory)
    check_that_a_repetition_is_wrong(engine)
