"""kvtide decides as vLLM does, on 20,000 random models, prompts and stores.

``make differential`` prints the tallies.
"""

from __future__ import annotations

import random
from collections import Counter

from kvtide.core.chunks import ChunkedTokenDatabase
from kvtide.core.coordinator import Coordinator
from kvtide.core.groups import ChunkedLocal, Group
from tests.engines.vllm.differential_cases import HASHES, Case, Presence, random_case
from tests.engines.vllm.differential_oracle import Oracle

NUM_CASES = 20_000


class Decisions:
    """What kvtide decides in one case, and what it asked of the store for it."""

    def __init__(self, case: Case, coordinator: Coordinator, present: set[tuple[int, int]]) -> None:
        self.case = case
        self.coordinator = coordinator
        self.hashes = HASHES[: case.num_hashes]
        self.databases = [
            [ChunkedTokenDatabase(f"{number}", group.block_size, case.hash_block_size)]
            for number, group in enumerate(coordinator.groups)
        ]
        self.keys = {self.databases[g][0].key_for(self.hashes[index]) for g, index in present}
        self.asked: list[str] = []
        self.hit = coordinator.find_longest_cache_hit(
            case.num_tokens, self.hashes, self.databases, self._exists
        )
        assert len(set(self.asked)) == len(self.asked), f"a key was asked twice: {case}"

    def _exists(self, keys: list[str]) -> list[bool]:
        self.asked += keys
        return [key in self.keys for key in keys]

    def load_mask(self) -> list[list[int]]:
        """Return per group the chunks to load."""
        return [list(chunks) for chunks in self.coordinator.load_mask(self.hit, 0)]

    def store_mask(self) -> list[list[bool] | None]:
        """Return per group the chunks to store."""
        case = self.case
        return self.coordinator.store_mask(
            case.aligned_token_len, case.start_token, case.num_prompt_tokens
        )


def draw(number: int, *, use_eagle: bool) -> tuple[Case, Oracle, set[tuple[int, int]]]:
    """Return the case of this number, vLLM's classes for it, and what the store holds."""
    rng = random.Random(f"{'eagle' if use_eagle else 'plain'} {number}")
    case = random_case(rng, use_eagle=use_eagle)
    oracle = Oracle(case)
    present = Presence(case, rng, uses_partial_hits=oracle.uses_partial_hits).random()
    return case, oracle, present


def test_hits_and_masks_are_those_of_vllm() -> None:
    """Hit length, load masks and store masks of every kind of group, without a draft model."""
    tally: Counter[str] = Counter()
    for number in range(NUM_CASES):
        case, oracle, present = draw(number, use_eagle=False)
        kvtide = Decisions(case, oracle.coordinator(), present)
        expected = oracle.hit(kvtide.hashes, {(g, kvtide.hashes[i]) for g, i in present})
        assert kvtide.hit == expected, f"hit {kvtide.hit}, vLLM {expected}: {number} {case}"
        tally["hits"] += 1
        tally["hits above 0"] += kvtide.hit > 0
        tally["hits inside a block"] += kvtide.hit % case.lcm_block_size > 0
        if kvtide.hit:
            assert kvtide.load_mask() == oracle.load_mask(kvtide.hashes, kvtide.hit), case
            tally["load masks"] += 1
        compare_store_masks(case, oracle, kvtide, tally)
    print("\nwithout a draft model, all equal:", *report(tally), sep="\n  ")  # noqa: T201 - what it is run for
    assert tally["hits"] == NUM_CASES
    assert min(tally.values()) > NUM_CASES / 50


def compare_store_masks(case: Case, oracle: Oracle, kvtide: Decisions, tally: Counter[str]) -> None:
    """Check the masks of all groups.

    Of states, vLLM keeps all blocks where retention is dense, though a hit can only lie at a
    multiple of all block sizes: kvtide stores those. Of local attention it stores what some
    boundary requires.
    """
    theirs = oracle.store_mask(case.aligned_token_len, case.start_token, case.num_prompt_tokens)
    groups = kvtide.coordinator.groups
    for group, spec, own, their in zip(
        groups, case.groups, kvtide.store_mask(), theirs, strict=True
    ):
        size = group.block_size
        chunks = range(case.start_token // size, case.aligned_token_len // size)
        mine = [True] * len(chunks) if own is None else own
        kept = [True] * len(chunks) if their is None else their
        kind = f"store masks, {spec.kind}"
        if isinstance(group, ChunkedLocal):
            kept = [is_required(group, chunk, case.lcm_block_size) for chunk in chunks]
            kind += " (what a boundary requires)"
        elif group.is_state and size < case.lcm_block_size:
            kept = [
                keep and (chunk + 1) * size % case.lcm_block_size == 0
                for chunk, keep in zip(chunks, kept, strict=True)
            ]
            kind += " smaller than the LCM (at its multiples)"
        assert mine == kept, f"{group}: {case}"
        tally[kind] += 1


def is_required(group: Group, chunk: int, unit: int) -> bool:
    """Tell whether some boundary, a multiple of ``unit`` tokens, requires the chunk."""
    assert group.reach_tokens is not None
    last = (chunk + 1) * group.block_size + group.reach_tokens
    return any(chunk in group.required(boundary) for boundary in range(unit, last + 1, unit))


def report(tally: Counter[str]) -> list[str]:
    """Return the tally as lines."""
    return [f"{count:6} {what}" for what, count in sorted(tally.items())]
