"""Blocks of hybrid models, laid out and allocated by vLLM: all groups read and written at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvtide.engines.vllm import rows as rows_module
from kvtide.engines.vllm.tensors import TensorBlocks
from tests.engines.vllm.configs import attention_spec, cache_config, uniform
from tests.engines.vllm.layouts import (
    LAYOUTS,
    MODELS,
    allocate,
    check_all_groups,
    empty_rows,
    padded_state,
    plan_caches,
    share_out,
    window,
)


@pytest.fixture
def plan(model_folder: Any, make_config: Callable[..., Any]) -> Callable[[list[Any], str], Any]:
    """Lay layers out as vLLM's own planner does, in a small memory."""
    config = make_config(model_folder, max_model_len=512)
    return lambda specs, layout: plan_caches(config, specs, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_groups_that_overlay_each_other_keep_to_their_blocks(
    name: str, layout: str, plan: Callable[[list[Any], str], Any]
) -> None:
    """As vLLM plans and allocates them: a block of one group is never touched for another."""
    config = plan(MODELS[name](), layout)
    raw, caches = allocate(config, layout)
    blocks = TensorBlocks(caches, config, config.group_ids)
    assert len(blocks.layout.groups) == len(config.kv_cache_groups)
    check_all_groups(blocks, raw, config)


@pytest.mark.parametrize("name", MODELS)
def test_the_devices_indexing_agrees_for_every_group(
    name: str, plan: Callable[[list[Any], str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy made for devices, run on host tensors, moves the same bytes to the same places."""
    config = plan(MODELS[name](), "BLNHC")
    raw, caches = allocate(config, "BLNHC")
    host = TensorBlocks(caches, config, config.group_ids)
    monkeypatch.setattr(rows_module, "HostRows", rows_module.TorchRows)
    device = TensorBlocks(caches, config, config.group_ids)
    for group, ids in enumerate(share_out(config, len(host.layout.groups))):
        payload = host.layout.groups[group].payload_bytes
        values = np.random.default_rng(group).integers(0, 256, (len(ids), payload), np.uint8)
        host.write(group, ids, values)
        after = raw.clone()
        read = np.zeros_like(values)
        device._device_copy(group, np.asarray(ids), read, to_host=True)
        assert np.array_equal(read, values)
        host.write(group, ids, np.zeros_like(values))
        device._device_copy(group, np.asarray(ids), values, to_host=False)
        assert torch.equal(raw, after)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_state_is_its_row_without_the_padding_of_its_page(
    layout: str, plan: Callable[[list[Any], str], Any]
) -> None:
    """The convolution and then the state, as the layers see them; none of the rest of the page."""
    spec = padded_state()
    config = plan([spec, attention_spec()], layout)
    _, caches = allocate(config, layout)
    tensor = caches["model.layers.0.mixer"]
    assert tuple(tensor.shape[1:]) == (1, 1, spec.state_content_size_bytes)
    assert tensor.stride(0) == spec.page_size_padded > spec.state_content_size_bytes
    blocks = TensorBlocks(caches, config, config.group_ids)
    (group,) = [
        number
        for number, planned in enumerate(config.kv_cache_groups)
        if "model.layers.0.mixer" in planned.layer_names
    ]
    assert blocks.layout.groups[group].segment_bytes == (spec.state_content_size_bytes,)
    row = np.zeros((1, spec.state_content_size_bytes), np.uint8)
    blocks.read(group, [5], row)
    assert row.tobytes() == tensor[5].contiguous().numpy().tobytes()


def test_kernel_blocks_of_one_group_alone_are_joined(
    plan: Callable[[list[Any], str], Any],
) -> None:
    """Attention may be split finer than the states beside it; block ids mean the same to both."""
    config = plan([padded_state(block_size=64), attention_spec(block_size=64)] * 2, "LBHNC")
    sizes = [
        16 if "Full" in type(group.kv_cache_spec).__name__ else 64
        for group in config.kv_cache_groups
    ]
    raw, caches = allocate(config, "LBHNC", sizes)
    rows = {len(cache) // config.num_blocks for cache in caches.values()}
    assert rows == {1, 4}
    check_all_groups(TensorBlocks(caches, config, config.group_ids), raw, config)


def test_layers_of_different_shapes_in_one_group_are_told_apart(
    plan: Callable[[list[Any], str], Any],
) -> None:
    """A block's row is each layer's own size, in the group's order, whatever lies between them."""
    config = plan(MODELS["latent caches of two sizes"](), "BLNHC")
    _, caches = allocate(config, "BLNHC")
    blocks = TensorBlocks(caches, config, config.group_ids)
    names = config.kv_cache_groups[0].layer_names
    row = empty_rows(blocks, 0, 1)
    blocks.read(0, [3], row)
    expected = [caches[name][3].contiguous().view(torch.uint8).numpy().tobytes() for name in names]
    assert row[0, :-24].tobytes() == b"".join(expected)
    assert blocks.layout.groups[0].segment_bytes == tuple(map(len, expected))
    assert len(set(map(len, expected))) == 2


def test_groups_outside_prefix_caching_are_neither_read_nor_written() -> None:
    """Their blocks are scratch of one request; they have no place in the layout."""
    ring = attention_spec("CircularBufferSpec", block_size=8)
    config = cache_config((ring, 1), (attention_spec(), 1), (window(), 1))
    for tensor in config.kv_cache_tensors:
        tensor.size = max(placed.size for placed in config.kv_cache_tensors)
    raw, caches = allocate(config, "LBHNC")
    blocks = TensorBlocks(caches, config, (1, 2))
    assert [group.block_size for group in blocks.layout.groups] == [32, 32]
    check_all_groups(blocks, raw, config)


def test_uniform_groups_have_their_layers_own_shapes() -> None:
    """What wraps layers of different specs has no shape of its own."""
    small, large = attention_spec(), attention_spec(head_size=64)
    config = cache_config((uniform(small, large), 2))
    names = config.kv_cache_groups[0].layer_names
    config.kv_cache_tensors[0].block_stride = 8192 + 16_384
    memory = torch.zeros(config.num_blocks, 8192 + 16_384, dtype=torch.int8)
    caches = {
        names[0]: memory[:, :8192],
        names[1]: memory[:, 8192:],
    }
    blocks = TensorBlocks(caches, config, (0,))
    assert blocks.layout.groups[0].segment_bytes == (8192, 16_384)
    check_all_groups(blocks, memory.view(-1), config)
