"""How an engine with kvtide starts, pauses and stops: as one without it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtide.testing import Fault, FaultKind
from tests.engines.vllm.engines import engine, prompt_of

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).parents[3]


def scenario(model: Path, store: str) -> dict[str, Any]:
    """Run ``async_scenario.py`` and return what it measured."""
    path = os.pathsep.join(folder for folder in sys.path if folder)
    child = subprocess.run(
        [sys.executable, "-m", "tests.engines.vllm.async_scenario", str(model), store],
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=ROOT,
    )
    lines = [line for line in child.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, f"exit {child.returncode}: {child.stdout[-2000:]}{child.stderr[-3000:]}"
    result: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return result


@pytest.fixture(scope="module")
def plain(model: Path) -> dict[str, Any]:
    """The same scenario without kvtide."""
    return scenario(model, "")


@pytest.fixture
def warm_pool(model: Path, tmp_path: Path) -> Iterator[Path]:
    """A local pool that holds the prompts of the scenario."""
    path = Path("/dev/shm") / f"kvtide-test-{tmp_path.parent.name}-life"
    with engine(model, f"local://{path}?size=64MiB") as cold:
        cold.generate(*(prompt_of(400, seed=seed) for seed in range(3)))
        cold.settle()
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.mark.parametrize("method", ["put", "get"])
def test_with_a_store_that_hangs_the_engine_idles_pauses_and_stops(
    model: Path, plain: dict[str, Any], warm_pool: Path, method: str
) -> None:
    """On an engine whose cache holds one request: no polling, pauses and shutdown within 5 s.

    A load that hangs ends when its request is aborted, and by its deadline otherwise.
    """
    inner = f"&inner=local://{warm_pool}" if method == "get" else ""
    result = scenario(model, f"faulty://async?kind=hang&method={method}{inner}")
    assert result["tokens"] == plain["tokens"]
    assert result["idle_cpu_s"] < 1.0, "an engine that polls burns more than a core"
    assert max(result["pause_s"].values()) < 5.0, result["pause_s"]
    assert result["shutdown_s"] < plain["shutdown_s"] + 5.0
    assert result["left_over"] <= plain["left_over"], "no process outlives the engine"


def test_shutting_down_with_a_put_that_hangs_ends_in_time(model: Path) -> None:
    """VLLM kills its workers after 5 s; the store call is abandoned before that."""
    import kvtide_faulty

    with engine(model, "faulty://hanging", options={"save_timeout_s": 30.0}) as one:
        store = kvtide_faulty.opened["hanging"]
        store.script = (Fault(FaultKind.HANG, "put"),)
        one.generate(prompt_of(200))
        one.step_until(lambda: not one.pool.has_pins)
        begun_s = time.monotonic()
        one.close_connectors()
        assert time.monotonic() - begun_s < 5.0
        store.release()
