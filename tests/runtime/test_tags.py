"""Tags prove whose bytes a value is, and that all of them are there."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.runtime.tags import TAG_BYTES, verify, write_tag


def tagged(payload: bytes, key: str = "key") -> bytearray:
    """A stored value."""
    value = bytearray(payload) + bytearray(TAG_BYTES)
    write_tag(memoryview(value), key, len(payload))
    return value


def test_tag_has_the_documented_length() -> None:
    """The length is part of the stored format: changing it makes every stored value a miss."""
    assert TAG_BYTES == 32


def test_every_changed_byte_is_detected() -> None:
    """Each byte of payload and tag, changed to each other value, makes the value wrong."""
    value = tagged(b"some payload")
    for position in range(len(value)):
        for change in range(1, 256):
            value[position] ^= change
            assert not verify(memoryview(value), "key", 12), (position, change)
            value[position] ^= change
    assert verify(memoryview(value), "key", 12)


@given(st.binary(max_size=5000), st.text(max_size=60), st.data())
def test_round_trip_and_flip(payload: bytes, key: str, data: st.DataObject) -> None:
    """Any payload under any key verifies, and does not once one bit of the value is flipped."""
    key = key.encode(errors="ignore").decode()
    value = tagged(payload, key)
    assert verify(memoryview(value), key, len(payload))
    bit = data.draw(st.integers(0, 8 * len(value) - 1))
    value[bit // 8] ^= 1 << bit % 8
    assert not verify(memoryview(value), key, len(payload))


def test_value_of_another_key_is_refused() -> None:
    """The right bytes of the wrong key are wrong bytes."""
    assert not verify(memoryview(tagged(b"payload", "a")), "b", 7)


def test_value_of_another_length_is_refused() -> None:
    """A value verifies only as the length it was written with, and never when it is cut."""
    value = memoryview(tagged(b"payload"))
    assert not verify(value, "key", 6)
    assert not verify(value, "key", 8)
    assert not verify(value[:-1], "key", 7)
    assert not verify(value[:0], "key", 0)


def test_zeroed_value_is_refused() -> None:
    """Memory that was never written does not look like a value, not even an empty one."""
    assert not verify(memoryview(bytes(100)), "", 0)


def test_writes_in_place_and_nothing_else() -> None:
    """A row of a larger array gets its tag behind the payload; what follows is not touched."""
    rows = np.full((2, 100), 7, dtype=np.uint8)
    write_tag(rows[1], "key", 20)
    assert (rows[0] == 7).all()
    assert (rows[1, :20] == 7).all()
    assert (rows[1, 20 + TAG_BYTES :] == 7).all()
    assert verify(rows[1], "key", 20)


def test_no_room_for_the_tag_is_an_error() -> None:
    """A tag is never cut short."""
    with pytest.raises(ValueError, match="no room"):
        write_tag(memoryview(bytearray(40)), "key", 9)
