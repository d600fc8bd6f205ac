"""Which processes use a local pool, and the one that may write its index, by file locks.

Every process holds a lock on one byte of a file, its *slot*, for as long as it has the pool open.
The kernel drops the lock however the process dies, pids may be reused, and containers that share
the directory but not their pids still see each other. (POSIX record locks: they belong to the
process, a forked child does not inherit them, and they are lost if the process closes any other
descriptor of the file: a process opens a pool once.)
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NUM_SLOTS = 1024
_INCARNATION = struct.Struct("<Q")
_SETUP_BYTE = NUM_SLOTS * _INCARNATION.size
_WRITER_BYTE = _SETUP_BYTE + 1
_FLOCK = struct.Struct("hhqqi4x")
_FIRST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 1e-3


class LockTimeoutError(Exception):
    """A lock was not free in time; the caller of a store sees a Status or another error instead."""


class AlreadyOpenError(Exception):
    """This process has the file open, or had when it was forked from its parent."""


_open_files: set[tuple[int, int]] = set()
_open_files_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Owner:
    """One opening of a pool by one process: its slot, and a number no other opening had."""

    slot: int
    incarnation: int


class PoolLocks:
    """The lock file of one pool, as this process sees it. Any thread may call.

    Raises:
        AlreadyOpenError: the file is open already; closing it again would drop the locks.
        OSError: it cannot be opened, or is no file.
    """

    def __init__(self, path: Path) -> None:
        with _open_files_lock:
            if path.exists() and _file_id(path.stat()) in _open_files:
                raise AlreadyOpenError
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            status = os.fstat(self._fd)
            if not stat.S_ISREG(status.st_mode):
                os.close(self._fd)
                raise OSError(errno.EINVAL, "not a file", str(path))
            self._file_id = _file_id(status)
            _open_files.add(self._file_id)
        self._writer = threading.Lock()
        self.owner: Owner | None = None

    @contextmanager
    def setting_up(self, timeout_s: float) -> Iterator[None]:
        """Hold the lock under which a pool is created, emptied, opened and closed.

        Raises:
            LockTimeoutError: another process held it for ``timeout_s``.
        """
        self._acquire(_SETUP_BYTE, time.monotonic() + timeout_s)
        try:
            yield
        finally:
            self._unlock(_SETUP_BYTE)

    @contextmanager
    def writing(self, timeout_s: float) -> Iterator[None]:
        """Hold the lock of the index's only writer, among threads and processes.

        LMDB has such a lock, but waits for it without end when its holder is stopped.

        Raises:
            LockTimeoutError: another writer held it for ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        if not self._writer.acquire(timeout=timeout_s):
            raise LockTimeoutError
        try:
            self._acquire(_WRITER_BYTE, deadline)
            try:
                yield
            finally:
                self._unlock(_WRITER_BYTE)
        finally:
            self._writer.release()

    def take_slot(self) -> Owner | None:
        """Become an owner; None if every slot is taken. Call it while setting up."""
        for slot in range(NUM_SLOTS):
            if self._try_lock(slot * _INCARNATION.size):
                incarnation = secrets.randbits(64)
                os.pwrite(self._fd, _INCARNATION.pack(incarnation), slot * _INCARNATION.size)
                self.owner = Owner(slot, incarnation)
                return self.owner
        return None

    def is_alive(self, owner: Owner) -> bool:
        """Tell whether ``owner`` still has the pool open."""
        if self.owner is not None and owner.slot == self.owner.slot:
            return owner.incarnation == self.owner.incarnation
        offset = owner.slot * _INCARNATION.size
        stored = os.pread(self._fd, _INCARNATION.size, offset)
        return stored == _INCARNATION.pack(owner.incarnation) and self._is_locked(offset, 1)

    def others_alive(self) -> bool:
        """Tell whether another process has the pool open."""
        return self._is_locked(0, _SETUP_BYTE)

    def close(self) -> None:
        """Give up the slot, and with it every lock."""
        with _open_files_lock:
            os.close(self._fd)
            _open_files.discard(self._file_id)

    def _acquire(self, offset: int, deadline: float) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._try_lock(offset):
            if time.monotonic() > deadline:
                raise LockTimeoutError
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _try_lock(self, offset: int) -> bool:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)
        except (BlockingIOError, PermissionError):  # the two errors POSIX allows for "held"
            return False
        return True

    def _unlock(self, offset: int) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, offset)

    def _is_locked(self, offset: int, num_bytes: int) -> bool:
        """Tell whether another process holds a lock in the range."""
        query = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, offset, num_bytes, 0)
        kind: int = _FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_GETLK, query))[0]
        return kind != fcntl.F_UNLCK


def _file_id(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
