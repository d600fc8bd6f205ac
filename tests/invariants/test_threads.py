"""The same invariants while the pool's threads really run, on every store that needs no server."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.core.admission import AdmissionLimits
from kvtide.core.back_off import Delays
from kvtide.stores import open_store
from kvtide.stores.base import Store
from kvtide.testing import Fault, FaultKind, FaultyStore, ScriptedEngine
from kvtide.testing.engine_checks import check_engine, check_idle, check_store
from tests.engine_models import DIVISIONS, MODELS

MAX_STEPS = 100_000
"""Bounds every wait: reached only where something hangs that must not."""


@pytest.fixture(params=["memory", "local"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """A store of each kind."""
    url = "memory://" if request.param == "memory" else f"local://{tmp_path}/pool?size=64MiB"
    opened = open_store(url)
    yield opened
    opened.close()


def drain(engine: ScriptedEngine) -> None:
    """Step until nothing is left, giving the threads a turn between two steps."""
    turn = threading.Event()
    for _ in range(MAX_STEPS):
        if not engine.has_work and not engine.scheduler.num_open_jobs:
            break
        engine.step()
        turn.wait(0.0005)
    for _ in range(4):
        engine.step()
    assert all(rank.worker.flush(20.0) for rank in engine.ranks.ranks)
    check_idle(engine)


@pytest.mark.parametrize(
    "name, division",
    [
        ("full", "more ranks than shards"),
        ("window and state", "a stage without layers"),
        ("state, cut blocks", "copies"),
        ("drafts", "more shards than ranks"),
    ],
)
def test_random_requests_compute_on_right_bytes_whatever_the_threads_do(
    store: Store, name: str, division: str
) -> None:
    """Arrivals, aborts and a small cache; values that vanish or are bad, puts refused."""
    draw = random.Random(name)
    faulty = FaultyStore(store)
    setup = MODELS[name].setup(
        num_blocks=24 if name == "full" else 40,
        num_drafts=draw.choice([0, 2]),
        threaded=True,
        lookup_timeout_s=30.0,
        delays=Delays(0.001, 0.01),
        admission=AdmissionLimits(lookup_wait_s=30.0),
    )
    engine = ScriptedEngine(faulty, DIVISIONS[division].apply(setup), clock=time.monotonic)
    prompts: dict[str, list[int]] = {}
    turn = threading.Event()
    try:
        for number in range(60):
            prompts[str(number)] = [draw.randrange(2), *range(draw.randrange(1, 40))]
            engine.add(str(number), prompts[str(number)], max_tokens=draw.choice([1, 6]))
            faulty.script = (
                (Fault(draw.choice(list(FaultKind)[4:]), keys=lambda key: key[-1] in "05af"),)
                if draw.random() < 0.4
                else ()
            )
            if draw.random() < 0.3:
                engine.pool.drop_cached()
            name = draw.choice(list(engine.requests))
            if draw.random() < 0.2 and engine.requests[name].state.value != "finished":
                engine.abort(name)
            for _ in range(draw.randrange(6)):
                engine.step()
                turn.wait(0.0005)
                check_engine(engine)
        faulty.script = ()
        drain(engine)
        for name in ("last", "last again"):
            engine.pool.drop_cached()
            prompts[name] = list(range(40))
            engine.add(name, prompts[name])
            drain(engine)
        assert check_store(engine, store) > 0
    finally:
        engine.close()
    for name, output in engine.outputs.items():
        assert output == engine.model.generate(prompts[name], len(output))
    assert engine.scheduler.counters["loaded_tokens"] > 0
    assert engine.scheduler.counters["saved_bytes"] > 0
