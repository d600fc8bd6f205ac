"""A store in this process's memory: for tests, single-process engines, and as a pattern to read."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from kvtide.core.batch import Batch
from kvtide.core.layout import Region
from kvtide.errors import StoreClosedError
from kvtide.stores.base import Status, Store
from kvtide.stores.copying import gather, scatter
from kvtide.stores.memory_buffer import ByteArray
from kvtide.stores.regions import RegionSet
from kvtide.stores.url import StoreUrl, UrlReader

DEFAULT_CAPACITY_BYTES = 1 << 30


class MemoryStore(Store):
    """Values in a dict, at most ``capacity_bytes`` of them, the least recently used evicted first.

    A batch is touched from its last chunk to its first, so that of equally old chunks the later
    one goes first: a chain loses its tail, not its head. A put never evicts what the same call
    stored: what does not fit beside it is NO_SPACE.
    """

    def __init__(self, capacity_bytes: int = DEFAULT_CAPACITY_BYTES) -> None:
        self.capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._values: OrderedDict[str, ByteArray] = OrderedDict()
        self._used_bytes = 0
        self._regions = RegionSet()
        self._closed = False

    @property
    def used_bytes(self) -> int:
        """The bytes of all values held now."""
        return self._used_bytes

    def _require_open(self) -> None:
        if self._closed:
            raise StoreClosedError("the memory store is closed")

    def register(self, region: Region) -> None:
        """See :meth:`Store.register`."""
        self._require_open()
        self._regions.add(region)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """See :meth:`Store.exists`."""
        self._require_open()
        with self._lock:
            answers = [key in self._values for key in keys]
            self._touch(keys, None)
        return answers

    def put(self, batch: Batch) -> list[Status]:
        """See :meth:`Store.put`."""
        self._require_open()
        self._regions.check(batch)
        added: set[str] = set()
        statuses = []
        for index, key in enumerate(batch.keys):
            if key in self._values:
                statuses.append(Status.OK)
            elif batch.value_bytes(index) > self.capacity_bytes:
                statuses.append(Status.NO_SPACE)
            else:
                # The copy runs outside the lock; a rival that stored the key meanwhile wins.
                value = np.empty(batch.value_bytes(index), dtype=np.uint8)
                gather(value.ctypes.data, batch.addresses[index], batch.sizes[index])
                statuses.append(self._insert(key, value, added))
        with self._lock:
            self._touch(batch.keys, batch.order)
        return statuses

    def get(self, batch: Batch) -> list[Status]:
        """See :meth:`Store.get`."""
        self._require_open()
        self._regions.check(batch)
        with self._lock:
            values = [self._values.get(key) for key in batch.keys]
            self._touch(batch.keys, batch.order)
        statuses = []
        for index, value in enumerate(values):
            if value is None:
                statuses.append(Status.MISSING)
            elif len(value) != batch.value_bytes(index):
                statuses.append(Status.FAILED)
            else:
                scatter(value.ctypes.data, batch.addresses[index], batch.sizes[index])
                statuses.append(Status.OK)
        return statuses

    def remove(self, keys: Sequence[str]) -> list[Status]:
        """See :meth:`Store.remove`."""
        self._require_open()
        with self._lock:
            return [Status.OK if self._drop(key) else Status.MISSING for key in keys]

    def close(self) -> None:
        """Forget every value."""
        with self._lock:
            self._closed = True
            self._values.clear()
            self._used_bytes = 0

    def _insert(self, key: str, value: ByteArray, added: set[str]) -> Status:
        with self._lock:
            if self._closed:
                raise StoreClosedError("the memory store was closed during a put")
            if key in self._values:
                return Status.OK
            while self._used_bytes + len(value) > self.capacity_bytes:
                victim = next((old for old in self._values if old not in added), None)
                if victim is None:
                    return Status.NO_SPACE
                self._drop(victim)
            self._values[key] = value
            self._used_bytes += len(value)
            added.add(key)
            return Status.OK

    def _drop(self, key: str) -> bool:
        value = self._values.pop(key, None)
        if value is None:
            return False
        self._used_bytes -= len(value)
        return True

    def _touch(self, keys: Sequence[str], order: Sequence[int] | None) -> None:
        last_first: Iterable[str] = reversed(keys)
        if order is not None:
            ranked = sorted(zip(order, keys, strict=True), key=lambda pair: pair[0], reverse=True)
            last_first = (key for _, key in ranked)
        for key in last_first:
            if key in self._values:
                self._values.move_to_end(key)


def open_memory(url: StoreUrl) -> MemoryStore:
    """Open ``memory://[name][?size=1GiB]``; handles of one name share one store.

    Raises:
        ConfigError: every fault of the URL.
    """
    reader = UrlReader(url, known=("size",))
    size = reader.size("size")
    if url.path not in ("", "/"):
        reader.fault(f"a memory store has a name, not a path: write memory://{url.host or 'name'}")
    reader.finish()
    return MemoryStore(size or DEFAULT_CAPACITY_BYTES)
