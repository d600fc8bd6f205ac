"""The engine that the end-to-end benchmark asks is the same with its connector and without."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(180)]

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark's module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bench_end_to_end

    return bench_end_to_end


def test_an_engine_loads_with_its_connector_and_computes_without(
    bench: Any, model: Path, store: str
) -> None:
    """And what comes late is answered beside the rest, step by step."""
    prompt = list(range(100, 400))
    with bench.EngineProcess(model, bench.kvtide(store), max_model_len=1024) as engine:
        computed = engine.answer([prompt], 4)
        loaded = engine.answer([prompt], 4, late=[prompt[::-1]])
        without = engine.answer([prompt], 4, is_connected=False)
        again = engine.answer([prompt], 4)
    assert computed.num_loaded == without.num_loaded == 0
    assert loaded.num_loaded == again.num_loaded == loaded.num_cached[0] == 288
    assert computed.tokens[0] == loaded.tokens[0] == without.tokens[0] == again.tokens[0]
    assert len(loaded.first_token_s) == 2
    saved = [computed.num_saved, loaded.num_saved, without.num_saved, again.num_saved]
    assert saved == [300 // 32, 300 // 32, 0, 0]  # the late prompt is new
    assert len(loaded.steps) >= 4
    assert all(0 < step.scheduler_s < step.seconds for step in loaded.steps if step.has_run)


def test_puts_are_counted_where_the_peer_calls_its_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that Mooncake refuses are not, and other calls reach the client."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from connector_counts import InTreeCounts

    class Client:
        def batch_is_exist(self, keys: list[str]) -> list[int]:
            return [0] * len(keys)

        def batch_put_from_multi_buffers(self, keys: list[str], *_: Any) -> list[int]:
            return [-200, *[0] * (len(keys) - 1)]

    queue = SimpleNamespace(unfinished_tasks=1)
    thread = SimpleNamespace(store=Client(), request_queue=queue)
    counts = InTreeCounts(thread)
    assert thread.store.batch_is_exist(["a"]) == [0]
    assert thread.store.batch_put_from_multi_buffers(list("abc"), [], [], None) == [-200, 0, 0]
    assert counts.num_saved() == 2
    assert counts.is_saving()
