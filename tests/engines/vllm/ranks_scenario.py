"""Run as a script: an engine of several ranks answers prompts, and tells what came of it, as JSON.

usage: python -m tests.engines.vllm.ranks_scenario '{"model": ..., "store": ..., ...}'

In a process of its own, whose ranks are processes too. The scheduler runs in this one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.engines.vllm.engines import InProcessEngine, prompt_of
from tests.engines.vllm.environment import report, run_script

PROMPT_TOKENS = 500


@dataclass(frozen=True, slots=True)
class RanksRun:
    """One engine: ``store`` is a URL, empty for none; ``zeros`` writes zeros for what is loaded."""

    model: str
    store: str
    tp_size: int = 1
    pp_size: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    zeros: bool = False
    num_tokens: int = 24


@dataclass(frozen=True, slots=True)
class RanksResult:
    """What the engine answered to its prompt, how much of it was not computed, and counters."""

    tokens: list[int]
    num_cached_tokens: int
    counters: dict[str, int]


def run(case: RanksRun) -> RanksResult:
    """Run an engine in a process of its own."""
    found = run_script("ranks_scenario", json.dumps(asdict(case)), timeout_s=300.0)
    return RanksResult(**found)


def _settle(one: InProcessEngine, limit_s: float = 60.0) -> None:
    """Let the ranks' reports reach the scheduler, which they do with a step."""
    end_s = time.monotonic() + limit_s
    one.step_until(lambda: not one.core.scheduler.has_requests(), limit_s=limit_s)
    while one.pool.num_open_jobs or one.pool.num_loads:
        assert time.monotonic() < end_s, f"never ended: {one.pool!r}"
        one.generate([3, 4, 5], num_tokens=2)


def _zero_what_is_loaded() -> None:
    """Let the ranks, which are forked from this process, write zeros into their blocks."""
    import numpy as np

    from kvtide.engines.vllm.tensors import TensorBlocks

    write = TensorBlocks.write
    TensorBlocks.write = lambda self, group, ids, data: write(  # type: ignore[method-assign]
        self, group, ids, np.zeros_like(data)
    )


def main(case: RanksRun) -> None:
    """Answer the prompt, save what there is to save, and report."""
    num_ranks = case.tp_size * case.pp_size
    # Each rank its own core, where there are as many; vLLM's ranks spin while they wait.
    cores = sorted(os.sched_getaffinity(0))
    binds = [str(cores[rank % len(cores)]) for rank in range(num_ranks)]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(binds)
    if case.zeros:
        _zero_what_is_loaded()
    one = InProcessEngine(
        Path(case.model),
        store=case.store or None,
        options=case.options,
        tensor_parallel_size=case.tp_size,
        pipeline_parallel_size=case.pp_size,
        # vLLM's CPU worker makes room for what a stage receives only when it compiles.
        enforce_eager=case.pp_size == 1,
        **case.arguments,
    )
    try:
        [output] = one.run(prompt_of(PROMPT_TOKENS), num_tokens=case.num_tokens)
        counters = {}
        if case.store:
            _settle(one)
            counters = dict(one.counters)
        report(
            asdict(
                RanksResult(list(output.outputs[0].token_ids), output.num_cached_tokens, counters)
            )
        )
    finally:
        one.close()


if __name__ == "__main__":
    main(RanksRun(**json.loads(sys.argv[1])))
