"""A batch: keys, with the memory each value is read from or written to.

One object instead of parallel lists that have to be filtered in step: ``select``, ``rotate`` and
``split`` keep a key and its memory together.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import eq


@dataclass(frozen=True, slots=True)
class Batch:
    """Keys of a store call and, per key, the memory segments that make up its value.

    ``addresses[i]`` and ``sizes[i]`` (bytes) describe the segments of ``keys[i]`` in order; their
    concatenation is the value, so a value may be written as 100 + 200 bytes and read as 150 + 150.
    ``order[i]``, where given, is the absolute chunk index of ``keys[i]`` in its request: a hint for
    eviction, since an early chunk is worth more than the chunks that need it.

    Raises:
        ValueError: the sequences differ in length, or a size is negative.
    """

    keys: Sequence[str]
    addresses: Sequence[Sequence[int]]
    sizes: Sequence[Sequence[int]]
    order: Sequence[int] | None = field(default=None)

    def __post_init__(self) -> None:
        if not len(self.keys) == len(self.addresses) == len(self.sizes):
            raise ValueError(
                f"a batch needs one list of segments per key: {len(self.keys)} keys, "
                f"{len(self.addresses)} address lists, {len(self.sizes)} size lists"
            )
        if self.order is not None and len(self.order) != len(self.keys):
            raise ValueError(
                f"a batch's order needs one entry per key: {len(self.keys)} keys, "
                f"{len(self.order)} entries"
            )
        # Without a loop in Python: it would cost as much as the rest of a put.
        if not all(map(eq, map(len, self.addresses), map(len, self.sizes))):
            counts = zip(map(len, self.addresses), map(len, self.sizes), strict=True)
            found = next(pair for pair in counts if pair[0] != pair[1])
            raise ValueError(
                f"a value needs one size per address: {found[0]} addresses, {found[1]} sizes"
            )
        least = min(itertools.chain.from_iterable(self.sizes), default=0)
        if least < 0:
            raise ValueError(f"a segment's size cannot be negative: {least}")

    def __len__(self) -> int:
        return len(self.keys)

    def value_bytes(self, index: int) -> int:
        """Return the length in bytes of the value at ``index``."""
        return sum(self.sizes[index])

    @property
    def total_bytes(self) -> int:
        """The bytes of all values together."""
        return sum(itertools.chain.from_iterable(self.sizes))

    def select(self, indices: Sequence[int]) -> Batch:
        """Return the batch of the keys at ``indices``, in that order."""
        return Batch(
            [self.keys[i] for i in indices],
            [self.addresses[i] for i in indices],
            [self.sizes[i] for i in indices],
            None if self.order is None else [self.order[i] for i in indices],
        )

    def rotate(self, offset: int) -> Batch:
        """Return the same keys starting at ``offset`` (modulo the length).

        Ranks that start at different keys need not ask for the same key at once.
        """
        length = len(self)
        return self.select([(i + offset) % length for i in range(length)]) if length else self

    def split(
        self, *, max_keys: int | None = None, max_bytes: int | None = None
    ) -> Iterator[Batch]:
        """Yield consecutive parts of at most ``max_keys`` keys and ``max_bytes`` bytes.

        A value larger than ``max_bytes`` travels alone.
        """
        fits = max_keys is None or len(self) <= max_keys
        if self.keys and fits and (max_bytes is None or self.total_bytes <= max_bytes):
            yield self
            return
        start = total = 0
        for i in range(len(self)):
            size = self.value_bytes(i)
            many = max_keys is not None and i - start >= max_keys
            large = max_bytes is not None and total + size > max_bytes
            if (many or large) and i > start:
                yield self.select(range(start, i))
                start, total = i, 0
            total += size
        if start < len(self):
            yield self.select(range(start, len(self)))

    @classmethod
    def concat(cls, batches: Sequence[Batch]) -> Batch:
        """Join batches, keeping ``order`` only where each of them has it."""
        chain = itertools.chain.from_iterable
        orders = [batch.order for batch in batches if batch.order is not None]
        return cls(
            list(chain(batch.keys for batch in batches)),
            list(chain(batch.addresses for batch in batches)),
            list(chain(batch.sizes for batch in batches)),
            list(chain(orders)) if len(orders) == len(batches) else None,
        )
