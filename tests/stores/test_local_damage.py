"""A local pool whose files were damaged while it is open: what is lost is stored again."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.errors import StoreLostError
from kvtide.stores import Status
from kvtide.stores.local import LocalStore
from kvtide.stores.local_index import ENTRY
from kvtide.testing import Arena
from tests.stores.local_checks import check_extents

VALUE = b"value" * 1_000
NUM_PAGES = 256


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    """A pool of ``NUM_PAGES`` pages with the value ``k``."""
    store = LocalStore(tmp_path / "pool", NUM_PAGES << 12)
    assert Arena(store).put([("k", VALUE)]) == [Status.OK]
    yield store
    store.close()


def entry_of(store: LocalStore) -> bytes | None:
    """Return what the index says about ``k``."""
    return store._index.find([b"k"])[0]


def set_entry(store: LocalStore, entry: bytes) -> None:
    """Damage the entry of ``k``."""
    with store._index._env.begin(write=True) as txn:
        txn.put(b"k", entry, db=store._index._keys)


def damaged_entries() -> list[bytes]:
    """Return entries that no kvtide wrote."""
    return [
        b"",
        b"short",
        ENTRY.pack(4, 10, 0) + b"x",
        ENTRY.pack(4, len(VALUE), NUM_PAGES),
        ENTRY.pack(4, len(VALUE), NUM_PAGES - 1),
        ENTRY.pack(4, len(VALUE), (1 << 32) - 1),
        ENTRY.pack(4, (1 << 64) - 1, 0),
    ]


@pytest.mark.parametrize("entry", damaged_entries())
@pytest.mark.parametrize("first_call", ["exists", "get", "put", "remove"])
def test_a_damaged_entry_is_absent_and_goes(
    store: LocalStore, entry: bytes, first_call: str
) -> None:
    """Whichever call meets it first, the key can be stored and read again, and stays."""
    set_entry(store, entry)
    arena = Arena(store)
    if first_call == "exists":
        assert store.exists(["k", "absent"]) == [False, False]
        assert entry_of(store) is None
    elif first_call == "get":
        assert arena.get([("k", len(VALUE))])[0][0] is Status.MISSING
        assert entry_of(store) is None
    elif first_call == "remove":
        assert store.remove(["k"]) == [Status.OK]
    assert arena.put([("k", VALUE)]) == [Status.OK]
    assert arena.get([("k", len(VALUE))]) == [(Status.OK, VALUE)]
    assert store.remove(["k"]) == [Status.OK]
    for number in range(NUM_PAGES):  # the hand takes the pages that nobody names any more
        assert arena.put([(f"other-{number}", b"x" * 4096)]) == [Status.OK]
    assert arena.put([("k", VALUE)]) == [Status.OK]
    check_extents(store)


def test_one_damaged_entry_among_many(store: LocalStore) -> None:
    """The others are found, also the one that ends where the slab does."""
    arena = Arena(store)
    keys = [f"key-{number}" for number in range(100)]
    assert set(arena.put([(key, b"x") for key in keys])) == {Status.OK}
    assert arena.put([("to the end", b"x" * 4096 * (NUM_PAGES - 102))]) == [Status.OK]
    assert store.exists([*keys, "to the end"]) == [True] * 101
    for entry in damaged_entries():
        set_entry(store, entry)
        assert store.exists([*keys, "k", "to the end"]) == [True] * 100 + [False, True]


def test_a_value_stored_again_outlives_the_pages_it_had(store: LocalStore) -> None:
    """Evicting pages whose key leads elsewhere by now leaves the key."""
    set_entry(store, b"short")
    arena = Arena(store)
    assert arena.put([("k", VALUE)]) == [Status.OK]
    entry = entry_of(store)
    with store._index._env.begin(write=True) as txn:
        hand = store._index._hand(txn, 0, 1 << 62)
        store._slab.chances[:] = 0
        assert hand.take(2) == 0
        txn.abort()
    assert entry is not None
    assert entry_of(store) == entry


def test_a_key_without_its_value_heals(store: LocalStore) -> None:
    """Where the pages hold another generation the key goes, so that it is stored again."""
    store._slab.generations[1] ^= 4
    arena = Arena(store)
    assert store.exists(["k"]) == [True]
    assert arena.get([("k", len(VALUE))])[0][0] is Status.MISSING
    assert store.exists(["k"]) == [False]
    assert check_extents(store)["value"] == 0
    assert arena.put([("k", VALUE)]) == [Status.OK]
    assert arena.get([("k", len(VALUE))]) == [(Status.OK, VALUE)]


def test_a_key_that_was_only_missed_stays(store: LocalStore) -> None:
    """What a get found is looked at again under the lock; a rival's value is not removed."""
    entry = entry_of(store)
    assert entry is not None
    store._discard_lost([(b"k", entry), (b"k", b"an older entry"), (b"absent", entry)])
    assert entry_of(store) == entry


def test_a_busy_writer_does_not_hold_up_the_get_that_would_heal(store: LocalStore) -> None:
    """The key is left for the next get, at once."""
    store._slab.generations[1] ^= 4
    with store._locks.writing(1.0):
        assert Arena(store).get([("k", len(VALUE))])[0][0] is Status.MISSING
        assert entry_of(store) is not None
    assert Arena(store).get([("k", len(VALUE))])[0][0] is Status.MISSING
    assert entry_of(store) is None


def test_a_damaged_table_of_pages_loses_the_store(store: LocalStore) -> None:
    """Nothing raw comes out of a put, and the message says what to do."""
    with store._index._env.begin(write=True) as txn:
        txn.put(struct.pack(">I", 2), b"?", db=store._index._extents)
    with pytest.raises(StoreLostError, match="remove the directory"):
        Arena(store).put([("other", VALUE)])


@pytest.mark.parametrize("name", ["slab", "pages", "index.lmdb"])
def test_a_file_that_was_cut_loses_the_store(store: LocalStore, name: str) -> None:
    """The next look refuses, instead of a SIGBUS in a call."""
    size = (store.path / name).stat().st_size
    os.truncate(store.path / name, size - 1)
    store._next_path_check = 0.0
    with pytest.raises(StoreLostError, match="cut"):
        store.exists(["k"])
