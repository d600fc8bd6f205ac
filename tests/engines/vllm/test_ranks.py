"""How a vLLM engine's blocks are divided among its ranks, and who may share what they store."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvtide.config import PoolConfig
from kvtide.core.topology import ParallelSizes, Part, RankPlace, Split
from kvtide.engines.vllm import features
from kvtide.engines.vllm.ranks import RankPlan, Sharing, plan_ranks, this_rank, total_kv_heads
from kvtide.errors import ConfigError
from tests.engines.vllm.configs import attention_spec, engine_of, state_spec, uniform

MLA = attention_spec("MLAAttentionSpec", max_tp_shards=1)


def heads(count: int, **changes: Any) -> Any:
    """A layer's spec with so many KV heads on a rank."""
    return attention_spec(num_kv_heads=count, **changes)


def plan(
    *specs: Any,
    total_kv_heads: int = 2,
    options: dict[str, object] | None = None,
    engine: dict[str, Any] | None = None,
    **sizes: int,
) -> RankPlan:
    """Plan the ranks of an engine with one group for each spec."""
    config = PoolConfig.from_mapping(options or {})
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    vllm_config = engine_of(ParallelSizes(**sizes), total_kv_heads=total_kv_heads, **engine or {})
    cache = SimpleNamespace(kv_cache_groups=groups)
    return plan_ranks(config, range(len(specs)), cache, vllm_config)


def test_one_rank_asks_nothing_of_the_model() -> None:
    """Without ranks there is nothing to divide, whatever the model is like."""
    found = plan(heads(2), engine={"model": SimpleNamespace()})
    assert found.topology.role(0).parts == ((Part(),),)


@pytest.mark.parametrize(
    "spec,tp_size,total,shards",
    [
        (heads(1), 2, 2, 2),
        (heads(2), 2, 4, 2),
        (heads(1), 8, 2, 2),
        (heads(1), 8, 1, 1),
        (MLA, 8, 128, 1),
        (
            uniform(MLA, attention_spec("MLAAttentionSpec", head_size=128, max_tp_shards=1)),
            4,
            128,
            1,
        ),
        (attention_spec("SlidingWindowSpec", num_kv_heads=1, sliding_window=64), 8, 4, 4),
        (state_spec(), 8, 2, 8),
        (state_spec(tp_replicated=True), 8, 2, 1),
        (uniform(MLA, heads(1)), 8, 2, 2),
        (uniform(MLA, heads(2)), 8, 2, 8),
        (attention_spec("MLAAttentionSpec"), 8, 128, 8),
    ],
)
def test_ranks_hold_copies_where_heads_are_fewer_and_of_latent_caches(
    spec: Any, tp_size: int, total: int, shards: int
) -> None:
    """States, and layers of which it is not certain, are each rank's own."""
    found = plan(spec, total_kv_heads=total, tp_size=tp_size)
    assert found.topology.splits == (Split(shards),)


@pytest.mark.parametrize(
    "model",
    [
        {"swa_num_key_value_heads": 4},
        {"num_global_key_value_heads": 1},
        {"attention_other_setting": {"num_attention_groups": 8}},
        {"block_configs": [{"attention": {"n_heads_in_group": 8}}]},
        {"num_key_value_heads": [2, 4, 2]},
    ],
)
def test_models_whose_layers_may_have_other_numbers_of_heads_hold_no_copies(
    model: dict[str, Any],
) -> None:
    """One head a rank says nothing of how many there are: four could be one of two or of eight."""
    assert total_kv_heads(engine_of(ParallelSizes(tp_size=8), **model)) is None
    assert plan(heads(1), tp_size=8, engine=model).topology.splits == (Split(8),)
    found = plan(heads(1), tp_size=8, engine=model, options={"store_tp_size": 8})
    assert found.sharing.shards is None
    assert "different numbers of KV heads" in found.sharing.describe(8, (0, 1))


def test_a_draft_model_with_other_heads_makes_them_uncertain() -> None:
    """Its layers may be among a group's."""
    draft = SimpleNamespace(get_total_num_kv_heads=lambda: 4, hf_text_config={})
    config = engine_of(ParallelSizes(tp_size=8))
    config.speculative_config = SimpleNamespace(
        uses_draft_kv_cache=lambda: True, draft_model_config=draft
    )
    assert total_kv_heads(config) is None
    draft.get_total_num_kv_heads = lambda: 2
    assert total_kv_heads(config) == 2


def test_a_layer_with_more_heads_than_the_model_says_is_uncertain() -> None:
    """Four heads on each of two ranks cannot be two in all."""
    assert plan(heads(4), tp_size=2).topology.splits == (Split(2),)
    assert plan(heads(4), tp_size=4).topology.splits == (Split(4),)


def test_context_parallel_ranks_hold_other_tokens() -> None:
    """Of two heads on eight ranks, four ranks each: two of them have the same tokens of one."""
    topology = plan(heads(1), tp_size=8, dcp_size=2).topology
    assert topology.splits == (Split(2, is_token_sharded=True),)
    assert len(topology.parts(0)) == 4
    assert topology.share(0, 0).put_step == 2
    latent = plan(MLA, tp_size=4, dcp_size=4, total_kv_heads=128).topology
    assert len(latent.parts(0)) == 4
    state = plan(state_spec(), tp_size=4, dcp_size=2, total_kv_heads=1).topology
    assert state.splits == (Split(4),)


def test_uncertain_heads_and_divided_tokens_are_each_ranks_own() -> None:
    """A key for each rank holds whatever it has."""
    model = {"swa_num_key_value_heads": 2}
    found = plan(heads(1), total_kv_heads=4, tp_size=8, dcp_size=2, engine=model).topology
    assert found.splits == (Split(8),)


# ------------------------------------------------------------------- one pool for many sizes


@pytest.mark.parametrize("tp_size,local_heads,parts", [(1, 4, 4), (2, 2, 2), (4, 1, 1), (8, 1, 1)])
def test_engines_of_every_size_store_the_same_parts(
    tp_size: int, local_heads: int, parts: int
) -> None:
    """Four heads, cut for up to eight ranks: four shards, which two ranks of eight hold alike."""
    found = plan(
        heads(local_heads), MLA, tp_size=tp_size, total_kv_heads=4, options={"store_tp_size": 8}
    )
    assert found.sharing.shards == (4, 1)
    assert found.topology.parts(0) == tuple(Part(0, shard) for shard in range(4))
    assert found.topology.parts(1) == (Part(),)
    assert len(found.topology.parts_held(0, 0)) == parts
    line = found.sharing.describe(8, (0, 3))
    assert "KV cache group 0 in 4 shards" in line
    assert "KV cache group 3 in 1 shard of" in line


@pytest.mark.parametrize(
    "specs,sizes,store_tp_size,reason",
    [
        ((heads(2), state_spec()), {"tp_size": 2}, 4, "KV cache group 1 holds states"),
        ((heads(3),), {"tp_size": 2}, 4, "has 6 KV heads, which 4 shards do not divide"),
        ((uniform(heads(3), heads(2)),), {"tp_size": 2}, 2, "different numbers of KV heads"),
        ((uniform(MLA, heads(1)),), {"tp_size": 6}, 6, "layers with heads, and others without"),
        ((heads(3, num_head_slots=4),), {"tp_size": 2}, 2, "packs its heads"),
        ((MLA,), {"tp_size": 4, "dcp_size": 2}, 4, "context parallel"),
        ((MLA,), {"tp_size": 2, "pcp_size": 2}, 4, "context parallel"),
    ],
)
def test_what_cannot_be_shared_is_kept_apart_and_says_why(
    specs: tuple[Any, ...], sizes: dict[str, int], store_tp_size: int, reason: str
) -> None:
    """The engine runs, with a pool for engines of its own size."""
    total = 4 if len(specs) == 2 else 6
    found = plan(*specs, total_kv_heads=total, options={"store_tp_size": store_tp_size}, **sizes)
    assert found.sharing.shards is None
    assert reason in found.sharing.describe(store_tp_size, (0, 1))


def test_without_the_option_nothing_is_said() -> None:
    """It is opt-in."""
    assert plan(heads(1), tp_size=2).sharing == Sharing()


# ------------------------------------------------------------------- refusals


def test_a_store_size_that_the_engines_does_not_divide_is_refused() -> None:
    """The operator meant something else; the message says what to give."""
    with pytest.raises(ConfigError, match="least common multiple"):
        plan(heads(1), tp_size=4, options={"store_tp_size": 6})
    with pytest.raises(ConfigError, match="least common multiple"):
        plan(heads(1), tp_size=4, options={"store_tp_size": 2})


def test_prefill_context_parallel_hybrids_are_refused() -> None:
    """So are such ranks in vLLM's own form, which has a key for each of their copies."""
    with pytest.raises(ConfigError, match="prefill-context-parallel-size 2 is not supported"):
        plan(MLA, MLA, pcp_size=2)
    with pytest.raises(ConfigError, match="cannot be used with key_format"):
        plan(MLA, pcp_size=2, options={"key_format": "vllm"})


def test_ranks_that_divide_heads_in_an_unknown_way_and_tokens_are_refused() -> None:
    """Prefill-context parallel ranks have no keys of their own, but would have other tokens."""
    latent = attention_spec("MLAAttentionSpec")
    with pytest.raises(ConfigError, match="does not tell how its heads are divided"):
        plan(latent, total_kv_heads=128, tp_size=2, pcp_size=2, dcp_size=2)
    plan(MLA, total_kv_heads=128, tp_size=2, pcp_size=2, dcp_size=2)
    plan(latent, total_kv_heads=128, tp_size=2, pcp_size=2)


def test_layers_of_which_vllms_own_connector_stores_false_copies_are_refused() -> None:
    """It takes ranks to hold the same bytes by the model's one number of heads."""
    with pytest.raises(ConfigError, match="copies that are none"):
        plan(
            heads(1),
            tp_size=8,
            options={"key_format": "vllm"},
            engine={"swa_num_key_value_heads": 4},
        )


def test_a_rank_that_stands_where_none_is_known_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another numbering of ranks would store some bytes twice and others never."""
    sizes = ParallelSizes(tp_size=4, pp_size=2, dcp_size=2)
    monkeypatch.setattr(features, "rank_place", lambda: RankPlace(1, 0, 3, 1))
    assert this_rank(sizes) == 7
    monkeypatch.setattr(features, "rank_place", lambda: RankPlace(1, 0, 3, 0))
    with pytest.raises(ConfigError, match="knows no rank"):
        this_rank(sizes)
    assert this_rank(ParallelSizes()) == 0
