"""The embedded store: a pool in a directory that many processes share and that outlives them.

An LMDB index says where a value lies in one preallocated, memory-mapped slab. A put is in two
phases: pages are reserved under the write lock, filled outside any lock, and published under the
lock again. A get copies, and then looks whether the pages are still what the index promised.

Never truncate a file of a pool that is in use: it is mapped, and whoever touches a page that is
gone dies of SIGBUS. Each process looks once a second and then refuses further calls, but what it
touches before is not caught. Removing the whole directory is safe: mapped files outlive it.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import lmdb
import numpy as np

from kvtide.core.batch import Batch
from kvtide.core.layout import Region
from kvtide.errors import StoreClosedError, StoreLostError, StoreOpenError
from kvtide.stores import local_files as files
from kvtide.stores.base import Status, Store
from kvtide.stores.copying import gather, scatter
from kvtide.stores.local_hand import MOST_CHANCES
from kvtide.stores.local_index import (
    ENTRY,
    MAX_KEYS_AT_ONCE,
    LocalIndex,
    Reservation,
    encode_keys,
    first_pages,
    num_pages_of,
)
from kvtide.stores.local_locks import AlreadyOpenError, LockTimeoutError, Owner, PoolLocks
from kvtide.stores.memory_buffer import PAGE_BYTES
from kvtide.stores.regions import RegionSet
from kvtide.stores.running_calls import RunningCalls
from kvtide.stores.slab import Slab
from kvtide.stores.url import StoreUrl, UrlReader
from kvtide.units import format_size

DEFAULT_LOCK_TIMEOUT_S = 2.0
_SETUP_TIMEOUT_S = 60.0
_OPEN_INDEX_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_S = 5.0
_CHECK_PATH_EVERY_S = 1.0
_READERS_PAUSE_S = 1e-3
_MAX_BYTES_AT_ONCE = 256 << 20

# How many laps of the hand a value survives when new and after each touch. Measured on two traces:
# a new value needs one, or the newest goes first; three for a touch keep up with LRU. Losing an
# early chunk wastes all later ones, so early chunks get one more.
_NEW_CHANCES = 1
_TOUCHED_CHANCES = MOST_CHANCES - 1
_EARLY_CHUNKS = 64

T = TypeVar("T")


class LocalStore(Store):
    """A pool of ``size_bytes`` in the directory ``path``; open it once per process.

    Args:
        path: created if need be; a directory of its own.
        size_bytes: rounded up to pages. None takes an existing pool as it is, or makes one of half
            the free space.
        lock_timeout_s: how long a call may wait for other writers; then its keys are FAILED.

    Raises:
        StoreOpenError: the pool cannot be opened; the message says what to change.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        size_bytes: int | None = None,
        *,
        lock_timeout_s: float = DEFAULT_LOCK_TIMEOUT_S,
    ) -> None:
        try:
            self.path = Path(path).resolve()
        except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a NUL, a surrogate
            raise StoreOpenError(
                f"{str(path)!r} is no path of a directory ({error}): choose another path"
            ) from error
        self._lock_timeout_s = lock_timeout_s
        self._regions = RegionSet()
        self._pid = os.getpid()
        self._call = RunningCalls(str(self.path), self._check_usable, lmdb.Error)
        self._abandoned: list[Reservation] = []
        self._next_path_check = 0.0
        files.check_directory(self.path)
        try:
            self._locks = PoolLocks(self.path / files.LOCKS)
        except AlreadyOpenError:
            raise StoreOpenError(
                f"{self.path} is already open in this process, or was when it was forked: share it"
                " by open_store; open it after a fork, or start processes with spawn"
            ) from None
        except OSError as error:
            raise files.cannot_open(self.path, error) from error
        try:
            with self._locks.setting_up(_SETUP_TIMEOUT_S):
                self._open(size_bytes)
        except LockTimeoutError:
            self._locks.close()
            raise StoreOpenError(
                f"another process has been opening {self.path} for {_SETUP_TIMEOUT_S:.0f} s"
            ) from None
        except (OSError, lmdb.Error) as error:
            self._locks.close()
            raise files.cannot_open(self.path, error) from error
        except BaseException:
            self._locks.close()
            raise

    def _open(self, size_bytes: int | None) -> None:
        alone = not self._locks.others_alive()
        owner = self._locks.take_slot()
        if owner is None:
            raise StoreOpenError(f"too many processes have {self.path} open")
        self._owner: Owner = owner
        marker = files.read_marker(self.path)
        if marker is not None and not files.is_usable(self.path, marker):
            size_bytes = size_bytes or marker.size_bytes
            marker = None
        if marker is None and not alone:
            raise StoreOpenError(
                f"{self.path} is damaged and in use: stop the processes that use it, then retry"
            )
        if marker is None:
            marker = files.create_pool(self.path, size_bytes)
        elif size_bytes is not None and num_pages_of(size_bytes) != marker.size_bytes // PAGE_BYTES:
            raise StoreOpenError(
                f"{self.path} holds a pool of {format_size(marker.size_bytes)}, not of"
                f" {format_size(size_bytes)}: leave the size out to use it, or remove the directory"
            )
        self.size_bytes = marker.size_bytes
        num_pages = marker.size_bytes // PAGE_BYTES
        self._slab = Slab(self.path / files.SLAB, self.path / files.PAGES, num_pages)
        index_path = self.path / files.INDEX
        try:
            # Opening writes, and LMDB itself would wait for a stopped writer without end.
            with self._locks.writing(_OPEN_INDEX_TIMEOUT_S):
                self._index = LocalIndex(index_path, marker.index_bytes, self._slab, self._locks)
        except LockTimeoutError:
            raise StoreOpenError(
                f"a process that uses this pool ({self.path}) is stopped: resume or end it"
            ) from None
        # LMDB leaves holes in its map; without this a full disk would be a SIGBUS later.
        try:
            files.fill_holes(index_path, marker.index_bytes)
            self._marker = files.in_use(marker)
            files.write_marker(self.path, self._marker)
        except BaseException:
            self._index.close()
            raise
        self._identity = _identity_of(self.path)

    def register(self, region: Region) -> None:
        """See :meth:`Store.register`."""
        with self._call:
            self._regions.add(region)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """See :meth:`Store.exists`; what exists counts as used."""
        with self._call:
            entries = self._find(encode_keys(keys))
            present = [entry for entry in entries if entry is not None]
            self._touch(present)
            if len(present) == len(entries):
                return [True] * len(entries)
            return [entry is not None for entry in entries]

    def put(self, batch: Batch) -> list[Status]:
        """See :meth:`Store.put`."""
        with self._call:
            self._regions.check(batch)
            statuses: list[Status] = []
            protected_from = 0
            at_once = min(_MAX_BYTES_AT_ONCE, max(PAGE_BYTES, self.size_bytes // 4))
            for part in batch.split(max_keys=MAX_KEYS_AT_ONCE, max_bytes=at_once):
                part_statuses, protected_from = self._put_part(part, protected_from)
                statuses += part_statuses
            return statuses

    def get(self, batch: Batch) -> list[Status]:
        """See :meth:`Store.get`."""
        with self._call:
            self._regions.check(batch)
            keys = encode_keys(batch.keys)
            entries = self._find(keys)
            statuses = [
                Status.MISSING if entry is None else self._copy_out(batch, index, entry)
                for index, entry in enumerate(entries)
            ]
            self._touch([entry for entry in entries if entry is not None])
            self._discard_lost(
                [
                    (key, entry)
                    for key, entry, status in zip(keys, entries, statuses, strict=True)
                    if entry is not None and status is Status.MISSING
                ]
            )
            return statuses

    def remove(self, keys: Sequence[str]) -> list[Status]:
        """See :meth:`Store.remove`."""
        with self._call:
            encoded = encode_keys(keys)
            statuses = self._write(lambda: self._index.remove(encoded)) if encoded else []
            return [Status.FAILED] * len(keys) if statuses is None else statuses

    def close(self) -> None:
        """Leave the pool; the last process to leave writes it to the disk."""
        if not self._call.stop(_CLOSE_TIMEOUT_S):
            return
        if os.getpid() != self._pid:
            return
        # A lock that is not free in time leaves the pool marked as in use: safe, only not durable.
        with (
            contextlib.suppress(LockTimeoutError, OSError, lmdb.Error),
            self._locks.setting_up(self._lock_timeout_s),
        ):
            if not self._locks.others_alive() and not self._is_gone():
                self._index.sync()
                self._slab.sync()
                files.write_marker(self.path, replace(self._marker, is_clean=True))
        self._index.close()
        self._locks.close()

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise StoreClosedError(
                f"{self.path} was opened before a fork: open it after the fork, or use spawn"
            )
        now = time.monotonic()
        if now >= self._next_path_check:
            if self._is_gone():
                raise StoreLostError(
                    f"the pool in {self.path} was removed, or a file of it cut: open it again"
                )
            self._next_path_check = now + _CHECK_PATH_EVERY_S

    def _is_gone(self) -> bool:
        return _identity_of(self.path) != self._identity

    def _find(self, keys: Sequence[bytes]) -> list[bytes | None]:
        try:
            entries = self._index.find(keys)
        except lmdb.ReadersFullError:
            self._index.clear_dead_readers()
            entries = self._index.find(keys)
        if self._index.are_sound(entries):
            return entries
        damaged = [not self._index.are_sound([entry]) for entry in entries]
        self._discard_lost(
            [
                (key, entry)
                for key, entry, is_damaged in zip(keys, entries, damaged, strict=True)
                if entry is not None and is_damaged
            ]
        )
        return [
            None if is_damaged else entry
            for entry, is_damaged in zip(entries, damaged, strict=True)
        ]

    def _discard_lost(self, found: Sequence[tuple[bytes, bytes]]) -> None:
        """Remove keys whose value could not be reached, unless that was a race or others write."""
        if not found:
            return
        # A value that was evicted while it was copied has no entry any more, or another one.
        now = self._index.find([key for key, _ in found])
        lost = [pair for pair, entry in zip(found, now, strict=True) if entry == pair[1]]
        if lost:
            self._write(lambda: self._index.discard_lost(lost), timeout_s=0.0)

    def _touch(self, entries: Sequence[bytes]) -> None:
        if entries:
            pages = first_pages(entries)
            self._slab.chances[pages] = self._slab.worth[pages]

    def _write(self, change: Callable[[], T], timeout_s: float | None = None) -> T | None:
        """Run ``change`` as the only writer; None if that was not possible in time."""
        if timeout_s is None:
            timeout_s = self._lock_timeout_s
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                with self._locks.writing(timeout_s):
                    return self._change(change)
            except LockTimeoutError:
                return None
            except lmdb.MapFullError:
                # A reader that died, or was preempted, keeps old versions of the index alive. The
                # transaction was undone; once the reader is gone its pages can be used.
                self._index.clear_dead_readers()
                if time.monotonic() >= deadline:
                    return None
                time.sleep(_READERS_PAUSE_S)

    def _change(self, change: Callable[[], T]) -> T:
        # Other threads only append to the list, and only a writer takes from it.
        abandoned = list(self._abandoned)
        if abandoned:
            self._index.release(abandoned)
            del self._abandoned[: len(abandoned)]
        try:
            return change()
        except (struct.error, IndexError) as error:
            # The transaction was undone. Only what the index says is unpacked in it.
            raise lmdb.CorruptedError(
                "its index is damaged: stop the processes that use it and remove the directory"
            ) from error

    def _put_part(self, batch: Batch, protected_from: int) -> tuple[list[Status], int]:
        keys = encode_keys(batch.keys)
        first_index: dict[bytes, int] = {}
        for index, key in enumerate(keys):
            first_index.setdefault(key, index)
        indices = list(first_index.values())
        sizes = [batch.value_bytes(index) for index in indices]
        reserved = self._write(
            lambda: self._index.reserve(list(first_index), sizes, self._owner, protected_from)
        )
        if reserved is None:
            return [Status.FAILED] * len(batch), protected_from
        outcomes, protected_from = reserved
        held = [outcome for outcome in outcomes if isinstance(outcome, Reservation)]
        try:
            for index, outcome in zip(indices, outcomes, strict=True):
                if isinstance(outcome, Reservation):
                    self._copy_in(batch, index, outcome)
            published = self._write(lambda: self._index.publish(held)) if held else []
        except BaseException:
            self._abandoned.extend(held)
            raise
        if published is None:
            self._abandoned.extend(held)
            published = [Status.FAILED] * len(held)
        results = iter(published)
        by_key = {
            key: next(results) if isinstance(outcome, Reservation) else outcome
            for key, outcome in zip(first_index, outcomes, strict=True)
        }
        return [by_key[key] for key in keys], protected_from

    def _copy_in(self, batch: Batch, index: int, held: Reservation) -> None:
        first, last = held.first_page, held.first_page + held.num_pages
        generations = self._slab.generations
        generations[first:last] = held.generation
        destination = self._slab.address_of(first, held.num_bytes, to_write=True)
        gather(destination, batch.addresses[index], batch.sizes[index])
        is_early = batch.order is not None and batch.order[index] < _EARLY_CHUNKS
        self._slab.worth[first] = _TOUCHED_CHANCES + is_early
        self._slab.chances[first] = _NEW_CHANCES + is_early
        generations[first:last] = held.generation + 1

    def _copy_out(self, batch: Batch, index: int, entry: bytes) -> Status:
        generation, num_bytes, first = ENTRY.unpack(entry)
        sizes = batch.sizes[index]
        if sum(sizes) != num_bytes:
            return Status.FAILED
        source = self._slab.address_of(first, num_bytes, to_write=False)
        scatter(source, batch.addresses[index], sizes)
        generations = self._slab.generations[first : first + num_pages_of(num_bytes)]
        # The pages may have been given to another key while we copied: then this one is gone.
        # That the copy's reads come before these, and a writer's stores in its order, is x86's
        # rule and no fence of ours: on ARM only the tag behind each value finds a torn copy.
        return Status.OK if bool(np.all(generations == generation)) else Status.MISSING


def _identity_of(path: Path) -> list[tuple[int, int, int]] | None:
    try:
        found = [(path / name).stat() for name in (files.SLAB, files.PAGES, files.INDEX)]
    except OSError:
        return None
    return [(status.st_dev, status.st_ino, status.st_size) for status in found]


def open_local(url: StoreUrl) -> LocalStore:
    """Open ``local:///path[?size=20GiB][&lock_timeout_ms=2000]``.

    Raises:
        ConfigError: every fault of the URL.
        StoreOpenError: the pool cannot be opened.
    """
    reader = UrlReader(url, known=("size", "lock_timeout_ms"))
    size_bytes = reader.size("size")
    lock_timeout_ms = reader.milliseconds("lock_timeout_ms")
    if url.host:
        reader.fault(
            f"local:// takes an absolute path, with three slashes: local:///{url.host}{url.path}"
        )
    elif url.path in ("", "/"):
        reader.fault("local:// needs the path of a directory: local:///dev/shm/kvtide?size=20GiB")
    if size_bytes is not None and size_bytes < files.MIN_POOL_BYTES:
        reader.fault(
            f"the parameter 'size': a pool needs {format_size(files.MIN_POOL_BYTES)} at least"
        )
    reader.finish()
    timeout_s = lock_timeout_ms / 1000 if lock_timeout_ms else DEFAULT_LOCK_TIMEOUT_S
    return LocalStore(url.path, size_bytes, lock_timeout_s=timeout_s)
