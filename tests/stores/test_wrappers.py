"""Wrappers keep the contract; CountingStore counts, FaultyStore fails on a script."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvtide.errors import StoreClosedError, StoreLostError
from kvtide.stores import Status, Store
from kvtide.stores.memory import MemoryStore
from kvtide.stores.wrappers import CountingStore, WrapperStore
from kvtide.testing import Arena, Fault, FaultKind, FaultyStore, StoreTests, value_of
from kvtide.testing.store_tests import SMALL_BYTES


class WrapperTests(StoreTests):
    """The laws for a wrapper around a memory store."""

    wrap: Callable[[Store], WrapperStore]

    def open(self, directory: Path) -> Store:
        """An empty store of ample size."""
        return type(self).wrap(MemoryStore())

    def open_small(self, directory: Path) -> Store:
        """An empty store that is soon full."""
        return type(self).wrap(MemoryStore(SMALL_BYTES))

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


class TestWrapperStore(WrapperTests):
    """A wrapper that adds nothing."""

    wrap = WrapperStore


class TestCountingStore(WrapperTests):
    """A wrapper that counts."""

    wrap = CountingStore


class TestFaultyStoreWithoutFaults(WrapperTests):
    """A faulty store whose script is empty."""

    wrap = FaultyStore


class TestLostStore(WrapperTests):
    """A faulty store that can be lost."""

    wrap = FaultyStore
    can_be_lost = True

    def lose(self, store: Store) -> None:
        """Take the backend away."""
        assert isinstance(store, FaultyStore)
        store.script = (Fault(FaultKind.LOST),)


def faulty(*script: Fault) -> tuple[FaultyStore, Arena]:
    """Return a store with a script, and its arena, holding ``a`` and ``b`` of 100 bytes."""
    store = FaultyStore(MemoryStore())
    arena = Arena(store)
    arena.put([("a", value_of("a", 100)), ("b", value_of("b", 100))])
    store._num_calls.clear()
    store.script = script
    return store, arena


def test_counting_store_counts_calls_keys_and_bytes() -> None:
    """Counters tell calls, keys and bytes per method, and per key where asked."""
    store = CountingStore(MemoryStore(), per_key=True)
    arena = Arena(store)
    arena.put([("a", bytes(10)), ("b", bytes(20))])
    arena.get([("a", 10), ("x", 5)])
    store.exists(["a", "a", "c"])
    assert store.num_calls == Counter(put=1, get=1, exists=1)
    assert store.num_keys == Counter(put=2, get=2, exists=3)
    assert store.times_asked["exists"] == Counter(a=2, c=1)
    assert (store.put_bytes, store.got_bytes) == (30, 10)
    store.reset()
    assert store.num_calls == Counter()


def test_a_lost_store_raises_in_the_calls_of_the_script() -> None:
    """LOST raises, by method and call number, and the store works again afterwards."""
    store, _ = faulty(Fault(FaultKind.LOST, "exists", calls=range(1, 3)))
    assert store.exists(["a"]) == [True]
    for _ in range(2):
        with pytest.raises(StoreLostError):
            store.exists(["a"])
    assert store.exists(["a"]) == [True]
    assert store.injected == Counter({FaultKind.LOST: 2})


def test_failed_keys_leave_the_others_alone() -> None:
    """FAILED speaks about single keys in every call."""
    store, arena = faulty(Fault(FaultKind.FAILED, keys=lambda key: key in ("a", "new")))
    assert store.exists(["a", "b"]) == [False, True]
    assert arena.put([("new", b"x"), ("c", b"y")]) == [Status.FAILED, Status.OK]
    assert [status for status, _ in arena.get([("a", 100), ("b", 100)])] == [
        Status.FAILED,
        Status.OK,
    ]
    assert store.remove(["a", "b"]) == [Status.FAILED, Status.OK]
    assert store.inner.exists(["a", "b", "new", "c"]) == [True, False, False, True]


def test_no_space_is_answered_per_key() -> None:
    """NO_SPACE refuses a put and stores nothing; other calls do not know it."""
    store, arena = faulty(Fault(FaultKind.NO_SPACE, keys=lambda key: key == "x"))
    assert arena.put([("x", b"1"), ("y", b"2")]) == [Status.NO_SPACE, Status.OK]
    assert store.exists(["x", "y"]) == [False, True]


def test_a_vanished_key_exists_and_is_missing() -> None:
    """VANISHED promises in ``exists`` what ``get`` does not hold."""
    store, arena = faulty(Fault(FaultKind.VANISHED, keys=lambda key: key in ("a", "never")))
    assert store.exists(["a", "b", "never", "x"]) == [True, True, True, False]
    answers = arena.get([("a", 100), ("b", 100)])
    assert [status for status, _ in answers] == [Status.MISSING, Status.OK]


def test_short_bytes_are_answered_ok() -> None:
    """SHORT writes the first half only, in whatever segments, and says OK."""
    store, arena = faulty(Fault(FaultKind.SHORT, "get", keys=lambda key: key == "a"))
    arena.fill()
    assert store.get(arena.batch(["a", "b"], [[30, 70], [100]])) == [Status.OK] * 2
    assert arena.read(0, 100) == value_of("a", 100)[:50] + b"\xee" * 50
    assert arena.read(100, 100) == value_of("b", 100)


def test_a_flipped_bit_is_answered_ok() -> None:
    """FLIPPED changes one bit of the value."""
    _, arena = faulty(Fault(FaultKind.FLIPPED, keys=lambda key: key == "a"))
    (status, found), (_, other) = arena.get([("a", 100), ("b", 100)])
    assert status is Status.OK
    difference = int.from_bytes(found, "big") ^ int.from_bytes(value_of("a", 100), "big")
    assert difference.bit_count() == 1
    assert other == value_of("b", 100)


def test_a_delay_lets_the_call_through() -> None:
    """DELAY only takes time."""
    store, _ = faulty(Fault(FaultKind.DELAY, delay_s=0.001))
    assert store.exists(["a"]) == [True]
    assert store.injected == Counter({FaultKind.DELAY: 1})


def test_a_hang_ends_with_release() -> None:
    """HANG holds the call until the test lets go; then it does its work, and none hangs again."""
    store, _ = faulty(Fault(FaultKind.HANG, "exists"))
    answers: list[list[bool]] = []
    thread = threading.Thread(target=lambda: answers.append(store.exists(["a"])))
    thread.start()
    assert store.wait_until_hanging()
    assert not answers
    store.release()
    thread.join()
    assert answers == [[True]]
    assert store.exists(["a"]) == [True]


def test_a_hang_ends_with_close() -> None:
    """Close ends hanging calls with the closed error."""
    store, _ = faulty(Fault(FaultKind.HANG, "exists"))
    caught: list[Exception] = []

    def call() -> None:
        try:
            store.exists(["a"])
        except StoreClosedError as error:
            caught.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    assert store.wait_until_hanging()
    store.close()
    thread.join()
    assert len(caught) == 1


def test_a_hang_has_a_limit() -> None:
    """A hang nobody ends raises ``StoreLostError`` at its limit."""
    store = FaultyStore(MemoryStore(), [Fault(FaultKind.HANG)], hang_limit_s=0.001)
    with pytest.raises(StoreLostError, match="limit"):
        store.exists(["a"])
    assert not store.wait_until_hanging(timeout_s=0.001)


@pytest.mark.parametrize(
    "kind, method",
    [(FaultKind.NO_SPACE, "get"), (FaultKind.FLIPPED, "put"), (FaultKind.LOST, "close")],
)
def test_a_fault_that_cannot_happen_is_refused(kind: FaultKind, method: str) -> None:
    """A script that would never do anything is a mistake of the test."""
    with pytest.raises(ValueError, match="cannot happen"):
        Fault(kind, method)


def test_the_first_rule_decides() -> None:
    """Of two rules about one key the first one counts."""
    store, _ = faulty(
        Fault(FaultKind.VANISHED, "exists", keys=lambda key: key == "x"),
        Fault(FaultKind.FAILED, "exists"),
    )
    assert store.exists(["x", "a"]) == [True, False]
