"""A worker's half rests only where the engine has nothing else to do than wait for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvtide.core.jobs import StepPlan
from kvtide.engines.vllm import worker_side
from kvtide.engines.vllm.metadata import KVTideMetadata
from kvtide.engines.vllm.worker_side import REST_S, WorkerSide

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


def test_a_step_that_must_rest_rests_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop of an engine in its caller's process would starve the threads it waits for."""
    rests: list[float] = []
    monkeypatch.setattr(worker_side, "time", SimpleNamespace(sleep=rests.append))
    nothing: Any = None
    ranks: Any = SimpleNamespace(topology=SimpleNamespace(role=lambda rank: rank))
    half = WorkerSide(nothing, nothing, nothing, nothing, nothing, nothing, ranks=ranks, rank=0)
    for must_rest, num_rests in ((False, 0), (True, 1), (True, 2), (False, 2)):
        half.take_over(KVTideMetadata(StepPlan(), must_rest))
        half.poll()
        assert rests == [REST_S] * num_rests
