"""The cases of engines of several ranks that ``make ranks`` runs, and what is expected of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from tests.engines.vllm.families import HIT, Family
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
from tests.engines.vllm.ranks_neighbours import beside_in_tree, data_parallel
from tests.engines.vllm.ranks_scenario import Answer, RanksRun, run

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
    lab: Lab, engines: str, model: str, store: str, *, has_copies: bool = False, **changes: Any
) -> Iterator[Row]:
    """A plain engine; one that computes and saves; and one that loads it, then loads zeros."""
    expected = lab.plain(model, **changes)[FIRST]
    family = lab.family(model)
    with lab.pool(store) as url:
        case = lab.case(model, url, **changes)
        cold = run(case)[FIRST]
        warm = run(again(case, expected[: family.num_decoded]))[FIRST]
        found = present(url, cold)
    one_copy = lab.one_copy_bytes(model)
    yield Seen(family, store, expected, cold, warm, found, one_copy, has_copies).row(engines)


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
            "note": "shared only with engines of this one's tensor parallel size" in cold.said,
        },
        "\n".join(line for line in cold.said.splitlines() if "store_tp_size" in line),
    )


def cases(num_starts: int) -> dict[str, Case]:
    """Every case by its name."""
    two = partial(alone, engines="TP=2", tp_size=2)
    stages = partial(alone, engines="PP=2", pp_size=2)
    found: dict[str, Case] = {}
    for store in ("local", "mooncake"):
        found |= {
            f"tp-{store}": partial(two, model="llama", store=store),
            f"sizes-{store}": partial(between_sizes, model="llama", store=store),
            f"pp-{store}": partial(stages, model="llama", store=store),
        }
    return found | {
        "windows": partial(two, model="gemma3", store="local"),
        "windows-sizes": partial(between_sizes, model="gemma3", store="local"),
        "windows-pp": partial(stages, model="gemma3", store="local"),
        "latent": partial(two, model="deepseek-v2", store="local", has_copies=True),
        "copies": partial(two, model=ONE_HEAD, store="local", has_copies=True),
        "context": partial(
            two,
            engines="TP=2 DCP=2",
            model=ONE_HEAD,
            store="local",
            arguments={"decode_context_parallel_size": 2},
        ),
        "states": partial(kept_apart, model="lfm2", store="local"),
        "in-tree": beside_in_tree,
        "dp-mooncake": partial(data_parallel, store="mooncake"),
        "dp-local": partial(data_parallel, store="local", num_starts=num_starts),
    }
