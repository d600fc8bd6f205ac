"""The store contract: six methods and their laws.

:class:`kvtide.testing.StoreTests` holds every store to the laws.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from enum import Enum

from kvtide.core.batch import Batch
from kvtide.core.layout import Region


class Status(Enum):
    """What became of one key in one call."""

    OK = "ok"
    MISSING = "missing"
    NO_SPACE = "no_space"
    FAILED = "failed"


class Store(ABC):
    """A map from string keys to immutable bytes, addressed by memory segments.

    Laws (each a test of its name in :class:`kvtide.testing.StoreTests`): answers match the keys in
    number and order; an empty batch answers ``[]``; a second put of a key is OK and leaves the
    first value, whatever its size; segments concatenate; a get of the wrong size is FAILED and
    leaves no short read; an absent key is MISSING and its neighbours are untouched; duplicates in a
    batch are each answered; a key's failure is a ``Status``, only a lost store raises; when full,
    some keys are NO_SPACE and the rest are stored; a value may vanish, but if it is there it is
    whole; unregistered memory is refused; any thread may call; every call ends within its deadline;
    closing twice is harmless and a call after close raises
    :class:`~kvtide.errors.StoreClosedError`.
    """

    @abstractmethod
    def register(self, region: Region) -> None:
        """Announce memory that batches may point into; it stays registered until ``close``.

        Registering a region twice is harmless.
        """

    @abstractmethod
    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Tell for each key whether its value is present and whole."""

    @abstractmethod
    def put(self, batch: Batch) -> list[Status]:
        """Store each key's segments as one value: OK, NO_SPACE or FAILED per key."""

    @abstractmethod
    def get(self, batch: Batch) -> list[Status]:
        """Fill each key's segments with its value: OK, MISSING or FAILED per key.

        Only OK promises anything about the memory: after FAILED or MISSING the segments
        may hold anything.
        """

    @abstractmethod
    def remove(self, keys: Sequence[str]) -> list[Status]:
        """Forget each key: OK, MISSING or FAILED (for instance while it is leased)."""

    @abstractmethod
    def close(self) -> None:
        """Give back everything the store holds in this process."""

    @property
    def checks_before_put(self) -> bool:
        """Whether asking ``exists`` first makes a put cheaper; a wrapper answers for its inner."""
        return True

    def take_counters(self) -> Counter[str]:
        """Return what the store counted since the last call, by the names of ``metrics.COUNTERS``.

        Called in every step on the engine's thread: it must not wait, raise or ask anyone. Nothing,
        for a store that counts nothing; a wrapper answers for its inner.
        """
        return Counter()
