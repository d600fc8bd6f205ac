"""The memory of a local pool: one file of 4 KiB pages, with a generation per page beside it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtide.stores.memory_buffer import (
    MADV_POPULATE_READ,
    MADV_POPULATE_WRITE,
    PAGE_BYTES,
    ByteArray,
)

_CHUNK_BYTES = 2 << 20
"""Pages are mapped in such steps: one system call instead of 512 faults."""
_READABLE, _WRITABLE = 1, 2
_PAGE_RECORD_BYTES = 8 + 1 + 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def pages_file_bytes(num_pages: int) -> int:
    """Return the size of the file that describes ``num_pages`` pages."""
    return num_pages * _PAGE_RECORD_BYTES


class Slab:
    """Values' bytes, mapped from a preallocated file and shared with other processes.

    ``generations[page]`` names the last write to a page: odd while it is being written, and never
    the same number again, so that a reader who finds the generation it expects *after* its copy has
    copied what it was promised. ``chances[page]`` counts how often the evicting hand must still
    pass the value that starts there; ``worth[page]`` is what a touch sets it to.

    The files stay mapped until the object is gone, so a copy never meets an unmapped page.
    """

    def __init__(self, slab_path: Path, pages_path: Path, num_pages: int) -> None:
        self.num_pages = num_pages
        self._map = _map_file(slab_path, num_pages * PAGE_BYTES)
        self._bytes: ByteArray = np.frombuffer(self._map, dtype=np.uint8)
        self._address: int = self._bytes.ctypes.data
        pages = _map_file(pages_path, pages_file_bytes(num_pages))
        self.generations: npt.NDArray[np.uint64] = np.frombuffer(
            pages, dtype=np.uint64, count=num_pages
        )
        self.chances: ByteArray = np.frombuffer(
            pages, dtype=np.uint8, count=num_pages, offset=8 * num_pages
        )
        self.worth: ByteArray = np.frombuffer(
            pages, dtype=np.uint8, count=num_pages, offset=9 * num_pages
        )
        self._pages_map = pages
        self._chunk_states = bytearray(-(-num_pages * PAGE_BYTES // _CHUNK_BYTES))

    def address_of(self, first_page: int, num_bytes: int, *, to_write: bool) -> int:
        """Return where the pages from ``first_page`` lie in this process, made present for use."""
        start = first_page * PAGE_BYTES
        chunk, last = start // _CHUNK_BYTES, (start + max(num_bytes, 1) - 1) // _CHUNK_BYTES
        wanted = _WRITABLE if to_write else _READABLE
        if min(self._chunk_states[chunk : last + 1]) < wanted:
            self._populate(chunk, last, wanted)
        return self._address + start

    def sync(self) -> None:
        """Wait until everything written is on the disk (at once where the files are memory)."""
        self._map.flush()
        self._pages_map.flush()

    def _populate(self, first_chunk: int, last_chunk: int, wanted: int) -> None:
        # Reading must not make pages of a disk's file dirty.
        advice = MADV_POPULATE_WRITE if wanted == _WRITABLE else MADV_POPULATE_READ
        start = first_chunk * _CHUNK_BYTES
        end = min((last_chunk + 1) * _CHUNK_BYTES, self.num_pages * PAGE_BYTES)
        # Best effort: a kernel before 5.14 refuses, and the pages come by faults instead.
        _LIBC.madvise(self._address + start, end - start, advice)
        for chunk in range(first_chunk, last_chunk + 1):
            self._chunk_states[chunk] = max(self._chunk_states[chunk], wanted)


def preallocate(path: Path, num_bytes: int) -> None:
    """Create ``path`` with ``num_bytes`` zeroed bytes that are really there: no SIGBUS later.

    Raises:
        OSError: no space.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
        raise
    finally:
        os.close(fd)


def _map_file(path: Path, num_bytes: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(fd, num_bytes)
    finally:
        os.close(fd)
