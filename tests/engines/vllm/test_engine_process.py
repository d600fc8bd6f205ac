"""The engine that the end-to-end benchmark asks is the same with its connector and without."""

from __future__ import annotations

from pathlib import Path
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
    assert len(loaded.steps_s) >= 4
