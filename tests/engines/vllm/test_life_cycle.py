"""How an engine with kvtide starts, pauses and stops: as one without it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvtide.testing import Fault, FaultKind
from tests.engines.vllm.engines import engine, prompt_of

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


def test_shutting_down_with_a_put_that_hangs_ends_in_time(model: Path) -> None:
    """vLLM kills its workers after 5 s; the store call is abandoned before that."""
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
