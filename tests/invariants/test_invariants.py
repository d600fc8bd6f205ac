"""The invariants of the design, one after the other, over an engine that computes on the bytes."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from kvtide.core.admission import AdmissionLimits
from kvtide.core.save_limits import SavePolicy
from kvtide.core.topology import ParallelSizes
from kvtide.runtime.limits import WorkerLimits
from kvtide.stores.memory import MemoryStore
from kvtide.testing import Fault, FaultKind, FaultyStore
from kvtide.testing.engine import ScriptedEngine
from kvtide.testing.engine_checks import check_engine, check_idle, check_store
from kvtide.testing.engine_setup import EngineSetup, HookOrder, ManualClock, full_attention

PROMPT = list(range(100))
TOKENS = 10_000
LARGE = EngineSetup(
    num_blocks=1500,
    groups=full_attention(16),
    max_tokens_per_step=2048,
    max_job_tokens=1 << 14,
    worker=WorkerLimits(staging_bytes=8 << 20, load_staging_bytes=1 << 20, stage_wait_s=0.0),
)


def run_one(
    engine: ScriptedEngine, prompt: list[int] = PROMPT, request_id: str = "r", **how: Any
) -> list[int]:
    """Run one request to its end, and the pool to rest; return what was generated."""
    engine.add(request_id, prompt, **how)
    engine.run()
    settle(engine)
    check_idle(engine)
    return engine.outputs[request_id]


def settle(engine: ScriptedEngine) -> None:
    """Take a few more steps, so that the last jobs are reported."""
    for _ in range(4):
        engine.step()


@pytest.fixture(scope="module")
def large() -> ScriptedEngine:
    """An engine that has computed 10,000 tokens in prefill steps of 2,048, and decoded 40 more."""
    engine = ScriptedEngine(MemoryStore(), LARGE)
    run_one(engine, list(range(TOKENS)), max_tokens=40)
    return engine


# ------------------------------------------------------------------ I1, I2, I3, I8: what it costs


@pytest.mark.parametrize("method", ["exists", "put"])
def test_each_key_is_checked_once_and_put_once_over_ten_thousand_tokens(
    large: ScriptedEngine, method: str
) -> None:
    """I1: prefill in five steps and decode over two boundaries; no step asks about an old key."""
    times = large.ranks.ranks[0].store.times_asked[method]
    assert len(times) == (TOKENS + 39) // 16
    assert set(times.values()) == {1}


def test_metadata_grows_with_what_a_step_adds_and_not_with_the_request(
    large: ScriptedEngine,
) -> None:
    """I2: equal steps cost equal bytes, whether they are the first or the last of a request."""
    prefills = [r.metadata_bytes for r in large.records if r.num_tokens.get("r") == 2048]
    assert len(prefills) == 4
    assert max(prefills) - min(prefills) < 100
    decodes = [r for r in large.records if r.num_tokens.get("r") == 1]
    with_job = [r.metadata_bytes for r in decodes if r.num_stores]
    without = {r.metadata_bytes for r in decodes if not r.num_stores}
    assert len(with_job) == 2
    assert max(with_job) < 600
    assert len(without) == 1
    assert max(without) < 150


def test_a_step_touches_only_its_own_hashes_and_block_table_entries(
    large: ScriptedEngine,
) -> None:
    """I3: hashes and blocks of the range that became certain, each read once, in order."""
    read_hashes: list[int] = []
    read_blocks: list[int] = []
    for record in large.records[1:]:
        hashes = [index for part in record.hash_reads.get("r", ()) for index in part]
        blocks = [i for _, first, end in record.block_reads.get("r", ()) for i in range(first, end)]
        if record.num_tokens:
            first = record.num_computed["r"] // 16
            end = (record.num_computed["r"] + record.num_tokens["r"]) // 16
            assert set(hashes) <= set(range(first, end))
        read_hashes += hashes
        read_blocks += blocks
    assert read_hashes == read_blocks == list(range(128, (TOKENS + 39) // 16))
    assert not any(record.num_list_reads for record in large.records)


NUM_CROWD = 64


@pytest.fixture(scope="module")
def crowd() -> tuple[ScriptedEngine, list[Counter[str]]]:
    """An engine that computed 64 prompts and decoded 40 tokens of each, and each step's calls."""
    setup = replace(LARGE, max_running=NUM_CROWD, max_tokens_per_step=NUM_CROWD * 100)
    memory = MemoryStore()
    engine = ScriptedEngine(memory, setup)
    for number in range(NUM_CROWD):
        engine.add(f"r{number}", [number, *PROMPT[1:]], max_tokens=40)
    store = engine.ranks.ranks[0].store
    calls = []
    while engine.has_work:
        before = store.num_calls.copy()
        engine.step()
        calls.append(store.num_calls - before)
    settle(engine)
    check_idle(engine)
    assert check_store(engine, memory) == NUM_CROWD * (139 // 16)
    return engine, calls


def test_a_crowd_that_decodes_costs_two_calls_of_the_store_a_step(
    crowd: tuple[ScriptedEngine, list[Counter[str]]],
) -> None:
    """I1: all that complete a block share a check and a put, which ask for each key once."""
    engine, calls = crowd
    decodes = [r for r in engine.records if r.num_stores and set(r.num_tokens.values()) == {1}]
    assert [record.num_stores for record in decodes] == [1, 1]
    assert [made for made in calls if made] == [{"exists": 1, "put": 1}] * 3  # one of the prefill
    for method in ("exists", "put"):
        times = engine.ranks.ranks[0].store.times_asked[method]
        assert len(times) == NUM_CROWD * (139 // 16)
        assert set(times.values()) == {1}


def test_metadata_of_a_crowd_grows_with_the_blocks_that_it_completes(
    crowd: tuple[ScriptedEngine, list[Counter[str]]],
) -> None:
    """I2: beside what a step costs in any case, a hash, a chunk and a block for each."""
    engine, _ = crowd
    decodes = [r for r in engine.records if set(r.num_tokens.values()) == {1}]
    with_job = {r.metadata_bytes for r in decodes if r.num_stores}
    without = {r.metadata_bytes for r in decodes if not r.num_stores}
    assert max(without) < 150
    assert max(with_job) - max(without) < 400 + NUM_CROWD * (32 + 4 + 4)


def test_a_crowd_reads_only_what_it_completes(
    crowd: tuple[ScriptedEngine, list[Counter[str]]],
) -> None:
    """I3: over its life each request's hashes and blocks are read once, in order."""
    engine, _ = crowd
    for number in range(NUM_CROWD):
        request_id = f"r{number}"
        hashes = [
            index
            for record in engine.records[1:]
            for part in record.hash_reads.get(request_id, ())
            for index in part
        ]
        blocks = [
            index
            for record in engine.records[1:]
            for _, first, end in record.block_reads.get(request_id, ())
            for index in range(first, end)
        ]
        assert hashes == blocks == [6, 7]
    assert not any(record.num_list_reads for record in engine.records)


@pytest.mark.parametrize("method", ["exists", "put"])
def test_what_was_loaded_is_not_asked_about_again_on_the_save_path(method: str) -> None:
    """I1: a request that resumes behind a load saves what it computes, and no chunk before it."""
    engine = ScriptedEngine(MemoryStore(), EngineSetup())
    run_one(engine, PROMPT)
    engine.pool.drop_cached()
    store = engine.ranks.ranks[0].store
    store.reset()
    request = engine.add("again", [*PROMPT, *range(100, 140)], max_tokens=1)
    engine.run()
    settle(engine)
    assert request.num_loaded_tokens == 100
    assert len(store.times_asked[method]) == 10
    assert set(store.times_asked[method].values()) == {1}


def test_no_store_call_is_made_on_the_engines_thread() -> None:
    """I8: with the pool's threads running, every call comes from one of them."""
    callers: set[str] = set()

    class Watched(MemoryStore):
        def exists(self, keys: Any) -> list[bool]:
            callers.add(threading.current_thread().name)
            return super().exists(keys)

        def put(self, batch: Any) -> Any:
            callers.add(threading.current_thread().name)
            return super().put(batch)

        def get(self, batch: Any) -> Any:
            callers.add(threading.current_thread().name)
            return super().get(batch)

    engine = ScriptedEngine(Watched(), EngineSetup(threaded=True))
    try:
        for number in range(3):
            engine.pool.drop_cached()
            engine.add(str(number), PROMPT, max_tokens=3)
            engine.run(100_000)
            assert all(rank.worker.flush(20.0) for rank in engine.ranks.ranks)
            settle(engine)
    finally:
        engine.close()
    assert engine.scheduler.counters["saved_bytes"] > 0
    assert callers <= {"kvtide-sender", "kvtide-receiver", "kvtide-lookup"}
    assert "kvtide-sender" in callers


# ------------------------------------------------------------------ I4: what is saved is found


@pytest.mark.parametrize("block_sizes", [(4,), (4, 8)])
@pytest.mark.parametrize("num_tokens", [1, 4, 5, 8, 9, 16, 17, 31, 32, 33, 100])
def test_a_repeated_prompt_hits_up_to_its_last_boundary_but_one_token(
    block_sizes: tuple[int, ...], num_tokens: int
) -> None:
    """I4: whatever the length, every full block is loaded, except that one token must be left."""
    engine = ScriptedEngine(
        MemoryStore(),
        EngineSetup(groups=full_attention(*block_sizes), sizes=ParallelSizes(tp_size=2)),
    )
    prompt = list(range(num_tokens))
    run_one(engine, prompt)
    engine.pool.drop_cached()
    request = engine.add("again", prompt)
    engine.run()
    assert request.num_loaded_tokens == engine.coordinator.last_boundary(num_tokens - 1)
    assert request.num_loads == (request.num_loaded_tokens > 0)


def test_what_was_decoded_is_found_by_the_next_turn() -> None:
    """I4: with decode saving a conversation's answer is part of the next hit."""
    engine = ScriptedEngine(MemoryStore(), EngineSetup(num_drafts=3))
    answer = run_one(engine, PROMPT, max_tokens=21, accepts=(3, 0, 1))
    engine.pool.drop_cached()
    request = engine.add("next", PROMPT + answer)
    engine.run()
    assert request.num_loaded_tokens == (100 + 21 - 1) // 4 * 4


def test_a_prompt_cut_by_the_pin_budget_is_saved_whole_while_it_decodes() -> None:
    """I4: a budget of one block slows saving down, and drops nothing of a live request."""
    setup = EngineSetup(max_pinned_blocks=1, saves=SavePolicy(prefill=True, decode=False))
    engine = ScriptedEngine(MemoryStore(), setup)
    run_one(engine, PROMPT, max_tokens=60)
    assert engine.scheduler.counters["saved_chunks"] == 25


# ------------------------------------------------------------------ I5, I9: equal output


FAULTS = {
    "none": [],
    **{
        f"{kind.value} {method}": [Fault(kind, method)]
        for kind, methods in {
            FaultKind.LOST: ("exists", "put", "get"),
            FaultKind.FAILED: ("exists", "put", "get"),
            FaultKind.NO_SPACE: ("put",),
            FaultKind.VANISHED: ("exists", "get"),
            FaultKind.SHORT: ("get",),
            FaultKind.FLIPPED: ("get",),
        }.items()
        for method in methods
    },
    "unremovable": [Fault(FaultKind.FLIPPED, "get"), Fault(FaultKind.FAILED, "remove")],
    "lost": [Fault(FaultKind.LOST)],
}
PUT_CANNOT_SUCCEED = {"lost exists", "lost put", "failed put", "no_space put", "lost"}


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", FAULTS)
def test_a_failing_store_changes_no_token(name: str, num_ranks: int) -> None:
    """I9: cold, warm from the pool, and warm from the engine; saving goes on where it can."""
    faulty = FaultyStore(MemoryStore())
    engine = ScriptedEngine(faulty, EngineSetup(sizes=ParallelSizes(tp_size=num_ranks)))
    clean = name not in PUT_CANNOT_SUCCEED and name != "vanished exists"
    if clean:  # faults of reading need something to read
        run_one(engine, PROMPT, max_tokens=9)
        engine.pool.drop_cached()
    faulty.script = tuple(FAULTS[name])
    for number in range(3):
        assert run_one(engine, PROMPT, str(number), max_tokens=9) == engine.model.generate(
            PROMPT, 9
        )
        if number:
            engine.pool.drop_cached()
    assert bool(faulty.injected) == (name != "none")
    saved_bytes = engine.scheduler.counters["saved_bytes"]
    assert (saved_bytes > 0) == clean
    check_store(engine, faulty.inner)


def test_loaded_zeros_would_change_the_tokens() -> None:
    """The control beside every claim of equal output: the engine does compute on what is loaded."""
    engine = ScriptedEngine(MemoryStore(), EngineSetup())
    run_one(engine, PROMPT, max_tokens=20)
    engine.pool.drop_cached()
    engine.add("zeros", PROMPT, max_tokens=20)
    rank = engine.ranks.ranks[0]
    write = rank.blocks.write
    rank.blocks.write = lambda group_id, ids, data: write(group_id, ids, data * 0)  # type: ignore[method-assign]
    engine.run()
    assert engine.outputs["zeros"] != engine.model.generate(PROMPT, 20)
    with pytest.raises(AssertionError, match="wrong KV"):
        check_engine(engine)


@pytest.mark.parametrize("order", HookOrder)
@pytest.mark.parametrize("report_delay", [0, 2])
def test_bytes_survive_preemption_in_every_order_of_hooks(
    order: HookOrder, report_delay: int
) -> None:
    """I5: requests push each other out of a small cache and come back through the pool."""
    setup = EngineSetup(num_blocks=16, num_drafts=2, order=order, report_delay=report_delay)
    memory = MemoryStore()
    engine = ScriptedEngine(memory, setup)
    prompts = {str(n): [n, *range(20)] for n in range(4)}
    requests = [
        engine.add(name, prompt, max_tokens=15, accepts=(n, 1))
        for n, (name, prompt) in enumerate(prompts.items())
    ]
    while engine.has_work:
        engine.step()
        check_engine(engine)
    settle(engine)
    check_idle(engine)
    assert sum(request.num_preemptions for request in requests) > 0
    assert sum(request.num_loaded_tokens for request in requests) > 0
    for name, prompt in prompts.items():
        assert engine.outputs[name] == engine.model.generate(prompt, 15)
    assert check_store(engine, memory) > 0


# ------------------------------------------------------------------ I6: nothing is left


@pytest.mark.parametrize("name", FAULTS)
def test_every_job_ends_once_per_rank_whatever_the_store_does(name: str) -> None:
    """I6: one end for each job and rank, at most one staging before it, and nothing held after."""
    engine = ScriptedEngine(
        FaultyStore(MemoryStore(), FAULTS[name]), EngineSetup(sizes=ParallelSizes(tp_size=2))
    )
    ends: Counter[int] = Counter()
    stagings: Counter[int] = Counter()
    on_report = engine.scheduler.on_report

    def watched(report: Any, now_s: float) -> list[int]:
        stagings.update(report.staged)
        for job_id, job_ends in report.ended.items():
            ends[job_id] += job_ends.total()
        return on_report(report, now_s)

    engine.scheduler.on_report = watched  # type: ignore[method-assign]
    run_one(engine, PROMPT, max_tokens=9)
    assert engine.scheduler.counters["store_jobs"] == len(ends) > 0
    assert set(ends.values()) == {2}
    assert max(stagings.values(), default=0) <= 2


@pytest.mark.parametrize("method", ["exists", "put", "get"])
def test_a_store_that_hangs_neither_stops_the_engine_nor_keeps_its_blocks(method: str) -> None:
    """I6, I9: deadlines end what hangs; after the store has come back nothing is left."""
    threads_before = set(threading.enumerate())
    faulty = FaultyStore(MemoryStore())
    clock = ManualClock()
    # Where a get is to hang, its lookup must have answered, however long that takes.
    wait_s = 1e9 if method == "get" else 0.05
    setup = EngineSetup(
        threaded=True,
        num_blocks=32,
        lookup_timeout_s=wait_s,
        admission=AdmissionLimits(lookup_wait_s=wait_s),
    )
    engine = ScriptedEngine(faulty, setup, clock=clock)
    second = PROMPT[::-1] if method == "put" else PROMPT  # something to put
    try:
        _run_threaded(engine, "first", PROMPT)
        engine.pool.drop_cached()
        faulty.script = (Fault(FaultKind.HANG, method),)
        output = _run_threaded(engine, "second", second, clock)
        assert output == engine.model.generate(second, 5)
        assert faulty.wait_until_hanging()
        assert not engine.scheduler.has_pins
        faulty.script = ()
        faulty.release()
        engine.pool.drop_cached()
        clock.now_s += 100.0
        assert _run_threaded(engine, "third", PROMPT, clock) == engine.model.generate(PROMPT, 5)
        assert all(rank.worker.flush(20.0) for rank in engine.ranks.ranks)
        settle(engine)
        assert not engine.scheduler.num_open_jobs
    finally:
        engine.close()
    assert engine.scheduler.counters["saved_bytes"] > 0
    left = [t.name for t in threading.enumerate() if t not in threads_before]
    assert not [name for name in left if name.startswith("kvtide")]


def _run_threaded(
    engine: ScriptedEngine,
    request_id: str,
    prompt: list[int],
    clock: ManualClock | None = None,
) -> list[int]:
    """Run a request while the pool's threads run; with ``clock`` every step takes a while."""
    turn = threading.Event()
    engine.add(request_id, prompt, max_tokens=5)
    for _ in range(50_000):
        if not engine.has_work:
            break
        engine.step()
        turn.wait(0.001)
        if clock is not None:
            clock.now_s += 0.05
    return engine.outputs[request_id]
