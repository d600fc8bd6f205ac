"""vLLM's request as the core sees it: the guess of the local hit, beside vLLM's own answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtide.engines.vllm.view import MAX_HINT_PROBES
from tests.engines.vllm.modelled_runner import ModelledEngine, Setup, modelled_engine
from tests.engines.vllm.test_modelled_runner import EAGLE, KINDS, run, setup_of, tokens


def hint_and_hit(engine: ModelledEngine, prompt: list[int]) -> tuple[int, int]:
    """Add a request; return kvtide's guess of the local hit, in whole units, and vLLM's own."""
    engine.add("asked", prompt)
    request = engine.scheduler.requests["asked"]
    hint = engine.connector._scheduler_side._views["asked"].local_hit_hint()
    hint = engine.pool.coordinator.aligned(hint)
    hit = engine.scheduler.kv_cache_manager.get_computed_blocks(request)[1]
    engine.abort("asked")
    return hint, hit


@pytest.mark.parametrize("interval", [None, 0])
@pytest.mark.parametrize("kind", KINDS)
def test_the_guess_of_the_local_hit_is_vllms_own(
    folder: Path, store: str, kind: str, interval: int | None
) -> None:
    """For the same prompt, the next turn behind its answer, a shorter beginning, another prompt."""
    has_interval = kind != "chunked local and full"
    setup = setup_of(kind, retention_interval=interval if has_interval else None)
    prompt = tokens(1, 700)
    with modelled_engine(folder, store, setup) as engine:
        run(engine, {"p": prompt}, max_tokens=60)
        turn = prompt + engine.outputs["p"] + tokens(2, 50)
        for asked in (prompt, turn, prompt[:400] + tokens(3, 100), tokens(4, 300)):
            hint, hit = hint_and_hit(engine, asked)
            assert hint == hit


@pytest.mark.parametrize("kind", EAGLE)
def test_the_guess_leaves_the_proof_of_a_draft_model(folder: Path, store: str, kind: str) -> None:
    """Else each request with a local hit would be looked up twice."""
    specs, drafts = EAGLE[kind]
    setup = Setup(specs(), draft_groups=drafts)
    prompt = tokens(5, 705)
    with modelled_engine(folder, store, setup) as engine:
        run(engine, {"p": prompt})
        lookups = engine.pool.counters["lookups"]
        for asked in (prompt, prompt[:400] + tokens(6, 100)):
            hint, hit = hint_and_hit(engine, asked)
            assert hint == hit > 0
        run(engine, {"again": prompt})
        assert engine.pool.counters["lookups"] - lookups == 3


def test_the_guess_costs_the_scheduling_thread_few_probes(
    folder: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the prompt is, and whatever vLLM has lost."""
    setup = setup_of("window alone", num_blocks=1200, max_num_batched_tokens=2048)
    with modelled_engine(folder, store, setup) as engine:
        tables = type(engine.connector._scheduler_side._tables)
        find_cached = tables.find_cached
        probes: list[int] = []

        def counting(self: Any, group_id: int) -> Callable[[bytes], object]:
            find = find_cached(self, group_id)

            def count(block_hash: bytes) -> object:
                probes.append(group_id)
                return find(block_hash)

            return count

        monkeypatch.setattr(tables, "find_cached", counting)
        run(engine, {"p": tokens(7, 2000)})
        probes.clear()
        assert hint_and_hit(engine, tokens(8, 2000)) == (0, 0)
        # Once when it came, and once for the test.
        assert 0 < len(probes) <= 2 * (MAX_HINT_PROBES + 32)
