"""Blocks in the in-tree connector's form are the bytes that its own layout class names."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvtide.engines.vllm import rows as rows_module
from kvtide.engines.vllm.raw_blocks import find_raw_blocks
from kvtide.engines.vllm.tensors import TensorBlocks
from kvtide.errors import UnsupportedModelError
from tests.engines.vllm.configs import attention_spec, cache_config, uniform
from tests.engines.vllm.in_tree import rank_local_layout
from tests.engines.vllm.layouts import (
    ALL_LAYOUTS,
    MODELS,
    allocate,
    check_all_groups,
    empty_rows,
    padded_state,
    plan_caches,
    window,
)

HEADS_APART = [
    ("gpt-oss", "BHLNC"),
    ("LFM2", "LHBNC"),
    ("LFM2", "BHLNC"),
    ("Falcon-H1", "LHBNC"),
    ("Falcon-H1", "BHLNC"),
    ("two kinds of states", "LHBNC"),
]
"""A block's heads do not lie together, and other layers lie between them or states beside them."""
NOT_PLANNED = {("latent caches of two sizes", layout) for layout in ("LHBNC", "BHLNC")}
"""What vLLM itself refuses to lay out."""


@pytest.fixture
def plan(model_folder: Any, make_config: Callable[..., Any]) -> Callable[[list[Any], str], Any]:
    """Lay layers out as vLLM's own planner does, in a small memory."""
    config = make_config(model_folder, max_model_len=512)
    return lambda specs, layout: plan_caches(config, specs, layout)


def raw_blocks(caches: Any, config: Any, group_ids: Any = None) -> TensorBlocks:
    """The blocks of all groups, in the in-tree connector's form."""
    ids = config.group_ids if group_ids is None else group_ids
    return TensorBlocks(caches, config, ids, find=find_raw_blocks)


def check_against_in_tree(blocks: TensorBlocks, caches: Any, num_blocks: int) -> None:
    """Read blocks of every group, and compare with the memory that the connector's layout names."""
    theirs = rank_local_layout(caches, num_blocks)
    for group, layout in enumerate(blocks.layout.groups):
        assert list(layout.segment_bytes) == theirs.block_len
        rows = empty_rows(blocks, group, num_blocks)
        blocks.read(group, range(num_blocks), rows)
        for block_id, row in enumerate(rows):
            addresses, sizes = theirs.prepare_value_for_block(block_id)
            value = b"".join(map(ctypes.string_at, addresses, sizes))
            assert row[: layout.payload_bytes].tobytes() == value


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_a_value_is_the_memory_that_the_in_tree_connector_stores(
    name: str, layout: str, plan: Callable[[list[Any], str], Any]
) -> None:
    """As vLLM plans and allocates it; and no group's block is touched for another."""
    if (name, layout) in NOT_PLANNED:
        with pytest.raises(ValueError, match="mixed page sizes"):
            plan(MODELS[name](), layout)
        return
    config = plan(MODELS[name](), layout)
    raw, caches = allocate(config, layout)
    if (name, layout) in HEADS_APART:
        with pytest.raises(UnsupportedModelError, match="mix the bytes of different blocks"):
            raw_blocks(caches, config)
        return
    blocks = raw_blocks(caches, config)
    check_against_in_tree(blocks, caches, config.num_blocks)
    check_all_groups(blocks, raw, config)


def test_where_it_is_refused_the_in_tree_connector_really_mixes_blocks(
    plan: Callable[[list[Any], str], Any],
) -> None:
    """What it would load into one block changes a layer's bytes in another."""
    config = plan(MODELS["gpt-oss"](), "BHLNC")
    _, caches = allocate(config, "BHLNC")
    before = {name: cache.clone() for name, cache in caches.items()}
    theirs = rank_local_layout(caches, config.num_blocks)
    for address, size in zip(*theirs.prepare_value_for_block(3), strict=True):
        ctypes.memset(address, 1, size)
    changed = [(caches[name] != cache).nonzero()[:, 0].unique() for name, cache in before.items()]
    assert any(4 in blocks for blocks in changed)


def test_paddings_are_stored_too(plan: Callable[[list[Any], str], Any]) -> None:
    """A state that fills a part of its page is stored with the rest of it."""
    spec = padded_state()
    config = plan([spec, attention_spec()], "LBHNC")
    _, caches = allocate(config, "LBHNC")
    blocks = raw_blocks(caches, config)
    assert spec.state_content_size_bytes < 8192
    assert [group.payload_bytes for group in blocks.layout.groups] == [8192, 8192]


def test_every_group_has_the_bytes_of_all_layers() -> None:
    """One layer here and two there: the blocks of both are as long."""
    config = cache_config((window(), 1), (attention_spec(), 2))
    for tensor in config.kv_cache_tensors:
        tensor.size = max(placed.size for placed in config.kv_cache_tensors)
    raw, caches = allocate(config, "LBHNC")
    blocks = raw_blocks(caches, config, (0, 1))
    assert [group.segment_bytes for group in blocks.layout.groups] == [(8192, 8192)] * 2
    check_against_in_tree(blocks, caches, config.num_blocks)
    check_all_groups(blocks, raw, config)


def test_a_group_without_layers_here_has_the_bytes_of_the_others() -> None:
    """That connector asks no pipeline stage which groups it has layers of."""
    config = cache_config((attention_spec(), 2), (window(), 0))
    del config.kv_cache_tensors[1:]
    _, caches = allocate(config, "LBHNC")
    blocks = raw_blocks(caches, config, (0, 1))
    assert [group.segment_bytes for group in blocks.layout.groups] == [(8192, 8192)] * 2
    check_against_in_tree(blocks, caches, config.num_blocks)


def test_layers_of_a_group_outside_prefix_caching_do_not_count() -> None:
    """The connector takes the layers of the groups that it stores."""
    config = cache_config((attention_spec("CircularBufferSpec", block_size=8), 1), (window(), 1))
    for tensor in config.kv_cache_tensors:
        tensor.size = max(placed.size for placed in config.kv_cache_tensors)
    _, caches = allocate(config, "LBHNC")
    blocks = raw_blocks(caches, config, (1,))
    stored = {name: caches[name] for name in config.kv_cache_groups[1].layer_names}
    check_against_in_tree(blocks, stored, config.num_blocks)
    assert len(blocks.layout.groups) == 1


def test_kernel_blocks_are_joined_to_the_managers_blocks(
    plan: Callable[[list[Any], str], Any],
) -> None:
    """Attention may be split finer than the states beside it."""
    config = plan([padded_state(block_size=64), attention_spec(block_size=64)] * 2, "LBHNC")
    sizes = [
        16 if "Full" in type(group.kv_cache_spec).__name__ else 64
        for group in config.kv_cache_groups
    ]
    raw, caches = allocate(config, "LBHNC", sizes)
    blocks = raw_blocks(caches, config)
    check_against_in_tree(blocks, caches, config.num_blocks)
    check_all_groups(blocks, raw, config)


def own_tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Any:
    """A cache per layer, each with memory of its own, and a configuration of one group."""
    config = cache_config((attention_spec(), len(shapes)), num_blocks=16)
    rng = np.random.default_rng(1)
    caches = {}
    for name, shape in zip(config.kv_cache_groups[0].layer_names, shapes, strict=True):
        bits = rng.integers(0, 1 << 16, shape, dtype=np.uint16).view(np.int16)
        caches[name] = torch.from_numpy(bits).view(dtype)
    return config, caches


def test_layers_with_memory_of_their_own_follow_each_other() -> None:
    """In the order in which the engine registers them, whatever the configuration's is."""
    config, caches = own_tensors((16, 2, 32, 64), (16, 1, 32, 64))
    first, second = caches
    check_against_in_tree(raw_blocks(caches, config, (0,)), caches, 16)
    turned = {second: caches[second], first: caches[first]}
    blocks = raw_blocks(turned, config, (0,))
    assert blocks.layout.groups[0].segment_bytes == (4096, 8192)
    check_against_in_tree(blocks, turned, 16)


def test_a_layer_that_reuses_another_s_cache_adds_nothing() -> None:
    """It is the same memory."""
    config, caches = own_tensors((16, 2, 32, 64), (16, 2, 32, 64))
    first, second = caches
    caches[second] = caches[first]
    blocks = raw_blocks(caches, config, (0,))
    assert blocks.layout.groups[0].segment_bytes == (8192,)
    check_against_in_tree(blocks, caches, 16)


def test_of_several_tensors_of_a_layer_the_first_stands_for_all() -> None:
    """States of two shapes in one page, registered as a list."""
    config, caches = own_tensors((16, 4096))
    [(name, page)] = caches.items()
    caches[name] = [page[:, :96], page[:, 96:1000]]
    blocks = raw_blocks(caches, config, (0,))
    assert blocks.layout.groups[0].segment_bytes == (8192,)
    check_against_in_tree(blocks, caches, 16)


@pytest.mark.parametrize("tail", [0, 1, 4096])
def test_an_allocation_that_is_longer_than_its_blocks_is_read_up_to_them(tail: int) -> None:
    """Some platforms round the allocation up."""
    config, caches = own_tensors((16, 2, 32, 64))
    [(name, cache)] = caches.items()
    memory = torch.zeros(cache.numel() + tail, dtype=cache.dtype)
    caches[name] = memory[: cache.numel()].view(cache.shape).copy_(cache)
    blocks = raw_blocks(caches, config, (0,))
    check_against_in_tree(blocks, caches, 16)


def test_heads_that_lie_apart_are_parts_of_their_own() -> None:
    """Each head's blocks in a row, one head after the other."""
    config, caches = own_tensors((3, 16, 32, 64))
    [(name, heads_first)] = caches.items()
    caches[name] = heads_first.permute(1, 0, 2, 3)
    blocks = raw_blocks(caches, config, (0,))
    assert blocks.layout.groups[0].segment_bytes == (4096,) * 3
    check_against_in_tree(blocks, caches, 16)
    check_all_groups(blocks, heads_first.view(torch.int8).view(-1), config)


def test_the_devices_indexing_agrees(
    plan: Callable[[list[Any], str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy made for devices, run on host tensors, moves the same bytes to the same places."""
    config = plan(MODELS["Falcon-H1"](), "LBHNC")
    raw, caches = allocate(config, "LBHNC")
    host = raw_blocks(caches, config)
    monkeypatch.setattr(rows_module, "HostRows", rows_module.TorchRows)
    device = raw_blocks(caches, config)
    ids = np.array([5, 1, 30])
    rows, expected = (
        np.zeros((3, host.layout.groups[0].payload_bytes), np.uint8) for _ in range(2)
    )
    device._device_copy(0, ids, rows, to_host=True)
    host.read(0, ids, expected)
    assert np.array_equal(rows, expected)
    host.write(0, ids, expected[::-1].copy())
    after = raw.clone()
    host.write(0, ids, expected)
    device._device_copy(0, ids, expected[::-1].copy(), to_host=False)
    assert torch.equal(raw, after)


def refusal(caches: Any, config: Any) -> str:
    """The message with which a cache is refused."""
    with pytest.raises(UnsupportedModelError) as refused:
        raw_blocks(caches, config, (0,))
    return str(refused.value)


def test_a_tensor_whose_first_dimension_counts_no_blocks_is_refused() -> None:
    """Keys and values apart: the connector cannot take such a cache either."""
    config, caches = own_tensors((2, 16, 32, 64))
    message = refusal(caches, config)
    assert "does not count 16 blocks" in message
    assert "key_format" in message
    with pytest.raises(AssertionError):
        rank_local_layout(caches, 16)


def test_a_block_in_pieces_is_refused() -> None:
    """Neither the block nor its heads lie together."""
    config, caches = own_tensors((16, 2, 32, 128))
    [(name, cache)] = caches.items()
    caches[name] = cache[..., :64]
    assert "neither a block nor the heads" in refusal(caches, config)
    with pytest.raises(AssertionError):
        rank_local_layout(caches, 16)


def test_layers_of_different_lengths_that_begin_at_one_place_are_refused() -> None:
    """The connector takes the first one's length for both."""
    config, caches = own_tensors((16, 2, 32, 64), (16, 2, 32, 64))
    first, second = caches
    caches[second] = caches[first].view(-1)[: 16 * 2048].view(16, 1, 32, 64)
    assert "leave out bytes of some layers" in refusal(caches, config)


def test_a_layer_without_a_cache_is_refused() -> None:
    """And what is registered without being a tensor."""
    config, caches = own_tensors((16, 2, 32, 64), (16, 2, 32, 64))
    second = list(caches)[1]
    del caches[second]
    assert f"{second} registered no KV cache" in refusal(caches, config)
    assert "not registered as a tensor" in refusal({**caches, second: None}, config)


def test_blocks_in_host_memory_are_refused() -> None:
    """The connector lays them out group by group."""
    config, caches = own_tensors((16, 2, 32, 64))
    fields = SimpleNamespace(
        num_blocks=16, kv_cache_groups=config.kv_cache_groups, hisparse_host_num_blocks=4
    )
    assert "host memory" in refusal(caches, fields)


def test_uniform_groups_have_their_layers_own_lengths() -> None:
    """What wraps layers of different specs has no length of its own."""
    config, caches = own_tensors((16, 2, 32, 64), (16, 2, 32, 128))
    config.kv_cache_groups[0].kv_cache_spec = uniform(
        attention_spec(), attention_spec(head_size=64)
    )
    blocks = raw_blocks(caches, config, (0,))
    assert blocks.layout.groups[0].segment_bytes == (8192, 16_384)
    check_against_in_tree(blocks, caches, 16)
