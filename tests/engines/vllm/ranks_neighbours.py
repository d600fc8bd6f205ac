"""Cases of engines that share a pool with a neighbour: data parallel, or of another connector."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from kvtide.testing.mooncake import MooncakePool
from tests.engines.vllm import data_parallel_scenario, in_tree_engine
from tests.engines.vllm.engines import BLOCK
from tests.engines.vllm.families import HIT
from tests.engines.vllm.in_tree_engine import InTreeEngine, write_config
from tests.engines.vllm.ranks_lab import FIRST, SECOND, Lab, Row, ask_one_rank, kib_by_rank, shown
from tests.engines.vllm.ranks_scenario import (
    NUM_OUTPUT_TOKENS,
    PROMPT_TOKENS,
    Answer,
    RanksRun,
    cores_of,
    run,
)


def data_parallel(lab: Lab, store: str, num_starts: int = 1) -> Iterator[Row]:
    """Two engines start side by side; the second answers with what the first has computed."""
    folder = lab.folder_of("llama")
    plain = RanksRun(str(folder), "", num_prompt_tokens=PROMPT_TOKENS)
    expected = ask_one_rank(plain).tokens
    starts = []
    faults = []
    for _ in range(num_starts):
        with lab.pool(store) as url, TemporaryDirectory(prefix="kvtide-ranks-") as files:
            try:
                starts.append(
                    data_parallel_scenario.run(folder, url, str(Path(files) / "counters.json"))
                )
            except AssertionError as error:
                faults.append(str(error))
    loaded = PROMPT_TOKENS // BLOCK * BLOCK
    hits = {tuple(engine["num_cached_tokens"] for engine in engines) for engines in starts}
    saved = [sum(engine["counters"].get("saved_bytes", 0) for engine in e) for e in starts]
    yield Row(
        "DP=2",
        "llama",
        store,
        " ".join(str(second) for _, second in sorted(hits)),
        saved=" ".join(sorted({f"{count / 1024:.0f}" for count in saved})),
        verdicts={
            "loaded": hits == {(0, loaded)},
            "tokens": all(engine["tokens"] == expected for e in starts for engine in e),
            "note": len(starts) == num_starts,
        },
        note=f"started {len(starts)} of {num_starts} times {' '.join(faults)[-300:]}",
    )


@dataclass(frozen=True, slots=True)
class Beside:
    """vLLM's own connector stored the first prompt; kvtide loaded it, and stored the second.

    ``num_keys`` are those in the pool after each of the three.
    """

    stored: in_tree_engine.Answer
    kvtide: dict[int, Answer]
    loaded: in_tree_engine.Answer
    num_keys: tuple[int, int, int]


def run_beside(lab: Lab, pool: MooncakePool, folder: Path) -> Beside:
    """Run both, two ranks each, at a time."""
    config = write_config(pool, folder)
    case = lab.case("llama", "mooncake://", tp_size=2, options={"key_format": "vllm"})
    arguments = {**case.arguments, "tensor_parallel_size": 2}
    with (
        mock.patch.dict(os.environ, MOONCAKE_CONFIG_PATH=str(config)),
        InTreeEngine(Path(case.model), config, arguments, {}, environment=cores_of(2)) as in_tree,
    ):
        stored = in_tree.answer(case.prompt(FIRST), NUM_OUTPUT_TOKENS)
        num_first = pool.metrics().num_keys
        kvtide = run(replace(case, seeds=(FIRST, SECOND), zeros=True))
        num_both = pool.metrics().num_keys
        loaded = in_tree.answer(case.prompt(SECOND), NUM_OUTPUT_TOKENS)
        return Beside(stored, kvtide, loaded, (num_first, num_both, pool.metrics().num_keys))


def beside_in_tree(lab: Lab) -> Iterator[Row]:
    """VLLM's own connector and kvtide, two ranks each, on one pool: each loads the other's."""
    expected = lab.plain("llama", tp_size=2)
    with MooncakePool(segment_bytes=256 << 20) as pool, TemporaryDirectory() as folder:
        seen = run_beside(lab, pool, Path(folder))
    first, second = seen.kvtide[FIRST], seen.kvtide[SECOND]
    num_first, num_both, num_last = seen.num_keys
    per_prompt = 2 * HIT // BLOCK
    yield Row(
        "in-tree TP=2 -> TP=2",
        "llama",
        "mooncake",
        str(first.num_cached_tokens),
        shown([[num_first]]),
        verdicts={
            "loaded": (seen.stored.hit, first.num_cached_tokens) == (0, HIT),
            "tokens": seen.stored.tokens == first.tokens == expected[FIRST],
            "parts": num_first == per_prompt and "saved_chunks" not in first.counters,
            "zeros": first.tokens_of_zeros != expected[FIRST],
        },
    )
    yield Row(
        "TP=2 -> in-tree TP=2",
        "llama",
        "mooncake",
        str(seen.loaded.hit),
        shown([[num_both - num_first]]),
        kib_by_rank(second),
        {
            "loaded": (second.num_cached_tokens, seen.loaded.hit) == (0, HIT),
            "tokens": second.tokens == seen.loaded.tokens == expected[SECOND],
            "parts": num_both - num_first == num_last - num_first == per_prompt,
            "zeros": second.tokens_of_zeros != expected[SECOND],
        },
        "zeros were loaded by kvtide",
    )
