"""Run as a script: an engine of several ranks answers prompts, and tells what came of it, as JSON.

usage: python -m tests.engines.vllm.ranks_scenario '{"model": ..., "store": ..., ...}'

In a process of its own, since its ranks are processes too. The scheduler runs in this one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.engines.vllm.engines import InProcessEngine, prompt_of
from tests.engines.vllm.environment import report, run_script

PROMPT_TOKENS = 500
PATIENT = {"lookup_wait_ms": 10_000, "lookup_timeout_ms": 10_000}
"""Ranks that spin take every core, so a lookup may be late, and would be a miss."""
NUM_OUTPUT_TOKENS = 24


@dataclass(frozen=True, slots=True)
class RanksRun:
    """One engine, and the prompts that it is asked one after the other, by their seeds.

    ``store`` is the URL of a pool, empty for none. With ``zeros``, what is loaded are zeros.
    """

    model: str
    store: str
    tp_size: int = 1
    pp_size: int = 1
    seeds: tuple[int, ...] = (0,)
    options: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    zeros: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine answered to a prompt, how much of it was not computed, and what it counted.

    ``keys`` has, of each group and part, the keys of the prompt's chunks.
    """

    tokens: list[int]
    num_cached_tokens: int
    counters: dict[str, int] = field(default_factory=dict)
    keys: dict[str, list[str]] = field(default_factory=dict)


def run(case: RanksRun) -> dict[int, Answer]:
    """Run an engine in a process of its own; return its answers by seed."""
    found = run_script("ranks_scenario", json.dumps(asdict(case)), timeout_s=400.0)
    return {seed: Answer(**answer) for seed, answer in zip(case.seeds, found, strict=True)}


def ask(one: InProcessEngine, seed: int, *, has_pool: bool = True) -> Answer:
    """Let an engine answer a prompt, and wait until its ranks have saved what there is to save."""
    if not has_pool:
        [output] = one.run(prompt_of(PROMPT_TOKENS, seed), num_tokens=NUM_OUTPUT_TOKENS)
        return Answer(list(output.outputs[0].token_ids), output.num_cached_tokens)
    before = Counter(one.counters)
    requests: list[Any] = []
    finished = one.connector.request_finished_all_groups

    def note(request: Any, block_ids: Any) -> Any:
        requests.append(request)
        return finished(request, block_ids)

    one.connector.request_finished_all_groups = note
    [output] = one.run(prompt_of(PROMPT_TOKENS, seed), num_tokens=NUM_OUTPUT_TOKENS)
    one.connector.request_finished_all_groups = finished
    _settle(one)
    counted = Counter(one.counters)
    counted.subtract(before)
    return Answer(
        list(output.outputs[0].token_ids),
        output.num_cached_tokens,
        {name: count for name, count in counted.items() if count},
        _keys(one, requests[0]),
    )


def _keys(one: InProcessEngine, request: Any) -> dict[str, list[str]]:
    side = one.connector._scheduler_side
    parts = side._agreement.parts
    namespace = side._namespace_of(request)
    databases = side._plan.coordinator().databases(namespace, parts)
    num_chunks = PROMPT_TOKENS // databases[0][0].hash_block_size
    return {
        f"group {group_id}, {part}": [
            database.key_for(value) for value in request.block_hashes[:num_chunks]
        ]
        for group_id, group in enumerate(databases)
        for part, database in zip(parts[group_id], group, strict=True)
    }


def _settle(one: InProcessEngine, limit_s: float = 60.0) -> None:
    """Let the ranks' reports reach the scheduler, which they do with a step."""
    end_s = time.monotonic() + limit_s
    one.step_until(lambda: not one.core.scheduler.has_requests(), limit_s=limit_s)
    while one.pool.num_open_jobs or one.pool.num_loads:
        assert time.monotonic() < end_s, f"never ended: {one.pool!r}"
        one.generate([3, 4, 5], num_tokens=2)


def main(case: RanksRun) -> None:
    """Open the engine, ask it, and report."""
    num_ranks = case.tp_size * case.pp_size
    # Each rank its own core, where there are as many: vLLM's ranks spin while they wait.
    cores = sorted(os.sched_getaffinity(0))
    binds = [str(cores[rank % len(cores)]) for rank in range(num_ranks)]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(binds)
    one = InProcessEngine(
        Path(case.model),
        store=case.store or None,
        module="tests.engines.vllm.zeroing_connector" if case.zeros else "kvtide.engines.vllm",
        options={**PATIENT, **case.options},
        tensor_parallel_size=case.tp_size,
        pipeline_parallel_size=case.pp_size,
        # vLLM's CPU worker makes room for what a stage receives only when it compiles.
        enforce_eager=case.pp_size == 1,
        **case.arguments,
    )
    try:
        report([asdict(ask(one, seed, has_pool=bool(case.store))) for seed in case.seeds])
    finally:
        one.close()


if __name__ == "__main__":
    main(RanksRun(**json.loads(sys.argv[1])))
