"""The index of a local pool: which key lies in which pages, and whose turn it is to be evicted.

Three LMDB tables. ``keys``: key -> where its value lies. ``extents``: first page -> what the pages from
there are, in the order of the slab, covering it without a gap. ``meta``: the hand and the counters.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import lmdb
import numpy as np
import numpy.typing as npt

from kvtide.stores.base import Status
from kvtide.stores.local_locks import Owner, PoolLocks
from kvtide.stores.memory_buffer import PAGE_BYTES
from kvtide.stores.slab import Slab

MAX_KEY_BYTES = 511
_KEPT_BYTES = 440
_DIGEST_BYTES = 32

ENTRY = struct.Struct("<QQI")
"""A value of ``keys``: generation, size in bytes, first page."""
ENTRY_DTYPE = np.dtype([("generation", "<u8"), ("size", "<u8"), ("first_page", "<u4")])
_PAGE = struct.Struct(">I")
_EXTENT = struct.Struct("<IBQ")
_OWNER = struct.Struct("<IQ")
_META = struct.Struct("<QQ")
_FREE, _VALUE, _RESERVED = range(3)

_PATIENCE = 256
"""Extents the hand passes for one value before it stops granting second chances."""
_LAST_STEP = 20_000
"""Extents the hand passes for one value at most: it bounds the time under the write lock."""
MAX_KEYS_AT_ONCE = 256
"""Keys that one transaction may reserve: it bounds the pages that LMDB copies before it writes."""
_COPIED_PAGES = 6 * MAX_KEYS_AT_ONCE
"""Pages of the index to leave for such copies: those of this transaction and the two before it."""
_LEAST_USE = 0.25


def encode_key(key: str) -> bytes:
    """Return ``key`` as LMDB can hold it: a long one as its first 440 bytes and a digest."""
    encoded = key.encode()
    if len(encoded) <= MAX_KEY_BYTES and encoded:
        return encoded
    return encoded[:_KEPT_BYTES] + b"#" + blake2b(encoded, digest_size=_DIGEST_BYTES).digest()


def encode_keys(keys: Sequence[str]) -> list[bytes]:
    """Return ``keys`` as LMDB can hold them, fast where none is long."""
    encoded = [key.encode() for key in keys]
    lengths = [len(key) for key in encoded]
    if lengths and 0 < min(lengths) and max(lengths) <= MAX_KEY_BYTES:
        return encoded
    return [encode_key(key) for key in keys]


def num_pages_of(num_bytes: int) -> int:
    """Return the pages that a value takes: at least one, so that each has a place of its own."""
    return max(1, -(-num_bytes // PAGE_BYTES))


@dataclass(frozen=True, slots=True)
class Reservation:
    """Pages that one put writes to, and nobody else until its process is dead or it gives them up.

    ``generation`` is odd; the value is published under ``generation + 1``.
    """

    key: bytes
    num_bytes: int
    first_page: int
    num_pages: int
    generation: int


@dataclass(slots=True)
class _Extent:
    first_page: int
    num_pages: int
    kind: int
    generation: int
    tail: bytes

    @classmethod
    def read(cls, page: bytes, record: bytes) -> _Extent:
        num_pages, kind, generation = _EXTENT.unpack_from(record)
        return cls(*_PAGE.unpack(page), num_pages, kind, generation, record[_EXTENT.size :])


class LocalIndex:
    """The LMDB environment of one pool. Writers hold :meth:`PoolLocks.writing` around each call."""

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
        self._env.reader_check()
        self._keys = self._env.open_db(b"keys")
        self._extents = self._env.open_db(b"extents")
        self._meta = self._env.open_db(b"meta")
        with self._env.begin(write=True) as txn:
            if txn.get(b"state", db=self._meta) is None:
                whole = _EXTENT.pack(slab.num_pages, _FREE, 0)
                txn.put(_PAGE.pack(0), whole, db=self._extents)
                txn.put(b"state", _META.pack(0, 2), db=self._meta)

    def find(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return each key's packed :data:`ENTRY`, None where absent."""
        with self._env.begin(db=self._keys) as txn:
            get = txn.get
            return [get(key) for key in keys]

    def reserve(
        self,
        keys: Sequence[bytes],
        sizes: Sequence[int],
        owner: Owner,
        protected_from: int,
    ) -> tuple[list[Reservation | Status], int]:
        """Reserve pages for each key, evicting as the hand goes; OK where the key is present.

        Values of ``protected_from`` and later generations are not evicted (0: this call's first).
        Returns the outcome per key and the first generation of this call's.
        """
        with self._env.begin(write=True) as txn:
            hand, generation = _META.unpack(txn.get(b"state", db=self._meta))
            protected_from = protected_from or generation
            walk = _Walk(self, txn, hand, protected_from)
            outcomes: list[Reservation | Status] = []
            tail = _OWNER.pack(owner.slot, owner.incarnation)
            index_is_full = self._index_is_full(txn)
            for key, num_bytes in zip(keys, sizes, strict=True):
                if txn.get(key, db=self._keys) is not None:
                    outcomes.append(Status.OK)
                    continue
                if index_is_full:
                    walk.take(1, split=False)
                num_pages = num_pages_of(num_bytes)
                first_page = walk.take(num_pages)
                if first_page is None:
                    outcomes.append(Status.NO_SPACE)
                    continue
                record = _EXTENT.pack(num_pages, _RESERVED, generation + 1) + tail
                txn.put(_PAGE.pack(first_page), record, db=self._extents)
                outcomes.append(Reservation(key, num_bytes, first_page, num_pages, generation + 1))
                generation += 2
            txn.put(b"state", _META.pack(walk.hand, generation), db=self._meta)
        return outcomes, protected_from

    def publish(self, reservations: Sequence[Reservation]) -> list[Status]:
        """Make each reservation's key visible; one that a rival stored first keeps its value."""
        statuses = []
        with self._env.begin(write=True) as txn:
            for held in reservations:
                page = _PAGE.pack(held.first_page)
                if not self._is_held(txn, held):
                    statuses.append(Status.FAILED)
                    continue
                entry = ENTRY.pack(held.generation + 1, held.num_bytes, held.first_page)
                if txn.put(held.key, entry, overwrite=False, db=self._keys):
                    record = _EXTENT.pack(held.num_pages, _VALUE, held.generation + 1) + held.key
                else:
                    record = _EXTENT.pack(held.num_pages, _FREE, 0)
                txn.put(page, record, db=self._extents)
                statuses.append(Status.OK)
        return statuses

    def release(self, reservations: Sequence[Reservation]) -> None:
        """Give the pages of puts back that did not come to their end."""
        with self._env.begin(write=True) as txn:
            for held in reservations:
                if self._is_held(txn, held):
                    self._free(txn, held.first_page, held.num_pages)

    def remove(self, keys: Sequence[bytes]) -> list[Status]:
        """Forget each key and free its pages."""
        statuses = []
        with self._env.begin(write=True) as txn:
            for key in keys:
                record = txn.pop(key, db=self._keys)
                if record is None:
                    statuses.append(Status.MISSING)
                    continue
                _, num_bytes, first_page = ENTRY.unpack(record)
                self._free(txn, first_page, num_pages_of(num_bytes))
                statuses.append(Status.OK)
        return statuses

    def clear_dead_readers(self) -> None:
        """Free what processes that died while reading kept the index from reusing."""
        self._env.reader_check()

    def sync(self) -> None:
        """Wait until the index is on the disk."""
        self._env.sync(True)

    def close(self) -> None:
        """Close the environment; no call may be running."""
        self._env.close()

    def _free(self, txn: lmdb.Transaction, first_page: int, num_pages: int) -> None:
        record = _EXTENT.pack(num_pages, _FREE, 0)
        txn.put(_PAGE.pack(first_page), record, db=self._extents)

    def _is_held(self, txn: lmdb.Transaction, held: Reservation) -> bool:
        record = txn.get(_PAGE.pack(held.first_page), db=self._extents)
        expected = _EXTENT.pack(held.num_pages, _RESERVED, held.generation)
        return record is not None and record.startswith(expected)

    def _index_is_full(self, txn: lmdb.Transaction) -> bool:
        used = 0
        for table in (self._keys, self._extents):
            stat = txn.stat(table)
            used += stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        return bool(used > self._full_from)


class _Walk:
    """The hand's way over the extents within one transaction: CLOCK with a counter per value."""

    def __init__(
        self, index: LocalIndex, txn: lmdb.Transaction, hand: int, protected_from: int
    ) -> None:
        self.hand = hand
        self._index = index
        self._txn = txn
        self._cursor = txn.cursor(db=index._extents)
        self._chances = index._slab.chances
        self._protected_from = protected_from
        self._owner_is_alive: dict[bytes, bool] = {}
        self._too_large = 1 << 32  # pages; what did not fit once does not fit in this transaction

    def take(self, num_pages: int, *, split: bool = True) -> int | None:
        """Evict a run of neighbouring extents of at least ``num_pages``; return its first page.

        What the run has too much becomes free (without ``split`` all of it does). None: there is
        no such run.
        """
        if num_pages >= self._too_large:
            return None
        run: list[_Extent] = []
        run_pages = laps = 0
        found = self._cursor.set_range(_PAGE.pack(self.hand))
        for step in range(_LAST_STEP):
            if not found:
                # A run does not wrap. Two laps meet every extent once without second chances.
                run, run_pages, laps = [], 0, laps + (step > _PATIENCE)
                if laps > 1:
                    break
                self._cursor.first()
            extent = _Extent.read(*self._cursor.item())
            if self._may_take(extent, forced=step >= _PATIENCE):
                run.append(extent)
                run_pages += extent.num_pages
                if run_pages >= num_pages:
                    self._claim(run, run_pages, num_pages if split else 0)
                    return run[0].first_page
            else:
                run, run_pages = [], 0
            found = self._cursor.next()
        self._too_large = num_pages
        return None

    def _may_take(self, extent: _Extent, *, forced: bool) -> bool:
        if extent.kind == _FREE:
            return True
        if extent.kind == _RESERVED:
            return not self._is_alive(extent.tail)
        if extent.generation >= self._protected_from:
            return False
        chances = int(self._chances[extent.first_page])
        if chances and not forced:
            self._chances[extent.first_page] = chances - 1
            return False
        return True

    def _is_alive(self, tail: bytes) -> bool:
        alive = self._owner_is_alive.get(tail)
        if alive is None:
            alive = self._index._locks.is_alive(Owner(*_OWNER.unpack(tail)))
            self._owner_is_alive[tail] = alive
        return alive

    def _claim(self, run: list[_Extent], run_pages: int, num_pages: int) -> None:
        txn, index = self._txn, self._index
        for extent in run:
            if extent.kind == _VALUE:
                txn.delete(extent.tail, db=index._keys)
            txn.delete(_PAGE.pack(extent.first_page), db=index._extents)
        surplus = run_pages - num_pages
        if surplus:
            index._free(txn, run[0].first_page + num_pages, surplus)
        self.hand = run[0].first_page + (num_pages or run_pages)


def first_pages(entries: Sequence[bytes]) -> npt.NDArray[np.uint32]:
    """Return the first page of each packed :data:`ENTRY`."""
    pages: npt.NDArray[np.uint32] = np.frombuffer(b"".join(entries), ENTRY_DTYPE)["first_page"]
    return pages
