"""One pool for engines of different tensor parallel sizes, and stages without layers of a group."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvtide.core.groups import FullAttention, SlidingWindow
from kvtide.core.topology import ParallelSizes, Split
from kvtide.stores.memory import MemoryStore
from kvtide.testing import Arena
from kvtide.testing.engine import ScriptedEngine
from kvtide.testing.engine_checks import check_store, finish
from kvtide.testing.engine_requests import EngineRequest
from kvtide.testing.engine_setup import EngineSetup
from tests.rank_cases import longest_hit

PROMPT = list(range(41))
SETUP = EngineSetup(
    groups=(FullAttention(4), SlidingWindow(4, window=6)), splits=(Split(2), Split(4))
)
SIZES = [
    ParallelSizes(tp_size, pp_size, pcp_size)
    for tp_size, pp_size, pcp_size in [(1, 1, 1), (2, 1, 1), (4, 1, 1), (2, 1, 2)]
]


def run(engine: ScriptedEngine, request_id: str = "r") -> EngineRequest:
    """Answer the prompt."""
    request = engine.add(request_id, PROMPT, max_tokens=6)
    finish(engine)
    return request


@pytest.mark.parametrize("reader", SIZES, ids=str)
@pytest.mark.parametrize("writer", SIZES, ids=str)
def test_engines_of_different_sizes_read_what_each_other_wrote(
    writer: ParallelSizes, reader: ParallelSizes
) -> None:
    """Two shards of one group and four of the other: equal tokens, and nothing is stored again."""
    memory = MemoryStore()
    first = ScriptedEngine(memory, replace(SETUP, sizes=writer))
    run(first)
    second = ScriptedEngine(memory, replace(SETUP, sizes=reader))
    assert run(second).num_loaded_tokens == 40
    assert second.outputs == first.outputs == {"r": second.model.generate(PROMPT, 6)}
    assert sum(rank.store.num_keys["put"] for rank in second.ranks.ranks) == 0
    assert sum(rank.store.put_bytes for rank in first.ranks.ranks) == memory.used_bytes
    assert check_store(second, memory) == check_store(first, memory) == len(memory._values)


@pytest.mark.parametrize(
    "sizes, zeroed",
    [(sizes, rank) for sizes in SIZES for rank in [None, *range(sizes.num_ranks)]],
    ids=str,
)
def test_zeros_in_place_of_what_any_rank_loads_give_other_tokens(
    sizes: ParallelSizes, zeroed: int | None
) -> None:
    """Negative control: every rank's own bytes decide, also where another has copies of them."""
    memory = MemoryStore()
    run(ScriptedEngine(memory, replace(SETUP, sizes=ParallelSizes())))
    engine = ScriptedEngine(memory, replace(SETUP, sizes=sizes))
    for rank in engine.ranks.ranks:
        if zeroed in (None, rank.rank):
            write = rank.blocks.write
            rank.blocks.write = lambda group_id, ids, data, write=write: write(  # type: ignore[method-assign, misc]
                group_id, ids, np.zeros_like(data)
            )
    request = engine.add("r", PROMPT, max_tokens=6)
    engine.run()
    assert request.num_loaded_tokens == 40
    assert engine.outputs["r"] != engine.model.generate(PROMPT, 6)


STAGES = {
    "a window on the last stage": (Split(1), Split(1, stages=(1,))),
    "a group on each stage": (Split(1, stages=(0,)), Split(2, stages=(1,))),
    "a window on the first stage": (Split(2, stages=(0, 1)), Split(1, stages=(0,))),
}


@pytest.mark.parametrize("splits", STAGES.values(), ids=STAGES)
def test_a_hit_needs_no_part_of_a_stage_without_layers_of_the_group(
    splits: tuple[Split, ...],
) -> None:
    """Such a rank copies, stores, loads and asks for nothing of the group."""
    memory = MemoryStore()
    sizes = ParallelSizes(tp_size=2, pp_size=2)
    engine = ScriptedEngine(memory, replace(SETUP, sizes=sizes, splits=splits))
    run(engine)
    values = {key: value.tobytes() for key, value in memory._values.items()}
    arena = Arena(memory, 4096)
    hits: set[int] = set()
    for number, (key, value) in enumerate(values.items()):
        engine.pool.drop_cached()
        memory.remove([key])
        request = engine.add(str(number), PROMPT, max_tokens=6)
        wanted = longest_hit(engine, request, set(memory._values))
        finish(engine)
        assert request.num_loaded_tokens == wanted
        assert request.num_loads == (wanted > 0), "the first answer is right"
        hits.add(wanted)
        assert engine.outputs[str(number)] == engine.model.generate(PROMPT, 6)
        arena.put([(key, value)])
    assert hits == set(range(0, 41, 4))
    assert check_store(engine, memory) == len(values)
    for rank in engine.ranks.ranks:
        copied = {group_id for group_id, _ in rank.blocks.reads + rank.blocks.writes}
        assert copied == {group_id for group_id, held in enumerate(rank.held) if held}
