"""The peers of the lookup and load benchmarks are vLLM's own, and find what kvtide finds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(240)]

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def on_path() -> Iterator[None]:
    """Let the benchmarks be imported."""
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


def test_both_sides_find_the_same_hit_and_the_peer_asks_for_everything() -> None:
    """On one rank and on eight; the bench itself compares the hits."""
    import bench_lookup_cost as bench

    for model in bench.models():
        case = bench.Case(model, with_vllm=True)
        for state in ("cold miss", "half hit"):
            keys, calls, cpu = case.rows(state, 1)
            chunks = sum(bench.NUM_TOKENS // group.block_size for group in model.coordinator.groups)
            if model.name != "like DeepSeek-V4":  # vLLM's mask leaves out some of its windows
                assert keys.peer == model.tp_size * chunks
            assert keys.kvtide < keys.peer
            assert calls.peer == 1
            assert cpu.ratio == cpu.kvtide / cpu.peer


def test_the_scheduling_thread_is_timed_on_vllms_own_request_and_socket() -> None:
    """Every answer is what the store and the engine's cache allow, and the server ends."""
    import bench_lookup_cost as bench
    from lookup_sides import EngineCache, InTreeScheduler, InTreeSide, KVTideSide

    model = bench.models()[0]
    store = bench.GatedStore()
    cache = EngineCache(model.coordinator, 4097, num_blocks=1024)
    request = cache.request("r", 4097, held_token=1024)
    store.present = frozenset(value.hex() for value in request.block_hashes[:128])
    ours = KVTideSide(model, store, threaded=True)
    theirs = InTreeScheduler(model, InTreeSide(model, store))
    try:
        views = [cache.view(request)]
        assert len(bench.waiting_turn(ours, store, views, 1024)) == 1  # which checks the wait
        assert store.num_keys == 64 + 128 + 2
        store.clear()
        assert len(bench.our_turn(ours, views, 1024)) == 1
        assert store.num_keys == 64 + 128 + 2  # two batches, and the sentinels
        assert theirs.match(request, 1024) == 1024
        assert store.num_keys == 64 + 128 + 2 + 256
    finally:
        ours.close()
        theirs.close()


def test_both_sides_load_the_same_chunks() -> None:
    """The bench itself compares the names of what both ask for."""
    import bench_load_planning as bench

    for name in bench.MODELS:
        rows: list[Any] = list(bench.rows(name, 8 << 10, 1, with_vllm=True))
        assert [row.peer is not None for row in rows] == [False, True, True]
