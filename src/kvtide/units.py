"""Sizes as people write them: ``"20GiB"`` is 21,474,836,480 bytes."""

from __future__ import annotations

import re
from decimal import Decimal

_FACTORS = {
    "B": 1,
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)},
}
_LOWER = {name.lower(): factor for name, factor in _FACTORS.items()}
# Without the "B" the number would be one thing to a disk maker and another to everyone else.
_AMBIGUOUS = {"k", "m", "g", "t"}
_SIZE = re.compile(r"(?a:(\d+(?:\.\d+)?)\s*([a-z]*))", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return the number of bytes that ``text`` means.

    A number and a unit: ``B``, ``KiB``, ``MiB``, ``GiB``, ``TiB`` (powers of 1024) or ``kB``,
    ``MB``, ``GB``, ``TB`` (powers of 1000), in upper or lower case. A bare number is bytes.

    Raises:
        ValueError: ``text`` is not a size, or not a whole number of bytes.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size: write a number and a unit, such as '20GiB'")
    number, unit = match.groups()
    if unit.lower() in _AMBIGUOUS:
        letter = unit.upper()
        raise ValueError(f"{text!r} is ambiguous: write {number}{letter}iB or {number}{letter}B")
    factor = _LOWER.get(unit.lower() or "b")
    if factor is None:
        raise ValueError(f"{text!r} has no known unit: write one of {', '.join(_FACTORS)}")
    size = Decimal(number) * factor
    if size != int(size):
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return int(size)


def format_size(num_bytes: int) -> str:
    """Return ``num_bytes`` for people, in powers of 1024: exactly where that is short."""
    if num_bytes < 0:
        raise ValueError(f"a size cannot be negative: {num_bytes}")
    unit, factor = "B", 1
    for prefix in "KMGT":
        candidate = _FACTORS[f"{prefix}iB"]
        if num_bytes < candidate:
            break
        unit, factor = f"{prefix}iB", candidate
    if num_bytes % factor == 0:
        return f"{num_bytes // factor}{unit}"
    return f"{num_bytes / factor:.1f}{unit}"
