"""Engines of many ranks: what a hit needs, and who writes what, in every combination."""

from __future__ import annotations

from collections import Counter

import pytest

from kvtide.runtime.tags import TAG_BYTES
from kvtide.stores.memory import MemoryStore
from kvtide.testing import Arena
from kvtide.testing.engine import ScriptedEngine
from kvtide.testing.engine_attention import block_bytes
from kvtide.testing.engine_checks import check_engine, check_store, finish
from tests.rank_cases import BLOCK, CASES, PCP_CASES, WITH_COPIES, Case, longest_hit

PROMPT = list(range(18))
NUM_OUTPUT = 2


@pytest.mark.parametrize("case", [*CASES, *PCP_CASES], ids=str)
def test_a_hit_is_the_longest_prefix_that_all_ranks_hold(case: Case) -> None:
    """Each rank's every key is deleted in turn: no wrong byte, and the tokens are the model's."""
    memory = MemoryStore()
    engine = ScriptedEngine(memory, case.setup(max_tokens_per_step=8))
    engine.add("first", PROMPT, max_tokens=NUM_OUTPUT)
    finish(engine)
    expected = engine.model.generate(PROMPT, NUM_OUTPUT)
    values = {key: value.tobytes() for key, value in memory._values.items()}
    arena = Arena(memory, 4096)
    hits = Counter[int]()
    for key, value in values.items():
        engine.pool.drop_cached()
        memory.remove([key])
        request = engine.add("again", PROMPT, max_tokens=NUM_OUTPUT)
        wanted = longest_hit(engine, request, set(memory._values))
        engine.run()
        engine.step()
        check_engine(engine)
        assert request.num_loaded_tokens == wanted
        assert request.num_loads == (wanted > 0), "the first answer is right"
        assert engine.outputs["again"] == expected
        arena.put([(key, value)])
        hits[wanted] += 1
    assert set(hits) >= {0, *range(0, engine.coordinator.aligned(len(PROMPT) - 1), 8)}
    finish(engine)
    assert check_store(engine, memory) == len(values)


def num_stored(engine: ScriptedEngine, num_tokens: int) -> list[int]:
    """How many chunks of each group a prompt has that are worth storing; states: one a step."""
    masks = engine.coordinator.store_mask(num_tokens)
    counts = [
        num_tokens // group.block_size if mask is None else sum(mask)
        for group, mask in zip(engine.setup.groups, masks, strict=True)
    ]
    num_steps = -(-num_tokens // engine.setup.max_tokens_per_step)
    return [
        num_steps if group.is_state else count
        for group, count in zip(engine.setup.groups, counts, strict=True)
    ]


@pytest.mark.parametrize("case", WITH_COPIES, ids=str)
def test_ranks_with_copies_write_one_copy_in_equal_shares(case: Case) -> None:
    """Each key is checked and put by one rank; over a long prompt shares differ by 10 % at most."""
    memory = MemoryStore()
    setup = case.setup(num_blocks=600, max_tokens_per_step=64)
    engine = ScriptedEngine(memory, setup)
    num_tokens = 168 * BLOCK
    engine.add("r", range(num_tokens + 1))
    finish(engine)
    ranks = engine.ranks.ranks
    for method in ("exists", "put"):
        times = sum((rank.store.times_asked[method] for rank in ranks), Counter[str]())
        assert set(times) == set(memory._values)
        assert set(times.values()) == {1}
    one_copy = sum(
        len(parts) * num_chunks * (block_bytes(group) + TAG_BYTES)
        for group, parts, num_chunks in zip(
            setup.groups, setup.topology.all_parts(), num_stored(engine, num_tokens), strict=True
        )
    )
    written = [rank.store.put_bytes for rank in ranks]
    assert sum(written) == one_copy
    assert min(written) >= 0.9 * max(written)
