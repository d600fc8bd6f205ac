"""Finding the blocks of a tensor by stride: checked against plain indexing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.engines.vllm.segments import find_segment


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
    strides = [0] * 4
    step = item
    for dim in reversed(order):
        strides[dim] = step
        step *= sizes[dim]
        if dim == order[-1]:
            step += padding * item
    memory = np.arange(step + 64, dtype=np.uint32).view(np.uint8)[: step + 16 * item]
    dtype = np.dtype(f"u{item}")
    indexed = np.ndarray(sizes, dtype, memory, 8 * item, strides)
    segment = find_segment(
        sizes,
        strides,
        start=8 * item,
        item_bytes=item,
        num_blocks=sizes[0],
        block_stride=strides[0],
    )
    blocks = np.ndarray(
        (segment.num_blocks, *segment.shape),
        f"u{segment.unit}",
        memory,
        segment.start,
        (segment.block_stride, *segment.strides),
    )
    inner = [dim for dim in order if dim != 0]
    for number in range(sizes[0]):
        expected = indexed.transpose(0, *inner)[number].tobytes()
        assert np.ascontiguousarray(blocks[number]).tobytes() == expected
    assert segment.num_bytes == len(expected)
    assert segment.end <= len(memory)


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


@pytest.mark.parametrize("shape", [(8, 8, 4), (7, 5, 4)])
def test_a_tensor_that_shows_no_blocks_is_refused(shape: tuple[int, ...]) -> None:
    """Where no dimension, or more than one, may count the blocks, nothing is guessed."""
    strides = list(itertools.accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1))[::-1]
    with pytest.raises(ValueError, match="which dimension"):
        find_segment(shape, strides, start=0, item_bytes=1, num_blocks=8, block_stride=None)
