"""The cases of engines of several ranks that ``make ranks`` runs, and what is expected of each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from kvtide.testing.mooncake import MooncakePool
from tests.engines.vllm import data_parallel_scenario
from tests.engines.vllm.engines import BLOCK
from tests.engines.vllm.families import HIT, Family
from tests.engines.vllm.in_tree_engine import InTreeEngine, write_config
from tests.engines.vllm.ranks_lab import (
    FIRST,
    ONE_HEAD,
    SECOND,
    Lab,
    Row,
    ask_one_rank,
    kib_by_rank,
    payload_bytes,
    present,
    shown,
)
from tests.engines.vllm.ranks_scenario import (
    NUM_OUTPUT_TOKENS,
    PROMPT_TOKENS,
    Answer,
    RanksRun,
    cores_of,
    run,
)

Case = Callable[[Lab], Iterator[Row]]
SHARED = {"store_tp_size": 2}


@dataclass(frozen=True, slots=True)
class Seen:
    """An engine that computed a prompt and saved it, and another that loaded it.

    ``found`` are the keys present of each part of each group. ``has_copies``: every rank holds the
    same bytes.
    """

    family: Family
    store: str
    expected: list[int]
    cold: Answer
    warm: Answer
    found: list[list[int]]
    one_copy_bytes: int
    has_copies: bool = False

    def row(self, engines: str) -> Row:
        """Return the row of the table, in which ``engines`` says who they were."""
        cold, warm = self.cold, self.warm
        after = self.expected[self.family.num_decoded :]
        return Row(
            engines,
            self.family.model,
            self.store,
            str(warm.num_cached_tokens),
            shown(self.found),
            kib_by_rank(cold),
            {
                "loaded": (cold.num_cached_tokens, warm.num_cached_tokens) == (0, HIT),
                "tokens": (cold.tokens, warm.tokens) == (self.expected, after),
                "parts": self._is_complete() and self._is_stored_once(),
                "bytes": payload_bytes(cold) == self.one_copy_bytes and self._is_even(),
                "zeros": warm.tokens_of_zeros != after,
            },
        )

    def _is_complete(self) -> bool:
        """Whether every part has what the others have, and full attention has every chunk."""
        return all(
            set(parts) == {HIT // block_size} if kind == "FullAttention" else len(set(parts)) == 1
            for (kind, block_size), parts in zip(self.family.groups, self.found, strict=True)
        ) and all(chain.from_iterable(self.found))

    def _is_stored_once(self) -> bool:
        return sum(chain.from_iterable(self.found)) == self.cold.counters["saved_chunks"]

    def _is_even(self) -> bool:
        """Whether ranks with copies took turns: a chunk of each group more or less."""
        saved = [counted.get("saved_chunks", 0) for counted in self.cold.by_rank]
        most = len(self.found) if self.has_copies else max(saved)
        return min(saved) > 0 and max(saved) - min(saved) <= most


def alone(
    lab: Lab,
    model: str,
    store: str,
    *,
    tp_size: int = 1,
    pp_size: int = 1,
    has_copies: bool = False,
) -> Iterator[Row]:
    """A plain engine; one that computes and saves; and one that loads it, then loads zeros."""
    expected = lab.plain(model, tp_size=tp_size, pp_size=pp_size)[FIRST]
    family = lab.family(model)
    with lab.pool(store) as url:
        case = lab.case(model, url, tp_size=tp_size, pp_size=pp_size)
        cold = run(case)[FIRST]
        warm = run(again(case, expected[: family.num_decoded]))[FIRST]
        found = present(url, cold)
    one_copy = lab.one_copy_bytes(model)
    seen = Seen(family, store, expected, cold, warm, found, one_copy, has_copies)
    yield seen.row(f"TP={tp_size}" if pp_size == 1 else f"PP={pp_size}")


def again(case: RanksRun, appended: Sequence[int] = ()) -> RanksRun:
    """The engine that loads, then loads zeros."""
    return replace(case, appended=tuple(appended), zeros=True)


def between_sizes(lab: Lab, model: str, store: str) -> Iterator[Row]:
    """One rank stores a prompt and two another; each then loads the other's, and zeros."""
    expected = lab.plain(model, tp_size=2)
    family = lab.family(model)
    with lab.pool(store) as url:
        one = lab.case(model, url, options=SHARED)
        wrote_alone = ask_one_rank(replace(one, seeds=(SECOND,)))
        both = run(again(replace(one, tp_size=2, seeds=(FIRST, SECOND))))
        read_alone = ask_one_rank(again(one))
        found = {seed: present(url, answer) for seed, answer in both.items()}
    copy = payload_bytes(wrote_alone)
    for engines, seed, cold, warm in (
        ("TP=1 -> TP=2", SECOND, wrote_alone, both[SECOND]),
        ("TP=2 -> TP=1", FIRST, both[FIRST], read_alone),
    ):
        yield Seen(family, store, expected[seed], cold, warm, found[seed], copy).row(engines)


def kept_apart(lab: Lab, model: str, store: str) -> Iterator[Row]:
    """Two ranks load what two have stored; one rank looks elsewhere, and says so."""
    expected = lab.plain(model, tp_size=2)[FIRST]
    family = lab.family(model)
    with lab.pool(store) as url:
        case = lab.case(model, url, tp_size=2, options=SHARED)
        cold = run(case)[FIRST]
        warm = run(again(case))[FIRST]
        found = present(url, cold)
        other = ask_one_rank(replace(case, tp_size=1))
        found_other = present(url, other)
    yield Seen(family, store, expected, cold, warm, found, payload_bytes(other)).row("TP=2")
    yield Row(
        "TP=2 -> TP=1",
        model,
        store,
        str(other.num_cached_tokens),
        shown(found_other),
        kib_by_rank(other),
        {
            "loaded": other.num_cached_tokens == 0,
            "tokens": other.tokens == expected,
            "parts": sum(chain.from_iterable(found_other)) == other.counters["saved_chunks"],
            "note": "shared only with engines of tensor parallel size 2" in cold.said,
        },
        cold.said.splitlines()[-1],
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
        note=f"{len(starts)} of {num_starts} starts without a collision {' '.join(faults)[-300:]}",
    )


def beside_in_tree(lab: Lab) -> Iterator[Row]:
    """VLLM's own connector and kvtide, two ranks each, on one pool: each loads the other's."""
    expected = lab.plain("llama", tp_size=2)
    family = lab.family("llama")
    prompts = lab.case("llama", "")
    with MooncakePool(segment_bytes=256 << 20) as pool, TemporaryDirectory() as files:
        config = write_config(pool, Path(files))
        with (
            mock.patch.dict(os.environ, MOONCAKE_CONFIG_PATH=str(config)),
            InTreeEngine(
                lab.folder_of("llama"),
                config,
                {**family.arguments, "tensor_parallel_size": 2},
                {},
                environment=cores_of(2),
            ) as in_tree,
        ):
            stored = in_tree.answer(prompts.prompt(FIRST), NUM_OUTPUT_TOKENS)
            num_first = pool.metrics().num_keys
            case = lab.case("llama", "mooncake://", tp_size=2, options={"key_format": "vllm"})
            both = run(replace(case, seeds=(FIRST, SECOND), zeros=True))
            num_both = pool.metrics().num_keys
            loaded = in_tree.answer(prompts.prompt(SECOND), NUM_OUTPUT_TOKENS)
            num_last = pool.metrics().num_keys
    first, second = both[FIRST], both[SECOND]
    per_prompt = 2 * HIT // BLOCK
    yield Row(
        "in-tree TP=2 -> TP=2",
        "llama",
        "mooncake",
        str(first.num_cached_tokens),
        shown([[num_first]]),
        verdicts={
            "loaded": (stored.hit, first.num_cached_tokens) == (0, HIT),
            "tokens": stored.tokens == first.tokens == expected[FIRST],
            "parts": num_first == per_prompt and "saved_chunks" not in first.counters,
            "zeros": first.tokens_of_zeros != expected[FIRST],
        },
    )
    yield Row(
        "TP=2 -> in-tree TP=2",
        "llama",
        "mooncake",
        str(loaded.hit),
        shown([[num_both - num_first]]),
        kib_by_rank(second),
        {
            "loaded": (second.num_cached_tokens, loaded.hit) == (0, HIT),
            "tokens": second.tokens == loaded.tokens == expected[SECOND],
            "parts": num_both - num_first == num_last - num_first == per_prompt,
            "zeros": second.tokens_of_zeros != expected[SECOND],
        },
    )


def cases(num_starts: int) -> dict[str, Case]:
    """Every case by its name."""
    found: dict[str, Case] = {}
    for store in ("local", "mooncake"):
        found |= {
            f"tp-{store}": partial(alone, model="llama", store=store, tp_size=2),
            f"sizes-{store}": partial(between_sizes, model="llama", store=store),
            f"pp-{store}": partial(alone, model="llama", store=store, pp_size=2),
        }
    local = partial(alone, store="local")
    return found | {
        "windows": partial(local, model="gemma3", tp_size=2),
        "windows-sizes": partial(between_sizes, model="gemma3", store="local"),
        "windows-pp": partial(local, model="gemma3", pp_size=2),
        "latent": partial(local, model="deepseek-v2", tp_size=2, has_copies=True),
        "copies": partial(local, model=ONE_HEAD, tp_size=2, has_copies=True),
        "states": partial(kept_apart, model="lfm2", store="local"),
        "in-tree": beside_in_tree,
        "dp-mooncake": partial(data_parallel, store="mooncake"),
        "dp-local": partial(data_parallel, store="local", num_starts=num_starts),
    }
