"""What ranks tell of their memory becomes one layout for each pipeline stage, or a refusal."""

from __future__ import annotations

import pytest

from kvtide.core.layout import GroupLayout, StoreLayout
from kvtide.core.topology import ParallelSizes, Part, Split, Topology
from kvtide.engines.vllm.metadata import KVTideHandshake
from kvtide.engines.vllm.stages import stage_layouts
from kvtide.errors import ConfigError

TOPOLOGY = Topology(ParallelSizes(tp_size=2, pp_size=2), (Split(2), Split(1)))


def layout(*num_layers: int, description: str = "bytes") -> StoreLayout:
    """Groups with so many layers each."""
    return StoreLayout(
        tuple(
            GroupLayout(16, (64,) * count, description if count else "", 1 if count else 0)
            for count in num_layers
        )
    )


def told(*layouts: StoreLayout, topology: Topology = TOPOLOGY) -> list[KVTideHandshake]:
    """One handshake a rank, in the order of ranks."""
    return [KVTideHandshake(found, rank, topology) for rank, found in enumerate(layouts)]


def test_stages_may_have_other_numbers_of_layers() -> None:
    """Ranks of one stage agree; whoever needs keys is told which stages have a group."""
    first, last = layout(2, 1), layout(3, 0)
    layouts, topology = stage_layouts(TOPOLOGY, told(first, first, last, last))
    assert layouts == [first, last]
    assert topology.parts(0) == (Part(0, 0), Part(0, 1), Part(1, 0), Part(1, 1))
    assert topology.parts(1) == (Part(0, 0),)
    assert topology.role(3).parts[1] == ()


def test_ranks_of_a_stage_that_differ_are_refused() -> None:
    """For instance an attention backend that only some of them have."""
    one, other = layout(2, 1), layout(2, 1, description="other")
    with pytest.raises(ConfigError, match="differently"):
        stage_layouts(TOPOLOGY, told(one, one, one, other))


def test_missing_ranks_are_refused() -> None:
    """A hit would not count what they hold."""
    one = layout(1, 1)
    with pytest.raises(ConfigError, match=r"ranks \[0, 1\] of pipeline stage 1"):
        stage_layouts(TOPOLOGY, told(one, one))
    with pytest.raises(ConfigError, match="list KVTideConnector first"):
        stage_layouts(TOPOLOGY, [])


def test_ranks_that_divide_the_cache_in_another_way_are_refused() -> None:
    """They would store under keys that nobody asks for."""
    one = layout(1, 1)
    other = Topology(TOPOLOGY.sizes, (Split(2), Split(2)))
    with pytest.raises(ConfigError, match="disagree"):
        stage_layouts(TOPOLOGY, told(one, one, one, one, topology=other))


def test_one_of_several_ranks_with_copies_speaks_for_them() -> None:
    """One handshake arrives for all prefill-context parallel ranks, where DCP is not used."""
    topology = Topology(ParallelSizes(tp_size=2, pcp_size=2), (Split(1),))
    one = layout(1)
    layouts, _ = stage_layouts(
        topology, [KVTideHandshake(one, 2, topology), KVTideHandshake(one, 3, topology)]
    )
    assert layouts == [one]
