"""Stores around a store: what is said about calls is said once, for every store."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from kvtide.core.batch import Batch
from kvtide.core.layout import Region
from kvtide.stores.base import Status, Store


class WrapperStore(Store):
    """Passes every call on to ``inner``; a wrapper overrides the calls it is about.

    The wrapper owns ``inner`` and closes it.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    def register(self, region: Region) -> None:
        """See :meth:`Store.register`."""
        self.inner.register(region)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """See :meth:`Store.exists`."""
        return self.inner.exists(keys)

    def put(self, batch: Batch) -> list[Status]:
        """See :meth:`Store.put`."""
        return self.inner.put(batch)

    def get(self, batch: Batch) -> list[Status]:
        """See :meth:`Store.get`."""
        return self.inner.get(batch)

    def remove(self, keys: Sequence[str]) -> list[Status]:
        """See :meth:`Store.remove`."""
        return self.inner.remove(keys)

    def close(self) -> None:
        """Close ``inner``."""
        self.inner.close()

    @property
    def checks_before_put(self) -> bool:
        """See :attr:`Store.checks_before_put`."""
        return self.inner.checks_before_put

    def take_counters(self) -> Counter[str]:
        """See :meth:`Store.take_counters`."""
        return self.inner.take_counters()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class CountingStore(WrapperStore):
    """Counts what is asked of a store, per method (``"exists"``, ``"put"``, ``"get"``, ...).

    Attributes:
        num_calls: calls per method.
        num_keys: keys per method, repeated keys counted each time.
        times_asked: per method, how often each key was asked for; only with ``per_key``, since it
            grows with every key.
        put_bytes, got_bytes: bytes of the values that were answered OK.

    Calls that raise are counted too. Any thread may call; read the counters when calls have ended.
    """

    def __init__(self, inner: Store, *, per_key: bool = False) -> None:
        super().__init__(inner)
        self._per_key = per_key
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Start to count from zero."""
        with self._lock:
            self.num_calls: Counter[str] = Counter()
            self.num_keys: Counter[str] = Counter()
            self.times_asked: dict[str, Counter[str]] = {
                method: Counter() for method in ("exists", "put", "get", "remove")
            }
            self.put_bytes = 0
            self.got_bytes = 0

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """See :meth:`Store.exists`."""
        self._count("exists", keys)
        return super().exists(keys)

    def put(self, batch: Batch) -> list[Status]:
        """See :meth:`Store.put`."""
        self._count("put", batch.keys)
        statuses = super().put(batch)
        moved = _bytes_ok(batch, statuses)
        with self._lock:
            self.put_bytes += moved
        return statuses

    def get(self, batch: Batch) -> list[Status]:
        """See :meth:`Store.get`."""
        self._count("get", batch.keys)
        statuses = super().get(batch)
        moved = _bytes_ok(batch, statuses)
        with self._lock:
            self.got_bytes += moved
        return statuses

    def remove(self, keys: Sequence[str]) -> list[Status]:
        """See :meth:`Store.remove`."""
        self._count("remove", keys)
        return super().remove(keys)

    def _count(self, method: str, keys: Sequence[str]) -> None:
        with self._lock:
            self.num_calls[method] += 1
            self.num_keys[method] += len(keys)
            if self._per_key:
                self.times_asked[method].update(keys)


def _bytes_ok(batch: Batch, statuses: Sequence[Status]) -> int:
    return sum(
        batch.value_bytes(index) for index, status in enumerate(statuses) if status is Status.OK
    )
