"""One family of models through its engines: plain and cold here, warm in a fresh process.

Run as a script it is the warm one:
    python -m tests.engines.vllm.family_runs MODEL FOLDER STORE_URL OUTPUT_TOKENS
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from tests.engines.vllm.engines import InProcessEngine, engine
from tests.engines.vllm.environment import report, run_script
from tests.engines.vllm.families import BY_MODEL, NUM_OUTPUT_TOKENS, Family
from tests.engines.vllm.models import build
from tests.engines.vllm.pool_bytes import Digests, Requests, in_pool


@dataclass(frozen=True, slots=True)
class Plain:
    """What an engine without kvtide answers, and what its own prefix cache would have saved it."""

    groups: list[tuple[str, int]]
    specs: list[str]
    """The engine's own names of the groups."""
    first: list[int]
    partial: list[int]
    turn: list[int]
    own_hits: dict[str, int]
    """Of the prompts ``again``, ``partial`` and ``turn``; empty where it has no prefix cache."""


@dataclass(frozen=True, slots=True)
class Cold:
    """What an engine on an empty pool did."""

    tokens: list[int]
    hit: int
    saved_bytes: int
    saved_chunks: int
    in_blocks: Digests
    in_pool: Digests


@dataclass(frozen=True, slots=True)
class Warm:
    """What a fresh process on the pool did: tokens and hits by prompt."""

    tokens: dict[str, list[int]]
    hits: dict[str, int]
    loaded_tokens: int
    loaded_chunks: int
    in_blocks: Digests
    controls: dict[str, list[int]] = field(default_factory=dict)
    """The tokens where the loaded values of one kind of group were replaced by zeros."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that was seen of a family."""

    family: Family
    plain: Plain
    cold: Cold
    warm: Warm
    seconds: float


def gather(family: Family, folder: Path, url: str, plain: Plain | None = None) -> Evidence:
    """Run a family's engines on the empty pool ``url``; ``folder`` keeps the models.

    ``plain`` is what was seen of the engine without a pool before, if it was.
    """
    begun_s = time.monotonic()
    model = build(family.model, folder)
    plain = plain or run_plain(family, model)
    cold = run_cold(family, model, url)
    output = json.dumps(plain.first)
    warm = Warm(**run_script("family_runs", family.model, str(folder), url, output))
    return Evidence(family, plain, cold, warm, time.monotonic() - begun_s)


def run_plain(family: Family, model: Path) -> Plain:
    """Answer each prompt from an empty cache, then see which hits the engine has of its own."""
    with engine(model, None, **family.arguments) as one:

        def fresh(prompt: list[int]) -> list[int]:
            one.forget_local()
            [output] = one.generate(prompt, num_tokens=NUM_OUTPUT_TOKENS)
            return output

        config = one.core.scheduler.kv_cache_config
        specs = [group.kv_cache_spec for group in config.kv_cache_groups]
        first = fresh(family.first)
        partial, turn = fresh(family.partial), fresh(family.turn(first))
        prompts = {
            "again": family.again(first),
            "partial": family.partial,
            "turn": family.turn(first),
        }
        own_hits = {}
        for name, prompt in prompts.items():
            fresh(family.first)
            [output] = one.run(prompt, num_tokens=1)
            own_hits[name] = output.num_cached_tokens
        return Plain(
            groups=[(_KINDS[type(spec).__name__], spec.block_size) for spec in specs],
            specs=[_described(spec) for spec in specs],
            first=first,
            partial=partial,
            turn=turn,
            own_hits=own_hits if one.core.scheduler.kv_cache_manager.enable_caching else {},
        )


_KINDS = {
    "FullAttentionSpec": "FullAttention",
    "MLAAttentionSpec": "FullAttention",
    "SlidingWindowSpec": "SlidingWindow",
    "ChunkedLocalAttentionSpec": "ChunkedLocal",
    "MambaSpec": "Mamba",
}


def _described(spec: Any) -> str:
    name = type(spec).__name__.removesuffix("Spec").removesuffix("Attention")
    state = getattr(spec, "mamba_type", None)
    return f"{name if state is None else state.name} {spec.block_size}"


def run_cold(family: Family, model: Path, url: str) -> Cold:
    """Let an engine compute the prompt and save it, and compare its blocks with the pool."""
    options = {"save_decode_cache": True}
    with engine(model, url, options=options, **family.arguments) as one:
        requests = Requests(one)
        [output] = one.run(family.first, num_tokens=NUM_OUTPUT_TOKENS)
        one.settle()
        request, blocks = requests.in_blocks(0)
        return Cold(
            tokens=list(output.outputs[0].token_ids),
            hit=output.num_cached_tokens,
            saved_bytes=one.counters["saved_bytes"],
            saved_chunks=one.counters["saved_chunks"],
            in_blocks=blocks,
            in_pool=in_pool(one, url, request),
        )


def run_warm(family: Family, model: Path, url: str, output: list[int]) -> Warm:
    """Ask for the three prompts, each of which only the pool can help with, then try zeros."""
    with engine(model, url, **family.arguments) as one:
        requests = Requests(one)
        num_tokens = NUM_OUTPUT_TOKENS - family.num_decoded
        [again] = one.run(family.again(output), num_tokens=num_tokens)
        one.settle()
        counters = one.counters
        _, blocks = requests.in_blocks(0)
        answers = {"again": again}
        for name, prompt in (("partial", family.partial), ("turn", family.turn(output))):
            one.forget_local()
            [answers[name]] = one.run(prompt, num_tokens=NUM_OUTPUT_TOKENS)
            one.settle()
        one.worker.check_idle()
        return Warm(
            tokens={name: list(answer.outputs[0].token_ids) for name, answer in answers.items()},
            hits={name: answer.num_cached_tokens for name, answer in answers.items()},
            loaded_tokens=counters["loaded_tokens"],
            loaded_chunks=counters["loaded_chunks"],
            in_blocks=blocks,
            controls={
                kind: answer_with_zeros(one, kind, family.again(output), num_tokens)
                for kind in family.kinds
            },
        )


def answer_with_zeros(
    one: InProcessEngine, kind: str, prompt: list[int], num_tokens: int
) -> list[int]:
    """Answer a prompt where what is loaded of one kind of group are zeros."""
    one.forget_local()
    groups = one.connector._scheduler_side._plan.groups
    chosen = {index for index, group in enumerate(groups) if type(group).__name__ == kind}
    with zeroed_loads(chosen):
        [tokens] = one.generate(prompt, num_tokens=num_tokens)
        one.settle()
    return tokens


@contextmanager
def zeroed_loads(groups: set[int]) -> Iterator[None]:
    """Let kvtide write zeros into the blocks of these groups instead of what it loads."""
    from kvtide.engines.vllm.tensors import TensorBlocks

    write = TensorBlocks.write

    def zeroing(blocks: TensorBlocks, group_id: int, ids: Any, data: Any) -> None:
        write(blocks, group_id, ids, np.zeros_like(data) if group_id in groups else data)

    with mock.patch.object(TensorBlocks, "write", zeroing):
        yield


def main(name: str, folder: Path, url: str, output: list[int]) -> None:
    """Be the fresh process."""
    family = BY_MODEL[name]
    report(asdict(run_warm(family, build(name, folder), url, output)))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
