"""Reading and writing KV cache blocks in the layouts vLLM makes, byte for byte."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvtide.core.layout import common_layout
from kvtide.engines.vllm import rows as rows_module
from kvtide.engines.vllm import tensors
from kvtide.engines.vllm.tensors import TensorBlocks
from kvtide.errors import UnsupportedModelError
from tests.engines.vllm.configs import attention_spec, cache_config, state_spec
from tests.engines.vllm.layouts import ALL_LAYOUTS, planned

NUM_BLOCKS = 64


def allocate(config: Any, layout: str = "LBHNC", kernel: int | None = None) -> Any:
    """Return the engine's own views, over one allocation of random bytes.

    Groups overlay each other from offset 0, as the engine lays them.
    """
    from vllm.v1.kv_cache_interface import create_kv_cache_views
    from vllm.v1.kv_cache_layout import KVCacheLayout

    raw = torch.from_numpy(
        np.random.default_rng(1).integers(0, 255, allocation_bytes(config), dtype=np.uint8)
    ).view(torch.int8)
    caches = {}
    for placed, group in zip(config.kv_cache_tensors, config.kv_cache_groups, strict=True):
        views = create_kv_cache_views(
            raw, group.kv_cache_spec, config.num_blocks, KVCacheLayout[layout], placed, kernel
        )
        caches.update(zip(placed.layers, views, strict=True))
    return raw, caches


def allocation_bytes(config: Any) -> int:
    """Return the size of the one allocation behind all groups."""
    return max(tensor.size for tensor in config.kv_cache_tensors)


def random_rows(blocks: TensorBlocks, count: int, group: int = 0, tail: int = 24) -> Any:
    """Return ``count`` rows with room for a tag behind the payload."""
    width = blocks.layout.groups[group].payload_bytes + tail
    return np.random.default_rng(2 + group).integers(0, 255, (count, width), dtype=np.uint8)


def round_trip(blocks: TensorBlocks, raw: torch.Tensor, group: int = 0) -> None:
    """Write random blocks, and check what is read back and what was left alone."""
    ids = [63, 1, 17, 40]
    before = raw.clone()
    keep = random_rows(blocks, 1, group)
    payload = blocks.layout.groups[group].payload_bytes
    untouched = np.zeros((NUM_BLOCKS - len(ids), keep.shape[1]), dtype=np.uint8)
    others = [number for number in range(NUM_BLOCKS) if number not in ids]
    blocks.read(group, others, untouched)
    data = random_rows(blocks, len(ids), group)
    blocks.write(group, ids, data)
    out = np.full_like(data, 7)
    blocks.read(group, ids, out)
    assert np.array_equal(out[:, :payload], data[:, :payload])
    assert (out[:, payload:] == 7).all(), "bytes beyond the payload were written"
    after = np.zeros_like(untouched)
    blocks.read(group, others, after)
    assert np.array_equal(after, untouched), "another block was written"
    changed = int((before != raw).sum())
    assert payload * len(ids) * 0.9 < changed <= payload * len(ids)


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@pytest.mark.parametrize("kind", ["FullAttentionSpec", "MLAAttentionSpec"])
def test_every_layout_of_the_engine_round_trips(layout: str, kind: str) -> None:
    """Attention and latent caches, in every order of dimensions the engine knows."""
    config = planned(attention_spec(kind), 3, layout)
    raw, caches = allocate(config, layout)
    round_trip(TensorBlocks(caches, config, [0]), raw)


def test_a_row_is_the_layers_blocks_one_after_the_other() -> None:
    """The payload is what plain indexing of each layer's tensor gives, in the group's order."""
    config = cache_config((attention_spec(), 3))
    _, caches = allocate(config)
    blocks = TensorBlocks(caches, config, [0])
    out = random_rows(blocks, 1, tail=0)
    blocks.read(0, [5], out)
    names = config.kv_cache_groups[0].layer_names
    expected = b"".join(
        caches[name][5].contiguous().view(torch.uint8).numpy().tobytes() for name in names
    )
    assert out.tobytes() == expected
    assert blocks.layout.groups[0].segment_bytes == (8192,) * 3
    assert blocks.layout.groups[0].payload_bytes == 3 * 8192


def test_padded_pages_keep_their_padding() -> None:
    """Where a page is longer than its content, the rest of it is neither read nor written."""
    spec = attention_spec("MLAAttentionSpec", page_size_padded=40_960)
    config = cache_config((spec, 2))
    raw, caches = allocate(config)
    blocks = TensorBlocks(caches, config, [0])
    assert blocks.layout.groups[0].segment_bytes == (36_864,) * 2
    round_trip(blocks, raw)


def test_kernel_blocks_are_joined_to_the_managers_blocks() -> None:
    """Where a backend splits blocks finer, a block is still one block."""
    config = cache_config((attention_spec(block_size=64), 2))
    raw, caches = allocate(config, kernel=16)
    assert next(iter(caches.values())).shape[0] == 4 * NUM_BLOCKS
    round_trip(TensorBlocks(caches, config, [0]), raw)


def test_groups_that_overlay_each_other_keep_apart_by_block() -> None:
    """Groups share one allocation; a block id belongs to one of them at a time."""
    config = cache_config((attention_spec(), 2), (attention_spec(), 2), (attention_spec(), 2))
    raw, caches = allocate(config)
    blocks = TensorBlocks(caches, config, [0, 2])
    assert len(blocks.layout.groups) == 2
    for group in range(2):
        round_trip(blocks, raw, group)


def test_keys_before_values_round_trip() -> None:
    """A backend that keeps all keys before all values gives two pieces per block."""
    config = cache_config((attention_spec(), 1))
    raw = torch.randint(-128, 127, (NUM_BLOCKS * 8192,), dtype=torch.int8)
    tensor = raw.view(torch.bfloat16).view(2, NUM_BLOCKS, 32, 2, 32)
    name = config.kv_cache_groups[0].layer_names[0]
    round_trip(TensorBlocks({name: tensor}, config, [0]), raw)


def test_odd_sizes_round_trip() -> None:
    """Blocks of an odd number of bytes at odd places are copied byte by byte."""
    config = cache_config((attention_spec(), 1))
    config.kv_cache_tensors[0].block_stride = 37
    raw = torch.randint(-128, 127, (NUM_BLOCKS * 37 + 5,), dtype=torch.int8)
    tensor = raw[5:].view(NUM_BLOCKS, 37)[:, :33]
    name = config.kv_cache_groups[0].layer_names[0]
    round_trip(TensorBlocks({name: tensor}, config, [0]), raw)


def test_a_layer_that_shares_anothers_cache_counts_once() -> None:
    """Layers without a KV cache of their own add no bytes."""
    config = cache_config((attention_spec(), 2))
    raw, caches = allocate(config)
    caches["shared"] = next(iter(caches.values()))
    config.kv_cache_groups[0].layer_names.append("shared")
    blocks = TensorBlocks(caches, config, [0])
    assert len(blocks.layout.groups[0].segment_bytes) == 2
    round_trip(blocks, raw)


def test_layers_of_one_allocation_are_copied_as_one() -> None:
    """Equal layers at one distance are one copy; what breaks the pattern starts another."""
    config = cache_config((attention_spec(), 6))
    _, caches = allocate(config)
    blocks = TensorBlocks(caches, config, [0])
    assert len(blocks._rows[0]) == 1
    names = config.kv_cache_groups[0].layer_names
    caches[names[2]] = caches[names[2]].clone()
    names[4], names[5] = names[5], names[4]
    mixed = TensorBlocks(caches, config, [0])
    assert [high - low for low, high, _ in mixed._rows[0]] == [2 * 8192, 8192, 2 * 8192, 8192]
    out = random_rows(mixed, 1, tail=0)
    mixed.read(0, [9], out)
    tensors_in_order = [caches[name][9].contiguous().view(torch.uint8) for name in names]
    assert out.tobytes() == b"".join(tensor.numpy().tobytes() for tensor in tensors_in_order)


def layout_of(layout: str, traits: str = "", **spec: Any) -> Any:
    """Return the layout two layers of these settings have."""
    config = planned(attention_spec(**spec), 2, layout)
    _, caches = allocate(config, layout)
    return TensorBlocks(caches, config, [0], dict.fromkeys(caches, traits)).layout


def test_equal_bytes_are_equal_layouts() -> None:
    """Where only the places of blocks differ, ranks and engines agree."""
    assert common_layout([layout_of("LBHNC"), layout_of("BLHNC"), layout_of("LHBNC")]) is not None
    assert common_layout([layout_of("LBNHC"), layout_of("BLNHC")]) is not None


def test_different_bytes_are_different_layouts() -> None:
    """The order of heads and tokens, the type, the size and the kernel's packing all count."""
    layouts = [
        layout_of("LBHNC"),
        layout_of("LBNHC"),
        layout_of("LBHNC", dtype=torch.float16),
        layout_of("LBHNC", block_size=64),
        layout_of("LBHNC", "CPU_ATTN/amx"),
        layout_of("LBHNC", "CPU_ATTN/vec"),
    ]
    described = [repr(layout.describe()) for layout in layouts]
    assert len(set(described)) == len(described)


def test_the_kind_of_device_counts_where_a_kernel_tells_nothing() -> None:
    """Layers of states have no attention backend, but their packing differs by device."""
    config = cache_config((state_spec(), 2))
    _, caches = allocate(config)
    description = TensorBlocks(caches, config, [0]).layout.groups[0].description
    assert '"kernel": "cpu"' in description


def test_a_description_does_not_grow_with_the_number_of_layers() -> None:
    """Equal layers are described once, with their number; no layer is named."""
    config = cache_config((attention_spec(), 48))
    _, caches = allocate(config)
    description = TensorBlocks(caches, config, [0]).layout.groups[0].description
    assert len(description) < 200
    assert description.startswith("48 x ")
    assert "layers" not in description


@pytest.mark.parametrize("ids", [[-1], [NUM_BLOCKS], [0, 1, 10**6]])
def test_ids_outside_the_cache_copy_nothing(ids: list[int]) -> None:
    """A wrong id is an error of the caller, and no block is touched."""
    config = cache_config((attention_spec(), 2))
    raw, caches = allocate(config)
    blocks = TensorBlocks(caches, config, [0])
    before = raw.clone()
    for copy in (blocks.read, blocks.write):
        with pytest.raises(IndexError, match="outside the KV cache"):
            copy(0, ids, random_rows(blocks, len(ids)))
    assert torch.equal(before, raw)


def test_rows_too_short_are_refused() -> None:
    """A slab row that cannot hold a block is an error, not a short block."""
    config = cache_config((attention_spec(), 2))
    _, caches = allocate(config)
    blocks = TensorBlocks(caches, config, [0])
    with pytest.raises(ValueError, match="do not fit"):
        blocks.read(0, [1], random_rows(blocks, 1, tail=-1))
    with pytest.raises(ValueError, match="do not fit"):
        blocks.read(0, [1, 2], random_rows(blocks, 1))


def test_no_blocks_is_no_copy() -> None:
    """An empty list of blocks is fine and does nothing."""
    config = cache_config((attention_spec(), 2))
    raw, caches = allocate(config)
    before = raw.clone()
    blocks = TensorBlocks(caches, config, [0])
    blocks.read(0, [], random_rows(blocks, 0))
    blocks.write(0, [], random_rows(blocks, 0))
    assert torch.equal(before, raw)


def test_all_layers_that_cannot_be_used_are_named() -> None:
    """Missing tensors, lists of tensors and tensors without blocks are told at once."""
    config = cache_config((attention_spec(), 4))
    _, caches = allocate(config)
    names = config.kv_cache_groups[0].layer_names
    del caches[names[0]]
    caches[names[1]] = [caches[names[1]]]
    caches[names[2]] = torch.zeros(7, 5)
    with pytest.raises(UnsupportedModelError) as caught:
        TensorBlocks(caches, config, [0])
    assert [name for name in names if any(name in fault for fault in caught.value.faults)] == (
        names[:3]
    )


def test_a_device_that_is_not_known_is_refused() -> None:
    """Memory kvtide cannot copy from is refused at start."""
    config = cache_config((attention_spec(), 1))
    name = config.kv_cache_groups[0].layer_names[0]
    tensor = torch.zeros(NUM_BLOCKS, 2, 32, 64, dtype=torch.bfloat16)
    segment = tensors._segment_of(tensor, 8192, num_blocks=NUM_BLOCKS)
    assert segment.num_bytes == 8192
    assert "meta" in tensors._device_faults({torch.device("meta")})[0]
    assert not tensors._device_faults(set()), "then every layer has a fault of its own"
    assert not tensors._device_faults({torch.device("cuda:0")})
    assert tensors._device_faults({torch.device("cuda:0"), torch.device("cuda:1")})
    TensorBlocks({name: tensor}, config, [0])


def test_host_copies_start_no_thread_team() -> None:
    """Copies on other threads leave the engine's thread count and torch's alone."""
    config = cache_config((attention_spec(), 4))
    _, caches = allocate(config)
    blocks = TensorBlocks(caches, config, [0])
    settings = (torch.get_num_threads(), torch.get_num_interop_threads())

    def count() -> int:
        with Path("/proc/self/status").open() as status:
            return next(int(line.split()[1]) for line in status if line.startswith("Threads"))

    before, during = count(), []

    def work() -> None:
        rows = random_rows(blocks, 64)
        for _ in range(20):
            blocks.read(0, range(64), rows)
            blocks.write(0, range(64), rows)
        during.append(count())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert during[0] <= before + 1
    assert (torch.get_num_threads(), torch.get_num_interop_threads()) == settings


def test_host_work_is_done_at_its_fence() -> None:
    """On the CPU a fence is passed at once, and adopting memory changes nothing."""
    config = cache_config((attention_spec(), 1))
    _, caches = allocate(config)
    blocks = TensorBlocks(caches, config, [0])
    buffer = np.full(4096, 7, dtype=np.uint8)
    blocks.adopt(buffer)
    blocks.record().wait()
    assert (buffer == 7).all()
    blocks.close()
    blocks.close()


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_the_devices_indexing_agrees_with_the_hosts(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy made for devices, run on host tensors in small parts, moves the same bytes."""
    config = planned(attention_spec(), 3, layout)
    _, caches = allocate(config, layout)
    host = TensorBlocks(caches, config, [0])
    monkeypatch.setattr(rows_module, "HostRows", rows_module.TorchRows)
    monkeypatch.setattr(tensors, "DEVICE_STAGING_BYTES", 3 * 8192 * 2)
    device = TensorBlocks(caches, config, [0])
    ids = np.array([9, 3, 60, 0, 33])
    rows = random_rows(host, 5)
    device._device_copy(0, ids, rows[:, : 3 * 8192], to_host=False)
    expected, got = np.full_like(rows, 7), np.full_like(rows, 7)
    host.read(0, ids, expected)
    device._device_copy(0, ids, got[:, : 3 * 8192], to_host=True)
    assert np.array_equal(got, expected)
    assert np.array_equal(got[:, : 3 * 8192], rows[:, : 3 * 8192])


def test_pinning_that_fails_is_told_and_survived(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A buffer that cannot be pinned works, with a warning that names the limit."""
    config = cache_config((attention_spec(), 1))
    _, caches = allocate(config)
    blocks = TensorBlocks(caches, config, [0])
    codes = iter([2, 0])
    freed: list[int] = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda *_: next(codes), cudaHostUnregister=freed.append
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(blocks, "_stream", object())
    blocks.adopt(np.zeros(4096, dtype=np.uint8))
    assert "ulimit -l" in caplog.text
    kept = np.zeros(4096, dtype=np.uint8)
    blocks.adopt(kept)
    blocks.close()
    assert freed == [kept.ctypes.data]
