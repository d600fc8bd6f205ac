"""vLLM on the CPU with each connector and with none, side by side, asked in turns.

    python benchmarks/bench_end_to_end.py [--rounds 9]

Four engines of a small model, each in a process with one thread for the model: without a connector,
with kvtide on a local pool and on Mooncake, and with vLLM's in-tree connector on another Mooncake
pool. All save what they decode. Measured are the time to a long prompt's first token, cold and from
the pool; the tax of saving on decode throughput; the slowest steps, and the scheduler's part of
them, while other requests' prefixes are looked up and loaded; and how much an engine's own small
cache still serves.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine_process import BLOCK, Answers, EngineProcess, Step
from measuring import Row, compared, figure, left_out, quartiles, report

from kvtide.errors import StoreOpenError
from kvtide.stores.mooncake_package import mooncake_module
from kvtide.testing.mooncake import MooncakePool

BENCH = "end_to_end"
LONG_TOKENS = 8192
NUM_DECODES, DECODE_PROMPT, DECODE_TOKENS = 8, 256, 96
DECODE_ROUNDS = 4
NUM_LATE, NUM_BESIDE = 6, 4
MAX_TAX = 2
TOKEN_BYTES = 4 << 10
"""Of the demo's model: keys and values of 4 layers with 2 heads of 64 elements of 4 bytes."""
NONE, LOCAL, MOONCAKE, IN_TREE = "none", "kvtide, local", "kvtide, Mooncake", "in-tree, Mooncake"


@dataclass(slots=True)
class Sides:
    """The engines by name, and prompts that none has seen."""

    engines: dict[str, EngineProcess]
    generator: random.Random = field(default_factory=lambda: random.Random(11))  # noqa: S311

    def prompt(self, num_tokens: int) -> list[int]:
        """Return a new prompt."""
        return [self.generator.randrange(3, 1024) for _ in range(num_tokens)]

    @property
    def connected(self) -> list[str]:
        """The engines that have a connector."""
        return [name for name in self.engines if name != NONE]

    def each(
        self, ask: Callable[[EngineProcess], Answers], among: Sequence[str] | None = None
    ) -> Iterator[tuple[str, Answers]]:
        """Ask the engines in turns, each time in another order."""
        names = list(self.engines if among is None else among)
        self.generator.shuffle(names)
        for name in names:
            yield name, ask(self.engines[name])


def first_token_rows(sides: Sides, num_rounds: int) -> list[Row]:
    """Time the first token of a long prompt, computed and loaded."""
    cold: dict[str, list[float]] = {name: [] for name in sides.engines}
    warm: dict[str, list[float]] = {name: [] for name in sides.engines}
    for _ in range(num_rounds):
        prompt = sides.prompt(LONG_TOKENS)
        tokens = set()
        for times in (cold, warm):
            for name, answers in sides.each(lambda engine: engine.answer([prompt], 16)):  # noqa: B023
                times[name].append(answers.first_token_s[0] * 1e3)
                tokens.add(tuple(answers.tokens[0]))
                if times is warm and name != NONE and not answers.num_cached[0]:
                    raise RuntimeError(f"{name} loaded nothing")
        if len(tokens) != 1:
            raise RuntimeError(f"the engines answer differently: {tokens}")
    case = f"first token, {LONG_TOKENS:,} tokens"
    rows = [
        compared(BENCH, f"{case}: computed with {name}, without", "ms", cold[name], cold[NONE])
        for name in (LOCAL, MOONCAKE, IN_TREE)
    ]
    rows += [
        compared(
            BENCH, f"{case}: loaded with {name}, computed without", "ms", warm[name], cold[NONE]
        )
        for name in (LOCAL, MOONCAKE, IN_TREE)
    ]
    loaded = f"{case}: loaded, {MOONCAKE} beside in-tree"
    return [*rows, compared(BENCH, loaded, "ms", warm[MOONCAKE], warm[IN_TREE])]


def decode_rows(sides: Sides, num_rounds: int) -> list[Row]:
    """Time decodes of which every block is saved, beside the same engine without its connector.

    The prompts are of different lengths, so that a block is full every few steps.
    """
    taxes: dict[str, list[float]] = {name: [] for name in sides.connected}
    for round_id in range(num_rounds * DECODE_ROUNDS):
        for name, tax in taxes.items():
            step_s = {}
            for is_connected in (True, False) if round_id % 2 else (False, True):
                prompts = [sides.prompt(DECODE_PROMPT + 4 * i) for i in range(NUM_DECODES)]
                answers = sides.engines[name].answer(
                    prompts, DECODE_TOKENS, is_connected=is_connected
                )
                check_saves(name, answers, num_full_blocks(prompts) if is_connected else 0)
                step_s[is_connected] = mean_decode_step_s(answers)
            tax.append(100 * (step_s[True] / step_s[False] - 1))
    in_tree = statistics.median(taxes[IN_TREE])
    return [_tax_row(name, taxes[name], in_tree) for name in (LOCAL, MOONCAKE)]


def num_full_blocks(prompts: Sequence[Sequence[int]]) -> int:
    """Return how many blocks decodes of these prompts fill; the last token's is never computed."""
    return sum((len(prompt) + DECODE_TOKENS - 1) // BLOCK for prompt in prompts)


def check_saves(name: str, answers: Answers, num_blocks: int) -> None:
    """Refuse a round that did not save what it is timed for, or saved without a connector."""
    if answers.num_saved < num_blocks or (answers.num_saved and not num_blocks):
        raise RuntimeError(f"{name} saved {answers.num_saved} chunks, not {num_blocks}")


def mean_decode_step_s(answers: Answers) -> float:
    """Return the mean of the steps in which all requests decode.

    The first eighth computes prompts. The slowest twentieth is other processes' doing.
    """
    in_full_s = [step.seconds for step in answers.steps if step.has_run and not step.num_ended]
    decodes_s = sorted(in_full_s[len(in_full_s) // 8 :])
    return statistics.mean(decodes_s[: len(decodes_s) * 19 // 20])


def _tax_row(name: str, taxes: Sequence[float], in_tree: float) -> Row:
    tax = statistics.median(taxes)
    return Row(
        BENCH,
        f"tax on a decode step of {NUM_DECODES} requests, {name} beside in-tree",
        "%",
        tax,
        in_tree,
        tax / in_tree if in_tree > 0 else None,
        f"< {MAX_TAX} %, and below in-tree's",
        tax < min(MAX_TAX, in_tree),
        quartiles([tax / in_tree for tax in taxes]) if in_tree > 0 else None,
    )


def slow_step_rows(sides: Sides, num_rounds: int) -> list[Row]:
    """Find the slowest steps of decodes, and first tokens, while prompts come that the pool has.

    Of the steps of all rounds together, since a round has too few for a p99. Each engine is also
    asked without its connector, when it computes what comes.
    """
    steps: dict[tuple[str, bool], list[Step]] = defaultdict(list)
    first: dict[str, list[float]] = {name: [] for name in sides.connected}
    for _ in range(num_rounds):
        late = [sides.prompt(LONG_TOKENS // 4) for _ in range(NUM_LATE)]
        for name in sides.connected:
            sides.engines[name].answer(late, 1)
        for is_connected in (True, False):
            for name, answers in sides.each(
                lambda engine: engine.answer(
                    [sides.prompt(DECODE_PROMPT) for _ in range(NUM_BESIDE)],
                    DECODE_TOKENS,
                    late=late,  # noqa: B023
                    is_connected=is_connected,  # noqa: B023
                ),
                sides.connected,
            ):
                check_loads(name, answers.num_cached[-NUM_LATE:], is_connected=is_connected)
                steps[name, is_connected] += [step for step in answers.steps if step.has_run]
                if is_connected:
                    first[name].append(1e3 * statistics.median(answers.first_token_s[-NUM_LATE:]))
    case = f"while {NUM_LATE} prefixes of {LONG_TOKENS // 4:,} tokens come"
    rows = list(_p99_rows(case, steps))
    for name in (LOCAL, MOONCAKE):
        beside = f"their first token {case}, {name} beside in-tree"
        rows.append(compared(BENCH, beside, "ms", first[name], first[IN_TREE]))
    return rows


def check_loads(name: str, num_cached: Sequence[int], *, is_connected: bool) -> None:
    """Refuse a round in which prompts that come late were not loaded, or were without connector."""
    if not all(bool(num_tokens) == is_connected for num_tokens in num_cached):
        raise RuntimeError(f"{name}, connected {is_connected}, found of late prompts {num_cached}")


def _p99_rows(case: str, steps: Mapping[tuple[str, bool], Sequence[Step]]) -> Iterator[Row]:
    """Compare the p99 of the scheduler's part of a step, and of whole steps."""
    part_ms = {key: p99([1e3 * step.scheduler_s for step in each]) for key, each in steps.items()}
    whole_ms = {key: p99([1e3 * step.seconds for step in each]) for key, each in steps.items()}
    part = f"p99 of the scheduler's part of a step {case}"
    for name in (LOCAL, MOONCAKE, IN_TREE):
        beside = f"{part}, {name} beside no connector"
        yield figure(BENCH, beside, "ms", part_ms[name, True], part_ms[name, False])
    for what, found_ms in ((part, part_ms), (f"p99 of a step {case}", whole_ms)):
        for name in (LOCAL, MOONCAKE):
            beside = f"{what}, {name} beside in-tree"
            yield figure(BENCH, beside, "ms", found_ms[name, True], found_ms[IN_TREE, True])


def p99(values: Sequence[float]) -> float:
    """Return what one value in a hundred exceeds."""
    return statistics.quantiles(values, n=100, method="inclusive")[-1]


def local_hit_rows(model: Path, url: str, num_rounds: int) -> list[Row]:
    """Compare what an engine's own cache serves with kvtide beside it and without.

    The cache holds half of what comes back, so eviction decides; pins change its order.
    """
    rates: dict[str, list[float]] = {NONE: [], LOCAL: []}
    small = {"num_gpu_blocks_override": 12 * 512 // BLOCK, "max_model_len": 1024}
    sides = {NONE: None, LOCAL: kvtide(url)}
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(EngineProcess(model, transfer, **small))
            for name, transfer in sides.items()
        }
        generator = random.Random(5)  # noqa: S311 - the same prompts on both sides
        known = [[generator.randrange(3, 1024) for _ in range(448)] for _ in range(24)]
        for _ in range(num_rounds):
            order = [known[min(int(generator.expovariate(0.12)), 23)] for _ in range(48)]
            for name, engine in engines.items():
                served = 0
                for first in range(0, len(order), 4):
                    answers = engine.answer(order[first : first + 4], 8, forget=False)
                    served += sum(answers.num_cached) - answers.num_loaded
                rates[name].append(100 * served / sum(map(len, order)))
    return [compared(BENCH, "served by the engine's own cache", "%", rates[LOCAL], rates[NONE])]


def kvtide(url: str) -> dict[str, Any]:
    """Return the configuration of kvtide on a pool."""
    return {
        "kv_connector": "KVTideConnector",
        "kv_connector_module_path": "kvtide.engines.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "store": url,
            "save_decode_cache": True,
            # A round that computes what it should load is refused: where other work has the cores
            # the default of 50 ms is not always enough.
            "lookup_wait_ms": 1000,
        },
    }


IN_TREE_TRANSFER = {
    "kv_connector": "MooncakeStoreConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"save_decode_cache": True},
}


def in_tree_config(pool: MooncakePool, folder: Path) -> Path:
    """Write the file by which vLLM's connector finds its pool."""
    path = folder / "mooncake.json"
    settings = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": f"{pool.host}:{pool.port}",
        "protocol": "tcp",
        "device_name": "",
        "mode": "standalone-store",
        "global_segment_size": 0,
        "local_buffer_size": 64 << 20,
    }
    path.write_text(json.dumps(settings), encoding="utf-8")
    return path


def pool_mib(num_rounds: int) -> int:
    """Return the size of a pool that holds what the rounds save: a full one saves nothing."""
    decodes = NUM_DECODES * (DECODE_PROMPT + 4 * NUM_DECODES + DECODE_TOKENS)
    late = NUM_LATE * LONG_TOKENS // 4 + NUM_BESIDE * (DECODE_PROMPT + DECODE_TOKENS)
    num_tokens = num_rounds * (LONG_TOKENS + DECODE_ROUNDS * decodes + late)
    return 256 + 2 * num_tokens * TOKEN_BYTES // (1 << 20)


def run(num_rounds: int) -> list[Row]:
    """Open the engines and measure."""
    from kvtide.engines.vllm.demo_model import build, is_built, model_folder

    model = model_folder()
    if not is_built(model):
        build(model)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        size_mib = pool_mib(num_rounds)
        ours = stack.enter_context(MooncakePool(segment_bytes=size_mib << 20))
        theirs = stack.enter_context(MooncakePool(segment_bytes=size_mib << 20))
        os.environ["MOONCAKE_CONFIG_PATH"] = str(in_tree_config(theirs, folder))
        transfers = {
            NONE: None,
            LOCAL: kvtide(f"local://{folder}/pool?size={size_mib}MiB"),
            MOONCAKE: kvtide(ours.url),
            IN_TREE: IN_TREE_TRANSFER,
        }
        with ExitStack() as running:
            sides = Sides(
                {
                    name: running.enter_context(EngineProcess(model, transfer))
                    for name, transfer in transfers.items()
                }
            )
            rows = first_token_rows(sides, num_rounds)
            rows += decode_rows(sides, num_rounds)
            rows += slow_step_rows(sides, num_rounds)
        return rows + local_hit_rows(model, f"local://{folder}/own?size=1GiB", min(num_rounds, 3))


def main() -> None:
    """Measure, or say why not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    rows = [left_out(BENCH, "vLLM is not installed")]
    if find_spec("vllm") is not None:
        try:
            mooncake_module()
            rows = run(options.rounds)
        except StoreOpenError as error:
            rows = [left_out(BENCH, str(error))]
    report(BENCH, rows)


if __name__ == "__main__":
    main()
