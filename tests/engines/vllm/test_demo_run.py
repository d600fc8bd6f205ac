"""One engine's part of the demo: that it waits for what is being saved."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtide.engines.vllm import demo_run
from kvtide.engines.vllm.demo_run import Engine, RunResult, RunSpec, read_counters


class FakeLLM:
    """Holds pins for a few looks at it; ``counters`` are written one per step, then the last."""

    def __init__(self, path: Path, counters: list[dict[str, int]], pinned_for: int = 0) -> None:
        self.path = path
        self.counters = counters
        self.pinned_for = pinned_for
        self.steps = 0

    def reset_prefix_cache(self) -> bool:
        """Say whether no block is pinned any more."""
        self.pinned_for -= 1
        return self.pinned_for < 0

    def step(self, *_: object) -> None:
        """Stand in for ``Engine.generate``: reports arrive."""
        self.path.write_text(json.dumps(self.counters[min(self.steps, len(self.counters) - 1)]))
        self.steps += 1


def engine(monkeypatch: pytest.MonkeyPatch, path: Path, llm: FakeLLM, **spec: Any) -> Engine:
    """Return an engine around ``llm`` that does not pause between looks."""
    monkeypatch.setattr(demo_run, "SETTLE_PAUSE_S", 0.001)
    monkeypatch.setattr(Engine, "generate", lambda self, *_: llm.step())
    values = {"store": "memory://", "stats_path": str(path), "settle_s": 5.0} | spec
    return Engine(RunSpec("cold", "/m", [5], [6], 24, **values), llm)


def test_settling_waits_for_open_jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """While a job has no end report, its bytes are not counted yet."""
    path = tmp_path / "stats.json"
    busy, done = {"jobs_open": 1, "saved_bytes": 1}, {"jobs_open": 0, "saved_bytes": 9}
    llm = FakeLLM(path, [busy, busy, busy, done])
    assert engine(monkeypatch, path, llm).settle() == done


def test_settling_waits_for_pins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """While the engine's prefix cache cannot be reset, blocks are still being copied."""
    path = tmp_path / "stats.json"
    llm = FakeLLM(path, [{"jobs_open": 0, "saved_bytes": 9}], pinned_for=5)
    engine(monkeypatch, path, llm).settle()
    assert llm.steps > 5


def test_settling_waits_until_the_counters_rest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file that lags behind shows no open job either; two equal readings settle it."""
    path = tmp_path / "stats.json"
    growing = [{"jobs_open": 0, "saved_bytes": size} for size in (1, 2, 3, 4)]
    assert engine(monkeypatch, path, FakeLLM(path, growing)).settle() == growing[-1]


def test_settling_without_a_pool_is_immediate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The plain engine saves nothing, and has no counters."""
    llm = FakeLLM(tmp_path / "stats.json", [])
    assert engine(monkeypatch, tmp_path, llm, store=None).settle() == {}
    assert llm.steps == 0


def test_settling_ends_in_an_error_that_shows_the_counters(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A job that never ends is told, with what is known about it."""
    path = tmp_path / "stats.json"
    llm = FakeLLM(path, [{"jobs_open": 1}])
    with pytest.raises(TimeoutError, match=r"did not end within 0\.1 s.*'jobs_open': 1"):
        engine(monkeypatch, path, llm, settle_s=0.1).settle()


def test_what_is_loaded_is_what_the_connector_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A hit in vLLM's own prefix cache, and what the warm-up loaded, are not from the pool."""
    spec = RunSpec("warm", "/m", [5] * 96, [6], 2, "memory://", str(tmp_path / "stats.json"))
    output = SimpleNamespace(
        outputs=[SimpleNamespace(token_ids=[7, 8])],
        metrics=SimpleNamespace(first_token_latency=0.5),
        num_cached_tokens=96,
    )
    readings = iter(
        [
            {"loaded_tokens": 32, "loaded_bytes": 10, "saved_bytes": 5, "jobs_open": 0},
            {"loaded_tokens": 96, "loaded_bytes": 30, "saved_bytes": 5, "jobs_open": 0},
        ]
    )
    monkeypatch.setattr(Engine, "start", classmethod(lambda cls, spec: cls(spec, None)))
    monkeypatch.setattr(Engine, "generate", lambda *_: output)
    monkeypatch.setattr(Engine, "settle", lambda self: next(readings))
    assert demo_run.run(spec) == RunResult(
        [7, 8], ttft_s=0.5, loaded_tokens=64, saved_bytes=0, loaded_bytes=20
    )


def test_without_a_pool_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain engine has no counters, and whatever vLLM calls cached is its own."""
    spec = RunSpec("plain", "/m", [5] * 96, [6], 1, None, "")
    output = SimpleNamespace(
        outputs=[SimpleNamespace(token_ids=[7])],
        metrics=SimpleNamespace(first_token_latency=0.5),
        num_cached_tokens=64,
    )
    monkeypatch.setattr(Engine, "start", classmethod(lambda cls, spec: cls(spec, None)))
    monkeypatch.setattr(Engine, "generate", lambda *_: output)
    assert demo_run.run(spec).loaded_tokens == 0


def test_counters_that_do_not_exist_yet_are_empty(tmp_path: Path) -> None:
    """The connector may not have started when they are first read."""
    assert read_counters(str(tmp_path / "stats.json")) == {}
