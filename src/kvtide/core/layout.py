"""Where bytes lie: regions of memory, and the slices of it that make up one block's value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Region:
    """A stretch of this process's memory that batches may point into.

    It is ``[address, address + num_bytes)``. The owner keeps it mapped for as long as any store it
    is registered with is open.
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
