"""The local store keeps the contract; and what is special to it."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from hypothesis import settings

from kvtide.errors import ConfigError, StoreClosedError, StoreLostError, StoreOpenError
from kvtide.stores import Status, Store, local_files, open_store
from kvtide.stores.local import LocalStore
from kvtide.stores.local_index import ENTRY, encode_key, num_pages_of
from kvtide.testing import Arena, StoreMachine, StoreTests, value_of
from kvtide.testing.store_tests import SMALL_BYTES
from tests.stores.local_checks import PAGE, check_extents


class TestLocalStore(StoreTests):
    """The laws."""

    can_be_lost = True

    def open(self, directory: Path) -> Store:
        """An empty store of ample size."""
        return LocalStore(directory / "pool", 16 << 20, lock_timeout_s=0.05)

    def open_small(self, directory: Path) -> Store:
        """An empty store that is soon full."""
        return LocalStore(directory / "pool", SMALL_BYTES)

    def raw_put(self, store: Store, key: str, value: bytes) -> None:
        """Write at the end of the slab, where a young pool has its free extent."""
        assert isinstance(store, LocalStore)
        index, num_pages = store._index, num_pages_of(len(value))
        first = store.size_bytes // PAGE - num_pages
        with (store.path / "slab").open("r+b") as slab:
            slab.seek(first * PAGE)
            slab.write(value)
        with (store.path / "pages").open("r+b") as pages:
            pages.seek(first * 8)
            pages.write((1000).to_bytes(8, "little") * num_pages)
        with index._env.begin(write=True) as txn:
            cursor = txn.cursor(index._extents)
            cursor.last()
            page, record = cursor.item()
            free = int.from_bytes(record[:4], "little") - num_pages
            txn.put(page, free.to_bytes(4, "little") + record[4:], db=index._extents)
            extent = num_pages.to_bytes(4, "little") + b"\1" + (1000).to_bytes(8, "little")
            encoded = encode_key(key)
            txn.put(first.to_bytes(4, "big"), extent + encoded, db=index._extents)
            txn.put(encoded, ENTRY.pack(1000, len(value), first), db=index._keys)

    def raw_get(self, store: Store, key: str) -> bytes | None:
        """Read past the store's methods."""
        assert isinstance(store, LocalStore)
        with store._index._env.begin(db=store._index._keys) as txn:
            record = txn.get(encode_key(key))
        if record is None:
            return None
        _, num_bytes, first = ENTRY.unpack(record)
        return (store.path / "slab").read_bytes()[first * PAGE :][:num_bytes]

    def lose(self, store: Store) -> None:
        """Take the backend away."""
        assert isinstance(store, LocalStore)
        shutil.rmtree(store.path)
        store._next_path_check = 0.0

    def obstructed(self, store: Store) -> AbstractContextManager[object]:
        """Keep the backend from answering."""
        assert isinstance(store, LocalStore)
        return store._locks.writing(1.0)


class _Machine(StoreMachine):
    size_bytes = 8 << 20

    def open(self) -> Store:
        """An empty store of ample size."""
        self.directory = tempfile.TemporaryDirectory(prefix="kvtide-test-")
        return LocalStore(Path(self.directory.name) / "pool", self.size_bytes)

    def teardown(self) -> None:
        """Close the store and remove what it left."""
        super().teardown()
        if hasattr(self, "directory"):
            self.directory.cleanup()


class RoomyMachine(_Machine):
    """Histories in which nothing may vanish."""


class TightMachine(_Machine):
    """Histories in which values are evicted."""

    may_evict = True
    size_bytes = 256 << 10


TestRoomyHistories = RoomyMachine.TestCase
TestRoomyHistories.settings = settings(max_examples=30, deadline=None)
TestTightHistories = TightMachine.TestCase
TestTightHistories.settings = settings(max_examples=30, deadline=None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A directory that does not exist yet."""
    return tmp_path / "pool"


@pytest.fixture
def small(path: Path) -> Iterator[LocalStore]:
    """A pool of 64 pages."""
    store = LocalStore(path, 64 * PAGE)
    yield store
    store.close()


def test_a_pool_outlives_its_process(path: Path) -> None:
    """What was put is there after close and open, without naming the size."""
    store = LocalStore(path, 1 << 20)
    Arena(store).put([("a", value_of("a", 9_000))])
    store.close()
    store = LocalStore(path)
    assert Arena(store).get([("a", 9_000)]) == [(Status.OK, value_of("a", 9_000))]
    assert store.size_bytes == 1 << 20
    store.close()


def test_every_page_can_be_used(small: LocalStore) -> None:
    """A pool of 64 pages holds 64 values of a page; the 65th evicts one of them."""
    arena = Arena(small)
    keys = [f"key-{i}" for i in range(65)]
    assert arena.put([(key, value_of(key, PAGE)) for key in keys[:64]]) == [Status.OK] * 64
    assert sum(small.exists(keys)) == 64
    assert arena.put([(keys[64], bytes(PAGE))]) == [Status.OK]
    assert sum(small.exists(keys)) == 64
    assert check_extents(small) == {"free": 0, "value": 64, "reserved": 0}


def test_what_is_used_gets_a_second_chance(small: LocalStore) -> None:
    """The hand passes values touched since it last came by."""
    arena = Arena(small)
    keys = [f"key-{i}" for i in range(64)]
    arena.put([(key, bytes(PAGE)) for key in keys])
    small.exists(keys[:32])
    arena.put([(f"new-{i}", bytes(PAGE)) for i in range(32)])
    assert small.exists(keys) == [True] * 32 + [False] * 32


def test_early_chunks_outlive_late_ones(small: LocalStore) -> None:
    """Of a chain that nobody touches the first chunks stay longest."""
    arena = Arena(small)
    keys = [f"key-{i}" for i in range(64)]
    orders = [0, 1, 2, 3, *range(64, 124)]
    arena.put([(key, bytes(PAGE)) for key in keys], order=orders)
    arena.put([(f"new-{i}", bytes(PAGE)) for i in range(60)], order=range(100, 160))
    assert small.exists(keys) == [True] * 4 + [False] * 60


def test_large_values_displace_many_small_ones(small: LocalStore) -> None:
    """A value takes a run of pages, whatever lay there, even if all of it was just used."""
    arena = Arena(small)
    keys = [f"key-{i}" for i in range(64)]
    arena.put([(key, bytes(PAGE)) for key in keys], order=range(64))
    small.exists(keys)
    big = value_of("big", 40 * PAGE)
    assert arena.put([("big", big)]) == [Status.OK]
    assert arena.get([("big", len(big))]) == [(Status.OK, big)]
    assert sum(small.exists(keys)) == 24
    check_extents(small)


def test_small_values_in_a_pool_of_many_do_not_fill_the_index(path: Path) -> None:
    """When the index is nearly full, evictions make room in it before the slab is full."""
    store = LocalStore(path, 64 << 20)
    arena = Arena(store)
    for start in range(0, 60_000, 250):
        keys = [f"{i:0500}" for i in range(start, start + 250)]
        assert arena.put([(key, b"x") for key in keys]) == [Status.OK] * 250
    assert 1_000 < sum(store.exists([f"{i:0500}" for i in range(60_000)])) < 16_384
    check_extents(store)
    store.close()


def test_a_recycled_extent_is_missing_never_wrong(small: LocalStore) -> None:
    """A get whose pages are given to another key between lookup and copy says MISSING."""
    arena, other = Arena(small), Arena(small)
    arena.put([("a", value_of("a", 30 * PAGE))])
    find = small._index.find

    def find_and_lose(keys: list[bytes]) -> list[bytes | None]:
        entries = find(keys)
        for i in range(4):
            other.put([(f"new-{i}", value_of(f"new-{i}", 20 * PAGE))])
        return entries

    small._index.find = find_and_lose  # type: ignore[assignment, method-assign]
    assert arena.get([("a", 30 * PAGE)])[0][0] is Status.MISSING


def test_a_put_that_breaks_off_gives_its_pages_back(
    small: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages reserved by a put that raised are free again at the next write."""
    arena = Arena(small)
    with monkeypatch.context() as patched:
        patched.setattr(small, "_copy_in", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            arena.put([("a", bytes(40 * PAGE))])
    assert small.exists(["a"]) == [False]
    assert arena.put([("b", bytes(60 * PAGE))]) == [Status.OK]
    assert check_extents(small)["reserved"] == 0


def test_a_held_write_lock_fails_keys_in_time(path: Path) -> None:
    """A put that waits longer than its limit answers FAILED; gets and exists go on."""
    store = LocalStore(path, 64 * PAGE, lock_timeout_s=0.01)
    arena = Arena(store)
    arena.put([("a", b"abc")])
    with store._locks.writing(1.0):
        assert arena.put([("b", b"x")]) == [Status.FAILED]
        assert store.remove(["a"]) == [Status.FAILED]
        assert store.exists(["a"]) == [True]
        assert arena.get([("a", 3)]) == [(Status.OK, b"abc")]
    store.close()


def test_a_removed_pool_is_lost(small: LocalStore) -> None:
    """Once the directory is gone, calls raise ``StoreLostError``, and close still works."""
    shutil.rmtree(small.path)
    small._next_path_check = 0.0
    with pytest.raises(StoreLostError, match="removed"):
        small.exists(["a"])
    small.close()


def test_a_clean_pool_outlives_a_restart_of_the_machine(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After another boot a pool that was closed keeps its content."""
    store = LocalStore(path, 1 << 20)
    Arena(store).put([("a", b"abc")])
    store.close()
    monkeypatch.setattr(local_files, "boot_id", lambda: "another boot")
    store = LocalStore(path)
    assert store.exists(["a"]) == [True]
    store.close()


def test_a_pool_in_use_at_power_loss_starts_empty(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After another boot a pool that was never closed is not trusted, and keeps its size."""
    store = LocalStore(path, 1 << 20)
    Arena(store).put([("a", b"abc")])
    marker = local_files.read_marker(path)
    assert marker is not None
    store.close()
    local_files.write_marker(path, marker)
    monkeypatch.setattr(local_files, "boot_id", lambda: "another boot")
    store = LocalStore(path)
    assert store.exists(["a"]) == [False]
    assert store.size_bytes == 1 << 20
    assert Arena(store).put([("a", b"abc")]) == [Status.OK]
    store.close()


@pytest.mark.parametrize("name", ["slab", "pages", "index.lmdb"])
@pytest.mark.parametrize("damage", ["removed", "cut"])
def test_a_damaged_pool_starts_empty(path: Path, name: str, damage: str) -> None:
    """A missing or shortened file costs the content, not the start."""
    store = LocalStore(path, 1 << 20)
    Arena(store).put([("a", b"abc")])
    store.close()
    if damage == "removed":
        (path / name).unlink()
    else:
        os.truncate(path / name, 100)
    store = LocalStore(path)
    assert store.exists(["a"]) == [False]
    store.close()


def test_a_creation_that_was_killed_is_begun_anew(path: Path) -> None:
    """Without a marker our own files are leftovers."""
    path.mkdir()
    for name in ("slab", "pages", "locks"):
        (path / name).write_bytes(b"half")
    store = LocalStore(path, 1 << 20)
    assert Arena(store).put([("a", b"abc")]) == [Status.OK]
    store.close()


def test_a_directory_of_someone_else_is_refused(path: Path) -> None:
    """Nothing is written into a directory that holds other files."""
    path.mkdir()
    (path / "thesis.txt").write_text("precious")
    with pytest.raises(StoreOpenError, match=r"holds other files \(thesis.txt\)"):
        LocalStore(path, 1 << 20)
    assert [entry.name for entry in path.iterdir()] == ["thesis.txt"]


def test_a_file_is_refused(path: Path) -> None:
    """A path that is a file, or lies below one, is named as such."""
    path.write_text("x")
    for wrong in (path, path / "below"):
        with pytest.raises(StoreOpenError, match="is a file"):
            LocalStore(wrong, 1 << 20)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_is_not_writable_is_refused(path: Path) -> None:
    """The message says whose right is missing."""
    path.mkdir(mode=0o500)
    with pytest.raises(StoreOpenError, match="not writable"):
        LocalStore(path, 1 << 20)


def test_a_directory_that_cannot_be_made_is_refused() -> None:
    """Whatever the system says is passed on with advice."""
    with pytest.raises(StoreOpenError, match="choose another path"):
        LocalStore("/proc/kvtide", 1 << 20)


def test_another_format_is_refused(path: Path) -> None:
    """A pool that another version wrote is left as it is."""
    LocalStore(path, 1 << 20).close()
    marker = json.loads((path / local_files.MARKER).read_text())
    marker["format_version"] = 99
    (path / local_files.MARKER).write_text(json.dumps(marker))
    with pytest.raises(StoreOpenError, match="pool format 99, this kvtide writes 1"):
        LocalStore(path)


@pytest.mark.parametrize("text", ["", "[1]", '{"format_version": 1}'])
def test_a_damaged_marker_is_refused(path: Path, text: str) -> None:
    """A marker that cannot be understood is never guessed at."""
    LocalStore(path, 1 << 20).close()
    (path / local_files.MARKER).write_text(text)
    with pytest.raises(StoreOpenError, match="remove the directory"):
        LocalStore(path)


def test_another_size_is_refused(path: Path) -> None:
    """An existing pool keeps its size; asking for another says both."""
    LocalStore(path, 1 << 20).close()
    with pytest.raises(StoreOpenError, match="a pool of 1MiB, not of 2MiB"):
        LocalStore(path, 2 << 20)
    LocalStore(path, (1 << 20) - 5).close()  # the same in whole pages


def test_more_than_is_free_is_refused_before_anything_is_written(path: Path) -> None:
    """The message compares what is asked with what is free."""
    with pytest.raises(StoreOpenError, match=r"needs .*TiB, but .* are free: ask for less"):
        LocalStore(path, 1 << 60)
    assert not (path / "slab").exists()


def test_a_small_dev_shm_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container the cure is another start option."""
    monkeypatch.setattr(local_files, "free_bytes", lambda _: 64 << 20)
    path = Path("/dev/shm") / f"kvtide-test-{os.getpid()}"
    try:
        with pytest.raises(StoreOpenError, match="--shm-size"):
            LocalStore(path, 1 << 30)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def test_a_network_file_system_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes do not share memory there."""
    monkeypatch.setattr(local_files, "file_system_of", lambda _: "nfs4")
    with pytest.raises(StoreOpenError, match=r"network file system \(nfs4\)"):
        LocalStore(path, 1 << 20)


def test_the_default_size_is_half_of_what_is_free(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a size a new pool leaves as much as it takes."""
    monkeypatch.setattr(local_files, "free_bytes", lambda _: 8 << 20)
    store = LocalStore(path)
    assert store.size_bytes == 4 << 20
    store.close()


@pytest.mark.parametrize(
    "url, says",
    [
        ("local://dev/shm/x", "local:///dev/shm/x"),
        ("local://", "needs the path"),
        ("local:///tmp/x?size=1KiB", "a pool needs 256KiB at least"),
        ("local:///tmp/x?size=20Gibibyte", "has no known unit"),
        ("local:///tmp/x?lock_timeout_ms=soon", "not a number of milliseconds"),
        ("local:///tmp/x?lock_timeout=5", "did you mean 'lock_timeout_ms'"),
        ("locl:///tmp/x", "did you mean 'local'"),
        ("/tmp/x", "has no scheme"),
        ("local://[/x", "not a URL"),
    ],
)
def test_a_wrong_url_is_refused_with_advice(url: str, says: str) -> None:
    """Each fault of a URL is named with what to write instead."""
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    assert says in str(caught.value)


def test_one_process_opens_a_pool_once(path: Path, tmp_path: Path) -> None:
    """URLs that lead to one directory share a handle; the size may be left out, not changed."""
    (tmp_path / "link").symlink_to(path)
    first = open_store(f"local://{path}?size=1MiB")
    second = open_store(f"local://{tmp_path}/link")
    Arena(first).put([("a", b"abc")])
    first.close()
    with pytest.raises(StoreClosedError):
        first.exists(["a"])
    assert second.exists(["a"]) == [True]
    with pytest.raises(StoreOpenError, match="other parameters"):
        open_store(f"local://{path}?size=2MiB")
    second.close()
    third = open_store(f"local://{path}")
    assert third.exists(["a"]) == [True]
    third.close()


def in_forked_child(check: Callable[[], None]) -> bool:
    """Run ``check`` in a forked child; True if it raised nothing."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            check()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_handle_from_before_a_fork_refuses(path: Path) -> None:
    """A child is told to open after the fork, and does its parent no harm; nor does its close."""
    store = open_store(f"local://{path}?size=1MiB")
    Arena(store).put([("a", b"abc")])

    def use() -> None:
        with pytest.raises(StoreClosedError, match="before a fork"):
            store.exists(["a"])
        store.close()
        with pytest.raises(StoreOpenError, match="spawn"):
            open_store(f"local://{path}")

    assert in_forked_child(use)
    assert store.exists(["a", "b"]) == [True, False]
    assert Arena(store).put([("b", b"parent")]) == [Status.OK]
    store.close()


def test_a_child_may_open_what_its_parent_closed(path: Path) -> None:
    """Only a pool that was open at the fork is refused."""
    store = open_store(f"local://{path}?size=1MiB")
    Arena(store).put([("a", b"abc")])
    store.close()

    def use() -> None:
        own = open_store(f"local://{path}")
        assert own.exists(["a"]) == [True]
        own.close()

    assert in_forked_child(use)


def test_a_second_store_on_one_path_is_refused(small: LocalStore) -> None:
    """Opening a pool twice without ``open_store`` is refused and leaves the first one sound."""
    with pytest.raises(StoreOpenError, match="already open in this process"):
        LocalStore(small.path)
    assert Arena(small).put([("a", b"abc")]) == [Status.OK]


def test_a_reader_that_stays_fills_the_index_not_for_ever(path: Path) -> None:
    """While someone reads an old version the index may fill: puts fail in time, and then go on."""
    store = LocalStore(path, 64 * PAGE, lock_timeout_s=0.01)
    arena = Arena(store)
    statuses: set[Status] = set()
    with store._index._env.begin():
        for number in range(2_000):
            statuses.update(arena.put([(f"key-{number}", b"x")]))
            if Status.FAILED in statuses:
                break
    assert statuses == {Status.OK, Status.FAILED}
    assert arena.put([("after", b"abc")]) == [Status.OK]
    assert arena.get([("after", 3)]) == [(Status.OK, b"abc")]
    assert check_extents(store)["reserved"] == 0
    store.close()
