"""The slab hands out rows that are aligned, never shared, and all come back."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.runtime.slab import ExtentAllocator, Rows, Slab, page_padded
from tests.runtime_harness import WAIT_S

PAGE = 4096


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40), st.integers(0, 1000)), max_size=60))
def test_extents_never_overlap_and_grow_together_again(
    steps: list[tuple[bool, int, int]],
) -> None:
    """Whatever is taken and given back in whatever order, nothing is shared, lost or split."""
    extents = ExtentAllocator(100)
    held: dict[int, int] = {}
    for is_take, size, choice in steps:
        if is_take or not held:
            offset = extents.take(size)
            if offset is None:
                assert extents.largest_free_bytes < size
            else:
                held[offset] = size
        else:
            offset = sorted(held)[choice % len(held)]
            extents.give_back(offset, held.pop(offset))
        covered = sorted((start, start + size) for start, size in held.items())
        assert all(before[1] <= after[0] for before, after in pairwise(covered))
        assert all(start >= 0 and end <= 100 for start, end in covered)
        assert extents.free_bytes == 100 - sum(held.values())
    for offset, size in held.items():
        extents.give_back(offset, size)
    assert extents.largest_free_bytes == 100


def test_giving_back_twice_is_refused() -> None:
    """Memory that two jobs both believe theirs would mix their bytes."""
    extents = ExtentAllocator(100)
    assert extents.take(60) == 0
    extents.give_back(10, 20)
    for offset, size in ((10, 20), (0, 11), (29, 2), (15, 5), (0, 60), (90, 5)):
        with pytest.raises(ValueError, match="twice"):
            extents.give_back(offset, size)


def test_rows_start_on_pages() -> None:
    """A value that starts on a page copies at full speed."""
    slab = Slab(10 * PAGE)
    (runs,) = slab.reserve([(page_padded(5000), 3)], timeout_s=0) or [[]]
    assert [run.num_rows for run in runs] == [3]
    assert all(address % PAGE == 0 for address in slab.addresses(runs[0]))
    assert slab.view(runs[0]).shape == (3, 2 * PAGE)
    assert slab.view(runs[0]).ctypes.data == slab.addresses(runs[0])[0]


def test_rows_are_split_only_where_no_run_is_long_enough() -> None:
    """A fragmented slab still serves a job, in as few runs as it has room for."""
    slab = Slab(6 * PAGE)
    whole = slab.reserve([(PAGE, 6)], timeout_s=0)
    assert whole == [[Rows(0, 6, PAGE)]]
    slab.release([Rows(0, 1, PAGE), Rows(2 * PAGE, 2, PAGE)])
    assert slab.reserve([(PAGE, 3)], timeout_s=0) == [[Rows(2 * PAGE, 2, PAGE), Rows(0, 1, PAGE)]]


def test_a_job_gets_all_its_rows_or_none() -> None:
    """A part of a job is of no use, and must not take another's place while it waits."""
    slab = Slab(6 * PAGE)
    assert slab.reserve([(PAGE, 2), (2 * PAGE, 3)], timeout_s=0) is None
    assert slab.used_bytes == 0
    assert slab.reserve([(PAGE, 2), (2 * PAGE, 2)], timeout_s=0) is not None
    assert slab.reserve([(PAGE, 1)], timeout_s=0) is None


def test_room_that_comes_in_time_is_taken() -> None:
    """Whoever waits for room goes on as soon as it is given back."""
    slab = Slab(2 * PAGE)
    first = slab.reserve([(PAGE, 2)], timeout_s=0) or []
    asked = threading.Event()
    got: list[object] = []

    def give_up() -> bool:
        asked.set()  # called only when an attempt found no room
        return False

    def wait() -> None:
        got.append(slab.reserve([(PAGE, 1)], timeout_s=WAIT_S, give_up=give_up))

    thread = threading.Thread(target=wait)
    thread.start()
    assert asked.wait(WAIT_S)
    slab.release(first[0])
    thread.join(WAIT_S)
    assert got == [[[Rows(0, 1, PAGE)]]]
