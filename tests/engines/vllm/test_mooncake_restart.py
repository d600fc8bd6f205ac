"""The benchmark of restarts, with one: an engine under load outlives the master of its pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(180)]

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
BUSY_MACHINE_S = 5.0


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark, with fewer prompts."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bench_mooncake_restart

    monkeypatch.setattr(bench_mooncake_restart, "NUM_PROMPTS", 12)
    monkeypatch.setattr(bench_mooncake_restart, "UP_S", 0.5)
    return bench_mooncake_restart


def test_under_load_no_request_notices_that_the_master_is_restarted(
    bench: Any, model: Path
) -> None:
    """None fails, no token differs, what is in the pool is used, and saving resumes by itself."""
    watch = bench.measure(model, 1)
    assert watch.num_requests > bench.NUM_PROMPTS
    assert watch.num_failed == watch.num_different == 0
    assert len(watch.loading_s) == 2, "before and after"
    assert watch.saving_s[1] < bench.RESUMED_WITHIN_S + BUSY_MACHINE_S
