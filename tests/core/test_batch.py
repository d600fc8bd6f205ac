"""Batches: a key and its memory stay together whatever is done to the batch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.core.batch import Batch


def batch_of(sizes: list[int], *, order: bool = True) -> Batch:
    """A batch whose key, address and order tell the same number."""
    n = len(sizes)
    return Batch(
        [f"k{i}" for i in range(n)],
        [[1000 + i, 2000 + i] for i in range(n)],
        [[size, 1] for size in sizes],
        list(range(n)) if order else None,
    )


def rows(batch: Batch) -> list[tuple[str, int, int, int | None]]:
    """What each key is paired with."""
    order = batch.order or [None] * len(batch)
    return [
        (key, addresses[0], sizes[0], number)
        for key, addresses, sizes, number in zip(
            batch.keys, batch.addresses, batch.sizes, order, strict=True
        )
    ]


sizes_lists = st.lists(st.integers(0, 100), max_size=20)


@given(sizes_lists, st.booleans(), st.data())
def test_select_keeps_a_key_with_its_memory(
    sizes: list[int], order: bool, data: st.DataObject
) -> None:
    """Every row of a selection is a row of the batch."""
    batch = batch_of(sizes, order=order)
    indices = data.draw(st.lists(st.sampled_from(range(len(sizes))), max_size=30)) if sizes else []
    assert rows(batch.select(indices)) == [rows(batch)[i] for i in indices]


@given(sizes_lists, st.integers(0, 50))
def test_rotate_only_changes_where_a_batch_begins(sizes: list[int], offset: int) -> None:
    """Rotating forth and back gives the same batch."""
    batch = batch_of(sizes)
    rotated = batch.rotate(offset)
    assert sorted(rows(rotated)) == sorted(rows(batch))
    assert rows(rotated.rotate(-offset)) == rows(batch)


@given(sizes_lists, st.integers(1, 5), st.integers(1, 150))
def test_split_parts_are_bounded_and_concatenate_to_the_whole(
    sizes: list[int], max_keys: int, max_bytes: int
) -> None:
    """No part has too many keys or, unless it is one large value, too many bytes."""
    batch = batch_of(sizes)
    parts = list(batch.split(max_keys=max_keys, max_bytes=max_bytes))
    assert all(0 < len(part) <= max_keys for part in parts)
    assert all(part.total_bytes <= max_bytes or len(part) == 1 for part in parts)
    assert rows(Batch.concat(parts)) == rows(batch)


def test_joining_a_batch_without_order_drops_the_order() -> None:
    """A hint for half of the keys would be misread as one for all."""
    joined = Batch.concat([batch_of([1]), batch_of([2], order=False)])
    assert joined.order is None
    assert len(joined) == 2
    assert joined.value_bytes(1) == 3


@pytest.mark.parametrize(
    "arguments",
    [
        (["k"], [], []),
        (["k"], [[1]], [[1, 2]]),
        (["k"], [[1]], [[-1]]),
        (["k"], [[1]], [[1]], [1, 2]),
    ],
)
def test_lists_that_do_not_match_are_refused(arguments: tuple) -> None:
    """A batch whose lists differ in length would pair a key with another one's memory."""
    with pytest.raises(ValueError, match=r"batch|value|size"):
        Batch(*arguments)
