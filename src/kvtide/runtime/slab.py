"""The staging slab: page-aligned memory, handed out as rows that each hold one value."""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvtide.stores.memory_buffer import PAGE_BYTES, ByteArray, aligned_buffer


def page_padded(num_bytes: int) -> int:
    """Return ``num_bytes`` rounded up to whole pages, so that the next value starts on one."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Rows:
    """``num_rows`` consecutive rows of ``row_bytes`` bytes, ``offset`` bytes into a slab."""

    offset: int
    num_rows: int
    row_bytes: int

    @property
    def num_bytes(self) -> int:
        """The bytes of all rows."""
        return self.num_rows * self.row_bytes

    def divided(self, per_row: int) -> Rows:
        """Return the same bytes as ``per_row`` rows for each of these."""
        return Rows(self.offset, self.num_rows * per_row, self.row_bytes // per_row)


class ExtentAllocator:
    """Hands out extents of ``[0, num_bytes)``: first fit, and neighbours grow together again.

    Not thread-safe. Free extents are kept sorted by offset and never touch each other.
    """

    def __init__(self, num_bytes: int) -> None:
        self._free: list[tuple[int, int]] = [(0, num_bytes)] if num_bytes else []
        self.free_bytes = num_bytes

    @property
    def largest_free_bytes(self) -> int:
        """The longest extent that could be taken at once."""
        return max((size for _, size in self._free), default=0)

    def take(self, num_bytes: int) -> int | None:
        """Return the offset of an extent of ``num_bytes`` (positive), ``None`` if none is free."""
        for index, (offset, size) in enumerate(self._free):
            if size >= num_bytes:
                if size == num_bytes:
                    del self._free[index]
                else:
                    self._free[index] = (offset + num_bytes, size - num_bytes)
                self.free_bytes -= num_bytes
                return offset
        return None

    def give_back(self, offset: int, num_bytes: int) -> None:
        """Return an extent, or a part of one.

        Raises:
            ValueError: some of it is free already: whoever held it would share it with another.
        """
        index = bisect_right(self._free, (offset, num_bytes))
        before = self._free[index - 1] if index else None
        after = self._free[index] if index < len(self._free) else None
        if (before and sum(before) > offset) or (after and offset + num_bytes > after[0]):
            raise ValueError(f"[{offset}, {offset + num_bytes}) was given back twice")
        self.free_bytes += num_bytes
        start, end = offset, offset + num_bytes
        if after and after[0] == end:
            end = sum(after)
            del self._free[index]
        if before and sum(before) == start:
            start = before[0]
            del self._free[index - 1]
        insort(self._free, (start, end - start))


class Slab:
    """Rows of page-aligned staging memory for several threads.

    ``buffer`` is the memory as 1-D bytes. It stays mapped while any view of it lives, so that a
    store call that hangs keeps its memory even when the pool is gone.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = page_padded(num_bytes)
        self.buffer: ByteArray = aligned_buffer(self.num_bytes)
        self.address = int(self.buffer.ctypes.data)
        self._extents = ExtentAllocator(self.num_bytes)
        self._room = threading.Condition()

    @property
    def used_bytes(self) -> int:
        """The bytes of all rows that are out."""
        return self.num_bytes - self._extents.free_bytes

    def reserve(
        self,
        wanted: Sequence[tuple[int, int]],
        *,
        timeout_s: float,
        give_up: Callable[[], bool] = lambda: False,
    ) -> list[list[Rows]] | None:
        """Return rows for each ``(row_bytes, num_rows)`` of ``wanted``: all of them or ``None``.

        One entry is one run of rows where the slab has such a run, else several. Waits at most
        ``timeout_s`` for room, less where ``give_up`` comes true when some room is freed.
        """
        if sum(row_bytes * num_rows for row_bytes, num_rows in wanted) > self.num_bytes:
            return None
        taken: list[list[Rows]] | None = None

        def attempt() -> bool:
            nonlocal taken
            taken = self._take_all(wanted)
            return taken is not None or give_up()

        with self._room:
            self._room.wait_for(attempt, timeout_s)
        return taken

    def release(self, rows: Iterable[Rows]) -> None:
        """Give rows back."""
        with self._room:
            for run in rows:
                self._extents.give_back(run.offset, run.num_bytes)
            self._room.notify_all()

    def view(self, rows: Rows) -> ByteArray:
        """Return the rows as bytes of shape ``(num_rows, row_bytes)``."""
        flat = self.buffer[rows.offset : rows.offset + rows.num_bytes]
        return flat.reshape(rows.num_rows, rows.row_bytes)

    def addresses(self, rows: Rows) -> list[int]:
        """Return where each row starts."""
        start = self.address + rows.offset
        return list(range(start, start + rows.num_bytes, rows.row_bytes))

    def _take_all(self, wanted: Sequence[tuple[int, int]]) -> list[list[Rows]] | None:
        taken: list[list[Rows]] = []
        for row_bytes, num_rows in wanted:
            runs = self._take_runs(row_bytes, num_rows)
            if runs is None:
                for run in (run for runs in taken for run in runs):
                    self._extents.give_back(run.offset, run.num_bytes)
                return None
            taken.append(runs)
        return taken

    def _take_runs(self, row_bytes: int, num_rows: int) -> list[Rows] | None:
        runs: list[Rows] = []
        left = num_rows
        while left:
            count = min(left, self._extents.largest_free_bytes // row_bytes)
            offset = self._extents.take(count * row_bytes) if count else None
            if offset is None:
                for run in runs:
                    self._extents.give_back(run.offset, run.num_bytes)
                return None
            runs.append(Rows(offset, count, row_bytes))
            left -= count
        return runs
