"""Finding the blocks of a tensor by stride: checked against plain indexing."""

from __future__ import annotations

import itertools
from functools import partial
from math import prod

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtide.engines.vllm.segments import IndivisibleHeadsError, find_segment


@given(
    sizes=st.tuples(st.integers(3, 6), st.integers(1, 3), st.integers(1, 5), st.integers(1, 8)),
    order=st.permutations([0, 1, 2, 3]),
    padding=st.integers(0, 3),
    item=st.sampled_from([1, 2, 4]),
)
def test_every_layout_is_read_as_indexing_reads_it(
    sizes: tuple[int, ...], order: list[int], padding: int, item: int
) -> None:
    """Whatever the memory order and the gaps, a block's bytes are the elements indexing gives."""
    check_against_indexing(sizes, order, padding, item, 1)


@given(
    heads=st.integers(1, 8).flatmap(
        lambda heads: st.tuples(
            st.just(heads), st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0])
        )
    ),
    others=st.tuples(st.integers(3, 9), st.integers(1, 5), st.integers(1, 8)),
    order=st.permutations([0, 1, 2, 3]),
    padding=st.integers(0, 3),
    item=st.sampled_from([1, 2, 4]),
)
@example(heads=(2, 2), others=(3, 1, 8), order=[0, 1, 2, 3], padding=1, item=1)
def test_every_layout_is_cut_as_indexing_cuts_it(
    heads: tuple[int, int], others: tuple[int, int, int], order: list[int], padding: int, item: int
) -> None:
    """A part is so many heads in a row, in every memory order and for each number of parts."""
    num_heads, num_parts = heads
    num_blocks, num_tokens, content = others
    sizes = (num_blocks, num_heads, num_tokens, content)
    check_against_indexing(sizes, order, padding, item, num_parts)


def check_against_indexing(
    sizes: tuple[int, ...], order: list[int], padding: int, item: int, num_parts: int
) -> None:
    """Compare each part of each block with the same heads of a tensor laid out in ``order``."""
    strides = [0] * 4
    step = item
    for dim in reversed(order):
        strides[dim] = step
        step *= sizes[dim]
        if dim == order[-1]:
            step += padding * item
    memory = np.arange(step + 64, dtype=np.uint32).view(np.uint8)[: step + 16 * item]
    indexed = np.ndarray(sizes, np.dtype(f"u{item}"), memory, 8 * item, strides)
    segment = find_segment(
        sizes,
        strides,
        start=8 * item,
        item_bytes=item,
        num_blocks=sizes[0],
        block_stride=strides[0],
        num_parts=num_parts,
        num_heads=sizes[1],
    )
    parts = np.ndarray(
        (segment.num_blocks, segment.num_parts, *segment.shape),
        f"u{segment.unit}",
        memory,
        segment.start,
        (segment.block_stride, segment.part_stride, *segment.strides),
    )
    in_memory_order = indexed.transpose(0, *(dim for dim in order if dim != 0))
    heads_axis = 1 + [dim for dim in order if dim != 0].index(1)
    for number in range(sizes[0]):
        cut = np.split(in_memory_order[number], num_parts, axis=heads_axis - 1)
        for part, expected in zip(parts[number], cut, strict=True):
            assert np.ascontiguousarray(part).tobytes() == expected.tobytes()
            assert segment.num_bytes == expected.nbytes
    last = indexed[-1:, -1:, -1:, -1:].ctypes.data
    assert segment.end == last + item - memory.ctypes.data
    distances = (segment.start, segment.block_stride, segment.part_stride, *segment.strides)
    assert not any(distance % segment.unit for distance in distances)


def test_a_dense_block_is_one_run_of_the_widest_words() -> None:
    """A block without gaps is copied eight bytes at a time, as one dimension."""
    segment = find_segment(
        (64, 2, 32, 64),
        (8192, 4096, 128, 2),
        start=0,
        item_bytes=2,
        num_blocks=64,
        block_stride=8192,
    )
    assert (segment.shape, segment.strides, segment.unit) == ((1024,), (8,), 8)


def test_kernel_blocks_make_up_the_managers_blocks() -> None:
    """Four kernel blocks of 16 tokens are one block of 64, found by the planned stride."""
    segment = find_segment(
        (256, 2, 16, 8),
        (512, 256, 16, 2),
        start=0,
        item_bytes=2,
        num_blocks=64,
        block_stride=2048,
    )
    assert (segment.block_stride, segment.num_bytes) == (2048, 2048)
    assert segment.order == ((0, 4), (1, 2), (2, 16), (3, 8))


def test_keys_and_values_apart_are_two_pieces_of_a_block() -> None:
    """With keys of all blocks before all values, a block is one run in each half."""
    segment = find_segment(
        (2, 64, 16, 4),
        (64 * 128, 128, 8, 2),
        start=0,
        item_bytes=2,
        num_blocks=64,
        block_stride=256,
    )
    assert segment.shape == (2, 16)
    assert (segment.strides, segment.block_stride) == ((64 * 128, 8), 128)


def test_the_order_of_dimensions_tells_layouts_apart() -> None:
    """Heads before tokens and tokens before heads are equal sizes and different bytes."""
    heads, tokens = (
        find_segment((9, 2, 4, 8), strides, start=0, item_bytes=1, num_blocks=9, block_stride=64)
        for strides in ((64, 32, 8, 1), (64, 8, 16, 1))
    )
    assert heads.num_bytes == tokens.num_bytes
    assert heads.order != tokens.order


def test_gaps_between_blocks_are_no_part_of_the_order() -> None:
    """Layers interleaved in one block hold the same bytes as layers kept apart."""
    orders = {
        find_segment(
            (9, 2, 4, 8),
            (stride, 32, 8, 1),
            start=64,
            item_bytes=1,
            num_blocks=9,
            block_stride=stride,
        ).order
        for stride in (64, 256, 72)
    }
    assert len(orders) == 1


@pytest.mark.parametrize("num_heads, is_alike", [(2, True), (4, False)])
def test_the_order_of_heads_and_tokens_tells_nothing_of_one_head(
    num_heads: int, is_alike: bool
) -> None:
    """Two parts of a head each are the same bytes, heads before tokens or tokens before heads."""
    shape = (9, num_heads, 4, 8)
    head_major = (num_heads * 32, 32, 8, 1)
    token_major = (num_heads * 32, 8, num_heads * 8, 1)
    one, other = (
        find_segment(
            shape,
            strides,
            start=0,
            item_bytes=1,
            num_blocks=9,
            block_stride=strides[0],
            num_parts=2,
            num_heads=num_heads,
        )
        for strides in (head_major, token_major)
    )
    assert one.num_bytes == other.num_bytes
    assert (one.order == other.order) is is_alike


@pytest.mark.parametrize(
    "shape, num_parts",
    [
        ((8, 6, 4, 2), 4),
        ((8, 6, 4, 2), 12),
        ((16, 6, 2, 2), 2),
        ((2, 8, 6, 4, 2), 2),
        ((8, 6, 8), 2),
        ((8, 4, 6, 2), 2),
        ((6, 8, 4, 2), 2),
    ],
    ids=[
        "heads no multiple",
        "fewer heads than parts",
        "kernel blocks",
        "keys and values apart",
        "no heads",
        "tokens before heads",
        "heads before blocks",
    ],
)
def test_heads_that_cannot_be_told_or_divided_are_refused(
    shape: tuple[int, ...], num_parts: int
) -> None:
    """Nothing is cut that is not surely heads; whole blocks are found all the same."""
    dense = partial(
        find_segment,
        shape,
        np.zeros(shape, np.uint8).strides,
        start=0,
        item_bytes=1,
        num_blocks=8,
        block_stride=prod(shape) // 8,
    )
    assert dense().num_bytes == prod(shape) // 8
    with pytest.raises(IndivisibleHeadsError, match=rf"8 blocks x 6 heads .* of {num_parts} heads"):
        dense(num_parts=num_parts, num_heads=6)


def test_heads_are_not_taken_for_blocks_where_they_are_as_many() -> None:
    """The planned stride tells them apart: here blocks are behind heads."""
    find = partial(
        find_segment,
        (8, 8, 4, 2),
        (64, 8, 2, 1),
        start=0,
        item_bytes=1,
        num_blocks=8,
        num_parts=2,
        num_heads=8,
    )
    assert find(block_stride=64).part_stride == 4 * 8
    with pytest.raises(IndivisibleHeadsError):
        find(block_stride=8)


@pytest.mark.parametrize("shape", [(8, 8, 4), (7, 5, 4)])
def test_a_tensor_that_shows_no_blocks_is_refused(shape: tuple[int, ...]) -> None:
    """Where no dimension, or more than one, may count the blocks, nothing is guessed."""
    strides = list(itertools.accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1))[::-1]
    with pytest.raises(ValueError, match="which dimension"):
        find_segment(shape, strides, start=0, item_bytes=1, num_blocks=8, block_stride=None)
