"""vLLM's in-tree connector looks up what kvtide has stored in its format, and finds all it loads.

Its lookup is held to random models and prompts. That kvtide finds what the connector stores follows
from ``test_differential``: hits and masks are equal there, whatever a store holds.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvtide.core.coordinator import Coordinator
from kvtide.core.keys import BlockHashes, VllmPoolKey
from tests.engines.vllm.differential_cases import HASHES, Case, GroupCase, random_case
from tests.engines.vllm.differential_oracle import Oracle
from tests.engines.vllm.in_tree import InTreeLookup

NUM_CASES = 5_000


def stored_keys(case: Case, coordinator: Coordinator, boundaries: Sequence[int] = ()) -> set[str]:
    """The keys that kvtide stores of the case's request: whole units, and these boundaries."""
    hashes = BlockHashes.pack(HASHES[: case.num_hashes])
    databases = [ranks[0] for ranks in coordinator.databases("model", keys=VllmPoolKey())]
    masks = coordinator.store_mask(case.aligned_token_len, 0, case.num_prompt_tokens)
    keys: set[str] = set()
    for database, mask in zip(databases, masks, strict=True):
        chunks = range(case.aligned_token_len // database.block_size)
        named = database.keys(hashes, chunks)
        wanted = [True] * len(chunks) if mask is None else mask
        keys.update(key for key, is_wanted in zip(named, wanted, strict=True) if is_wanted)
    for boundary in boundaries:
        needed = coordinator.boundary_chunks(boundary, saved_token=case.aligned_token_len)
        for group, database, chunks in zip(coordinator.groups, databases, needed, strict=True):
            ends = [boundary] if group.is_state else [end for _, end in chunks]
            names = [end // case.hash_block_size - 1 for end in ends]
            if max(names, default=0) < case.num_hashes:
                keys.update(database.keys_at(hashes, names))
    return keys


@pytest.mark.parametrize("use_eagle", [False, True])
def test_the_in_tree_lookup_finds_what_it_then_loads(use_eagle: bool) -> None:
    """It never fails, and every key of its loads is there."""
    tally: Counter[str] = Counter()
    for number in range(NUM_CASES):
        rng = random.Random(f"in-tree {use_eagle} {number}")
        case = random_case(rng, use_eagle=use_eagle)
        oracle = Oracle(case)
        coordinator = replace(oracle.coordinator(), stores_dense=True)
        last = case.num_hashes * case.hash_block_size
        cut = rng.randint(0, last) // case.hash_block_size * case.hash_block_size
        boundaries = [cut] if coordinator.partial_hits and cut else []
        keys = stored_keys(case, coordinator, boundaries)
        in_tree = InTreeLookup(oracle.store, keys)
        result = in_tree.lookup(case.num_tokens, HASHES[: case.num_hashes])
        loaded = in_tree.keys_to_load(result, HASHES[: case.num_hashes])
        assert set(loaded) <= keys, case
        tally["hits"] += result.hit_length > 0
        tally["hits with local attention"] += result.hit_length > 0 and any(
            group.kind == "local" for group in case.groups
        )
        tally["hits inside a block"] += result.hit_length % case.lcm_block_size > 0
    if use_eagle:  # vLLM takes no local attention beside a draft model
        del tally["hits with local attention"]
    assert tally["hits"] > NUM_CASES / 2
    assert min(tally.values()) > NUM_CASES / 100, tally


def test_the_in_tree_lookup_fails_where_local_attention_is_stored_as_hits_need_it() -> None:
    """Why chunks are stored that no hit requires: it takes the one that ends at a hit for granted.

    Four blocks are an attention chunk, and a hit behind them needs none of them. What fails is the
    thread that answers vLLM's scheduler, which then waits for ever.
    """
    case = Case((GroupCase("full", 16), GroupCase("local", 16, 64)), 16, 100)
    oracle = Oracle(case)
    needed = InTreeLookup(oracle.store, stored_keys(case, oracle.coordinator()))
    with pytest.raises(AssertionError):
        needed.lookup(65, HASHES[:4])
    coordinator = replace(oracle.coordinator(), stores_dense=True)
    dense = InTreeLookup(oracle.store, stored_keys(case, coordinator))
    assert dense.lookup(65, HASHES[:4]).hit_length == 64
