"""Copies between a batch's segments and a store's own memory.

``ctypes.memmove`` releases the interpreter lock for the copy and costs 0.3 us a call. Of many small
segments that is most of the cost: where all have one size, numpy copies them in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import memmove
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

_SMALL_BYTES = 4096
"""Up to here a numpy pass beats a call for each segment, by 3 to 5 times at 2 KiB."""
_STEP_BYTES = 1 << 20
"""numpy copies through memory of its own on the way to the destination: it should stay cached."""


def gather(destination: int, addresses: Sequence[int], sizes: Sequence[int]) -> None:
    """Copy the segments, one after the other, to ``destination`` (an address)."""
    if len(sizes) == 1:
        memmove(destination, addresses[0], sizes[0])
        return
    for address, num_bytes in zip(addresses, sizes, strict=True):
        memmove(destination, address, num_bytes)
        destination += num_bytes


def scatter(source: int, addresses: Sequence[int], sizes: Sequence[int]) -> None:
    """Copy from ``source`` (an address) into the segments, one after the other."""
    if len(sizes) == 1:
        memmove(addresses[0], source, sizes[0])
        return
    for address, num_bytes in zip(addresses, sizes, strict=True):
        memmove(address, source, num_bytes)
        source += num_bytes


def gather_values(
    destination: int, addresses: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]
) -> None:
    """Copy values of some segments each, one after the other, to ``destination`` (an address)."""
    size = _common_size(sizes)
    if size is None:
        for value_addresses, value_sizes in zip(addresses, sizes, strict=True):
            gather(destination, value_addresses, value_sizes)
            destination += sum(value_sizes)
        return
    anywhere, offsets = _segments(addresses, size)
    rows = _rows(destination, len(offsets), size, size)
    step = max(1, _STEP_BYTES // size)
    for first in range(0, len(rows), step):
        rows[first : first + step] = anywhere[offsets[first : first + step]]


def scatter_values(
    source: int, addresses: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]
) -> None:
    """Copy from ``source`` (an address) into the segments of values, one after the other."""
    size = _common_size(sizes)
    if size is None:
        for value_addresses, value_sizes in zip(addresses, sizes, strict=True):
            scatter(source, value_addresses, value_sizes)
            source += sum(value_sizes)
        return
    anywhere, offsets = _segments(addresses, size)
    anywhere[offsets] = _rows(source, len(offsets), size, size)


def _common_size(sizes: Sequence[Sequence[int]]) -> int | None:
    """Return the size of every segment, if there is one and it is small."""
    found = set(chain.from_iterable(sizes))
    size = found.pop() if len(found) == 1 else 0
    return size if 0 < size <= _SMALL_BYTES else None


def _segments(
    addresses: Sequence[Sequence[int]], size: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Return ``size`` bytes from every address on, as rows, and which rows the segments are.

    Only the rows of the segments may be touched: what lies between them is somebody else's.
    """
    places = np.fromiter(chain.from_iterable(addresses), dtype=np.int64)
    first, last = int(places.min()), int(places.max())
    return _rows(first, last - first + 1, size, 1), places - first


def _rows(address: int, num_rows: int, row_bytes: int, stride: int) -> npt.NDArray[np.uint8]:
    return np.asarray(_Memory(address, (num_rows, row_bytes), (stride, 1)))


class _Memory:
    """Bytes at an address, for numpy."""

    def __init__(self, address: int, shape: tuple[int, int], strides: tuple[int, int]) -> None:
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|u1",
            "data": (address, False),
            "shape": shape,
            "strides": strides,
        }
