"""The scheduler's half of the connector, as far as it needs no engine."""

from __future__ import annotations

import pytest

from kvtide.config import PoolConfig
from kvtide.core.groups import FullAttention
from kvtide.core.layout import GroupLayout, StoreLayout
from kvtide.engines.vllm.metadata import KVTideHandshake
from kvtide.engines.vllm.scheduler_side import SchedulerSide
from kvtide.engines.vllm.translate import GroupPlan
from kvtide.errors import ConfigError
from kvtide.stores.memory import MemoryStore

PLAN = GroupPlan(
    groups=(FullAttention(16),),
    group_ids=(0,),
    hash_block_size=16,
    specs=({},),
    num_layers=(1,),
)


class Pool:
    """vLLM's block pool, as far as the start reads it."""

    blocks = [None] * 100


class Manager:
    """vLLM's cache manager likewise."""

    block_pool = Pool()


def side(**options: object) -> SchedulerSide:
    """A scheduler side that knows its cache manager."""
    config = PoolConfig.from_mapping(options)
    half = SchedulerSide(config, PLAN, {"weights": "w"}, MemoryStore())
    half.bind(Manager())
    return half


def layout(payload_bytes: int, description: str = "bytes") -> KVTideHandshake:
    """A rank's handshake."""
    return KVTideHandshake(StoreLayout((GroupLayout(16, (payload_bytes,), description),)))


def test_budgets_below_one_block_are_refused_together() -> None:
    """Nothing would ever be saved or loaded, and nothing would say why."""
    half = side(staging_size="1MiB", max_load_bytes="1MiB")
    with pytest.raises(ConfigError) as refused:
        half.agree_on_layout([layout(4 << 20)])
    assert [fault.split(" is ")[0] for fault in refused.value.faults] == [
        "staging_size",
        "max_load_bytes",
    ]
    half.close()


def test_ranks_that_lay_bytes_out_differently_are_refused() -> None:
    """Their values would not be exchangeable under one key."""
    half = side()
    with pytest.raises(ConfigError, match="differently"):
        half.agree_on_layout([layout(4096), layout(4096, "other")])
    with pytest.raises(ConfigError, match="differently"):
        half.agree_on_layout([])
    half.close()


def test_before_the_ranks_have_told_their_layout_nothing_happens() -> None:
    """No key can be named yet."""
    half = side()
    assert not half.has_pins
    assert half.take_counters() == {}
    half.reset()
    half.on_finished("nobody")
    half.close()
