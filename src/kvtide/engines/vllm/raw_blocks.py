"""Blocks as vLLM's in-tree Mooncake connector stores them: raw memory, whichever layer it is for.

That connector does not ask which layers a group has. A block's value is, for every *region* of the
KV cache, the bytes between the block and the next one, paddings and other groups' layers included;
so it has one form for all groups. A region is what the connector takes a layer's tensor to begin:
its whole allocation, where blocks are the outermost dimension of that; a head, where a block's
heads lie apart; else the memory from the tensor's first byte on. A region that begins where another
one does is not counted again.

Where blocks of regions found in this way overlap, or do not hold what a layer has in a block, the
connector stores and loads bytes that are not the block's. Such a cache is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from typing import Any

import torch

from kvtide.engines.vllm.rows import Layer
from kvtide.engines.vllm.segments import Segment

_REMEDY = (
    "so what it stores is not this model's KV cache. Leave key_format at 'kvtide', whose pool is "
    "not shared with that connector"
)


@dataclass(frozen=True, slots=True)
class _Region:
    """Equally long blocks, one behind the other: ``start`` is an address, sizes are in bytes."""

    tensor: torch.Tensor
    start: int
    block_bytes: int

    def end(self, num_blocks: int) -> int:
        return self.start + num_blocks * self.block_bytes

    def is_inside(self, num_blocks: int) -> bool:
        storage = self.tensor.untyped_storage()
        return bool(self.end(num_blocks) <= storage.data_ptr() + storage.nbytes())

    def layer(self, num_blocks: int) -> Layer:
        """Return the region as what is copied per block."""
        offset = self.start - self.tensor.untyped_storage().data_ptr()
        unit = gcd(8, offset, self.block_bytes)
        segment = Segment(
            start=offset,
            num_blocks=num_blocks,
            block_stride=self.block_bytes,
            shape=(self.block_bytes // unit,),
            strides=(unit,),
            unit=unit,
            order=(),
        )
        return Layer(self.tensor, segment, "")


def find_raw_blocks(
    kv_caches: Mapping[str, Any],
    kv_cache_config: Any,
    group_ids: Sequence[int],
    traits: Mapping[str, str],  # noqa: ARG001 - that connector does not ask for them
    num_parts: Sequence[int],  # noqa: ARG001 - nor does it divide blocks in this form
) -> tuple[list[list[Layer]], list[str]]:
    """Return per group the regions that make up its blocks, and what stands against it.

    The order is that of ``kv_caches``, as the engine registers them.
    """
    num_blocks = int(kv_cache_config.num_blocks)
    names = {name for i in group_ids for name in kv_cache_config.kv_cache_groups[i].layer_names}
    faults = list(_faults_of_config(kv_cache_config, names - set(kv_caches)))
    tensors: list[torch.Tensor] = []
    regions: dict[int, _Region] = {}
    for name, cache in kv_caches.items():
        if name not in names:
            continue
        try:
            tensor = _by_block(cache, num_blocks)
            for region in _regions_of(tensor, num_blocks):
                regions.setdefault(region.start, region)
        except ValueError as error:
            faults.append(
                f"vLLM's in-tree connector cannot take the KV cache of layer {name}: {error}, "
                f"{_REMEDY}"
            )
            continue
        tensors.append(tensor)
    found = list(regions.values())
    faults += _faults_of_regions(found, tensors, num_blocks)
    layers = [region.layer(num_blocks) for region in found]
    return [list(layers) for _ in group_ids], faults


def _faults_of_config(kv_cache_config: Any, missing: set[str]) -> Iterator[str]:
    if getattr(kv_cache_config, "hisparse_host_num_blocks", None) is not None:
        yield (
            "a KV cache with blocks in host memory is laid out otherwise by vLLM's in-tree "
            "connector: leave key_format at 'kvtide', or hisparse_config out of --attention-config"
        )
    if missing:
        yield f"layers {', '.join(sorted(missing))} registered no KV cache"


def _by_block(cache: Any, num_blocks: int) -> torch.Tensor:
    """Return a layer's tensor with the engine's blocks as its first dimension.

    States may come as several tensors over one allocation: the first one stands for them.
    """
    tensor = cache[0] if isinstance(cache, list) and cache else cache
    if not isinstance(tensor, torch.Tensor):
        raise ValueError("it was not registered as a tensor")  # noqa: TRY004 - vLLM's value
    if tensor.shape[0] == num_blocks:
        return tensor
    if tensor.shape[0] % num_blocks:
        shape = tuple(tensor.shape)
        raise ValueError(f"the first dimension of {shape} does not count {num_blocks} blocks")
    return tensor.unflatten(0, (num_blocks, -1))


def _regions_of(tensor: torch.Tensor, num_blocks: int) -> Iterator[_Region]:
    block_bytes = tensor.stride(0) * tensor.element_size()
    if not _is_dense(tensor[0]):
        for head in range(tensor.shape[1]):
            part = tensor[:, head]
            if not _is_dense(part[0]):
                raise ValueError("neither a block nor the heads of a block lie together")
            yield _Region(tensor, part.data_ptr(), block_bytes)
    elif block_bytes * num_blocks == tensor.untyped_storage().nbytes():
        yield _Region(tensor, tensor.untyped_storage().data_ptr(), block_bytes)
    else:
        yield _Region(tensor, tensor.data_ptr(), block_bytes)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether the elements fill one stretch of memory, in whatever order of dimensions."""
    expected = 1
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    for size, stride in sorted(dims, key=lambda dim: dim[1]):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _faults_of_regions(
    regions: Sequence[_Region], tensors: Sequence[torch.Tensor], num_blocks: int
) -> Iterator[str]:
    harms = list(_harms(regions, tensors, num_blocks))
    if harms:
        yield f"vLLM's in-tree connector would {' and '.join(harms)}, {_REMEDY}"


def _harms(
    regions: Sequence[_Region], tensors: Sequence[torch.Tensor], num_blocks: int
) -> Iterator[str]:
    ordered = sorted(regions, key=lambda region: region.start)
    if any(not region.is_inside(num_blocks) for region in ordered):
        yield "read past the KV cache's memory"
    if any(one.end(num_blocks) > other.start for one, other in pairwise(ordered)):
        yield "mix the bytes of different blocks"
    if any(not _is_held(tensor, regions) for tensor in tensors):
        yield "leave out bytes of some layers"


def _is_held(tensor: torch.Tensor, regions: Sequence[_Region]) -> bool:
    """Tell whether each block of a layer, or each of its heads, lies in that block of a region."""
    parts = [tensor] if _is_dense(tensor[0]) else [tensor[:, i] for i in range(tensor.shape[1])]
    return all(any(_holds(region, part) for region in regions) for part in parts)


def _holds(region: _Region, part: torch.Tensor) -> bool:
    item = part.element_size()
    if region.block_bytes != part.stride(0) * item:
        return False
    first = part.data_ptr() - region.start
    room = region.block_bytes - part[0].numel() * item
    return bool(0 <= first <= room)
