"""The invariants of the design for models that mix kinds of attention, over the scripted engine."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvtide.core.groups import FullAttention, Group, Mamba, SlidingWindow
from kvtide.core.jobs import BoundaryJob
from kvtide.core.save_limits import SavePolicy
from kvtide.core.topology import ParallelSizes
from kvtide.runtime.limits import WorkerLimits
from kvtide.runtime.tags import TAG_BYTES
from kvtide.stores.memory import MemoryStore
from kvtide.testing import Arena, Fault, FaultKind, FaultyStore
from kvtide.testing.engine import ScriptedEngine
from kvtide.testing.engine_attention import block_bytes
from kvtide.testing.engine_checks import check_store, finish
from kvtide.testing.engine_requests import EngineRequest
from kvtide.testing.engine_setup import EngineSetup
from tests.engine_models import HYBRIDS, MODELS, best_hit
from tests.invariants.test_invariants import FAULTS, PUT_CANNOT_SUCCEED

PROMPT = list(range(100))
LARGE = EngineSetup(
    num_blocks=2000,
    groups=(FullAttention(16), SlidingWindow(16, window=70), Mamba(32)),
    max_tokens_per_step=1024,
    max_job_tokens=1 << 14,
    worker=WorkerLimits(staging_bytes=8 << 20, load_staging_bytes=1 << 20, stage_wait_s=0.0),
)


def run(
    engine: ScriptedEngine, prompt: list[int], request_id: str = "r", **how: Any
) -> EngineRequest:
    """Run one request to its end and the pool to rest, checking every step."""
    request = engine.add(request_id, prompt, **how)
    finish(engine)
    assert engine.outputs[request_id] == engine.model.generate(prompt, request.max_tokens)
    return request


def stored_keys(store: MemoryStore) -> set[str]:
    """Every key in the store."""
    return set(store._values)


def matched_ends(group: Group, boundary: int) -> list[int]:
    """Where the chunks end that a boundary matches; it may cut the last one."""
    cut = boundary + group.proof_tokens
    return [min((chunk + 1) * group.block_size, cut) for chunk in group.matched(boundary)]


def matched_keys(engine: ScriptedEngine, request: EngineRequest) -> set[str]:
    """The keys that a request which goes on from this one may ask for, as far as they are known.

    Those of all boundaries, whether or not the store can have what they need.
    """
    setup, hashes = engine.setup, request.block_hashes
    databases = engine.databases()
    known_tokens = len(hashes) * setup.hash_block_size
    return {
        database.key_for(hashes[end_token // setup.hash_block_size - 1])
        for boundary in range(setup.alignment, known_tokens + 1, setup.alignment)
        for group_id, group in enumerate(setup.groups)
        for end_token in matched_ends(group, boundary)
        if end_token <= known_tokens
        for database in databases[group_id]
    }


# ------------------------------------------------------------------ I1, I2, I3: what it costs


@pytest.mark.parametrize("name", HYBRIDS)
def test_each_key_is_checked_once_and_put_once_on_each_rank(name: str) -> None:
    """I1: over prefill in steps, decode and drafts; what a boundary cuts is another key.

    The exception: a whole block of a smaller group behind the last unit of a prefill, before a
    boundary inside the next one or as the proof of its end, was written by itself. It is checked
    again (not put) with its unit, if that is decoded.
    """
    model = HYBRIDS[name]
    engine = ScriptedEngine(
        MemoryStore(),
        model.setup(sizes=ParallelSizes(tp_size=2), max_tokens_per_step=24, num_blocks=200),
    )
    run(engine, PROMPT[:99], max_tokens=40)
    may_repeat = name in ("state, two sizes, cut blocks", "short window and drafts")
    for rank in engine.ranks.ranks:
        assert set(rank.store.times_asked["put"].values()) == {1}
        checks = rank.store.times_asked["exists"]
        again = [key for key, count in checks.items() if count > 1]
        assert len(again) <= may_repeat
        assert max(checks.values()) <= 1 + may_repeat


@pytest.fixture(scope="module")
def large() -> ScriptedEngine:
    """An engine that has computed 8,192 tokens in steps of 1,024, and decoded 70 more."""
    engine = ScriptedEngine(MemoryStore(), LARGE)
    engine.add("r", [index % 5000 for index in range(8192)], max_tokens=70)
    engine.run()
    return engine


def test_metadata_grows_with_what_a_step_adds_and_not_with_the_request(
    large: ScriptedEngine,
) -> None:
    """I2: equal steps cost equal bytes, whether they are the first or the last of a request."""
    prefills = [r.metadata_bytes for r in large.records if r.num_tokens.get("r") == 1024]
    assert len(prefills) >= 7
    assert max(prefills) - min(prefills) < 200
    decodes = [r for r in large.records if r.num_tokens.get("r") == 1]
    assert max(r.metadata_bytes for r in decodes) < 1500
    assert len({r.metadata_bytes for r in decodes if not r.num_stores}) == 1


def test_a_step_reads_only_what_it_adds_and_no_table_of_states(large: ScriptedEngine) -> None:
    """I3: entries of the unit that becomes certain; a state's place in its table says nothing."""
    num_reads = 0
    for record in large.records:
        if not record.num_tokens:
            continue
        start = record.num_computed["r"] // 32 * 32
        end = record.num_computed["r"] + record.num_tokens["r"]
        for group_id, first, stop in record.block_reads.get("r", ()):
            assert group_id != 2
            assert start <= first * 16
            assert stop * 16 <= end
            num_reads += 1
        for read in record.hash_reads.get("r", ())[record is large.records[0] :]:
            assert start // 16 <= read.start or read.stop - read.start == 1
    assert num_reads > 10


@pytest.mark.parametrize("retention_units", [0, 2])
def test_a_boundary_costs_no_more_reads_than_resuming_there_needs(retention_units: int) -> None:
    """I3: its job reads the window behind it and the blocks it cuts, however long the request."""
    model = HYBRIDS["window and state"]
    setup = model.setup(retention_units=retention_units, num_blocks=300, max_tokens_per_step=16)
    engine = ScriptedEngine(MemoryStore(), setup)
    run(engine, list(range(500)), max_tokens=30)
    assert engine.scheduler.counters["boundary_jobs"] > 0
    for record in engine.records[1:]:
        below = [
            read
            for read in record.block_reads.get("r", ())
            if record.num_tokens and (read[1] + 1) * 4 <= record.num_computed["r"] // 8 * 8
        ]
        assert sum(stop - first for _, first, stop in below) <= 3


# ------------------------------------------------------------------ I4: what is saved is found


def lengths(seed: int) -> Iterator[int]:
    """Some prompt lengths, those around multiples of the units among them."""
    yield from (1, 8, 9, 16, 17, 31, 32, 33)
    draw = random.Random(seed)
    yield from (draw.randrange(1, 80) for _ in range(3))


@pytest.mark.parametrize("max_tokens_per_step", [7, 64])
@pytest.mark.parametrize("retention_units", [None, 0, 2])
@pytest.mark.parametrize("name", MODELS)
def test_a_repeated_prompt_resumes_where_the_engines_own_cache_would(
    name: str, retention_units: int | None, max_tokens_per_step: int
) -> None:
    """I4: for any length, the best hit is the engine's replay boundary, and is fully stored."""
    model = MODELS[name]
    for num_tokens in lengths(0):
        memory = MemoryStore()
        setup = model.setup(
            retention_units=retention_units, max_tokens_per_step=max_tokens_per_step
        )
        engine = ScriptedEngine(memory, setup)
        prompt = list(range(num_tokens))
        run(engine, prompt)
        engine.pool.drop_cached()
        request = run(engine, prompt, "again")
        assert request.num_loaded_tokens == best_hit(setup, num_tokens)
        assert request.num_loads == (request.num_loaded_tokens > 0), "the first load succeeds"


@pytest.mark.parametrize("retention_units", [None, 0, 2])
@pytest.mark.parametrize("name", MODELS)
def test_everything_stored_is_what_some_lookup_asks_for(
    name: str, retention_units: int | None
) -> None:
    """I4: prompts of many lengths, decode, drafts: no key is left that no boundary matches."""
    memory = MemoryStore()
    setup = MODELS[name].setup(
        retention_units=retention_units, num_drafts=2, max_tokens_per_step=20, num_blocks=100
    )
    engine = ScriptedEngine(memory, setup)
    asked: set[str] = set()
    for number, num_tokens in enumerate(lengths(1)):
        request = run(engine, [number % 3, *range(num_tokens)], max_tokens=9, accepts=(1, 0, 2))
        asked |= matched_keys(engine, request)
        engine.pool.drop_cached()
    assert stored_keys(memory) <= asked
    assert stored_keys(memory)


@pytest.mark.parametrize("name", MODELS)
def test_the_next_turn_resumes_behind_what_was_decoded(name: str) -> None:
    """I4: with decode saving a conversation's answer is part of the next hit."""
    setup = MODELS[name].setup(num_blocks=100)
    engine = ScriptedEngine(MemoryStore(), setup)
    run(engine, PROMPT[:40], max_tokens=33)
    engine.pool.drop_cached()
    request = run(engine, PROMPT[:40] + engine.outputs["r"] + [7] * 5, "next")
    # 72 tokens had their KV computed. States inside blocks are kept for prompts alone.
    coordinator = engine.coordinator
    assert request.num_loaded_tokens == coordinator.aligned(72 - coordinator.max_proof_tokens)


@pytest.mark.parametrize("name", MODELS)
def test_one_engine_saves_the_prompt_and_another_the_answer(name: str) -> None:
    """I4: where prefill and decode are saved by different engines, no chunk is left between."""
    memory = MemoryStore()
    setup = MODELS[name].setup(num_blocks=100)
    prefiller, decoder, reader = (
        ScriptedEngine(memory, replace(setup, saves=policy))
        for policy in (SavePolicy(True, False), SavePolicy(False, True), SavePolicy(False, False))
    )
    run(prefiller, PROMPT[:40])
    run(decoder, PROMPT[:40], max_tokens=33)
    request = run(reader, PROMPT[:40] + decoder.outputs["r"] + [7] * 5, "next")
    coordinator = reader.coordinator
    assert request.num_loaded_tokens == coordinator.aligned(72 - coordinator.max_proof_tokens)


# ------------------------------------------------------------------ I5, I9: right bytes


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    "name", ["local", "window and state", "state, cut blocks", "window and drafts"]
)
def test_a_failing_store_changes_no_token(name: str, fault: str) -> None:
    """I9: cold, warm from the pool and warm from the engine, on two ranks."""
    faulty = FaultyStore(MemoryStore())
    setup = HYBRIDS[name].setup(sizes=ParallelSizes(tp_size=2), max_tokens_per_step=24)
    engine = ScriptedEngine(faulty, setup)
    clean = fault not in PUT_CANNOT_SUCCEED and fault != "vanished exists"
    if clean:  # faults of reading need something to read
        run(engine, PROMPT[:60], max_tokens=9)
        engine.pool.drop_cached()
    faulty.script = tuple(FAULTS[fault])
    for number in range(3):
        run(engine, PROMPT[:60], str(number), max_tokens=9)
        if number:
            engine.pool.drop_cached()
    assert bool(faulty.injected) == (fault != "none")
    assert (engine.scheduler.counters["saved_bytes"] > 0) == clean
    check_store(engine, faulty.inner)


@pytest.mark.parametrize("name", HYBRIDS)
def test_what_is_loaded_is_byte_for_byte_what_was_stored(name: str) -> None:
    """I5: for every group, also those whose content the tokens do not depend on."""
    memory = MemoryStore()
    engine = ScriptedEngine(memory, HYBRIDS[name].setup())
    run(engine, PROMPT[:62], max_tokens=9)
    engine.pool.drop_cached()
    blocks, groups = engine.ranks.ranks[0].blocks, engine.setup.groups
    write = blocks.write
    loaded: set[tuple[int, bytes]] = set()

    def watched(group_id: int, block_ids: Any, data: Any) -> None:
        loaded.update((group_id, bytes(row[: block_bytes(groups[group_id])])) for row in data)
        write(group_id, block_ids, data)

    blocks.write = watched  # type: ignore[method-assign]
    run(engine, PROMPT[:62], "again")
    arena = Arena(memory, 1 << 16)
    stored: set[tuple[int, bytes]] = set()
    for key in stored_keys(memory):
        group_id = int(key.split("@group:")[1].split("@")[0])
        size = block_bytes(groups[group_id])
        ((_, value),) = arena.get([(key, size + TAG_BYTES)])
        stored.add((group_id, value[:size]))
    assert {group_id for group_id, _ in loaded} == set(range(len(groups)))
    assert loaded <= stored


@pytest.mark.parametrize("name", HYBRIDS)
def test_bytes_survive_requests_that_push_each_other_out(name: str) -> None:
    """I5: a cache too small for all; preempted requests come back through the pool."""
    model = HYBRIDS[name]
    memory = MemoryStore()
    needed = ScriptedEngine(memory, model.setup()).tables.num_blocks(40)
    setup = model.setup(num_blocks=needed + 6, num_drafts=2, max_tokens_per_step=8)
    engine = ScriptedEngine(memory, setup)
    prompts = {str(n): [n, *range(20)] for n in range(4)}
    for n, (request_id, prompt) in enumerate(prompts.items()):
        engine.add(request_id, prompt, max_tokens=15, accepts=(n, 1))
    finish(engine)
    assert engine.outputs == {
        request_id: engine.model.generate(prompt, 15) for request_id, prompt in prompts.items()
    }
    assert check_store(engine, memory) > 0


# ------------------------------------------------------------------ I6: nothing is left


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_window_hybrid_saves_on_under_a_small_budget(name: str) -> None:
    """I6: jobs are cut to the budget; what its window has left behind by then is skipped."""
    engine = ScriptedEngine(MemoryStore(), HYBRIDS[name].setup(max_pinned_blocks=1))
    run(engine, PROMPT[:60], max_tokens=40)
    counters = engine.scheduler.counters
    assert counters["saved_chunks"] > 0
    check_store(engine, engine.ranks.ranks[0].store.inner)
    engine.pool.drop_cached()
    run(engine, PROMPT[:60], "again", max_tokens=5)


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_full_store_backs_off_and_costs_no_token(name: str) -> None:
    """I6: states are among what is refused; later requests are right, and nothing is left."""
    full = FaultyStore(MemoryStore(), [Fault(FaultKind.NO_SPACE, "put", calls=range(2, 9999))])
    engine = ScriptedEngine(full, HYBRIDS[name].setup(max_tokens_per_step=16))
    for number in range(4):
        run(engine, [number, *PROMPT[:50]], max_tokens=9)
        engine.pool.drop_cached()
        engine.clock.now_s += 10.0  # type: ignore[attr-defined]
    assert engine.scheduler.counters["pool_back_offs"] > 0
    assert engine.scheduler.counters["saved_bytes"] > 0
    check_store(engine, full.inner)


@pytest.mark.parametrize("name", ["state", "state, cut blocks"])
def test_states_handed_off_during_a_back_off_are_lost_and_counted(name: str) -> None:
    """An offer holds for one step; what is lost costs a later request a shorter hit, no more."""
    full = FaultyStore(MemoryStore(), [Fault(FaultKind.NO_SPACE, "put")])
    engine = ScriptedEngine(full, HYBRIDS[name].setup(max_tokens_per_step=16))
    run(engine, PROMPT, max_tokens=3)
    assert engine.scheduler.counters["lost_boundaries"] > 0


def test_boundary_jobs_end_once_on_every_rank() -> None:
    """I6: each job that was emitted is among those that ended, on both ranks."""
    engine = ScriptedEngine(
        MemoryStore(), HYBRIDS["state, cut blocks"].setup(sizes=ParallelSizes(tp_size=2))
    )
    jobs: list[int] = []
    ends: list[tuple[int, int]] = []
    step, on_report = engine.scheduler.step, engine.scheduler.on_report

    def watched_step(*what: Any) -> Any:
        outcome = step(*what)
        jobs.extend(job.job_id for job in outcome.plan.stores if isinstance(job, BoundaryJob))
        return outcome

    def watched_report(report: Any, now_s: float) -> list[int]:
        ends.extend((job_id, count.total()) for job_id, count in report.ended.items())
        return on_report(report, now_s)

    engine.scheduler.step = watched_step  # type: ignore[method-assign]
    engine.scheduler.on_report = watched_report  # type: ignore[method-assign]
    run(engine, PROMPT[:29], max_tokens=12)
    assert jobs
    for job_id in jobs:
        assert [total for ended, total in ends if ended == job_id] == [2]
