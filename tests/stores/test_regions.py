"""Registered memory is known by its bounds, however many regions and segments there are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.core.batch import Batch
from kvtide.core.layout import Region
from kvtide.errors import UnregisteredMemoryError
from kvtide.stores.memory_buffer import PAGE_BYTES, aligned_buffer, region_of
from kvtide.stores.regions import RegionSet

regions = st.lists(st.builds(Region, st.integers(1, 60), st.integers(1, 20)), max_size=6)
segments = st.lists(st.tuples(st.integers(0, 80), st.integers(0, 30)), max_size=40)


def is_refused(known: RegionSet, batch: Batch) -> bool:
    """Tell whether a batch is refused."""
    try:
        known.check(batch)
    except UnregisteredMemoryError:
        return True
    return False


@given(regions, segments, st.integers(0, 30))
def test_a_segment_is_allowed_if_every_byte_is_registered(
    registered: list[Region], asked: list[tuple[int, int]], padding: int
) -> None:
    """The answer is that of a set of addresses, for few segments and for many."""
    known = RegionSet()
    for region in registered:
        known.add(region)
    allowed = {a for region in registered for a in range(region.address, region.end)}
    asked = [*asked, *[(0, 0)] * padding]
    batch = Batch(
        [str(i) for i in range(len(asked))],
        [[address] for address, _ in asked],
        [[num_bytes] for _, num_bytes in asked],
    )
    outside = any(not allowed.issuperset(range(a, a + n)) for a, n in asked)
    assert is_refused(known, batch) == outside


def test_the_refusal_names_the_segment() -> None:
    """The message says which segment, and what to do."""
    with pytest.raises(UnregisteredMemoryError, match=r"8 bytes at 0x10 .* call register\(\)"):
        RegionSet().check(Batch(["a"], [[16]], [[8]]))


def test_an_aligned_buffer_starts_on_a_page() -> None:
    """Its memory is zeroed, writable, and page-aligned, whatever its length."""
    for num_bytes in (1, 4_097, 1 << 20):
        buffer = aligned_buffer(num_bytes)
        assert buffer.ctypes.data % PAGE_BYTES == 0
        assert len(buffer) == num_bytes
        assert not buffer.any()
        buffer[:] = 1
        assert region_of(buffer) == Region(buffer.ctypes.data, num_bytes)


def test_what_is_no_buffer_is_refused() -> None:
    """No length, or memory with holes, is an error of the caller."""
    with pytest.raises(ValueError, match="positive length"):
        aligned_buffer(0)
    with pytest.raises(ValueError, match="contiguous"):
        region_of(np.zeros((4, 4))[:, 0])


@pytest.mark.parametrize("num_keys", [1, 30])
def test_an_address_at_the_top_is_outside(num_keys: int) -> None:
    """Its end would wrap around to a small number."""
    regions = RegionSet()
    regions.add(Region(4096, 4096))
    batch = Batch(["a"] * num_keys, [[2**64 - 1]] * num_keys, [[10]] * num_keys)
    with pytest.raises(UnregisteredMemoryError):
        regions.check(batch)


def test_gaps_are_what_is_not_registered_yet() -> None:
    """In front of, between and behind what is, and nothing where all of it is."""
    regions = RegionSet()
    for start in (100, 300):
        regions.add(Region(start, 100))
    assert regions.gaps_in(Region(50, 400)) == [Region(50, 50), Region(200, 100), Region(400, 50)]
    assert regions.gaps_in(Region(120, 60)) == []
    assert regions.gaps_in(Region(500, 10)) == [Region(500, 10)]
