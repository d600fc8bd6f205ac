"""What one rank's failures mean for the others: ranks never wait for each other."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import pytest

from kvtide.core.topology import ParallelSizes
from kvtide.runtime.bad_keys import DISTRUST_S
from kvtide.stores.memory import MemoryStore
from kvtide.testing import Arena, Fault, FaultKind, FaultyStore
from kvtide.testing.engine import ScriptedEngine
from kvtide.testing.engine_checks import check_engine, check_idle, check_store, finish
from kvtide.testing.engine_requests import EngineState
from kvtide.testing.engine_setup import ManualClock
from tests.rank_cases import BLOCK, Case

PROMPT = list(range(41))
CASES = [
    Case("heads", ParallelSizes(tp_size=2)),
    Case("latent", ParallelSizes(tp_size=4)),
    Case("window", ParallelSizes(tp_size=4, pp_size=2)),
    Case("grouped heads", ParallelSizes(tp_size=4, dcp_size=2)),
]
RANKS = [
    pytest.param(case, rank, id=f"{case}, rank {rank}")
    for case in CASES
    for rank in range(case.sizes.num_ranks)
]
MAX_STEPS = 20_000
"""Bounds every wait: reached only where something hangs that must not."""


def fault_on(engine: ScriptedEngine, rank: int, *script: Fault) -> FaultyStore:
    """Let one rank's store fail as the script says."""
    store = engine.ranks.ranks[rank].store
    store.inner = faulty = FaultyStore(store.inner, script)
    return faulty


def filled(case: Case, **how: bool) -> tuple[MemoryStore, ScriptedEngine]:
    """A store that has the prompt, and an engine that holds none of it."""
    memory = MemoryStore()
    writer = ScriptedEngine(memory, case.setup())
    writer.add("r", PROMPT, max_tokens=3)
    finish(writer)
    return memory, ScriptedEngine(memory, case.setup(**how), clock=ManualClock())


def step_until(engine: ScriptedEngine, condition: Callable[[], bool]) -> None:
    """Step until something holds, giving the threads a turn between two steps."""
    turn = threading.Event()
    for _ in range(MAX_STEPS):
        if condition():
            return
        engine.step()
        turn.wait(0.0005)
    raise AssertionError(f"never came true: {engine!r}")


def calls(engine: ScriptedEngine, method: str) -> list[int]:
    """How often each rank has called its store."""
    return [rank.store.num_calls[method] for rank in engine.ranks.ranks]


@pytest.mark.parametrize("case, rank", RANKS)
def test_a_failing_rank_sets_its_job_back_for_all_and_nothing_is_lost(
    case: Case, rank: int
) -> None:
    """Nobody saves while the request waits; afterwards all go on where the last rank was.

    But for chunks of windows that the engine has freed meanwhile.
    """
    memory = MemoryStore()
    clock = ManualClock()
    engine = ScriptedEngine(memory, case.setup(max_tokens_per_step=16), clock=clock)
    faulty = fault_on(engine, rank, Fault(FaultKind.FAILED, "put"))
    engine.add("r", PROMPT, max_tokens=40)
    for _ in range(6):
        engine.step()
    assert faulty.injected[FaultKind.FAILED] > 0
    before = calls(engine, "exists")
    for _ in range(12):
        engine.step()
    assert calls(engine, "exists") == before, "no job while the request is in back-off"
    faulty.script = ()
    clock.now_s += 5.0
    finish(engine)
    healthy = ScriptedEngine(MemoryStore(), case.setup())
    healthy.add("r", PROMPT, max_tokens=40)
    finish(healthy)
    wanted = sum((r.store.times_asked["put"] for r in healthy.ranks.ranks), Counter[str]())
    given_up = set(wanted) - set(memory._values)
    assert all("@group:1@" in key for key in given_up) if case.kind == "window" else not given_up
    for other in engine.ranks.ranks:
        assert other.rank == rank or set(other.store.times_asked["put"].values()) == {1}
    assert engine.outputs == healthy.outputs
    check_store(engine, memory)
    engine.pool.drop_cached()
    request = engine.add("again", [*PROMPT, *engine.outputs["r"], 7])
    finish(engine)
    assert request.num_loaded_tokens == len(PROMPT) + 39


@pytest.mark.parametrize("case, rank", RANKS)
def test_one_rank_s_failed_load_fails_for_all_once(case: Case, rank: int) -> None:
    """The next answer ends before that chunk, on every rank; the tokens are the model's."""
    memory, engine = filled(case)
    request = engine.add("r", PROMPT, max_tokens=3)
    part = engine.ranks.ranks[rank].held[0][0].part
    database = engine.databases()[0][engine.model.parts[0].index(part)]
    key = database.key_for(request.block_hashes[2])
    assert key in memory._values
    faulty = fault_on(engine, rank, Fault(FaultKind.FAILED, "get", keys=lambda k: k == key))
    finish(engine)
    assert faulty.injected[FaultKind.FAILED] == 1
    assert request.num_loads == 2
    assert engine.scheduler.counters["failed_loads"] == 1
    assert request.num_loaded_tokens == 2 * BLOCK
    assert engine.outputs["r"] == engine.model.generate(PROMPT, 3)


@pytest.mark.parametrize("case, rank", RANKS)
def test_a_rank_whose_put_hangs_blocks_no_other(case: Case, rank: int) -> None:
    """The engine computes on, the others store all of theirs, and later nothing is left."""
    memory = MemoryStore()
    engine = ScriptedEngine(memory, case.setup(threaded=True, lookup_timeout_s=30.0))
    faulty = fault_on(engine, rank, Fault(FaultKind.HANG, "put"))
    healthy = ScriptedEngine(MemoryStore(), case.setup())
    healthy.add("r", PROMPT, max_tokens=3)
    finish(healthy)
    try:
        engine.add("r", PROMPT, max_tokens=3)
        step_until(engine, lambda: not engine.has_work)
        assert engine.outputs == healthy.outputs
        assert faulty.wait_until_hanging()
        for other in engine.ranks.ranks:
            if other.rank != rank:
                assert other.worker.flush(20.0)
                own = set(healthy.ranks.ranks[other.rank].store.times_asked["put"])
                assert own <= set(memory._values)
        missing = set(healthy.ranks.ranks[rank].store.times_asked["put"])
        assert missing.isdisjoint(memory._values)
        faulty.script = ()
        faulty.release()
        step_until(engine, lambda: not engine.scheduler.num_open_jobs)
        assert missing <= set(memory._values)
        check_idle(engine)
    finally:
        faulty.release()
        engine.close()


@pytest.mark.parametrize("case, rank", RANKS)
def test_a_rank_whose_get_hangs_blocks_no_other(case: Case, rank: int) -> None:
    """Other requests go on meanwhile; the load fails for all when its time is over."""
    _, engine = filled(case, threaded=True)
    assert isinstance(engine.clock, ManualClock)
    faulty = fault_on(engine, rank, Fault(FaultKind.HANG, "get"))
    try:
        request = engine.add("r", PROMPT, max_tokens=3)
        step_until(engine, lambda: request.state is EngineState.LOADING)
        assert faulty.wait_until_hanging()
        engine.add("other", [7, *PROMPT], max_tokens=3, may_load=False)
        step_until(engine, lambda: "other" in engine.outputs)
        check_engine(engine)
        assert request.state is EngineState.LOADING
        engine.clock.now_s += 100.0
        step_until(engine, lambda: "r" in engine.outputs)
        assert (request.num_loads, request.num_loaded_tokens) == (1, 0)
        assert engine.outputs["r"] == engine.model.generate(PROMPT, 3)
        assert engine.outputs["other"] == engine.model.generate([7, *PROMPT], 3)
        faulty.script = ()
        faulty.release()
        step_until(engine, lambda: not engine.scheduler.num_open_jobs and not engine.has_work)
        assert all(other.worker.flush(20.0) for other in engine.ranks.ranks)
    finally:
        faulty.release()
        engine.close()


def ask_again(engine: ScriptedEngine, name: str) -> tuple[int, int]:
    """Ask for the prompt with nothing of it held; return loads, and tokens that were loaded."""
    engine.pool.drop_cached()
    request = engine.add(name, PROMPT, max_tokens=3)
    finish(engine)
    return request.num_loads, request.num_loaded_tokens


@pytest.mark.parametrize("rank", range(4))
def test_a_read_that_failed_once_is_forgotten_though_another_rank_puts_the_value(
    rank: int,
) -> None:
    """The reader could not remove it then, as of a key that is leased; the value was whole."""
    _, engine = filled(Case("latent", ParallelSizes(tp_size=4)))
    request = engine.add("r", PROMPT, max_tokens=3)
    key = engine.databases()[0][0].key_for(request.block_hashes[2])
    faulty = fault_on(
        engine,
        rank,
        Fault(FaultKind.FAILED, "get", keys=lambda found: found == key),
        Fault(FaultKind.FAILED, "remove", keys=lambda found: found == key),
    )
    finish(engine)
    assert request.num_loaded_tokens == 2 * BLOCK
    faulty.script = ()
    ask_again(engine, "distrusts")
    assert not engine.ranks.ranks[0].store.num_calls["remove"] > 1, "it was whole all the time"
    assert isinstance(engine.clock, ManualClock)
    engine.clock.now_s += DISTRUST_S
    assert ask_again(engine, "tries again") == (1, len(PROMPT) - 1)
    assert not len(engine.lookups.bad_keys)


def test_a_value_that_one_rank_mends_is_whole_for_all() -> None:
    """None could remove it when it did not verify; afterwards none pays for it again."""
    memory, engine = filled(Case("latent", ParallelSizes(tp_size=4)))
    request = engine.add("r", PROMPT, max_tokens=3)
    key = engine.databases()[0][0].key_for(request.block_hashes[2])
    num_bytes = len(memory._values[key])
    memory.remove([key])
    Arena(memory, 4096).put([(key, bytes(num_bytes))])
    leased = Fault(FaultKind.FAILED, "remove", keys=lambda found: found == key)
    stores = [fault_on(engine, other.rank, leased) for other in engine.ranks.ranks]
    finish(engine)
    assert request.num_loaded_tokens == 2 * BLOCK
    for faulty in stores:
        faulty.script = ()
    ask_again(engine, "mends")  # and tells the others
    for number in range(2):
        assert ask_again(engine, f"whole {number}") == (1, len(PROMPT) - 1)
    check_store(engine, memory)
