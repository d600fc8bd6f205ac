"""The coordinator: masks and boundaries derived from ``required``."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.core.coordinator import Coordinator
from kvtide.core.groups import FullAttention, Group, Mamba

FULL = Coordinator((FullAttention(16),), 16)
MIXED = Coordinator((FullAttention(16), Mamba(32)), 16)


def test_full_attention_requires_every_chunk_below() -> None:
    """Whole and begun chunks alike."""
    group = FullAttention(16)
    assert [group.required(n) for n in (0, 1, 16, 17)] == [range(0), range(1), range(1), range(2)]
    assert group.is_downward_closed


@given(st.integers(0, 500), st.integers(0, 500))
def test_full_attention_is_downward_closed(one: int, other: int) -> None:
    """A longer prefix needs all that a shorter one needs."""
    low, high = sorted((one, other))
    group = FullAttention(16)
    assert set(group.required(low)) <= set(group.required(high))


@given(st.integers(0, 40), st.integers(0, 40))
def test_a_load_is_what_the_hit_requires_and_the_engine_lacks(
    hit_units: int, computed_units: int
) -> None:
    """Nothing below what the engine holds, nothing past the hit."""
    unit = MIXED.lcm_block_size
    hit, computed = hit_units * unit, computed_units * unit
    for group, chunks in zip(MIXED.groups, MIXED.load_mask(hit, computed), strict=True):
        wanted = {c for c in group.required(hit) if c >= computed // group.block_size}
        assert set(chunks) == wanted


@given(st.integers(0, 20), st.integers(0, 20))
def test_the_mask_of_a_suffix_is_the_tail_of_the_whole(first: int, more: int) -> None:
    """A job that starts at the saved offset stores what one from 0 would store there."""
    unit = MIXED.lcm_block_size
    start, end = first * unit, (first + more) * unit
    for group, whole, tail in zip(
        MIXED.groups, MIXED.store_mask(end), MIXED.store_mask(end, start), strict=True
    ):
        assert (whole is None) == (tail is None)
        if whole is not None and tail is not None:
            assert whole[start // group.block_size :] == tail


@given(st.integers(0, 20), st.integers(0, 20))
def test_a_mask_only_grows_at_its_end(first: int, more: int) -> None:
    """A chunk that was not worth storing does not become so when the request grows."""
    unit = MIXED.lcm_block_size
    for short, grown in zip(
        MIXED.store_mask(first * unit), MIXED.store_mask((first + more) * unit), strict=True
    ):
        if short is not None and grown is not None:
            assert grown[: len(short)] == short


@given(st.integers(0, 20))
def test_the_best_lookups_load_is_fully_stored(units: int) -> None:
    """What a hit at the last boundary loads lies within what was stored."""
    hit = units * MIXED.lcm_block_size
    for chunks, mask in zip(MIXED.load_mask(hit, 0), MIXED.store_mask(hit), strict=True):
        assert mask is None or all(mask[chunk] for chunk in chunks)


def test_boundaries_are_multiples_of_all_block_sizes() -> None:
    """Groups of 16 and 32 tokens meet every 32."""
    assert MIXED.lcm_block_size == MIXED.alignment == 32
    assert MIXED.last_boundary(95) == 64
    assert MIXED.num_chunks(32, 96) == 4 + 2
    assert FULL.store_mask(64, 16, 50) == [None]


@pytest.mark.parametrize(
    "groups, unit, message",
    [
        ((), 16, "at least one"),
        ((FullAttention(24),), 16, "multiple"),
    ],
)
def test_impossible_groups_are_refused(groups: tuple[Group, ...], unit: int, message: str) -> None:
    """Keys could not be named."""
    with pytest.raises(ValueError, match=message):
        Coordinator(groups, unit)
    with pytest.raises(ValueError, match="positive"):
        FullAttention(0)
