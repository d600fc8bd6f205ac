"""Segments of any sizes, anywhere, become one piece of memory, and one piece becomes segments."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.stores.copying import gather_values, scatter_values
from kvtide.stores.memory_buffer import aligned_buffer

SPACE = aligned_buffer(1 << 20)
PIECE = aligned_buffer(1 << 20)

Values = list[list[tuple[int, int]]]
"""Per value its segments: where in ``SPACE`` each begins, and how long it is."""


def values(size: st.SearchStrategy[int]) -> st.SearchStrategy[Values]:
    """Values of a few segments that do not overlap, in any order."""

    def placed(sizes: list[list[int]], order: list[int]) -> Values:
        flat = [size for value in sizes for size in value]
        places, end = {}, 0
        for index in sorted(range(len(flat)), key=lambda index: order[index % len(order)]):
            places[index] = end + index % 7
            end = places[index] + flat[index]
        numbers = iter(range(len(flat)))
        return [[(places[next(numbers)], size) for size in value] for value in sizes]

    sizes = st.lists(st.lists(size, min_size=1, max_size=6), min_size=1, max_size=6)
    return st.builds(placed, sizes, st.lists(st.integers(0, 99), min_size=1, max_size=36))


SIZES = st.integers(1, 6000)
ONE_SIZE = SIZES.flatmap(lambda size: values(st.just(size)))


@pytest.fixture(autouse=True)
def content() -> None:
    """Different bytes everywhere."""
    SPACE[:] = np.random.default_rng(1).integers(0, 256, SPACE.size, np.uint8)
    PIECE[:] = np.random.default_rng(2).integers(0, 256, PIECE.size, np.uint8)


@given(st.one_of(ONE_SIZE, values(SIZES)))
def test_values_are_gathered_one_after_the_other(chosen: Values) -> None:
    """Whether all segments have one size or not; what lies behind is left alone."""
    want = b"".join(bytes(SPACE[at : at + size]) for value in chosen for at, size in value)
    behind = bytes(PIECE[len(want) : len(want) + 64])
    gather_values(PIECE.ctypes.data, *addresses_and_sizes(chosen))
    assert bytes(PIECE[: len(want)]) == want
    assert bytes(PIECE[len(want) : len(want) + 64]) == behind


@given(st.one_of(ONE_SIZE, values(SIZES)))
def test_values_are_scattered_to_their_segments_alone(chosen: Values) -> None:
    """Every other byte is what it was."""
    want = SPACE.copy()
    taken = 0
    for at, size in (segment for value in chosen for segment in value):
        want[at : at + size] = PIECE[taken : taken + size]
        taken += size
    scatter_values(PIECE.ctypes.data, *addresses_and_sizes(chosen))
    assert np.array_equal(SPACE, want)


def test_more_than_one_step_is_gathered() -> None:
    """More segments than are copied at one time."""
    chosen = [[(number * 2048, 2048) for number in reversed(range(512))]]
    gather_values(PIECE.ctypes.data, *addresses_and_sizes(chosen))
    assert np.array_equal(PIECE.reshape(512, 2048)[::-1], SPACE.reshape(512, 2048))


def addresses_and_sizes(chosen: Values) -> tuple[list[list[int]], list[list[int]]]:
    """What a batch says of the values."""
    start = int(SPACE.ctypes.data)
    return (
        [[start + at for at, _ in value] for value in chosen],
        [[size for _, size in value] for value in chosen],
    )
