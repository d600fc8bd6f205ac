"""Where bytes lie: regions of memory, and the segments that make up one block's value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Region:
    """A stretch of this process's memory, ``[address, address + num_bytes)``.

    Batches may point into it once it is registered with a store. The owner keeps it mapped for
    as long as any store it is registered with is open.
    """

    address: int
    num_bytes: int

    def __post_init__(self) -> None:
        if self.address < 0 or self.num_bytes <= 0:
            raise ValueError(f"a region needs an address and a positive length: {self}")

    @property
    def end(self) -> int:
        """The first address past the region."""
        return self.address + self.num_bytes

    def contains(self, address: int, num_bytes: int) -> bool:
        """Tell whether ``[address, address + num_bytes)`` lies inside the region."""
        return self.address <= address and address + num_bytes <= self.end


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """What one block of a KV-cache group holds on one rank.

    ``block_size`` is in tokens. A block is stored as ``values_per_block`` values of one size, one
    for each part that the rank holds (none where it has no layers of the group). In a value,
    ``segment_bytes`` has one entry per layer, in the order in which they are concatenated to its
    payload; ``description`` says how the bytes of a segment are arranged (shape, strides, element
    type) and is part of the key.
    """

    block_size: int
    segment_bytes: tuple[int, ...]
    description: str
    values_per_block: int = 1

    @property
    def payload_bytes(self) -> int:
        """The payload of one value: all its segments together."""
        return sum(self.segment_bytes)


@dataclass(frozen=True, slots=True)
class StoreLayout:
    """The layouts of all groups on one rank, in group order."""

    groups: tuple[GroupLayout, ...]

    def describe(self) -> list[list[object]]:
        """Return the layout as plain data, equal exactly when values are exchangeable."""
        return [
            [group.block_size, list(group.segment_bytes), group.description]
            for group in self.groups
        ]


def common_layout(layouts: Sequence[StoreLayout]) -> StoreLayout | None:
    """Return the layout all ranks agree on, or ``None`` where they differ."""
    return layouts[0] if layouts and all(layout == layouts[0] for layout in layouts) else None
