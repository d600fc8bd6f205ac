"""vLLM on the CPU with each connector and with none, side by side, asked in turns.

    python benchmarks/bench_end_to_end.py [--rounds 7] [--decode-portion-tokens 0]

Four engines of a small model, each in a process of its own: without a connector, with kvtide on a
local pool and on Mooncake, and with vLLM's in-tree connector on another Mooncake pool. All save
what they decode. Measured are the time to a long prompt's first token, cold and from the pool; the
tax of saving on decode throughput; the slowest steps, and the scheduler's part of them, while other
requests' prefixes are looked up and loaded; and how much an engine's own small cache still serves.
The tax is measured on a larger model, too, with one thread and with all cores.
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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from engine_process import BLOCK, Answers, EngineProcess, Step
from measuring import Row, compared, figure, left_out, quartiles, report

from kvtide.errors import StoreOpenError
from kvtide.stores.mooncake_package import mooncake_module
from kvtide.testing.mooncake import MooncakePool

BENCH = "end_to_end"
LONG_TOKENS = 8192
NUM_DECODES, DECODE_PROMPT, DECODE_TOKENS = 8, 64, 144
"""Of portions of 128 tokens (``decode_portion_tokens``) one falls into the 126 steps timed."""
SLOW = 3
"""A step of so many times the median is other processes' doing."""
TAX_ROUNDS = 3
"""A tax of some hundredths takes so many more rounds to see; short ones, for a noisy machine."""
NUM_LATE, NUM_BESIDE, BESIDE_TOKENS = 6, 4, 96
MAX_TAX = 2
TOKEN_BYTES = 4 << 10
"""Of the demo's model: keys and values of 4 layers with 2 heads of 64 elements of 4 bytes."""
LARGER = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
}
"""A Llama of 50 million parameters: a decode step takes a core about as long as one of 8 billion
takes a GPU with 600 GB/s, 20 to 25 ms."""
LARGER_TOKEN_BYTES = 16 << 10
LARGER_THREADS = {
    1: "larger model",
    len(os.sched_getaffinity(0)): "larger model that takes all cores",
}
"""A server's connectors have cores beside those that feed the model, and a model for CPUs takes all
there are: what they compute then is taken from it, and its threads spin while they wait."""
NONE, LOCAL, MOONCAKE, IN_TREE = "none", "kvtide, local", "kvtide, Mooncake", "in-tree, Mooncake"


@dataclass(slots=True)
class Sides:
    """The engines by name, with the threads of each one's model, and prompts that none has seen."""

    engines: dict[str, EngineProcess]
    num_threads: int
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


def decode_rows(sides: Sides, model: str, num_rounds: int, *, is_judged: bool) -> Iterator[Row]:
    """Time decodes of which every block is saved, beside the same engine without its connector.

    The prompts are of different lengths, so that a block is full every few steps.
    """
    found: dict[tuple[str, bool], list[DecodeStep]] = defaultdict(list)
    for round_id in range(num_rounds):
        for name in sides.connected:
            for is_connected in (True, False) if round_id % 2 else (False, True):
                prompts = [sides.prompt(DECODE_PROMPT + 4 * i) for i in range(NUM_DECODES)]
                answers = sides.engines[name].answer(
                    prompts, DECODE_TOKENS, is_connected=is_connected
                )
                check_saves(name, answers, num_full_blocks(prompts) if is_connected else 0)
                found[name, is_connected].append(mean_decode_step(answers))
    added_us, taxes, beside_us = {}, {}, {}
    for name in sides.connected:
        pairs = list(zip(found[name, True], found[name, False], strict=True))
        added_us[name] = [1e6 * (ours.seconds - without.seconds) for ours, without in pairs]
        taxes[name] = [100 * (ours.seconds / without.seconds - 1) for ours, without in pairs]
        beside_us[name] = [1e6 * (ours.beside_s - without.beside_s) for ours, without in pairs]
    without_ms = 1e3 * statistics.median(step.seconds for step in found[IN_TREE, False])
    case = f"on a decode step of {NUM_DECODES} requests, {model} ({without_ms:.0f} ms)"
    for name in (LOCAL, MOONCAKE):
        yield _tax_row(f"added {case}, {name} beside in-tree", "us", added_us[name], added_us)
        goal = MAX_TAX if is_judged else None
        yield _tax_row(f"tax {case}, {name} beside in-tree", "%", taxes[name], taxes, goal)
        if sides.num_threads == 1:  # other threads of a model compute, and wait for each other
            cpu = f"CPU of other threads added {case}, {name} beside in-tree"
            yield _tax_row(cpu, "us", beside_us[name], beside_us)


def num_full_blocks(prompts: Sequence[Sequence[int]]) -> int:
    """Return how many blocks decodes of these prompts fill; the last token's is never computed."""
    return sum((len(prompt) + DECODE_TOKENS - 1) // BLOCK for prompt in prompts)


def check_saves(name: str, answers: Answers, num_blocks: int) -> None:
    """Refuse a round that did not save what it is timed for, or saved without a connector."""
    if answers.num_saved < num_blocks or (answers.num_saved and not num_blocks):
        raise RuntimeError(f"{name} saved {answers.num_saved} chunks, not {num_blocks}")


class DecodeStep(NamedTuple):
    """What a step takes by the clock, and of the CPU on other threads than the engine's."""

    seconds: float
    beside_s: float


def mean_decode_step(answers: Answers) -> DecodeStep:
    """Return the mean of the steps in which all requests decode.

    The first eighth computes prompts. Of what saving adds only a step as slow as :data:`SLOW` goes
    uncounted.
    """
    in_full = [step for step in answers.steps if step.has_run and not step.num_ended]
    decodes = in_full[len(in_full) // 8 :]
    slow_s = SLOW * statistics.median(step.seconds for step in decodes)
    timed = [step for step in decodes if step.seconds < slow_s]
    return DecodeStep(
        statistics.mean(step.seconds for step in timed),
        statistics.mean(step.beside_cpu_s for step in timed),
    )


def _tax_row(
    case: str,
    unit: str,
    costs: Sequence[float],
    all_costs: Mapping[str, Sequence[float]],
    at_most: float | None = None,
) -> Row:
    cost, in_tree = statistics.median(costs), statistics.median(all_costs[IN_TREE])
    is_positive = in_tree > 0
    return Row(
        BENCH,
        case,
        unit,
        cost,
        in_tree,
        cost / in_tree if is_positive else None,
        None if at_most is None else f"< {at_most} %, and below in-tree's",
        None if at_most is None else cost < min(at_most, in_tree),
        quartiles([each / in_tree for each in costs]) if is_positive else None,
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
                    BESIDE_TOKENS,
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
            order = [prompt for _ in range(12) for prompt in _four_of(known, generator)]
            for name, engine in engines.items():
                served = 0
                for first in range(0, len(order), 4):
                    answers = engine.answer(order[first : first + 4], 8, forget=False)
                    served += sum(answers.num_cached) - answers.num_loaded
                rates[name].append(100 * served / sum(map(len, order)))
    return [compared(BENCH, "served by the engine's own cache", "%", rates[LOCAL], rates[NONE])]


def _four_of(known: Sequence[list[int]], generator: random.Random) -> list[list[int]]:
    """Return four prompts, the first ones most often, and none twice: it would be loaded twice."""
    chosen: dict[int, None] = {}
    while len(chosen) < 4:
        chosen[min(int(generator.expovariate(0.12)), len(known) - 1)] = None
    return [known[index] for index in chosen]


def kvtide(url: str, portion_tokens: int = 0) -> dict[str, Any]:
    """Return the configuration of kvtide on a pool."""
    return {
        "kv_connector": "KVTideConnector",
        "kv_connector_module_path": "kvtide.engines.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "store": url,
            "save_decode_cache": True,
            "decode_portion_tokens": portion_tokens,
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


def num_decode_tokens() -> int:
    """Return how many tokens a round of decodes saves at most."""
    return NUM_DECODES * (DECODE_PROMPT + 4 * NUM_DECODES + DECODE_TOKENS)


def num_small_tokens(num_rounds: int) -> int:
    """Return how many tokens the rounds save of the demo's model."""
    decodes = num_decode_tokens()
    late = NUM_LATE * LONG_TOKENS // 4 + NUM_BESIDE * (DECODE_PROMPT + BESIDE_TOKENS)
    return num_rounds * (LONG_TOKENS + TAX_ROUNDS * decodes + late)


def build_larger(folder: Path) -> None:
    """Make the larger model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**LARGER)).to(torch.float32).save_pretrained(folder)


@contextmanager
def opened_sides(
    model: Path,
    num_bytes: int,
    *,
    portion_tokens: int = 0,
    without: bool = True,
    num_threads: int = 1,
    **arguments: Any,
) -> Iterator[Sides]:
    """Open an engine of each kind, whose pools hold twice ``num_bytes``: a full one saves less."""
    size_mib = 256 + 2 * num_bytes // (1 << 20)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        ours = stack.enter_context(MooncakePool(segment_bytes=size_mib << 20))
        theirs = stack.enter_context(MooncakePool(segment_bytes=size_mib << 20))
        os.environ["MOONCAKE_CONFIG_PATH"] = str(in_tree_config(theirs, folder))
        transfers = {
            LOCAL: kvtide(f"local://{folder}/pool?size={size_mib}MiB", portion_tokens),
            MOONCAKE: kvtide(ours.url, portion_tokens),
            IN_TREE: IN_TREE_TRANSFER,
            **({NONE: None} if without else {}),
        }
        engines = {
            name: stack.enter_context(
                EngineProcess(model, transfer, num_threads=num_threads, **arguments)
            )
            for name, transfer in transfers.items()
        }
        yield Sides(engines, num_threads)


def run(num_rounds: int, portion_tokens: int) -> list[Row]:
    """Open the engines and measure."""
    from kvtide.engines.vllm.demo_model import build, is_built, model_folder

    model = model_folder()
    if not is_built(model):
        build(model)
    small_bytes = num_small_tokens(num_rounds) * TOKEN_BYTES
    with opened_sides(model, small_bytes, portion_tokens=portion_tokens) as sides:
        rows = first_token_rows(sides, num_rounds)
        rows += decode_rows(sides, "small model", TAX_ROUNDS * num_rounds, is_judged=False)
        rows += slow_step_rows(sides, num_rounds)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        url = f"local://{folder}/own?size=1GiB"
        rows += local_hit_rows(model, url, min(num_rounds, 3))
        build_larger(folder / "model")
        num_tokens = TAX_ROUNDS * num_rounds * num_decode_tokens()
        num_bytes = num_tokens * LARGER_TOKEN_BYTES
        how = {"portion_tokens": portion_tokens, "without": False, "max_model_len": 2048}
        for num_threads, model_name in LARGER_THREADS.items():
            with opened_sides(folder / "model", num_bytes, num_threads=num_threads, **how) as sides:
                rows += decode_rows(sides, model_name, TAX_ROUNDS * num_rounds, is_judged=True)
    return rows


def main() -> None:
    """Measure, or say why not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--decode-portion-tokens", type=int, default=0, help="kvtide's option")
    options = parser.parse_args()
    rows = [left_out(BENCH, "vLLM is not installed")]
    if find_spec("vllm") is not None:
        try:
            mooncake_module()
            rows = run(options.rounds, options.decode_portion_tokens)
        except StoreOpenError as error:
            rows = [left_out(BENCH, str(error))]
    report(BENCH, rows)


if __name__ == "__main__":
    main()
