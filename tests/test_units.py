"""Sizes: what is accepted, and that what is printed can be read back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.units import format_size, parse_size


@pytest.mark.parametrize(
    "text,size",
    [
        ("0", 0),
        ("17", 17),
        ("17B", 17),
        ("1KiB", 1024),
        ("1kb", 1000),
        ("20GiB", 20 * 1024**3),
        ("20 gib", 20 * 1024**3),
        (" 1.5MiB ", 3 * 512 * 1024),
        ("2TB", 2 * 10**12),
    ],
)
def test_a_size_is_a_number_and_a_unit(text: str, size: int) -> None:
    """Binary and decimal units are told apart, in any case, with or without a space."""
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text,remedy",
    [
        ("", "such as '20GiB'"),
        ("-1GiB", "such as '20GiB'"),
        ("GiB", "such as '20GiB'"),
        ("1e9", "such as '20GiB'"),
        ("٣GiB", "such as '20GiB'"),
        ("20G", "write 20GiB or 20GB"),
        ("20m", "write 20MiB or 20MB"),
        ("20XiB", "one of B, KiB"),
        ("0.3B", "whole number"),
    ],
)
def test_what_is_no_size_is_refused_with_the_remedy(text: str, remedy: str) -> None:
    """A refusal says how to write it."""
    with pytest.raises(ValueError, match=r".") as caught:
        parse_size(text)
    assert remedy in str(caught.value)


@pytest.mark.parametrize(
    "size,text",
    [(0, "0B"), (1023, "1023B"), (1024, "1KiB"), (1536, "1.5KiB"), (1 << 28, "256MiB")],
)
def test_a_size_is_printed_in_the_largest_unit_that_fits(size: int, text: str) -> None:
    """Whole units are printed without a fraction."""
    assert format_size(size) == text


def test_a_negative_size_is_not_printed() -> None:
    """A negative size is a bug of the caller."""
    with pytest.raises(ValueError, match="negative"):
        format_size(-1)


@given(st.integers(0, 1 << 50))
def test_what_is_printed_reads_back_within_its_precision(size: int) -> None:
    """Reading a printed size back is off by less than the last digit shown."""
    text = format_size(size)
    unit = parse_size("1" + text.lstrip("0123456789."))
    assert abs(parse_size_loosely(text) - size) <= unit * 0.05 + 1


def parse_size_loosely(text: str) -> float:
    """Read a size that need not be a whole number of bytes."""
    number = text.rstrip("BKMGTi")
    return float(number) * parse_size("1" + text[len(number) :])
