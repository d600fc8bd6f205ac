"""Opening stores by URL, once per process: handles share what they open and count references."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import entry_points
from urllib.parse import urlencode

from kvtide.core.batch import Batch
from kvtide.core.layout import Region
from kvtide.errors import ConfigError, StoreClosedError, StoreOpenError
from kvtide.stores.base import Status, Store
from kvtide.stores.url import StoreUrl, nearest

ENTRY_POINT_GROUP = "kvtide.stores"
"""Entry points of this group map a URL scheme to a function ``(StoreUrl) -> Store``."""

# The same names stand in pyproject.toml; the table serves a source tree that was never installed.
_BUILT_IN = {
    "memory": "kvtide.stores.memory:open_memory",
    "local": "kvtide.stores.local:open_local",
    "mooncake": "kvtide.stores.mooncake:open_mooncake",
}

StoreOpener = Callable[[StoreUrl], Store]


def open_store(url: str) -> Store:
    """Open the store that ``url`` names, sharing it with whoever in this process has it open.

    Each call returns a handle of its own: closing one leaves the others open, and the last one
    closed closes the store. A URL without parameters joins an open store whatever its parameters.

    Raises:
        ConfigError: the URL is wrong; every fault is listed.
        StoreOpenError: the store cannot be opened, or is open with other parameters.
    """
    parsed = StoreUrl.parse(url)
    opener = _opener(parsed.scheme)
    with _registry.lock:
        shared = _registry.open.get(parsed.identity)
        if shared is None:
            store = opener(parsed)
            shared = _SharedStore(parsed, store)
            _registry.open[parsed.identity] = shared
        elif parsed.parameters and parsed.parameters != shared.url.parameters:
            raise StoreOpenError(
                f"this process has {shared.url.text!r} open; {url!r} names the same store with"
                " other parameters: use one URL everywhere"
            )
        shared.num_handles += 1
    return StoreHandle(shared)


def url_for_lookups(url: str) -> str:
    """Return the URL by which a process opens ``url`` that only asks what is there.

    It is the same, but for a Mooncake pool that takes memory from those who open it: whoever only
    asks gives none.

    Raises:
        ConfigError: the URL is wrong.
    """
    parsed = StoreUrl.parse(url)
    # Without a host it is a file that says how much is given.
    gives_memory = not parsed.host or parsed.parameters.get("segment", "0") != "0"
    if parsed.scheme != "mooncake" or not gives_memory:
        return url
    parameters = urlencode({**parsed.parameters, "segment": "0"}, safe=":/,")
    return f"{url.partition('?')[0]}?{parameters}"


def store_schemes() -> list[str]:
    """Return the URL schemes that can be opened: built in or installed as entry points."""
    return sorted({*_BUILT_IN, *(entry.name for entry in entry_points(group=ENTRY_POINT_GROUP))})


class StoreHandle(Store):
    """One caller's handle on a store that others in this process may share.

    It refuses to work in a child of the process that opened it: locks and sockets do not survive a
    fork. The child opens a URL of its own; a local pool that the parent had open at the fork cannot
    be opened in the child (LMDB keeps it open): open it after the fork, or start with spawn.
    """

    def __init__(self, shared: _SharedStore) -> None:
        self._shared: _SharedStore | None = shared
        self._store = shared.store
        self._url = shared.url
        self._pid = os.getpid()
        self._close_lock = threading.Lock()

    def _open_store(self) -> Store:
        if self._shared is None:
            raise StoreClosedError(f"the handle on {self._url.text!r} is closed")
        if os.getpid() != self._pid:
            raise StoreClosedError(
                f"the handle on {self._url.text!r} was opened before a fork, in {self._pid}:"
                " open stores after the fork, or start the process with spawn"
            )
        return self._store

    def register(self, region: Region) -> None:
        """Announce ``region`` to the shared store, until the last handle on it is closed."""
        self._open_store().register(region)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """See :meth:`Store.exists`."""
        return self._open_store().exists(keys)

    def put(self, batch: Batch) -> list[Status]:
        """See :meth:`Store.put`."""
        return self._open_store().put(batch)

    def get(self, batch: Batch) -> list[Status]:
        """See :meth:`Store.get`."""
        return self._open_store().get(batch)

    def remove(self, keys: Sequence[str]) -> list[Status]:
        """See :meth:`Store.remove`."""
        return self._open_store().remove(keys)

    @property
    def checks_before_put(self) -> bool:
        """See :attr:`Store.checks_before_put`."""
        return self._store.checks_before_put

    def take_counters(self) -> Counter[str]:
        """Take what the shared store counted: whichever handle asks first has it."""
        return self._store.take_counters()

    def close(self) -> None:
        """Give up this handle; the last one closes the store."""
        with self._close_lock:
            shared, self._shared = self._shared, None
        if shared is not None and os.getpid() == self._pid:
            _registry.release(shared)


@dataclass(slots=True)
class _SharedStore:
    url: StoreUrl
    store: Store
    num_handles: int = 0


@dataclass(slots=True)
class _Registry:
    lock: threading.RLock = field(default_factory=threading.RLock)
    open: dict[str, _SharedStore] = field(default_factory=dict)
    inherited: list[dict[str, _SharedStore]] = field(default_factory=list)

    def release(self, shared: _SharedStore) -> None:
        # The store is closed under the lock, so that opening it again waits until it is gone: LMDB
        # must not be open twice in one process.
        with self.lock:
            shared.num_handles -= 1
            if shared.num_handles == 0:
                self.open.pop(shared.url.identity, None)
                shared.store.close()

    def forget_parent(self) -> None:
        # The parent's stores are kept alive, not closed: closing them here would close the
        # parent's. The lock may have been held by a thread that this process does not have.
        self.lock = threading.RLock()
        self.inherited.append(self.open)
        self.open = {}


_registry = _Registry()
os.register_at_fork(after_in_child=_registry.forget_parent)


def _opener(scheme: str) -> StoreOpener:
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.name == scheme:
            opener: StoreOpener = entry.load()
            return opener
    if scheme not in _BUILT_IN:
        raise ConfigError(f"no store is called {scheme!r}: {nearest(scheme, store_schemes())}")
    module_name, _, function = _BUILT_IN[scheme].partition(":")
    try:
        built_in: StoreOpener = getattr(import_module(module_name), function)
    except ImportError as error:
        raise StoreOpenError(f"{scheme}:// stores cannot be used here: {error}") from error
    return built_in
