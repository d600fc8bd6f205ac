"""A rank's KV cache as rows of bytes: what staging reads from and loads write to.

A block's value is the concatenation of its layers' bytes, each in memory order without gaps. Two
engines whose layouts differ only in where blocks lie therefore write the same bytes. (Another form,
vLLM's own, is made by :mod:`kvtide.engines.vllm.raw_blocks`.)

On a CUDA device blocks are copied on a stream of kvtide's own. Its indexing is tested on host
tensors, but the streams, the fence and the pinning have not run in the project's own tests, which
have no device.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvtide.core.layout import GroupLayout, StoreLayout
from kvtide.engines.vllm import features
from kvtide.engines.vllm.rows import Bytes, Layer, copy_rows, place_rows
from kvtide.engines.vllm.segments import IndivisibleHeadsError, Segment, find_segment
from kvtide.errors import UnsupportedModelError

logger = logging.getLogger(__name__)

BlockFinder = Callable[
    [Mapping[str, Any], Any, Sequence[int], Mapping[str, str], Sequence[int]],
    tuple[list[list[Layer]], list[str]],
]
"""Takes what :class:`TensorBlocks` takes; returns per group what is copied of a block, and faults.
"""

BlockIds = Sequence[int] | npt.NDArray[np.integer[Any]]

DEVICE_STAGING_BYTES = 32 * 1024 * 1024
"""The most device memory a copy takes at a time, beside what the engine planned for."""


_REPORT = "Run this model without kvtide and report the layer's layout"
_REMOVE = (
    "Remove store_tp_size from kv_connector_extra_config, and run with a pool for engines of this "
    "tensor parallel size alone"
)


class _HostFence:
    """Host work is done when the call that did it returned."""

    def wait(self) -> None:
        """Return at once."""


class _DeviceFence:
    """A recorded event of the stream that is current when it is made, or of ``stream``."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self._event = torch.cuda.Event(blocking=True)  # a waiting thread sleeps, it does not spin
        self._event.record(stream)

    def wait(self) -> None:
        """Block until the device has done what was enqueued before the fence."""
        self._event.synchronize()


def find_layers(
    kv_caches: Mapping[str, Any],
    kv_cache_config: Any,
    group_ids: Sequence[int],
    traits: Mapping[str, str],
    num_parts: Sequence[int],
) -> tuple[list[list[Layer]], list[str]]:
    """Return per group what its layers have of a block, and what stands against a layer."""
    planned = {
        name: tensor.block_stride
        for tensor in kv_cache_config.kv_cache_tensors
        for name in tensor.layers
    }
    groups: list[list[Layer]] = []
    faults: list[str] = []
    for group_id, count in zip(group_ids, num_parts, strict=True):
        group = kv_cache_config.kv_cache_groups[group_id]
        find = partial(
            _segment_of,
            num_blocks=kv_cache_config.num_blocks,
            num_parts=count,
            num_heads=_heads_of(group.kv_cache_spec),
        )
        found: dict[tuple[int, Segment], Layer] = {}
        for name in group.layer_names:
            try:
                tensor = _one_tensor(kv_caches.get(name))
                segment = find(tensor, planned.get(name))
            except ValueError as error:
                remedy = _REMOVE if isinstance(error, IndivisibleHeadsError) else _REPORT
                faults.append(f"the KV cache of layer {name} cannot be used: {error}. {remedy}")
                continue
            # A layer that reuses another's KV cache has that layer's tensor: its bytes count once.
            key = (tensor.untyped_storage().data_ptr(), segment)
            found.setdefault(key, Layer(tensor, segment, traits.get(name, "")))
        groups.append(list(found.values()))
    return groups, faults


def _one_tensor(value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise ValueError("it was not registered as one tensor")  # noqa: TRY004 - vLLM's value
    return value


def _heads_of(spec: Any) -> int:
    """Return how many heads a rank has of a group's layers; each has as many if they are cut."""
    return int(getattr(features.each_layer_spec(spec)[0], "num_kv_heads", 1))


def _segment_of(
    tensor: torch.Tensor,
    block_stride: int | None,
    *,
    num_blocks: int,
    num_parts: int = 1,
    num_heads: int = 1,
) -> Segment:
    item = tensor.element_size()
    strides = [stride * item for stride in tensor.stride()]
    start = tensor.storage_offset() * item
    segment = find_segment(
        tensor.shape,
        strides,
        start=start,
        item_bytes=item,
        num_blocks=num_blocks,
        block_stride=block_stride,
        num_parts=num_parts,
        num_heads=num_heads,
    )
    if segment.end > tensor.untyped_storage().nbytes():
        raise ValueError(f"its blocks end past its memory: {segment}")
    return segment


class TensorBlocks:
    """The KV cache of one rank, by group and block id.

    ``layout`` says what one block of each group holds, in the order of ``group_ids``; ``read``
    and ``write`` take the index of a group in that order, and a row for each part of each block.
    They may be called from any thread and have copied everything when they return. The caller sees
    to it that the blocks are its own: pinned and fenced before a read, freshly allocated before a
    write.
    """

    def __init__(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        kv_cache_config: Any,
        group_ids: Sequence[int],
        traits: Mapping[str, str] | None = None,
        *,
        num_parts: Sequence[int] | None = None,
        find: BlockFinder = find_layers,
    ) -> None:
        """Find the blocks of the groups ``group_ids`` in the tensors vLLM registered.

        ``traits`` is :func:`features.attention_traits` of the layers. ``num_parts`` says, by group,
        in how many parts its heads are stored (default: one). ``find`` says what makes up a block's
        bytes. A group may have no layers here.

        Raises:
            UnsupportedModelError: a layer has no tensor, lies on a device kvtide cannot copy
                from, or is laid out in a way that shows no blocks; all such layers are named.
        """
        self._num_blocks = int(kv_cache_config.num_blocks)
        num_parts = num_parts if num_parts is not None else [1] * len(group_ids)
        layers, faults = find(kv_caches, kv_cache_config, group_ids, traits or {}, num_parts)
        devices = {layer.tensor.device for group in layers for layer in group}
        faults += _device_faults(devices)
        if faults:
            raise UnsupportedModelError(faults)
        self.layout = StoreLayout(
            tuple(
                _group_layout(kv_cache_config.kv_cache_groups[group_id].kv_cache_spec, found)
                for group_id, found in zip(group_ids, layers, strict=True)
            )
        )
        self._rows = [place_rows(group) for group in layers]
        self._device = devices.pop() if devices else torch.device("cpu")
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._registered: list[Bytes] = []

    def record(self) -> _HostFence | _DeviceFence:
        """Return a fence after all work the calling thread has enqueued so far.

        Called on the engine's thread, whose current stream is the one that computes.
        """
        return _HostFence() if self._stream is None else _DeviceFence()

    def adopt(self, buffer: Bytes) -> None:
        """Make ``buffer`` (one dimension, to be kept for good) fast to copy to and from.

        Where it cannot be pinned, copies work all the same, only slower.
        """
        if self._stream is None:
            return
        code = int(torch.cuda.cudart().cudaHostRegister(buffer.ctypes.data, buffer.nbytes, 0))
        if code == 0:
            self._registered.append(buffer)
        else:
            logger.warning(
                "staging memory of %d bytes was not pinned (CUDA error %d): copies are slower; "
                "raise the limit on locked memory (ulimit -l)",
                buffer.nbytes,
                code,
            )

    def close(self) -> None:
        """Unpin the adopted buffers, so that they can be freed. Calling it twice is harmless."""
        while self._registered:
            torch.cuda.cudart().cudaHostUnregister(self._registered.pop().ctypes.data)

    def read(self, group_id: int, block_ids: BlockIds, out: Bytes) -> None:
        """Copy blocks into the rows of ``out`` (one each part, at least the payload's bytes).

        Bytes of a row beyond the payload are left as they are.

        Raises:
            IndexError: a block id is outside the KV cache; nothing was copied.
        """
        ids, rows = self._checked(group_id, block_ids, out)
        if self._stream is None:
            for low, high, layer in self._rows[group_id]:
                layer.read(ids, rows[:, low:high])
            return
        self._device_copy(group_id, ids, rows, to_host=True)

    def write(self, group_id: int, block_ids: BlockIds, data: Bytes) -> None:
        """Copy the rows of ``data`` (one each part, at least the payload's bytes) into blocks.

        Raises:
            IndexError: a block id is outside the KV cache; nothing was copied.
        """
        ids, rows = self._checked(group_id, block_ids, data)
        if self._stream is None:
            for low, high, layer in self._rows[group_id]:
                layer.write(ids, rows[:, low:high])
            return
        self._device_copy(group_id, ids, rows, to_host=False)

    def _checked(
        self, group_id: int, block_ids: BlockIds, rows: Bytes
    ) -> tuple[npt.NDArray[np.int64], Bytes]:
        ids = np.asarray(block_ids, dtype=np.int64)
        group = self.layout.groups[group_id]
        payload, num_rows = group.payload_bytes, len(ids) * group.values_per_block
        if rows.ndim != 2 or len(rows) < num_rows or rows.shape[1] < payload:  # noqa: PLR2004
            raise ValueError(f"{num_rows} values of {payload} bytes do not fit in {rows.shape}")
        # A negative id would address from the end, as numpy has it: another block's bytes.
        if ids.size and not (ids.min() >= 0 and ids.max() < self._num_blocks):
            raise IndexError(f"block ids {ids.min()}..{ids.max()} are outside the KV cache")
        return ids, rows[:num_rows, :payload]

    def _device_copy(
        self, group_id: int, ids: npt.NDArray[np.int64], rows: Bytes, *, to_host: bool
    ) -> None:
        """Copy through a bounded buffer on the device, one transfer per row of the host."""
        host = torch.from_numpy(rows)
        per_block = self.layout.groups[group_id].values_per_block
        step = max(DEVICE_STAGING_BYTES // max(rows.shape[1] * per_block, 1), 1)
        stream: AbstractContextManager[Any] = nullcontext()
        if self._stream is not None:
            stream = torch.cuda.stream(self._stream)
        with stream:
            for first in range(0, len(ids), step):
                part = host[first * per_block : (first + step) * per_block]
                places = torch.from_numpy(ids[first : first + step]).to(self._device)
                staged = torch.empty(part.shape, dtype=torch.uint8, device=self._device)
                if not to_host:
                    copy_rows(part, staged)
                for low, high, layer in self._rows[group_id]:
                    copy = layer.read if to_host else layer.write
                    copy(places, staged[:, low:high])
                if to_host:
                    copy_rows(staged, part)
            if self._stream is not None:
                _DeviceFence(self._stream).wait()


def _device_faults(devices: set[torch.device]) -> list[str]:
    if not devices:  # every layer has a fault of its own
        return []
    if len(devices) == 1 and next(iter(devices)).type in ("cpu", "cuda"):
        return []
    names = ", ".join(sorted(str(device) for device in devices))
    return [f"the KV cache lies on {names}: kvtide copies from the CPU or from one CUDA device"]


def _group_layout(spec: Any, layers: Sequence[Layer]) -> GroupLayout:
    arrangements = [
        {
            "order": layer.segment.order,
            "dtype": str(layer.tensor.dtype).removeprefix("torch."),
            # State layers tell nothing, yet their bytes mean something else on another kind of
            # device: vLLM's CPU kernels for gated delta nets keep the matrices transposed.
            "kernel": layer.trait or layer.tensor.device.type,
        }
        for layer in layers
    ]
    runs = [(json.dumps(run), len(list(same))) for run, same in groupby(arrangements)]
    return GroupLayout(
        block_size=spec.block_size,
        values_per_block=layers[0].segment.num_parts if layers else 0,
        segment_bytes=tuple(layer.segment.num_bytes for layer in layers),
        description="; ".join(f"{count} x {text}" for text, count in runs),
    )
