"""What ranks tell of themselves becomes one agreement, or a refusal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import (
    _project_kv_cache_groups_to_worker,
    generate_scheduler_kv_cache_config,
)
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

from kvtide.config import PoolConfig
from kvtide.core.layout import GroupLayout, StoreLayout
from kvtide.core.topology import ParallelSizes, Part, Split, Topology
from kvtide.engines.vllm.metadata import KVTideHandshake
from kvtide.engines.vllm.ranks import Sharing, plan_ranks
from kvtide.engines.vllm.stages import Agreement, agree
from kvtide.errors import ConfigError
from tests.engines.vllm.configs import attention_spec, engine_of, uniform

SIZES = ParallelSizes(tp_size=2, pp_size=2)
TOPOLOGY = Topology(SIZES, (Split(2), Split(1)))


def layout(*num_layers: int, description: str = "bytes") -> StoreLayout:
    """Groups with so many layers each."""
    return StoreLayout(
        tuple(
            GroupLayout(16, (64,) * count, description if count else "", 1 if count else 0)
            for count in num_layers
        )
    )


def told(
    *layouts: StoreLayout, topology: Topology = TOPOLOGY, **more: Any
) -> list[KVTideHandshake]:
    """One handshake a rank, in the order of ranks."""
    handshakes = []
    for rank, found in enumerate(layouts):
        absent = [g for g, group in enumerate(found.groups) if not group.values_per_block]
        parts = topology.role(rank).without(absent).parts
        handshakes.append(KVTideHandshake(found, rank, parts, **more))
    return handshakes


def test_stages_may_have_other_numbers_of_layers() -> None:
    """Ranks of one stage agree; a hit needs a group's part only of stages that have its layers."""
    first, last = layout(2, 1), layout(3, 0)
    found = agree(SIZES, told(first, first, last, last))
    assert found.layouts == (first, last)
    assert found.parts == (
        (Part(0, 0), Part(0, 1), Part(1, 0), Part(1, 1)),
        (Part(0, 0),),
    )


def test_ranks_of_a_stage_that_differ_are_refused() -> None:
    """For instance in an attention backend, or in how many tokens in a row they have."""
    one, other = layout(2, 1), layout(2, 1, description="other")
    with pytest.raises(ConfigError, match="differently"):
        agree(SIZES, told(one, one, one, other))
    odd = told(one, one, one, one)
    odd[3] = replace(odd[3], token_interleave=16)
    with pytest.raises(ConfigError, match="differently"):
        agree(SIZES, odd)


def test_missing_ranks_are_refused() -> None:
    """A hit would not count what they hold."""
    one = layout(1, 1)
    with pytest.raises(ConfigError, match="2 ranks told no memory layout, tensor parallel rank 0"):
        agree(SIZES, told(one, one))
    with pytest.raises(ConfigError, match="1 ranks told no memory layout, tensor parallel rank 1"):
        agree(SIZES, told(one, one, one))
    with pytest.raises(ConfigError, match="list KVTideConnector first"):
        agree(SIZES, [])


def test_a_pool_is_shared_with_other_sizes_only_if_all_ranks_share_it() -> None:
    """The reasons of those that do not are told."""
    one = layout(1, 1)
    shared = Sharing((2, 1))
    handshakes = told(one, one, one, one, sharing=shared)
    assert agree(SIZES, handshakes).sharing == shared
    handshakes[2] = replace(handshakes[2], sharing=Sharing(reasons=("a layer is odd",)))
    found = agree(SIZES, handshakes).sharing
    assert found == Sharing(None, ("a layer is odd",))


def test_one_of_several_ranks_with_copies_speaks_for_them() -> None:
    """One handshake arrives for all prefill-context parallel ranks, where DCP is not used."""
    sizes = ParallelSizes(tp_size=2, pcp_size=2)
    every = told(*[layout(1)] * 4, topology=Topology(sizes, (Split(1),)))
    found = agree(sizes, every[2:])
    assert found.layouts == (layout(1),)
    assert found.parts == ((Part(),),)


def test_tokens_in_a_row_are_told_apart_where_ranks_divide_them() -> None:
    """The engine may settle it on the ranks alone, for a connector beside this one."""
    one = layout(1)

    def described(sizes: ParallelSizes, interleave: int) -> object:
        topology = Topology(sizes, (Split(1, is_token_sharded=sizes.dcp_size > 1),))
        return agree(
            sizes, told(one, one, topology=topology, token_interleave=interleave)
        ).describe()

    assert described(ParallelSizes(2, dcp_size=2), 1) != described(ParallelSizes(2, dcp_size=2), 16)
    assert described(ParallelSizes(2), 1) == described(ParallelSizes(2), 16)


@pytest.mark.parametrize("pp_size", [1, 2])
def test_what_counts_is_what_the_ranks_planned_where_vllm_shows_the_scheduler_less(
    pp_size: int,
) -> None:
    """Of a latent cache beside a draft model's heads the scheduler sees the first layer only."""
    latent = attention_spec("MLAAttentionSpec", max_tp_shards=1)
    specs = {"model.layers.0": latent, "model.layers.1": attention_spec(num_kv_heads=4)}
    whole = KVCacheGroupSpec(list(specs), uniform(*specs.values()))
    whole.kv_cache_spec.kv_cache_specs.clear()
    whole.kv_cache_spec.kv_cache_specs.update(specs)
    sizes = ParallelSizes(tp_size=2, pp_size=pp_size)
    vllm_config = engine_of(sizes, total_kv_heads=2)
    stages = [list(specs)] if pp_size == 1 else [["model.layers.0"], ["model.layers.1"]]
    configs = [
        KVCacheConfig(
            num_blocks=8,
            kv_cache_tensors=[],
            kv_cache_groups=_project_kv_cache_groups_to_worker(
                [whole], {name: specs[name] for name in names}
            ),
        )
        for names in stages
    ]
    seen = plan_ranks(PoolConfig(), (0,), generate_scheduler_kv_cache_config(configs), vllm_config)
    assert seen.topology.splits == (Split(1),), "a latent cache alone"
    handshakes = []
    for rank in range(sizes.num_ranks):
        stage = sizes.place(rank).pp_rank
        plan = plan_ranks(PoolConfig(), (0,), configs[stage], vllm_config)
        parts = plan.topology.role(rank).parts
        handshakes.append(KVTideHandshake(layout(stage + 1), rank, parts, plan.sharing))
    found: Agreement = agree(sizes, handshakes)
    if pp_size == 1:
        assert found.parts == ((Part(0, 0), Part(0, 1)),)
    else:
        assert found.parts == ((Part(0, 0), Part(1, 0), Part(1, 1)),)
