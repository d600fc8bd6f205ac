"""A rank's KV cache as rows of bytes: what staging reads from and loads write to.

A block's value is the concatenation of its layers' bytes, each in memory order without gaps. Two
engines whose layouts differ only in where blocks lie therefore write the same bytes.

Memory of the host is copied by numpy over the tensors' own storage: on one thread it is as fast
as torch on reads and several times as fast on writes, it releases the interpreter lock while it
copies, and it starts no second OpenMP team beside the engine's. Memory of a CUDA device is copied by torch on a stream of
its own. That second path is short and its indexing is tested on host tensors, but its streams
and pinning have not run in the project's own tests, which have no device.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvtide.core.layout import GroupLayout, StoreLayout
from kvtide.engines.vllm.segments import Segment, find_segment
from kvtide.errors import UnsupportedModelError

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]
BlockIds = Sequence[int] | npt.NDArray[np.integer[Any]]

DEVICE_STAGING_BYTES = 32 * 1024 * 1024
"""The most device memory a copy takes at a time, beside what the engine planned for."""

_TORCH_UNITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class _HostFence:
    """Host work is done when the call that did it returned."""

    def wait(self) -> None:
        """Return at once."""


class _DeviceFence:
    """A recorded event of the stream that was current when it was made."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> None:
        """Block until the device has done what was enqueued before the fence."""
        self._event.synchronize()


class _Rows(Protocol):
    """The blocks of a run of layers, as rows of bytes."""

    def read(self, ids: Any, out: Any) -> None: ...
    def write(self, ids: Any, data: Any) -> None: ...


class _HostRows:
    """Blocks in host memory, without a copy of torch's: a numpy view of the storage."""

    def __init__(self, run: _Run) -> None:
        storage = torch.empty(0, dtype=torch.uint8).set_(run.tensor.untyped_storage())
        self._unit = np.dtype(f"u{run.segment.unit}")
        self._blocks = np.ndarray(
            run.shape,
            dtype=self._unit,
            buffer=storage.numpy(),
            offset=run.segment.start,
            strides=run.strides,
        )

    def read(self, ids: npt.NDArray[np.int64], out: Bytes) -> None:
        """Copy the blocks ``ids`` into the rows of ``out``."""
        # One strided copy per block, all its layers: twice as fast as one per layer for all
        # blocks, which jumps between rows.
        for block, row in zip(ids.tolist(), self._shaped(out), strict=True):
            row[...] = self._blocks[block]

    def write(self, ids: npt.NDArray[np.int64], data: Bytes) -> None:
        """Copy the rows of ``data`` into the blocks ``ids``."""
        for block, row in zip(ids.tolist(), self._shaped(data), strict=True):
            self._blocks[block] = row

    def _shaped(self, rows: Bytes) -> npt.NDArray[Any]:
        # Splits the last dimension only, so it stays a view whatever the distance of the rows.
        return rows.view(self._unit).reshape(len(rows), *self._blocks.shape[1:])


class _TorchRows:
    """Blocks wherever torch has them; rows are uint8 tensors on the same device."""

    def __init__(self, run: _Run) -> None:
        unit = run.segment.unit
        self._unit = _TORCH_UNITS[unit]
        self._blocks = torch.empty(0, dtype=self._unit, device=run.tensor.device).set_(
            run.tensor.untyped_storage(),
            run.segment.start // unit,
            run.shape,
            tuple(stride // unit for stride in run.strides),
        )

    def read(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        """Copy the blocks ``ids`` into the rows of ``out``."""
        out.copy_(self._blocks.index_select(0, ids).view(len(ids), -1).view(torch.uint8))

    def write(self, ids: torch.Tensor, data: torch.Tensor) -> None:
        """Copy the rows of ``data`` into the blocks ``ids``."""
        rows = data.contiguous().view(self._unit)
        self._blocks.index_copy_(0, ids, rows.view(len(ids), *self._blocks.shape[1:]))


class TensorBlocks:
    """The KV cache of one rank, by group and block id.

    ``layout`` says what one block of each group holds, in the order of ``group_ids``; ``read``
    and ``write`` take the index of a group in that order. They may be called from any thread and
    have copied everything when they return. The caller sees to it that the blocks are its own:
    pinned and fenced before a read, freshly allocated before a write.
    """

    def __init__(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        kv_cache_config: Any,
        group_ids: Sequence[int],
        traits: Mapping[str, str] | None = None,
    ) -> None:
        """Find the blocks of the groups ``group_ids`` in the tensors vLLM registered.

        ``traits`` is :func:`features.attention_traits` of the layers.

        Raises:
            UnsupportedModelError: a layer has no tensor, lies on a device kvtide cannot copy
                from, or is laid out in a way that shows no blocks; all such layers are named.
        """
        self._num_blocks = int(kv_cache_config.num_blocks)
        layers, faults = _find_layers(kv_caches, kv_cache_config, group_ids, traits or {})
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
        self._rows = [_place_rows(group) for group in layers]
        self._device = devices.pop()
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
        """Copy blocks into the rows of ``out`` (n, at least the group's payload bytes).

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
        """Copy the rows of ``data`` (n, at least the group's payload bytes) into blocks.

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
        payload = self.layout.groups[group_id].payload_bytes
        if rows.ndim != 2 or len(rows) < len(ids) or rows.shape[1] < payload:
            raise ValueError(f"{len(ids)} blocks of {payload} bytes do not fit in {rows.shape}")
        # A negative id would address from the end, as numpy has it: another block's bytes.
        if ids.size and not (ids.min() >= 0 and ids.max() < self._num_blocks):
            raise IndexError(f"block ids {ids.min()}..{ids.max()} are outside the KV cache")
        return ids, rows[: len(ids), :payload]

    def _device_copy(
        self, group_id: int, ids: npt.NDArray[np.int64], rows: Bytes, *, to_host: bool
    ) -> None:
        """Copy through a bounded buffer on the device, one transfer per row of the host."""
        host = torch.from_numpy(rows)
        step = max(DEVICE_STAGING_BYTES // max(rows.shape[1], 1), 1)
        stream: AbstractContextManager[Any] = nullcontext()
        if self._stream is not None:
            stream = torch.cuda.stream(self._stream)
        with stream:
            for first in range(0, len(ids), step):
                part = host[first : first + step]
                places = torch.from_numpy(ids[first : first + step]).to(self._device)
                staged = torch.empty(part.shape, dtype=torch.uint8, device=self._device)
                if not to_host:
                    _copy_rows(part, staged)
                for low, high, layer in self._rows[group_id]:
                    copy = layer.read if to_host else layer.write
                    copy(places, staged[:, low:high])
                if to_host:
                    _copy_rows(staged, part)
            if self._stream is not None:
                self._stream.synchronize()


@dataclass(frozen=True, slots=True)
class _Layer:
    tensor: torch.Tensor
    segment: Segment
    trait: str


def _find_layers(
    kv_caches: Mapping[str, torch.Tensor],
    kv_cache_config: Any,
    group_ids: Sequence[int],
    traits: Mapping[str, str],
) -> tuple[list[list[_Layer]], list[str]]:
    planned = {
        name: tensor.block_stride
        for tensor in kv_cache_config.kv_cache_tensors
        for name in tensor.layers
    }
    groups: list[list[_Layer]] = []
    faults: list[str] = []
    for group_id in group_ids:
        found: dict[tuple[int, Segment], _Layer] = {}
        for name in kv_cache_config.kv_cache_groups[group_id].layer_names:
            try:
                tensor = _one_tensor(kv_caches.get(name))
                segment = _segment_of(tensor, kv_cache_config.num_blocks, planned.get(name))
            except ValueError as error:
                faults.append(
                    f"the KV cache of layer {name} cannot be used: {error}. Run this model "
                    "without kvtide and report the layer's layout"
                )
                continue
            # A layer that reuses another's KV cache has that layer's tensor: its bytes count once.
            key = (tensor.untyped_storage().data_ptr(), segment)
            found.setdefault(key, _Layer(tensor, segment, traits.get(name, "")))
        groups.append(list(found.values()))
    return groups, faults


def _one_tensor(value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise ValueError("it was not registered as one tensor")
    return value


def _segment_of(tensor: torch.Tensor, num_blocks: int, block_stride: int | None) -> Segment:
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
    )
    if segment.end > tensor.untyped_storage().nbytes():
        raise ValueError(f"its blocks end past its memory: {segment}")
    return segment


def _device_faults(devices: set[torch.device]) -> list[str]:
    if len(devices) == 1 and next(iter(devices)).type in ("cpu", "cuda"):
        return []
    names = ", ".join(sorted(str(device) for device in devices)) or "no device"
    return [f"the KV cache lies on {names}: kvtide copies from the CPU or from one CUDA device"]


def _group_layout(spec: Any, layers: Sequence[_Layer]) -> GroupLayout:
    arrangements = [
        {
            "order": layer.segment.order,
            "dtype": str(layer.tensor.dtype).removeprefix("torch."),
            "kernel": layer.trait,
        }
        for layer in layers
    ]
    runs = [(json.dumps(run), len(list(same))) for run, same in groupby(arrangements)]
    return GroupLayout(
        block_size=spec.block_size,
        segment_bytes=tuple(layer.segment.num_bytes for layer in layers),
        description="; ".join(f"{count} x {text}" for text, count in runs),
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """Layers that follow each other at one distance in one storage, copied as one."""

    tensor: torch.Tensor
    segment: Segment
    count: int = 1
    layer_stride: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.segment.num_blocks, self.count, *self.segment.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        return (self.segment.block_stride, self.layer_stride, *self.segment.strides)

    def joined(self, layer: _Layer) -> _Run | None:
        """Return the run with ``layer`` at its end, ``None`` where it does not continue it."""
        if layer.tensor.untyped_storage().data_ptr() != self.tensor.untyped_storage().data_ptr():
            return None
        if replace(layer.segment, start=self.segment.start) != self.segment:
            return None
        distance = layer.segment.start - self.segment.start
        stride = self.layer_stride if self.count > 1 else distance
        if distance != self.count * stride or stride <= 0 or stride % self.segment.unit:
            return None
        return replace(self, count=self.count + 1, layer_stride=stride)


def _place_rows(layers: Sequence[_Layer]) -> list[tuple[int, int, _Rows]]:
    runs: list[_Run] = []
    for layer in layers:
        joined = runs[-1].joined(layer) if runs else None
        if joined is not None:
            runs[-1] = joined
        else:
            runs.append(_Run(layer.tensor, layer.segment))
    placed: list[tuple[int, int, _Rows]] = []
    low = 0
    for run in runs:
        high = low + run.count * run.segment.num_bytes
        rows = _HostRows if run.tensor.device.type == "cpu" else _TorchRows
        placed.append((low, high, rows(run)))
        low = high
    return placed


def _copy_rows(source: torch.Tensor, target: torch.Tensor) -> None:
    # Row by row, because torch copies rows with gaps between host and device through a hidden
    # buffer and without overlap, while one row is a plain transfer from or to pinned memory.
    for row, into in zip(source, target, strict=True):
        into.copy_(row, non_blocking=True)
