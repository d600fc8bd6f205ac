"""Memory to put from and get into, and values that tell whose they are."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from kvtide.core.batch import Batch
from kvtide.stores.base import Status, Store
from kvtide.stores.memory_buffer import aligned_buffer, region_of


def value_of(key: str, num_bytes: int) -> bytes:
    """Return ``num_bytes`` that no other key has, and that differ from page to page."""
    seed = blake2b(key.encode(), digest_size=61).digest()  # prime to the page size
    return (seed * (num_bytes // len(seed) + 1))[:num_bytes]


class Arena:
    """A buffer registered with one store, from which and into which values are copied.

    One thread uses an arena at a time.
    """

    def __init__(self, store: Store, num_bytes: int = 4 << 20) -> None:
        self.store = store
        self.buffer = aligned_buffer(num_bytes)
        self.address: int = self.buffer.ctypes.data
        store.register(region_of(self.buffer))

    def fill(self, byte: int = 0xEE) -> None:
        """Set every byte, so that what a get leaves untouched can be seen."""
        self.buffer[:] = byte

    def write(self, offset: int, value: bytes) -> None:
        """Place ``value`` at ``offset``."""
        self.buffer[offset : offset + len(value)] = memoryview(value)

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return the bytes at ``offset``."""
        return self.buffer[offset : offset + num_bytes].tobytes()

    def batch(
        self,
        keys: Sequence[str],
        sizes: Sequence[Sequence[int]],
        order: Sequence[int] | None = None,
    ) -> Batch:
        """Return a batch whose values lie one after the other from the start of the arena."""
        offset = self.address
        addresses = []
        for segments in sizes:
            addresses.append([offset + sum(segments[:i]) for i in range(len(segments))])
            offset += sum(segments)
        if offset > self.address + len(self.buffer):
            raise ValueError("the values do not fit into the arena")
        return Batch(list(keys), addresses, [list(segments) for segments in sizes], order)

    def put(
        self,
        values: Sequence[tuple[str, bytes]],
        *,
        order: Sequence[int] | None = None,
    ) -> list[Status]:
        """Put each (key, value) in one call."""
        batch = self.batch([key for key, _ in values], [[len(v)] for _, v in values], order)
        self.write(0, b"".join(value for _, value in values))
        return self.store.put(batch)

    def get(self, asked: Sequence[tuple[str, int]]) -> list[tuple[Status, bytes]]:
        """Get each (key, size) in one call; return each status with the bytes then in memory."""
        batch = self.batch([key for key, _ in asked], [[size] for _, size in asked])
        self.fill()
        statuses = self.store.get(batch)
        offset = 0
        answers = []
        for (_, size), status in zip(asked, statuses, strict=True):
            answers.append((status, self.read(offset, size)))
            offset += size
        return answers
