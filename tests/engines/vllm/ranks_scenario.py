"""Run as a script: an engine of several ranks answers prompts, and tells what came of it, as JSON.

usage: python -m tests.engines.vllm.ranks_scenario '{"model": ..., "store": ..., ...}'

In a process of its own, since its ranks are processes too. The scheduler runs in this one.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from tests.engines.vllm.engines import InProcessEngine, prompt_of
from tests.engines.vllm.environment import report, run_script
from tests.engines.vllm.zeros import zeros_loaded

PROMPT_TOKENS = 500
PATIENT = {"lookup_wait_ms": 10_000, "lookup_timeout_ms": 10_000, "load_timeout_s": 30}
"""Ranks that spin take every core: a lookup or a load may be late, and would be a miss."""
NUM_OUTPUT_TOKENS = 24


@dataclass(frozen=True, slots=True)
class RanksRun:
    """One engine, and the prompts that it is asked one after the other, by their seeds.

    ``store`` is the URL of a pool, empty for none. ``appended`` are tokens behind each prompt that
    an engine has generated before: so many fewer are generated. With ``zeros`` each prompt is asked
    once more, of the pool alone, and what is loaded then are zeros.
    """

    model: str
    store: str
    tp_size: int = 1
    pp_size: int = 1
    seeds: tuple[int, ...] = (0,)
    num_prompt_tokens: int = PROMPT_TOKENS
    appended: tuple[int, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    zeros: bool = False

    @property
    def num_ranks(self) -> int:
        """The processes that compute."""
        return self.tp_size * self.pp_size

    def prompt(self, seed: int) -> list[int]:
        """The prompt of a seed."""
        return [*prompt_of(self.num_prompt_tokens, seed), *self.appended]


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine answered to a prompt, how much of it was not computed, and what it counted.

    ``by_rank`` are the counters of each rank. ``keys[g][p]`` are those of the prompt's chunks, of
    part ``p`` of group ``g``. ``said`` is what kvtide told at the engine's start.
    """

    tokens: list[int]
    num_cached_tokens: int
    counters: dict[str, int] = field(default_factory=dict)
    by_rank: list[dict[str, int]] = field(default_factory=list)
    keys: list[list[list[str]]] = field(default_factory=list)
    said: str = ""
    tokens_of_zeros: list[int] = field(default_factory=list)


def cores_of(num_ranks: int) -> dict[str, str]:
    """Return the setting that gives each rank its own core, where there are as many.

    vLLM's ranks spin while they wait.
    """
    cores = sorted(os.sched_getaffinity(0))
    binds = [str(cores[rank % len(cores)]) for rank in range(num_ranks)]
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(binds)}


def run(case: RanksRun) -> dict[int, Answer]:
    """Run an engine in a process of its own; return its answers by seed."""
    found = run_script("ranks_scenario", json.dumps(asdict(case)), timeout_s=400.0)
    return {seed: Answer(**answer) for seed, answer in zip(case.seeds, found, strict=True)}


class RanksEngine:
    """An engine of one or more ranks in this process, and what came of asking it.

    Use it in a ``with`` block.
    """

    def __init__(self, case: RanksRun) -> None:
        self._case = case
        self._lines = _Lines()
        self._logger = logging.getLogger("kvtide.engines.vllm")
        self._logger.addHandler(self._lines)
        level = self._logger.level
        self._logger.setLevel(logging.INFO)
        try:
            self._one = InProcessEngine(
                Path(case.model),
                store=case.store or None,
                options={**PATIENT, **case.options},
                tensor_parallel_size=case.tp_size,
                pipeline_parallel_size=case.pp_size,
                **{**_COMPILED, **case.arguments} if case.pp_size > 1 else case.arguments,
            )
        finally:
            self._logger.removeHandler(self._lines)
            self._logger.setLevel(level)
        self._by_rank: list[Counter[str]] = [Counter() for _ in range(case.num_ranks)]
        self._note_ranks()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._one.close()

    def _note_ranks(self) -> None:
        """Count what each rank reports, which vLLM then merges."""
        aggregator = self._one.core.model_executor.kv_output_aggregator
        if not self._case.store or self._case.num_ranks == 1:
            return
        aggregate = aggregator.aggregate

        def note(outputs: list[Any], *arguments: Any, **options: Any) -> Any:
            for counted, output in zip(self._by_rank, outputs, strict=True):
                told = output and output.kv_connector_output
                if told and told.kv_connector_worker_meta:
                    counted.update(told.kv_connector_worker_meta.report.counters)
            return aggregate(outputs, *arguments, **options)

        aggregator.aggregate = note

    def ask(self, seed: int) -> Answer:
        """Answer a prompt, and wait until all ranks have saved what there is to save."""
        case, one = self._case, self._one
        num_tokens = NUM_OUTPUT_TOKENS - len(case.appended)
        if not case.store:
            [output] = one.run(case.prompt(seed), num_tokens=num_tokens)
            return Answer(list(output.outputs[0].token_ids), output.num_cached_tokens)
        before = self._counted()
        requests = _Finished(one)
        [output] = one.run(case.prompt(seed), num_tokens=num_tokens)
        [request] = requests.stop()
        _settle(one)
        counted, *by_rank = (
            {name: count - then[name] for name, count in now.items() if count != then[name]}
            for now, then in zip(self._counted(), before, strict=True)
        )
        return Answer(
            list(output.outputs[0].token_ids),
            output.num_cached_tokens,
            counted,
            by_rank,
            self._keys(request),
            "\n".join(self._lines.said),
            self._ask_for_zeros(seed, num_tokens) if case.zeros else [],
        )

    def _counted(self) -> list[Counter[str]]:
        """Return the engine's counters, then those of each rank."""
        total = self._one.counters
        return [total, *map(Counter, self._by_rank if self._case.num_ranks > 1 else [total])]

    def _ask_for_zeros(self, seed: int, num_tokens: int) -> list[int]:
        self._one.forget_local()
        with zeros_loaded(self._one):
            [output] = self._one.run(self._case.prompt(seed), num_tokens=num_tokens)
        _settle(self._one)
        assert output.num_cached_tokens, f"no zeros were loaded: {self._one.counters}"
        return list(output.outputs[0].token_ids)

    def _keys(self, request: Any) -> list[list[list[str]]]:
        side = self._one.connector._scheduler_side
        databases = side._plan.coordinator().databases(
            side._namespace_of(request), side._agreement.parts
        )
        num_chunks = self._case.num_prompt_tokens // side._plan.hash_block_size
        return [
            [
                [database.key_for(value) for value in request.block_hashes[:num_chunks]]
                for database in group
            ]
            for group in databases
        ]


_COMPILED = {
    # vLLM's CPU worker makes room for what a stage receives only when it traces the model. What
    # it traces need not be compiled: that takes 20 s, and rounds differently.
    "enforce_eager": False,
    "compilation_config": {"mode": 2, "backend": "eager"},
}


class _Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


class _Finished:
    """Notes the requests that end."""

    def __init__(self, one: InProcessEngine) -> None:
        self._connector = one.connector
        self._finished = finished = one.connector.request_finished_all_groups
        self._requests: list[Any] = []

        def note(request: Any, block_ids: Any) -> Any:
            self._requests.append(request)
            return finished(request, block_ids)

        one.connector.request_finished_all_groups = note

    def stop(self) -> list[Any]:
        """Note no more; return the requests."""
        self._connector.request_finished_all_groups = self._finished
        return self._requests


def _settle(one: InProcessEngine, limit_s: float = 60.0) -> None:
    """Let the ranks' reports reach the scheduler, which they do with a step."""
    end_s = time.monotonic() + limit_s
    one.step_until(lambda: not one.core.scheduler.has_requests(), limit_s=limit_s)
    while one.pool.num_open_jobs or one.pool.num_loads:
        assert time.monotonic() < end_s, f"never ended: {one.pool!r}"
        one.generate([3, 4, 5], num_tokens=2)


def main(case: RanksRun) -> None:
    """Open the engine, ask it, and report."""
    os.environ.update(cores_of(case.num_ranks))
    with RanksEngine(case) as one:
        report([asdict(one.ask(seed)) for seed in case.seeds])


if __name__ == "__main__":
    main(RanksRun(**json.loads(sys.argv[1])))
