"""The laws find what they are for: stores that break one of them fail its test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvtide.core.batch import Batch
from kvtide.core.layout import Region
from kvtide.stores import Status, Store
from kvtide.stores.memory import MemoryStore
from kvtide.stores.wrappers import WrapperStore
from kvtide.testing import Arena, Fault, FaultKind, FaultyStore, StoreTests
from kvtide.testing.store_tests import SMALL_BYTES

# Not a class that pytest collects: the laws are called one by one.


class _Laws(StoreTests):
    __test__ = False

    def open(self, directory: Path) -> Store:
        """An empty store of ample size."""
        return MemoryStore()

    def open_small(self, directory: Path) -> Store:
        """An empty store that is soon full."""
        return MemoryStore(SMALL_BYTES)

    def raw_put(self, store: Store, key: str, value: bytes) -> None:
        """Write past the store's methods."""
        assert isinstance(store, WrapperStore)
        assert isinstance(store.inner, MemoryStore)
        store.inner._values[key] = np.frombuffer(value, dtype=np.uint8)

    def raw_get(self, store: Store, key: str) -> bytes | None:
        """Read past the store's methods."""
        assert isinstance(store, WrapperStore)
        assert isinstance(store.inner, MemoryStore)
        value = store.inner._values.get(key)
        return None if value is None else value.tobytes()


class _Overwriting(WrapperStore):
    def put(self, batch: Batch) -> list[Status]:
        self.inner.remove(batch.keys)
        return super().put(batch)


class _Reversed(WrapperStore):
    def exists(self, keys: Sequence[str]) -> list[bool]:
        return super().exists(keys)[::-1]


class _Deduplicating(WrapperStore):
    def exists(self, keys: Sequence[str]) -> list[bool]:
        return super().exists(list(dict.fromkeys(keys)))


class _ShortReading(WrapperStore):
    def get(self, batch: Batch) -> list[Status]:
        assert isinstance(self.inner, MemoryStore)
        statuses = super().get(batch)
        for index, key in enumerate(batch.keys):
            if statuses[index] is Status.FAILED and batch.addresses[index]:
                held = self.inner._values[key]
                size = min(len(held), batch.value_bytes(index))
                if size:
                    part = Batch(["part"], [[held.ctypes.data]], [[size]])
                    self.inner.register(Region(held.ctypes.data, size))
                    self.inner.put(part)
                    self.inner.get(Batch(["part"], [[batch.addresses[index][0]]], [[size]]))
                    self.inner.remove(["part"])
        return statuses


class _Trusting(WrapperStore):
    def register(self, region: Region) -> None:
        self.inner.register(Region(1, 1 << 47))


class _Forgetful(WrapperStore):
    def close(self) -> None:
        """Forget to close."""


class _FirstSegmentOnly(WrapperStore):
    def put(self, batch: Batch) -> list[Status]:
        sizes = [list(each[:1]) for each in batch.sizes]
        addresses = [list(each[:1]) for each in batch.addresses]
        return super().put(Batch(batch.keys, addresses, sizes, batch.order))


class _CutKeys(WrapperStore):
    def put(self, batch: Batch) -> list[Status]:
        keys = [key[:511] for key in batch.keys]
        return super().put(Batch(keys, batch.addresses, batch.sizes, batch.order))

    def get(self, batch: Batch) -> list[Status]:
        return super().get(Batch([key[:511] for key in batch.keys], batch.addresses, batch.sizes))


def _flipping(inner: Store) -> Store:
    return FaultyStore(inner, [Fault(FaultKind.FLIPPED)])


def _vanishing(inner: Store) -> Store:
    return FaultyStore(inner, [Fault(FaultKind.VANISHED, "get", keys=lambda key: key == "a")])


_LAWS = _Laws()


@pytest.mark.parametrize(
    "broken, law",
    [
        (_Overwriting, lambda s, a: _LAWS.test_write_once(s, a, 20_000)),
        (_Reversed, _LAWS.test_raw_put_is_seen_by_get),
        (_Deduplicating, _LAWS.test_duplicates_in_a_batch_are_each_answered),
        (_ShortReading, lambda _, a: _LAWS.test_a_get_of_the_wrong_size_fails(a, 999)),
        (_FirstSegmentOnly, _LAWS.test_segments_concatenate),
        (_CutKeys, _LAWS.test_long_and_odd_keys_are_told_apart),
        (_Forgetful, _LAWS.test_a_call_after_close_raises),
        (_flipping, _LAWS.test_raw_put_is_seen_by_get),
        (_vanishing, _LAWS.test_raw_put_is_seen_by_get),
        (_vanishing, lambda _, a: _LAWS.test_an_absent_key_leaves_its_neighbours_untouched(a)),
    ],
)
def test_a_store_that_breaks_a_law_fails_its_test(
    broken: Callable[[Store], Store], law: Callable[[Store, Arena], None]
) -> None:
    """A sound store passes the law's test, and the broken one does not."""
    sound = WrapperStore(MemoryStore())
    law(sound, Arena(sound))
    store = broken(MemoryStore())
    arena = Arena(store)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        law(store, arena)


def test_a_store_that_trusts_addresses_is_found() -> None:
    """Unregistered memory that is not refused fails the law before anything is read from it."""
    store = _Trusting(MemoryStore())
    with pytest.raises(pytest.fail.Exception):
        _LAWS.test_unregistered_memory_is_refused(store, Arena(store), 1)
