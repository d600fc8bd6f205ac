"""Copying the blocks of layers from and to rows of bytes, on the host and on a device.

Memory of the host is copied by numpy over the tensors' own storage: on one thread it is as fast
as torch on reads and several times as fast on writes, it releases the interpreter lock while it
copies, and it starts no second OpenMP team beside the engine's. Memory of a device is copied by
torch; that path is kept short, and its indexing is tested on host tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvtide.engines.vllm.segments import Segment

Bytes = npt.NDArray[np.uint8]

_TORCH_UNITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer's tensor, where its blocks lie, and how its kernel packs them."""

    tensor: torch.Tensor
    segment: Segment
    trait: str


@dataclass(frozen=True, slots=True)
class Run:
    """Layers that follow each other at one distance in one storage, copied as one."""

    tensor: torch.Tensor
    segment: Segment
    count: int = 1
    layer_stride: int = 0

    @property
    def dims(self) -> tuple[tuple[int, int], ...]:
        """Sizes and strides (bytes) of blocks, their parts, layers, and a layer's own dimensions.

        Parts and layers have none where there is only one: it would cost time for every block.
        """
        segment = self.segment
        outer = ((segment.num_parts, segment.part_stride), (self.count, self.layer_stride))
        return (
            (segment.num_blocks, segment.block_stride),
            *(dim for dim in outer if dim[0] > 1),
            *zip(segment.shape, segment.strides, strict=True),
        )

    def joined(self, layer: Layer) -> Run | None:
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


class Rows(Protocol):
    """The blocks of a run of layers, as rows of bytes, one for each part of a block."""

    def read(self, ids: Any, out: Any) -> None:
        """Copy the blocks ``ids`` into the rows of ``out``."""

    def write(self, ids: Any, data: Any) -> None:
        """Copy the rows of ``data`` into the blocks ``ids``."""


class HostRows:
    """Blocks in host memory, without a copy of torch's: a numpy view of the storage."""

    def __init__(self, run: Run) -> None:
        storage = torch.empty(0, dtype=torch.uint8).set_(run.tensor.untyped_storage())
        shape, strides = zip(*run.dims, strict=True)
        self._unit = np.dtype(f"u{run.segment.unit}")
        self._blocks = np.ndarray(
            shape,
            dtype=self._unit,
            buffer=storage.numpy(),
            offset=run.segment.start,
            strides=strides,
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
        # Only splits dimensions, so it stays a view whatever the distance of the rows.
        return rows.view(self._unit).reshape(-1, *self._blocks.shape[1:])


class TorchRows:
    """Blocks wherever torch has them; rows are uint8 tensors on the same device."""

    def __init__(self, run: Run) -> None:
        unit = run.segment.unit
        shape, strides = zip(*run.dims, strict=True)
        self._unit = _TORCH_UNITS[unit]
        self._blocks = torch.empty(0, dtype=self._unit, device=run.tensor.device).set_(
            run.tensor.untyped_storage(),
            run.segment.start // unit,
            shape,
            tuple(stride // unit for stride in strides),
        )

    def read(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        """Copy the blocks ``ids`` into the rows of ``out``."""
        out.copy_(self._blocks.index_select(0, ids).view(len(out), -1).view(torch.uint8))

    def write(self, ids: torch.Tensor, data: torch.Tensor) -> None:
        """Copy the rows of ``data`` into the blocks ``ids``."""
        rows = data.contiguous().view(self._unit)
        self._blocks.index_copy_(0, ids, rows.view(len(ids), *self._blocks.shape[1:]))


def place_rows(layers: Sequence[Layer]) -> list[tuple[int, int, Rows]]:
    """Return what copies a group's layers: ``(low, high, rows)`` with their span of the payload."""
    runs: list[Run] = []
    for layer in layers:
        joined = runs[-1].joined(layer) if runs else None
        if joined is not None:
            runs[-1] = joined
        else:
            runs.append(Run(layer.tensor, layer.segment))
    placed: list[tuple[int, int, Rows]] = []
    low = 0
    for run in runs:
        high = low + run.count * run.segment.num_bytes
        rows = HostRows if run.tensor.device.type == "cpu" else TorchRows
        placed.append((low, high, rows(run)))
        low = high
    return placed


def copy_rows(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy rows between host and device without waiting for it."""
    # Row by row, because torch copies rows with gaps between host and device through a hidden
    # buffer and without overlap, while one row is a plain transfer from or to pinned memory.
    for row, into in zip(source, target, strict=True):
        into.copy_(row, non_blocking=True)
