"""Where a layer's blocks lie in memory, read off a KV cache tensor by stride.

vLLM hands a worker one tensor per layer: a strided view of an allocation that all layers (and all
groups) may share. Only three things of it are used: which dimension counts blocks, the byte
strides of the others, and their memory order. So layouts with heads before tokens, tokens before
heads, several layers inside one block, padded pages, kernel blocks finer than the manager's, or
keys and values apart all come down to the same copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod

_Dim = tuple[int, int, int]  # (index in the tensor's shape, size, stride in bytes)
_NUM_DIMS = 4  # blocks, heads, tokens, content


class IndivisibleHeadsError(ValueError):
    """The heads of a tensor cannot be stored in as many parts as asked."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One layer's part of every block.

    ``start`` is the byte offset of block 0 in the layer's storage and ``block_stride`` the bytes
    from one block to the next. A block has ``num_parts`` parts that are stored apart, each with so
    many heads, ``part_stride`` bytes from one to the next. A part's elements are ``unit`` bytes
    each and lie at ``shape`` and ``strides`` (bytes), outermost first; the last dimension has no
    gaps. ``order`` names the same dimensions by their place in the tensor's shape, with their
    sizes: what the bytes mean.
    """

    start: int
    num_blocks: int
    block_stride: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    unit: int
    order: tuple[tuple[int, int], ...]
    num_parts: int = 1
    part_stride: int = 0

    @property
    def num_bytes(self) -> int:
        """The bytes of one part of a block of this layer."""
        return prod(self.shape) * self.unit

    @property
    def end(self) -> int:
        """The first byte of the storage past the last block."""
        dims = zip(self.shape, self.strides, strict=True)
        inside = sum((size - 1) * stride for size, stride in dims)
        last = (self.num_blocks - 1) * self.block_stride + (self.num_parts - 1) * self.part_stride
        return self.start + last + inside + self.unit


def find_segment(
    shape: Sequence[int],
    strides: Sequence[int],
    *,
    start: int,
    item_bytes: int,
    num_blocks: int,
    block_stride: int | None = None,
    num_parts: int = 1,
    num_heads: int = 1,
) -> Segment:
    """Describe the blocks of a tensor of ``shape`` whose ``strides`` and ``start`` are in bytes.

    ``block_stride`` is what the engine planned, in bytes; without it, or where the tensor keeps
    keys and values apart, the dimension is told by its size. With several ``num_parts`` the
    dimensions must be blocks, ``num_heads`` heads, tokens and content (of both keys and values).

    Raises:
        IndivisibleHeadsError: they are not, or the heads are no multiple of ``num_parts``.
        ValueError: no dimension counts ``num_blocks`` blocks, or more than one may.
    """
    dims = [(number, *dim) for number, dim in enumerate(zip(shape, strides, strict=True))]
    where = _block_dim(dims, num_blocks, block_stride)
    _, size, stride = dims.pop(where)
    ratio = size // num_blocks
    if ratio > 1:  # kernel blocks: so many in a row make one block of the manager
        dims.append((where, ratio, stride))
    part_stride = 0
    if num_parts > 1:
        _check_divisible(shape, where, num_blocks, num_heads, num_parts)
        axis, _, head_stride = dims[0]
        dims[0] = (axis, num_heads // num_parts, head_stride)
        part_stride = num_heads // num_parts * head_stride
    ordered = sorted((dim for dim in dims if dim[1] > 1), key=lambda dim: -dim[2])
    merged = _merge([(size, stride) for _, size, stride in ordered] + [(item_bytes, 1)])
    distances = (part_stride, stride * ratio, *(stride for _, stride in merged[:-1]))
    unit = gcd(8, merged[-1][0], start, *distances)
    merged[-1] = (merged[-1][0] // unit, unit)
    return Segment(
        start=start,
        num_blocks=num_blocks,
        block_stride=stride * ratio,
        shape=tuple(size for size, _ in merged),
        strides=tuple(stride for _, stride in merged),
        unit=unit,
        order=tuple((number, size) for number, size, _ in ordered),
        num_parts=num_parts,
        part_stride=part_stride,
    )


def _check_divisible(
    shape: Sequence[int], where: int, num_blocks: int, num_heads: int, num_parts: int
) -> None:
    found = (where, len(shape), *shape[:2])
    if found != (0, _NUM_DIMS, num_blocks, num_heads) or num_heads % num_parts:
        raise IndivisibleHeadsError(
            f"its shape {tuple(shape)} is not {num_blocks} blocks x {num_heads} heads x tokens x "
            f"content, with a multiple of {num_parts} heads"
        )


def _block_dim(dims: list[_Dim], num_blocks: int, block_stride: int | None) -> int:
    counting = [dim for dim in dims if dim[1] and dim[1] % num_blocks == 0]
    if block_stride is not None:
        for number, size, stride in counting:
            if stride * (size // num_blocks) == block_stride:
                return number
    exact = [number for number, size, _ in counting if size == num_blocks]
    if len(exact) == 1:
        return exact[0]
    shape = tuple(size for _, size, _ in dims)
    raise ValueError(
        f"which dimension of a KV cache tensor of shape {shape} counts its {num_blocks} blocks "
        f"is not clear (planned stride: {block_stride} bytes)"
    )


def _merge(dims: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join neighbouring dimensions that have no gap between them; the last one is in bytes."""
    merged = [dims[0]]
    for size, stride in dims[1:]:
        outer_size, outer_stride = merged[-1]
        if outer_stride == size * stride:
            merged[-1] = (outer_size * size, stride)
        else:
            merged.append((size, stride))
    return merged
