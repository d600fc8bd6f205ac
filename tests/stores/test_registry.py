"""``open_store`` finds stores by scheme, shares them by URL, and names every fault."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NoReturn

import pytest

from kvtide.errors import ConfigError, StoreClosedError, StoreOpenError
from kvtide.stores import Store, open_store, registry
from kvtide.stores.memory import MemoryStore
from kvtide.stores.url import StoreUrl
from kvtide.testing import Arena


@dataclass(frozen=True)
class FakeEntryPoint:
    """An installed entry point."""

    name: str
    opened: list[StoreUrl]

    def load(self) -> registry.StoreOpener:
        """Return the opener."""

        def open_it(url: StoreUrl) -> Store:
            self.opened.append(url)
            return MemoryStore()

        return open_it


def test_a_store_of_another_package_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry point's scheme opens its store, which gets the URL taken apart."""
    entry = FakeEntryPoint("theirs", [])
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    store = open_store("theirs://host:1234/a%20b?x=1&y=two")
    url = entry.opened[0]
    assert (url.scheme, url.host, url.path) == ("theirs", "host:1234", "/a b")
    assert url.parameters == {"x": "1", "y": "two"}
    assert "theirs" in registry.store_schemes()
    store.close()


def test_built_in_stores_need_no_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a source tree that was never installed the built-in schemes work."""
    monkeypatch.setattr(registry, "entry_points", lambda group: [])
    assert {"local", "memory"} <= set(registry.store_schemes())
    open_store("memory://built-in").close()


def test_a_store_whose_package_is_missing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import that fails is an error about the store, not a traceback about a module."""
    monkeypatch.setitem(registry._BUILT_IN, "absent", "kvtide.no_such_module:open_it")
    with pytest.raises(StoreOpenError, match="absent:// stores cannot be used here"):
        open_store("absent://x")


@pytest.mark.parametrize("scheme", sorted(registry._BUILT_IN))
def test_what_is_offered_can_be_opened(scheme: str) -> None:
    """Each built-in scheme has its opener in this version; advice may name it."""
    assert callable(registry._opener(scheme))


@pytest.mark.parametrize(
    "url, says",
    [
        ("memry://x", "did you mean 'memory'?"),
        ("zzz://x", "known: "),
        ("memory", "has no scheme"),
        ("://x", "has no scheme"),
    ],
)
def test_an_unknown_scheme_is_refused_with_advice(url: str, says: str) -> None:
    """The message names what was probably meant, or all there is."""
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    assert says in str(caught.value)


def test_each_handle_is_closed_on_its_own() -> None:
    """Closing a handle twice gives up one reference, not two."""
    handles = [open_store("memory://handles") for _ in range(3)]
    Arena(handles[0]).put([("a", b"x")])
    for _ in range(3):
        handles[0].close()
    handles[1].close()
    assert handles[2].exists(["a"]) == [True]
    for closed in handles[:2]:
        with pytest.raises(StoreClosedError, match="memory://handles"):
            closed.exists(["a"])
    handles[2].close()
    assert "memory://handles" not in registry._registry.open


def test_parameters_may_be_left_out_but_not_changed() -> None:
    """A second URL of an open store without parameters joins it; with others it is refused."""
    first = open_store("memory://sized?size=1MiB")
    open_store("memory://sized").close()
    open_store("memory://sized?size=1MiB").close()
    with pytest.raises(StoreOpenError, match=r"size=1MiB' open; .*size=2MiB"):
        open_store("memory://sized?size=2MiB")
    first.close()


def test_threads_that_open_at_once_share_one_store() -> None:
    """However many threads open a URL together, one store is opened."""
    barrier = threading.Barrier(8)

    def open_it(_: int) -> Store:
        barrier.wait(30)
        return open_store("memory://threads")

    with ThreadPoolExecutor(8) as threads:
        handles = list(threads.map(open_it, range(8)))
    assert registry._registry.open["memory://threads"].num_handles == 8
    for handle in handles:
        handle.close()


def test_a_store_that_fails_to_open_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error the next call tries again."""

    def fail(_: StoreUrl) -> NoReturn:
        raise StoreOpenError("not now")

    monkeypatch.setattr(registry, "_opener", lambda _: fail)
    with pytest.raises(StoreOpenError, match="not now"):
        open_store("memory://retry")
    monkeypatch.undo()
    open_store("memory://retry").close()
