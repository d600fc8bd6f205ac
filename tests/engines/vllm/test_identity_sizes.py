"""Engines of different tensor parallel sizes have one identity if they share, and else never."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtide.config import PoolConfig
from kvtide.core.keys import CacheIdentity
from kvtide.engines.vllm.identity import engine_identity, of_all_sizes
from kvtide.engines.vllm.ranks import plan_ranks
from kvtide.engines.vllm.translate import translate_groups
from tests.engines.model_folders import LLAMA, make_folder
from tests.engines.vllm.configs import attention_spec, cache_config, uniform

NUM_HEADS = 4


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A small Llama whose heads four ranks can divide."""
    return make_folder(tmp_path / "model", config=LLAMA | {"num_key_value_heads": NUM_HEADS})


@pytest.fixture
def identify(model_folder: Path, make_config: Callable[..., Any]) -> Callable[..., str]:
    """Return the fingerprint that engines of these arguments have, as the connector makes it."""

    def fingerprint(
        tp_size: int = 1,
        store_tp_size: int = 0,
        *,
        pp_size: int = 1,
        num_layers: int = 4,
        is_uniform: bool = False,
        **spec: Any,
    ) -> str:
        config = make_config(
            model_folder, tensor_parallel_size=tp_size, pipeline_parallel_size=pp_size
        )
        heads = NUM_HEADS // tp_size
        layers = attention_spec(**({"num_kv_heads": heads} | spec))
        if is_uniform:
            layers = uniform(layers, attention_spec(num_kv_heads=heads, head_size=64))
        groups = cache_config((layers, num_layers))
        plan = translate_groups(groups, config)
        options = PoolConfig.from_mapping({"store_tp_size": store_tp_size})
        ranks = plan_ranks(options, plan.group_ids, groups, config)
        shards = ranks.sharing.shards
        assert (shards is None) is (not store_tp_size)
        data = engine_identity(config, plan)
        if shards is not None:
            data = of_all_sizes(data, shards)
        return CacheIdentity(engine=data, worker="").fingerprint()

    return fingerprint


@pytest.mark.parametrize("is_uniform", [False, True])
def test_engines_that_share_have_one_identity_whatever_their_size(
    is_uniform: bool, identify: Callable[..., str]
) -> None:
    """One rank with four heads, two with two, four with one."""
    shared = {identify(size, 4, is_uniform=is_uniform) for size in (1, 2, 4)}
    assert len(shared) == 1


def test_engines_that_do_not_ask_for_it_never_share_with_another_size(
    identify: Callable[..., str],
) -> None:
    """Nor with engines that do, of the same size or of another."""
    plain = [identify(size) for size in (1, 2, 4)]
    shared = [identify(size, 4) for size in (1, 2, 4)]
    assert len(set(plain)) == 3
    assert not set(plain) & set(shared)


def test_a_size_is_told_even_where_ranks_have_equal_heads(
    model_folder: Path, make_config: Callable[..., Any]
) -> None:
    """The size itself is part of the identity, not only what follows from it in the specs."""
    prints = set()
    for size in (1, 2):
        config = make_config(model_folder, tensor_parallel_size=size)
        plan = translate_groups(cache_config((attention_spec(), 4)), config)
        prints.add(CacheIdentity(engine_identity(config, plan), worker="").fingerprint())
    assert len(prints) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"store_tp_size": 2},
        {"pp_size": 2},
        {"num_layers": 2},
        {"head_size": 64},
        {"block_size": 64},
        {"is_uniform": True},
    ],
    ids=str,
)
def test_whatever_else_changes_bytes_keeps_engines_that_share_apart(
    change: dict[str, Any], identify: Callable[..., str]
) -> None:
    """Other shards, other stages and other layers are other values."""
    wanted: dict[str, Any] = {"tp_size": 1, "store_tp_size": 4}
    assert identify(**wanted) != identify(**(wanted | change))


def test_more_ranks_than_heads_are_no_other_shards(identify: Callable[..., str]) -> None:
    """Four heads are four shards at most, so stores for four and for eight ranks are one."""
    assert identify(1, 4) == identify(4, 8)


def test_each_group_tells_its_shards(model_folder: Path, make_config: Callable[..., Any]) -> None:
    """Shards of the groups are told in their order, not as a sum or a set."""
    config = make_config(model_folder)
    window = attention_spec("SlidingWindowSpec", sliding_window=128)
    plan = translate_groups(cache_config((attention_spec(), 1), (window, 1)), config)
    prints = {
        CacheIdentity(of_all_sizes(engine_identity(config, plan), shards), worker="").fingerprint()
        for shards in ((1, 2), (2, 1), (2, 2), (2,))
    }
    assert len(prints) == 4
