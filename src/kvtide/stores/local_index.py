"""The index of a local pool: which key lies in which pages.

Three LMDB tables. ``keys``: key -> where its value lies. ``extents``: first page -> what the pages
from there are. ``meta``: where the hand stands, and the next generation.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import lmdb
import numpy as np
import numpy.typing as npt

from kvtide.stores.base import Status
from kvtide.stores.local_hand import Extent, ExtentKind, Hand, pack_owner
from kvtide.stores.local_locks import Owner, PoolLocks
from kvtide.stores.memory_buffer import PAGE_BYTES
from kvtide.stores.slab import Slab

MAX_KEY_BYTES = 511
_KEPT_BYTES = 440
_DIGEST_BYTES = 32

ENTRY = struct.Struct("<QQI")
"""A value of ``keys``: generation, size in bytes, first page."""
_ENTRY_DTYPE = np.dtype([("generation", "<u8"), ("size", "<u8"), ("first_page", "<u4")])
_META = struct.Struct("<QQ")
_STATE = b"state"

MAX_KEYS_AT_ONCE = 256
"""Keys that one transaction may reserve: it bounds the pages that LMDB copies before it writes."""
_COPIED_PAGES = 6 * MAX_KEYS_AT_ONCE
"""Pages of the index to leave for such copies: those of this transaction and the two before it."""
_LEAST_USE = 0.25
_FEW = 16
"""Up to so many entries Python's own numbers are faster than an array of them."""


def encode_key(key: str) -> bytes:
    """Return ``key`` as LMDB can hold it: a long one as its first 440 bytes and a digest."""
    encoded = key.encode()
    if 0 < len(encoded) <= MAX_KEY_BYTES:
        return encoded
    return encoded[:_KEPT_BYTES] + b"#" + blake2b(encoded, digest_size=_DIGEST_BYTES).digest()


def encode_keys(keys: Sequence[str]) -> list[bytes]:
    """Return ``keys`` as LMDB can hold them, fast where none is long."""
    encoded = [key.encode() for key in keys]
    lengths = [len(key) for key in encoded]
    if lengths and min(lengths) > 0 and max(lengths) <= MAX_KEY_BYTES:
        return encoded
    return [encode_key(key) for key in keys]


def num_pages_of(num_bytes: int) -> int:
    """Return the pages that a value takes: at least one, so that each has a place of its own."""
    return max(1, -(-num_bytes // PAGE_BYTES))


def first_pages(entries: Sequence[bytes]) -> npt.NDArray[np.uint32]:
    """Return the first page of each packed :data:`ENTRY`."""
    pages: npt.NDArray[np.uint32] = np.frombuffer(b"".join(entries), _ENTRY_DTYPE)["first_page"]
    return pages


class Reservation(NamedTuple):
    """Pages that one put writes to, and nobody else until its process is dead or it gives them up.

    ``generation`` is odd; the value is published under ``generation + 1``.
    """

    key: bytes
    num_bytes: int
    first_page: int
    num_pages: int
    generation: int
    owner: bytes

    @property
    def extent(self) -> Extent:
        """The reserved pages."""
        return Extent(
            self.first_page, self.num_pages, ExtentKind.RESERVED, self.generation, self.owner
        )


class LocalIndex:
    """The LMDB environment of one pool.

    Whoever changes it holds :meth:`PoolLocks.writing` around the call. Errors of LMDB are passed on
    as they are.
    """

    def __init__(self, path: Path, num_bytes: int, slab: Slab, locks: PoolLocks) -> None:
        self._slab = slab
        self._locks = locks
        num_index_pages = num_bytes // PAGE_BYTES
        self._full_from = max(num_index_pages * _LEAST_USE, num_index_pages - _COPIED_PAGES)
        self._env = lmdb.open(
            str(path),
            subdir=False,
            map_size=num_bytes,
            max_dbs=3,
            max_readers=2048,
            max_spare_txns=8,
            sync=False,
            metasync=False,
            writemap=True,
            meminit=False,
            readahead=False,
        )
        try:
            self._open_tables()
        except BaseException:
            self._env.close()  # or the process could not open it again
            raise

    def _open_tables(self) -> None:
        self._env.reader_check()
        self._keys = self._env.open_db(b"keys")
        self._extents = self._env.open_db(b"extents")
        self._meta = self._env.open_db(b"meta")
        with self._env.begin(write=True) as txn:
            state = txn.get(_STATE, db=self._meta)
            if state is not None and len(state) != _META.size:
                raise lmdb.CorruptedError("the index is damaged")
            if state is None:
                Extent(0, self._slab.num_pages, ExtentKind.FREE).write(txn, self._extents)
                txn.put(_STATE, _META.pack(0, 2), db=self._meta)

    def find(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return each key's packed :data:`ENTRY`, None where absent."""
        with self._env.begin(db=self._keys) as txn:
            get = txn.get
            return [get(key) for key in keys]

    def are_sound(self, entries: Sequence[bytes | None]) -> bool:
        """Tell whether each entry that is there is whole and its pages are pages of the slab."""
        present = [entry for entry in entries if entry is not None]
        if len(present) > _FEW:
            if set(map(len, present)) != {ENTRY.size}:
                return False
            found = np.frombuffer(b"".join(present), _ENTRY_DTYPE)
            if (found["size"] // PAGE_BYTES + found["first_page"]).max() < self._slab.num_pages:
                return True
            # Some value ends where the slab does, or behind it.
        return all(map(self._is_sound, present))

    def discard_lost(self, found: Sequence[tuple[bytes, bytes]]) -> None:
        """Forget each key whose entry is still the one found and leads to no such value.

        Between transactions an entry's pages always have its generation; where they do not, the
        index or the pages file was damaged, and the key would be neither stored again nor read.
        """
        with self._env.begin(write=True) as txn:
            for key, entry in found:
                if txn.get(key, db=self._keys) == entry and not self._leads_to_value(entry):
                    self._forget(txn, key)

    def reserve(
        self, keys: Sequence[bytes], sizes: Sequence[int], owner: Owner, protected_from: int
    ) -> tuple[list[Reservation | Status], int]:
        """Reserve pages for each key, evicting as the hand goes; OK where the key is present.

        Values of generations after ``protected_from`` are not evicted; 0 stands for the generation
        now reached. Returns the outcome per key, and ``protected_from`` for the rest of a put that
        must not evict what it stored itself.
        """
        tail = pack_owner(owner)
        outcomes: list[Reservation | Status] = []
        with self._env.begin(write=True) as txn:
            position, generation = _META.unpack(txn.get(_STATE, b"", db=self._meta))
            protected_from = protected_from or generation
            hand = self._hand(txn, position, protected_from)
            index_is_full = self._is_full(txn)
            for key, num_bytes in zip(keys, sizes, strict=True):
                entry = txn.get(key, db=self._keys)
                if entry is not None:
                    if self._is_sound(entry):
                        outcomes.append(Status.OK)
                        continue
                    self._forget(txn, key)
                if index_is_full:
                    hand.evict_one()
                num_pages = num_pages_of(num_bytes)
                first_page = hand.take(num_pages)
                if first_page is None:
                    outcomes.append(Status.NO_SPACE)
                    continue
                held = Reservation(key, num_bytes, first_page, num_pages, generation + 1, tail)
                held.extent.write(txn, self._extents)
                outcomes.append(held)
                generation += 2
            txn.put(_STATE, _META.pack(hand.position, generation), db=self._meta)
        return outcomes, protected_from

    def publish(self, reservations: Sequence[Reservation]) -> list[Status]:
        """Make each reservation's key visible; one that a rival stored first keeps its value."""
        statuses = []
        with self._env.begin(write=True) as txn:
            for held in reservations:
                first_page, num_pages = held.first_page, held.num_pages
                generation = held.generation + 1
                if not held.extent.is_at(txn, self._extents):
                    statuses.append(Status.FAILED)
                    continue
                entry = ENTRY.pack(generation, held.num_bytes, first_page)
                if txn.put(held.key, entry, overwrite=False, db=self._keys):
                    extent = Extent(first_page, num_pages, ExtentKind.VALUE, generation, held.key)
                else:
                    extent = Extent(first_page, num_pages, ExtentKind.FREE)
                extent.write(txn, self._extents)
                statuses.append(Status.OK)
        return statuses

    def release(self, reservations: Sequence[Reservation]) -> None:
        """Give the pages of puts back that did not come to their end."""
        with self._env.begin(write=True) as txn:
            for held in reservations:
                if held.extent.is_at(txn, self._extents):
                    self._free(txn, held.first_page, held.num_pages)

    def remove(self, keys: Sequence[bytes]) -> list[Status]:
        """Forget each key and free its pages."""
        with self._env.begin(write=True) as txn:
            return [Status.OK if self._forget(txn, key) else Status.MISSING for key in keys]

    def clear_dead_readers(self) -> None:
        """Free what processes that died while reading kept the index from reusing."""
        self._env.reader_check()

    def sync(self) -> None:
        """Wait until the index is on the disk."""
        self._env.sync(True)  # noqa: FBT003 - lmdb's only name for it is its place

    def close(self) -> None:
        """Close the environment; no call may be running."""
        self._env.close()

    def _hand(self, txn: lmdb.Transaction, position: int, protected_from: int) -> Hand:
        return Hand(
            txn,
            keys=self._keys,
            extents=self._extents,
            position=position,
            chances=self._slab.chances,
            protected_from=protected_from,
            is_alive=self._locks.is_alive,
        )

    def _is_sound(self, entry: bytes) -> bool:
        if len(entry) != ENTRY.size:
            return False
        _, num_bytes, first_page = ENTRY.unpack(entry)
        return bool(first_page + num_pages_of(num_bytes) <= self._slab.num_pages)

    def _leads_to_value(self, entry: bytes) -> bool:
        if not self._is_sound(entry):
            return False
        generation, num_bytes, first = ENTRY.unpack(entry)
        pages = self._slab.generations[first : first + num_pages_of(num_bytes)]
        return bool(np.all(pages == generation))

    def _forget(self, txn: lmdb.Transaction, key: bytes) -> bool:
        """Delete ``key`` and free its pages, if they are its; False if there was no such key."""
        entry = txn.pop(key, db=self._keys)
        if entry is None:
            return False
        if len(entry) == ENTRY.size:
            generation, num_bytes, first_page = ENTRY.unpack(entry)
            num_pages = num_pages_of(num_bytes)
            extent = (first_page, num_pages, ExtentKind.VALUE, generation, key)
            if num_pages <= self._slab.num_pages and Extent(*extent).is_at(txn, self._extents):
                self._free(txn, first_page, num_pages)
        return True

    def _free(self, txn: lmdb.Transaction, first_page: int, num_pages: int) -> None:
        Extent(first_page, num_pages, ExtentKind.FREE).write(txn, self._extents)

    def _is_full(self, txn: lmdb.Transaction) -> bool:
        used = 0
        for table in (self._keys, self._extents):
            stat = txn.stat(table)
            used += stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        return bool(used > self._full_from)
