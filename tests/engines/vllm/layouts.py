"""KV caches of hybrid models as vLLM plans and allocates them, and checks over all groups."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import torch

from kvtide.engines.vllm.tensors import TensorBlocks
from kvtide.engines.vllm.translate import translate_groups
from tests.engines.vllm.configs import attention_spec, cache_config, state_spec

LAYOUTS = ["LBHNC", "LBNHC", "BLHNC", "BLNHC"]
"""Those in which a block's heads lie together."""

ALL_LAYOUTS = [*LAYOUTS, "LHBNC", "BHLNC"]


def window(**changes: Any) -> Any:
    """A sliding-window spec."""
    return attention_spec("SlidingWindowSpec", sliding_window=128, **changes)


def padded_state(**changes: Any) -> Any:
    """A state whose page is as long as the attention's, and longer than its row."""
    return state_spec(page_size_padded=8192, **changes)


MODELS: dict[str, Callable[[], list[Any]]] = {
    "gpt-oss": lambda: [window(), attention_spec()] * 2,
    "Gemma3": lambda: [window(), window(), window(), attention_spec()],
    "LFM2": lambda: (
        [padded_state(shapes=((2, 128),), dtypes=(torch.bfloat16,)), attention_spec()] * 2
    ),
    "Falcon-H1": lambda: [padded_state(), attention_spec()] * 3,
    "two kinds of states": lambda: [
        padded_state(),
        padded_state(shapes=((3, 64), (2, 8, 16))),
        attention_spec(),
        attention_spec(),
    ],
    "latent caches of two sizes": lambda: [
        attention_spec("MLAAttentionSpec", head_size=64),
        attention_spec("MLAAttentionSpec", head_size=32),
        attention_spec("MLAAttentionSpec", head_size=64),
    ],
}


def planned(spec: Any, num_layers: int, layout: str, num_blocks: int = 64) -> Any:
    """Return the plan of one group, whose strides are those of ``layout``."""
    from vllm.v1.kv_cache_interface import compute_layout_strides
    from vllm.v1.kv_cache_layout import KVCacheLayout

    config = cache_config((spec, num_layers), num_blocks=num_blocks)
    strides = compute_layout_strides(spec, num_blocks, num_layers, KVCacheLayout[layout])
    config.kv_cache_tensors[0].layer_stride, config.kv_cache_tensors[0].block_stride = strides[:2]
    return config


def plan_caches(config: Any, specs: list[Any], layout: str) -> Any:
    """Lay layers out as vLLM's own planner does for ``config``, in a small memory."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    config.cache_config.kv_cache_layout = layout
    layers = {f"model.layers.{number}.mixer": spec for number, spec in enumerate(specs)}
    (planned,) = get_kv_cache_configs(config, [layers], [1 << 20])
    planned.group_ids = translate_groups(planned, config).group_ids
    return planned


def allocate(config: Any, layout: str, kernel_block_sizes: list[int] | None = None) -> Any:
    """Return the tensors of all layers as vLLM's runners allocate them, full of random bytes."""
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    caches = allocate_kv_cache(
        config, torch.device("cpu"), KVCacheLayout[layout], kernel_block_sizes
    )
    raw = torch.empty(0, dtype=torch.uint8).set_(next(iter(caches.values())).untyped_storage())
    raw.copy_(torch.from_numpy(np.random.default_rng(1).integers(0, 256, len(raw), np.uint8)))
    return raw, caches


def share_out(config: Any, num_groups: int) -> list[list[int]]:
    """Give most blocks to one group each, in random order; the rest belong to nobody."""
    ids = list(range(config.num_blocks))
    Random(3).shuffle(ids)
    share = config.num_blocks * 3 // 4 // num_groups
    assert share > 2
    return [ids[share * number : share * (number + 1)] for number in range(num_groups)]


def empty_rows(blocks: TensorBlocks, group: int, count: int) -> Any:
    """Rows for blocks of a group, with room behind the payload."""
    return np.full((count, blocks.layout.groups[group].payload_bytes + 24), 7, np.uint8)


def check_all_groups(blocks: TensorBlocks, raw: torch.Tensor, config: Any) -> None:
    """Fill every group's blocks, read all of them back, and restore them.

    Then the whole memory is as before: paddings, and the blocks of others and of nobody.
    """
    before = raw.clone()
    owned = share_out(config, len(blocks.layout.groups))
    originals, written = [], []
    for group, ids in enumerate(owned):
        originals.append(empty_rows(blocks, group, len(ids)))
        blocks.read(group, ids, originals[group])
        values = np.random.default_rng(group).integers(0, 256, originals[group].shape, np.uint8)
        written.append(values)
        blocks.write(group, ids, values)
    for group, ids in enumerate(owned):
        payload = blocks.layout.groups[group].payload_bytes
        read = empty_rows(blocks, group, len(ids))
        blocks.read(group, ids, read)
        assert np.array_equal(read[:, :payload], written[group][:, :payload])
        assert (read[:, payload:] == 7).all()
    assert not torch.equal(raw, before)
    for group, ids in enumerate(owned):
        blocks.write(group, ids, originals[group])
    assert torch.equal(raw, before)
