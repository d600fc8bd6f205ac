"""Whose pages a new value gets: CLOCK over the extents of a local pool.

Extents cover the slab without a gap. The hand walks over them and takes the first run of neighbours
that is long enough, passing values that were used since it last came by.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

import lmdb

from kvtide.stores.local_locks import Owner
from kvtide.stores.memory_buffer import ByteArray

PAGE_NUMBER = struct.Struct(">I")
"""A key of ``extents``: big-endian, so that LMDB's order is the slab's."""
_HEAD = struct.Struct("<IBQ")
_OWNER = struct.Struct("<IQ")
_ENTRY_PAGE = struct.Struct("<I")
"""The end of a value of ``keys``: the first page."""

MOST_CHANCES = 4
"""Laps that the hand passes a value at most."""
_PATIENCE = 8_192
"""Second chances the hand grants in one transaction; both bound the time under the write lock."""
_LAST_STEP = 20_000
"""Extents the hand looks at for one value."""


class ExtentKind(IntEnum):
    """What the pages of an extent are."""

    FREE = 0
    VALUE = 1
    RESERVED = 2


class Extent(NamedTuple):
    """Neighbouring pages with one fate. ``tail`` is the key of a value or the packed owner."""

    first_page: int
    num_pages: int
    kind: int
    generation: int = 0
    tail: bytes = b""

    @classmethod
    def read(cls, page: bytes, record: bytes) -> Extent:
        """Return the extent that a key and a value of ``extents`` describe."""
        num_pages, kind, generation = _HEAD.unpack_from(record)
        first_page: int = PAGE_NUMBER.unpack(page)[0]
        return cls(first_page, num_pages, kind, generation, record[_HEAD.size :])

    def write(self, txn: lmdb.Transaction, extents: Any) -> None:  # noqa: ANN401 - lmdb's table
        """Put the extent into ``extents``."""
        record = _HEAD.pack(self.num_pages, self.kind, self.generation) + self.tail
        txn.put(PAGE_NUMBER.pack(self.first_page), record, db=extents)

    def is_at(self, txn: lmdb.Transaction, extents: Any) -> bool:  # noqa: ANN401 - lmdb's table
        """Tell whether ``extents`` has exactly this extent."""
        record = _HEAD.pack(self.num_pages, self.kind, self.generation) + self.tail
        return bool(txn.get(PAGE_NUMBER.pack(self.first_page), db=extents) == record)


def pack_owner(owner: Owner) -> bytes:
    """Return the ``tail`` of an extent that ``owner`` reserves."""
    return _OWNER.pack(owner.slot, owner.incarnation)


class Hand:
    """The hand's way within one transaction.

    Args:
        txn: the write transaction.
        keys: the table a victim's key is deleted from.
        extents: the table walked over.
        position: the page it starts at; the attribute says where it has come to.
        chances: per page, how often the hand still passes the value that starts there.
        protected_from: values of later generations are not evicted.
        is_alive: tells whether an owner of reserved pages is.
    """

    def __init__(
        self,
        txn: lmdb.Transaction,
        *,
        keys: Any,  # noqa: ANN401 - lmdb's table
        extents: Any,  # noqa: ANN401 - lmdb's table
        position: int,
        chances: ByteArray,
        protected_from: int,
        is_alive: Callable[[Owner], bool],
    ) -> None:
        self.position = position
        self._txn = txn
        self._keys = keys
        self._extents = extents
        self._cursor: Any = txn.cursor(db=extents)
        self._chances = chances
        self._protected_from = protected_from
        self._is_alive = is_alive
        self._patience = _PATIENCE
        self._known_alive: dict[bytes, bool] = {}
        # In pages. What did not fit once does not fit in this transaction.
        self._too_large = 1 << 32

    def take(self, num_pages: int) -> int | None:
        """Evict a run of at least ``num_pages`` and return its first page; the rest of it is free.

        None: there is no such run. The caller writes an extent of ``num_pages`` at the page.
        """
        run = self._find_run(num_pages)
        if run is None:
            return None
        first_page = run[0].first_page
        self._evict(run)
        self.position = first_page + num_pages
        surplus = run[-1].first_page + run[-1].num_pages - self.position
        if surplus:
            Extent(self.position, surplus, ExtentKind.FREE).write(self._txn, self._extents)
        return first_page

    def evict_one(self) -> None:
        """Free the next extent that may be: what the slab does not need, the index does."""
        run = self._find_run(1)
        if run is None:
            return
        self._evict(run)
        freed = Extent(run[0].first_page, run[0].num_pages, ExtentKind.FREE)
        freed.write(self._txn, self._extents)
        self.position = freed.first_page + freed.num_pages

    def _find_run(self, num_pages: int) -> list[Extent] | None:
        if num_pages >= self._too_large:
            return None
        run: list[Extent] = []
        run_pages = laps = 0
        found = self._cursor.set_range(PAGE_NUMBER.pack(self.position))
        for _ in range(_LAST_STEP):
            if not found:
                # A run does not wrap. The last whole lap meets every value without a chance left.
                run, run_pages, laps = [], 0, laps + 1
                if laps > MOST_CHANCES + 2:
                    break
                self._cursor.first()
            extent = Extent.read(*self._cursor.item())
            if self._may_take(extent):
                run.append(extent)
                run_pages += extent.num_pages
                if run_pages >= num_pages:
                    return run
            else:
                run, run_pages = [], 0
            found = self._cursor.next()
        self._too_large = num_pages
        return None

    def _may_take(self, extent: Extent) -> bool:
        if extent.kind == ExtentKind.FREE:
            return True
        if extent.kind == ExtentKind.RESERVED:
            return not self._owner_is_alive(extent.tail)
        if extent.generation > self._protected_from:
            return False
        chances = int(self._chances[extent.first_page])
        if chances and self._patience:
            self._patience -= 1
            self._chances[extent.first_page] = chances - 1
            return False
        return True

    def _owner_is_alive(self, tail: bytes) -> bool:
        alive = self._known_alive.get(tail)
        if alive is None:
            alive = self._is_alive(Owner(*_OWNER.unpack(tail)))
            self._known_alive[tail] = alive
        return alive

    def _evict(self, run: list[Extent]) -> None:
        for extent in run:
            if extent.kind == ExtentKind.VALUE:
                self._delete_key(extent)
            self._txn.delete(PAGE_NUMBER.pack(extent.first_page), db=self._extents)

    def _delete_key(self, extent: Extent) -> None:
        # After damage a key may have been stored anew, elsewhere.
        entry = self._txn.get(extent.tail, db=self._keys)
        if entry is not None and entry[-_ENTRY_PAGE.size :] == _ENTRY_PAGE.pack(extent.first_page):
            self._txn.delete(extent.tail, db=self._keys)
