"""The memory store keeps the contract, evicts the least recently used, and shares by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

from kvtide.errors import ConfigError
from kvtide.stores import Status, Store, open_store
from kvtide.stores.memory import MemoryStore
from kvtide.testing import Arena, StoreMachine, StoreTests, value_of
from kvtide.testing.store_tests import SMALL_BYTES


class TestMemoryStore(StoreTests):
    """The laws."""

    def open(self, directory: Path) -> Store:
        """An empty store of ample size."""
        return MemoryStore()

    def open_small(self, directory: Path) -> Store:
        """An empty store that is soon full."""
        return MemoryStore(SMALL_BYTES)

    def raw_put(self, store: Store, key: str, value: bytes) -> None:
        """Write past the store's methods."""
        assert isinstance(store, MemoryStore)
        store._values[key] = np.frombuffer(value, dtype=np.uint8)

    def raw_get(self, store: Store, key: str) -> bytes | None:
        """Read past the store's methods."""
        assert isinstance(store, MemoryStore)
        value = store._values.get(key)
        return None if value is None else value.tobytes()


class RoomyMachine(StoreMachine):
    """Histories in which nothing may vanish."""

    def open(self) -> Store:
        """An empty store of ample size."""
        return MemoryStore(8 << 20)


class TightMachine(StoreMachine):
    """Histories in which values are evicted."""

    may_evict = True

    def open(self) -> Store:
        """An empty store of ample size."""
        return MemoryStore(256 << 10)


TestRoomyHistories = RoomyMachine.TestCase
TestRoomyHistories.settings = settings(max_examples=40, deadline=None)
TestTightHistories = TightMachine.TestCase
TestTightHistories.settings = settings(max_examples=40, deadline=None)


def test_the_tail_of_a_chain_is_evicted_first() -> None:
    """Of a chain put or touched in one call, the last chunks go first."""
    store = MemoryStore(10_000)
    arena = Arena(store)
    chain = [f"chunk-{i}" for i in range(10)]
    arena.put([(key, value_of(key, 1_000)) for key in chain], order=range(10))
    arena.put([("new-0", bytes(1_000)), ("new-1", bytes(1_000))])
    assert store.exists(chain) == [True] * 8 + [False] * 2


def test_what_is_used_stays() -> None:
    """A value that was read since is evicted after those that were not."""
    store = MemoryStore(3_000)
    arena = Arena(store)
    for key in "abc":
        arena.put([(key, bytes(1_000))])
    arena.get([("a", 1_000)])
    arena.put([("d", bytes(1_000))])
    assert store.exists(["a", "b", "c", "d"]) == [True, False, True, True]


def test_removing_gives_the_space_back() -> None:
    """The budget counts what is held, not what was put."""
    store = MemoryStore(1_000)
    arena = Arena(store)
    arena.put([("a", bytes(600))])
    assert store.used_bytes == 600
    store.remove(["a"])
    assert store.used_bytes == 0
    assert arena.put([("b", bytes(1_000))]) == [Status.OK]


def test_handles_of_one_name_share_one_store() -> None:
    """``memory://name`` is one store in this process, until its last handle is closed."""
    first, second = open_store("memory://shared"), open_store("memory://shared")
    other = open_store("memory://other")
    Arena(first).put([("a", b"x")])
    assert (second.exists(["a"]), other.exists(["a"])) == ([True], [False])
    first.close()
    first.close()
    assert second.exists(["a"]) == [True]
    second.close()
    with open_again() as third:
        assert third.exists(["a"]) == [False]
    other.close()


class open_again:  # noqa: N801 - reads as a call
    """Open ``memory://shared`` for a block."""

    def __enter__(self) -> Store:
        self._store = open_store("memory://shared")
        return self._store

    def __exit__(self, *_: object) -> None:
        self._store.close()


@pytest.mark.parametrize(
    "url, says",
    [
        ("memory://a?sixe=1GiB", "did you mean 'size'?"),
        ("memory://a?size=lots", "'lots' is not a size"),
        ("memory://a?size=0", "must be positive"),
        ("memory:///tmp/x", "has a name, not a path"),
        ("memory://a?size=1&size=2", "given twice"),
        ("memory://a?size=", "has no value"),
        ("memory://a#x", "fragment"),
    ],
)
def test_a_wrong_url_is_refused_with_advice(url: str, says: str) -> None:
    """Each fault of a URL is named with what to write instead."""
    with pytest.raises(ConfigError, match=says.replace("?", r"\?")):
        open_store(url)


def test_all_faults_of_a_url_come_at_once() -> None:
    """One restart mends them all."""
    with pytest.raises(ConfigError) as caught:
        open_store("memory:///x?sixe=1&colour=red&size=lots")
    assert len(caught.value.faults) == 4
