"""Histories that have gone wrong in systems like this one, each named after what must happen."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtide.core.admission import AdmissionLimits
from kvtide.core.topology import ParallelSizes
from kvtide.runtime.limits import WorkerLimits
from kvtide.stores.memory import MemoryStore
from kvtide.testing import Fault, FaultKind, FaultyStore
from kvtide.testing.engine import ScriptedEngine
from kvtide.testing.engine_checks import check_engine, check_idle, check_store, finish
from kvtide.testing.engine_model import chain_hashes
from kvtide.testing.engine_requests import EngineState
from kvtide.testing.engine_setup import EngineSetup, full_attention

PROMPT = list(range(100))


def key_of(engine: ScriptedEngine, tokens: list[int], chunk: int, rank: int = 0) -> str:
    """The key of one chunk of a prompt (one group of blocks of 4)."""
    database = engine.databases()[0][rank]
    return database.key_for(chain_hashes(tokens, 4, [])[chunk])


def warm(store: MemoryStore | FaultyStore, setup: EngineSetup | None = None) -> ScriptedEngine:
    """An engine that has saved ``PROMPT`` and holds none of it."""
    engine = ScriptedEngine(store, setup)
    engine.add("warm", PROMPT)
    finish(engine)
    engine.pool.drop_cached()
    return engine


# ------------------------------------------------------------------ blocks that are used again


def test_a_queued_job_keeps_its_blocks_from_other_requests() -> None:
    """A is preempted or gone before its blocks are copied; B must not get them."""
    memory = MemoryStore()
    engine = ScriptedEngine(memory, EngineSetup(num_blocks=12))
    engine.add("a", range(16))
    engine.run_lookups()
    engine.step(run_pool=False)
    assert "a" in engine.outputs
    engine.add("b", range(500, 536))
    for _ in range(5):
        engine.step(run_pool=False)
    assert engine.batch.running == [], "b needs blocks that a's job still reads"
    assert engine.pinned.total() == 4
    finish(engine)
    assert check_store(engine, memory) == 4 + 9


def test_blocks_are_held_until_the_slowest_rank_has_copied_them() -> None:
    """One rank's report frees nothing; else the other stores what the next request computes."""
    memory = MemoryStore()
    engine = ScriptedEngine(memory, EngineSetup(num_blocks=12, sizes=ParallelSizes(tp_size=2)))
    engine.add("a", range(16))
    engine.run_lookups()
    engine.step(run_pool=False)
    engine.ranks.ranks[0].worker.run_pending()
    engine.add("b", range(500, 540))
    for _ in range(5):
        engine.run_lookups()
        engine.step(run_pool=False)
        check_engine(engine)
    assert engine.pinned.total() == 4
    finish(engine)
    assert check_store(engine, memory) == 2 * (4 + 10)


def test_a_deadline_waits_for_a_copy_to_blocks_that_has_begun() -> None:
    """Ended from outside, its blocks would go to another request while they are written."""
    engine = warm(MemoryStore(), EngineSetup(num_blocks=30))
    rank = engine.ranks.ranks[0]
    write = rank.blocks.write
    reports = []

    def slow_write(*what: object) -> None:
        engine.clock.now_s += 100.0  # type: ignore[attr-defined]
        reports.append(rank.worker.poll())
        write(*what)  # type: ignore[arg-type]

    rank.blocks.write = slow_write  # type: ignore[method-assign]
    request = engine.add("r", PROMPT)
    finish(engine)
    assert reports
    assert not any(report.finished_loads for report in reports)
    assert request.num_loaded_tokens == 96


def test_bytes_written_after_a_job_was_planned_are_what_is_stored() -> None:
    """The copy waits for the work that was issued before its fence, however late that is done."""
    memory = MemoryStore()
    engine = ScriptedEngine(memory, EngineSetup(threaded=True))
    rank = engine.ranks.ranks[0]
    engine.ranks.complete = lambda: None  # type: ignore[method-assign]
    try:
        engine.add("a", range(16), may_load=False)
        engine.step()
        assert "a" in engine.outputs
        assert not rank.worker.flush(0.05), "nothing may be copied yet"
        rank.blocks.complete()
        assert rank.worker.flush(20.0)
        assert check_store(engine, memory) == 4
    finally:
        engine.close()


# ------------------------------------------------------------------ loads that fail


def failing_gets() -> dict[str, Fault]:
    """Every way in which a get fails for one key."""
    return {
        kind.value: Fault(kind, "get")
        for kind in (
            FaultKind.FAILED,
            FaultKind.LOST,
            FaultKind.VANISHED,
            FaultKind.SHORT,
            FaultKind.FLIPPED,
        )
    }


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("chunk", [0, 7, 23])
@pytest.mark.parametrize("kind", failing_gets())
def test_loads_that_always_fail_cost_a_request_at_most_two(
    kind: str, chunk: int, num_ranks: int
) -> None:
    """At the first key, in the middle or at the last; then it computes, and computes right."""
    faulty = FaultyStore(MemoryStore())
    engine = warm(faulty, EngineSetup(sizes=ParallelSizes(tp_size=num_ranks)))
    bad = key_of(engine, PROMPT, chunk, num_ranks - 1)
    # Removing does not help: somebody else may write the same bytes again.
    fault = failing_gets()[kind]
    faulty.script = (
        Fault(fault.kind, "get", keys=bad.__eq__),
        Fault(FaultKind.FAILED, "remove"),
    )
    request = engine.add("r", PROMPT, max_tokens=5)
    finish(engine)
    assert faulty.injected[fault.kind] > 0
    assert 1 <= request.num_loads <= 2
    assert engine.outputs["r"] == engine.model.generate(PROMPT, 5)
    if chunk and kind != "lost":
        assert request.num_loaded_tokens == chunk * 4, "what is whole before it is loaded"


def test_what_was_never_attempted_is_not_trusted() -> None:
    """A load in parts fails in its second: neither the rest nor the first part counts."""
    faulty = FaultyStore(MemoryStore())
    limits = WorkerLimits(staging_bytes=1 << 20, load_staging_bytes=8 << 10, stage_wait_s=0.0)
    engine = warm(faulty, EngineSetup(worker=limits))
    faulty.script = (Fault(FaultKind.FAILED, "get", keys=key_of(engine, PROMPT, 4).__eq__),)
    request = engine.add("r", PROMPT, max_tokens=3)
    finish(engine)
    assert request.num_loads == 2
    assert request.num_loaded_tokens == 16
    assert engine.outputs["r"] == engine.model.generate(PROMPT, 3)


def test_a_value_too_large_for_staging_fails_its_load() -> None:
    """It can never be fetched; the request computes instead of waiting."""
    memory = MemoryStore()
    warm(memory, EngineSetup(groups=full_attention(1024), num_blocks=8, max_tokens_per_step=4096))
    setup = EngineSetup(
        groups=full_attention(1024),
        num_blocks=8,
        max_tokens_per_step=4096,
        worker=WorkerLimits(staging_bytes=64 << 10, load_staging_bytes=4 << 10, stage_wait_s=0.0),
    )
    engine = ScriptedEngine(memory, setup)
    prompt = [index % 999 for index in range(2100)]
    engine.add("first", prompt)
    finish(engine)
    engine.pool.drop_cached()
    request = engine.add("second", prompt)
    finish(engine)
    assert request.num_loads == 1
    assert request.num_loaded_tokens == 0
    assert engine.outputs["second"] == engine.outputs["first"]


def test_a_value_evicted_between_promise_and_read_costs_only_what_follows_it() -> None:
    """On one rank only; both ranks agree, and the engine lives."""
    memory = MemoryStore()
    engine = warm(memory, EngineSetup(sizes=ParallelSizes(tp_size=2)))
    request = engine.add("r", PROMPT, max_tokens=3)
    engine.run_lookups()
    engine.step(run_pool=False)
    assert request.state is EngineState.LOADING
    memory.remove([key_of(engine, PROMPT, 10, rank=1)])
    finish(engine)
    assert request.num_loaded_tokens == 40
    assert engine.outputs["r"] == engine.model.generate(PROMPT, 3)


def test_nobody_hits_on_blocks_whose_load_was_aborted() -> None:
    """A prefix is found in the engine's cache only once its load has succeeded."""
    engine = warm(MemoryStore())
    engine.add("a", PROMPT)
    engine.run_lookups()
    engine.step(run_pool=False)
    engine.abort("a")
    request = engine.add("b", PROMPT, max_tokens=3)
    finish(engine)
    assert request.num_loaded_tokens == 96, "its own load, not a hit on what a left behind"
    assert engine.outputs["b"] == engine.model.generate(PROMPT, 3)


def test_an_aborted_load_is_cancelled_and_holds_its_blocks_until_the_report() -> None:
    """The store may hang: the engine gets its blocks back with the next step, but not before."""
    engine = warm(MemoryStore(), EngineSetup(num_blocks=30))
    engine.add("a", PROMPT)
    engine.run_lookups()
    engine.step(run_pool=False)
    num_free = engine.pool.num_free
    engine.abort("a")
    assert engine.pool.num_free == num_free
    assert engine.scheduler.num_loads == 1
    engine.step(run_pool=False)
    assert engine.pool.num_free == 29
    engine.step()
    assert engine.scheduler.num_loads == 0


@pytest.mark.parametrize("is_answered", [True, False])
def test_an_abort_between_lookup_and_allocation_leaves_nothing(is_answered: bool) -> None:
    """With no further traffic: nothing waits for a request that is gone."""
    engine = warm(MemoryStore())
    engine.add("a", PROMPT)
    if is_answered:
        engine.run_lookups()
    engine.abort("a")
    check_idle(engine)


# ------------------------------------------------------------------ what is saved


@pytest.mark.parametrize("num_tokens", [18_000, 8192, 8193])
def test_every_prefill_step_is_saved_and_not_only_the_first(num_tokens: int) -> None:
    """The tell-tale of saving one step only: a hit rate of step budget by prompt length."""
    setup = EngineSetup(
        num_blocks=1200,
        groups=full_attention(16),
        max_tokens_per_step=8192,
        max_job_tokens=1 << 14,
        worker=WorkerLimits(staging_bytes=8 << 20, load_staging_bytes=1 << 20, stage_wait_s=0.0),
    )
    engine = ScriptedEngine(MemoryStore(), setup)
    prompt = [index % 5000 for index in range(num_tokens)]
    engine.add("a", prompt)
    finish(engine)
    engine.pool.drop_cached()
    request = engine.add("b", prompt)
    finish(engine)
    assert request.num_loaded_tokens == (num_tokens - 1) // 16 * 16


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_drafted_tokens_are_saved_only_once_they_are_accepted(accepted: int) -> None:
    """30 tokens and 3 drafts: the boundary at 32 is saved when 32 tokens are certain."""
    memory = MemoryStore()
    engine = ScriptedEngine(memory, EngineSetup(num_drafts=3))
    request = engine.add("r", range(30), max_tokens=20, accepts=(accepted,))
    while engine.has_work:
        certain = len(request.tokens)
        engine.step()
        check_engine(engine)
        assert check_store(engine, memory) <= certain // 4
    finish(engine)
    assert check_store(engine, memory) >= (30 + 20 - 1 - 3) // 4
    assert engine.outputs["r"] == engine.model.generate(range(30), 20)


def job_paths() -> dict[str, Callable[[], ScriptedEngine]]:
    """Engines in which a job takes each of its ways to an end."""

    def on(*script: Fault, **setup: object) -> Callable[[], ScriptedEngine]:
        return lambda: ScriptedEngine(
            FaultyStore(MemoryStore(), script),
            EngineSetup(**setup),  # type: ignore[arg-type]
        )

    tiny = WorkerLimits(staging_bytes=4096, load_staging_bytes=4096, stage_wait_s=0.0)
    no_queue = WorkerLimits(
        staging_bytes=1 << 20, load_staging_bytes=4096, stage_wait_s=0.0, max_queued_puts=1
    )
    return {
        "stored": on(),
        "check raises": on(Fault(FaultKind.LOST, "exists")),
        "put raises": on(Fault(FaultKind.LOST, "put")),
        "all exist": on(Fault(FaultKind.VANISHED, "exists")),
        "no space": on(Fault(FaultKind.NO_SPACE, "put")),
        "too large for staging": on(worker=tiny),
        "queue full": on(worker=no_queue, max_tokens_per_step=200, max_job_tokens=4),
    }


@pytest.mark.parametrize("path", job_paths())
def test_a_job_gives_its_blocks_back_on_every_path(path: str) -> None:
    """Else the cache fills up with blocks that nobody uses."""
    engine = job_paths()[path]()
    for number in range(3):
        engine.add("same id", [number, *PROMPT], max_tokens=3)
        finish(engine)
    assert engine.pool.num_free == 63


# ------------------------------------------------------------------ lives of a request


def test_a_reused_id_inherits_neither_progress_nor_failures() -> None:
    """The first life's job ends late and badly; the second saves all of its own."""
    faulty = FaultyStore(MemoryStore(), [Fault(FaultKind.FAILED, "put", calls={0})])
    engine = ScriptedEngine(faulty)
    engine.add("r", range(32))
    engine.run_lookups()
    engine.step(run_pool=False)
    assert "r" not in engine.requests
    request = engine.add("r", range(200, 232), max_tokens=2)
    finish(engine)
    assert request.num_loads == 0
    assert check_store(engine, faulty.inner) == 8
    assert engine.outputs["r"] == engine.model.generate(range(200, 232), 2)


def test_a_resumed_request_is_read_by_its_new_block_table() -> None:
    """Preempted, resumed in other blocks, and grown further: what is stored is its own."""
    memory = MemoryStore()
    engine = ScriptedEngine(memory, EngineSetup(num_blocks=14, tell_preemptions=False))
    a = engine.add("a", range(20), max_tokens=12)
    b = engine.add("b", range(300, 320), max_tokens=12)
    finish(engine)
    assert a.num_preemptions + b.num_preemptions > 0
    assert check_store(engine, memory) >= 14
    assert engine.outputs["b"] == engine.model.generate(range(300, 320), 12)


def test_loads_that_would_fill_the_cache_together_take_turns() -> None:
    """Seven blocks; one needs four and one, the other three and one: both finish."""
    memory = MemoryStore()
    setup = EngineSetup(num_blocks=8)
    engine = ScriptedEngine(memory, setup)
    prompts = {"a": list(range(17)), "b": list(range(50, 63))}
    for name, prompt in prompts.items():
        engine.add("first " + name, prompt)
        finish(engine)
    engine.pool.drop_cached()
    requests = [engine.add(name, prompt, max_tokens=3) for name, prompt in prompts.items()]
    finish(engine)
    assert all(request.num_loads for request in requests)
    for name, prompt in prompts.items():
        assert engine.outputs[name] == engine.model.generate(prompt, 3)


@pytest.mark.parametrize("max_loads", [1, 64])
def test_fifty_requests_of_one_prefix_all_finish_right(max_loads: int) -> None:
    """Whoever comes later finds the prefix in the engine's own cache, or loads it too."""
    setup = EngineSetup(num_blocks=400, admission=AdmissionLimits(max_loads=max_loads))
    engine = warm(MemoryStore(), setup)
    for number in range(50):
        engine.add(str(number), [*PROMPT[:96], 1000 + number], max_tokens=2)
    finish(engine)
    for number in range(50):
        prompt = [*PROMPT[:96], 1000 + number]
        assert engine.outputs[str(number)] == engine.model.generate(prompt, 2)


# ------------------------------------------------------------------ new weights


def test_new_weights_never_meet_old_kv() -> None:
    """The same prompt misses after the update; and the old weights' values are still there."""
    memory = MemoryStore()
    engine = warm(memory)
    before = memory.used_bytes
    engine.change_weights(1)
    request = engine.add("r", PROMPT, max_tokens=3)
    finish(engine)
    assert request.num_loads == 0
    assert engine.outputs["r"] == engine.model.generate(PROMPT, 3)
    assert memory.used_bytes > before
    other = ScriptedEngine(memory)
    reader = other.add("r", PROMPT)
    finish(other)
    assert reader.num_loaded_tokens == 96, "a replica that still has the old weights"


def test_running_requests_are_saved_under_the_new_name_once_they_start_over() -> None:
    """Twice in a row, too: the name in between stands for weights that are gone."""
    memory = MemoryStore()
    engine = ScriptedEngine(memory)
    engine.add("r", PROMPT, max_tokens=20)
    for _ in range(4):
        engine.step()
    while engine.scheduler.has_pins:
        engine.step()
    engine.change_weights(1)
    engine.change_weights(2)
    finish(engine)
    assert check_store(engine, memory) >= 50
    assert engine.ranks.ranks[0].store.times_asked["put"]
    assert not [key for key in engine.ranks.ranks[0].store.times_asked["put"] if "weights-1" in key]
