"""Which adapter these weights are: content digests, computed off the engine's threads.

An engine keeps an adapter's weights in memory under an id, and reads its folder when it pleases.
So a digest is good only while the folder is still what it was when the id was first seen. Once it
has changed under an id, no one can tell which of the two versions the engine computes with, and
requests with that id neither save nor load any more; a fresh id of the same folder is fine.

The folder is looked at again every ``recheck_s`` seconds, while requests go on with the digest
known so far. So a request that arrives within that time of a change may still be given the old
digest: whoever replaces an adapter's files while it is served must give it another id, as engines
demand anyway.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from kvtide.engines.weights import weights_identity
from kvtide.errors import ConfigError

_Signature = tuple[tuple[str, int, int, int], ...]


class Pending(Enum):
    """The type of :data:`PENDING`."""

    PENDING = "pending"


PENDING = Pending.PENDING
"""The first digest is being computed: ask again at a later step, or go without the cache."""


@dataclass(slots=True)
class _Entry:
    path: str
    digest: str | None = None
    signature: _Signature = ()
    verified_at: float | None = None
    running: bool = False
    spoilt: bool = False


def adapter_identity(path: str) -> str | None:
    """Return the content identity of the adapter at ``path``, ``None`` where none can be had.

    It reads files (``adapter_config.json`` and the weights, bounded as in
    :mod:`kvtide.engines.weights`): not for an engine's scheduling thread.
    """
    try:
        return weights_identity(path)
    except (ConfigError, OSError, ValueError):
        return None


class AdapterDigests:
    """Digests of adapters by the engine's id for them, from one background thread.

    ``get`` does no I/O and waits for nothing. Any thread may call it.
    """

    def __init__(
        self,
        *,
        recheck_s: float = 2.0,
        max_adapters: int = 4096,
        digest: Callable[[str], str | None] = adapter_identity,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Trust a digest for ``recheck_s`` seconds, then look at the folder again."""
        self._recheck_s = recheck_s
        self._max_adapters = max_adapters
        self._digest = digest
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[int, _Entry] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False

    def get(
        self, adapter_id: int, path: str, *, replaced_in_place: bool = False
    ) -> str | Pending | None:
        """Return the digest of an adapter, ``None`` for none, or :data:`PENDING`.

        It is pending only at first; later the last verified digest is the answer, also while the
        folder is looked at again. ``replaced_in_place`` tells that the engine was told to load
        the folder anew under an id it already uses, which spoils that id, as another folder does.
        """
        with self._lock:
            entry = self._entry(adapter_id, path)
            if entry is None or self._closed:
                return None
            entry.spoilt = entry.spoilt or replaced_in_place or entry.path != path
            if entry.spoilt:
                return None
            checked = entry.verified_at
            is_due = checked is None or self._clock() - checked > self._recheck_s
            if is_due and not entry.running:
                entry.running = True
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(1, thread_name_prefix="kvtide-lora")
                self._pool.submit(self._verify, entry)
            return PENDING if checked is None else entry.digest

    def close(self) -> None:
        """Stop the thread; a digest in progress is finished, none is started. Idempotent."""
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)

    def _entry(self, adapter_id: int, path: str) -> _Entry | None:
        if adapter_id not in self._entries and len(self._entries) >= self._max_adapters:
            # Forgetting an entry would forget that its id is spoilt, so a full table takes no
            # more: adapters beyond it go without the cache.
            return None
        return self._entries.setdefault(adapter_id, _Entry(path))

    def _verify(self, entry: _Entry) -> None:
        path = entry.path
        digest, signature = entry.digest, entry.signature
        try:
            before = self._signature(path)
            if entry.verified_at is None:
                digest = self._digest(path)
                signature = before
            spoilt = self._signature(path) != signature
        except Exception:  # noqa: BLE001 - whatever a folder holds, a request must not wait on it for ever
            digest, spoilt = None, True
        with self._lock:
            entry.digest, entry.signature = digest, signature
            entry.spoilt = entry.spoilt or spoilt
            entry.verified_at = self._clock()
            entry.running = False

    def _signature(self, path: str) -> _Signature:
        """Return what tells cheaply that no file of a folder was touched."""
        folder = Path(path).expanduser()
        if not folder.exists():  # the id of a hub repository: its commit tells
            return ((self._digest(path) or "", 0, 0, 0),)
        files = sorted(folder.iterdir()) if folder.is_dir() else [folder]
        stats = [(file.name, file.stat()) for file in files if file.is_file()]
        return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats)
