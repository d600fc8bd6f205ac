"""I8: what lookups do on the engine's scheduling thread, and how long they keep it from running.

No clock is read: calls are recorded, and keys are counted between two chances for others to run.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any, ClassVar

import pytest

from kvtide.core.batch import Batch
from kvtide.core.chunks import ChunkedTokenDatabase
from kvtide.core.coordinator import Coordinator
from kvtide.core.groups import FullAttention, SlidingWindow
from kvtide.core.probes import MAX_PROBE_KEYS
from kvtide.core.topology import ParallelSizes, Topology
from kvtide.runtime import bad_keys, ledger, service, slab, values
from kvtide.runtime import lookup as lookups
from kvtide.runtime.lookup import MAX_ROUND_KEYS, LookupExecutor
from kvtide.stores.base import Status
from kvtide.stores.memory import MemoryStore
from kvtide.stores.wrappers import WrapperStore
from kvtide.testing.blocks import FakeBlocks
from kvtide.testing.engine import ScriptedEngine
from kvtide.testing.engine_setup import EngineSetup
from kvtide.testing.requests import fake_hashes

PROMPT = list(range(100))
WAITS = {
    "threading.wait",
    "threading.wait_for",
    "threading.join",
    "time.sleep",
    "SimpleQueue.get",
    "select.select",
    "socket.recv",
}
"""What puts a thread to sleep: of Python by module, of C by module or type."""


@contextmanager
def calls_recorded(calls: set[str]) -> Iterator[None]:
    """Add the name of everything that this thread calls, in Python and in C, to ``calls``."""

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            calls.add(f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}")
        elif event == "c_call":
            owner = argument.__module__ or type(argument.__self__).__name__
            calls.add(f"{owner}.{argument.__name__}")

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def test_the_recording_sees_sleeps_and_waits() -> None:
    """The control: waits in Python and in C are on record."""
    calls: set[str] = set()
    answers: queue.SimpleQueue[int] = queue.SimpleQueue()
    answers.put(1)
    with calls_recorded(calls):
        threading.Event().wait(0.0)
        time.sleep(0)
        answers.get()
    assert calls & WAITS == {"threading.wait", "time.sleep", "SimpleQueue.get"}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_engines_thread_never_sleeps_or_waits_for_a_lookup(num_ranks: int) -> None:
    """I8: over requests that miss, hit and are held locally, with the pool's threads running.

    The first two requests are not on record: they start the threads, and wait until these run.
    """
    engine = ScriptedEngine(
        MemoryStore(), EngineSetup(threaded=True, sizes=ParallelSizes(tp_size=num_ranks))
    )
    calls: set[str] = set()
    turn = threading.Event()
    try:
        for number in range(5):
            if number != 4:  # the last one finds what it needs in the engine
                engine.pool.drop_cached()
            recorded = calls if number > 1 else set()
            with calls_recorded(recorded):
                engine.add(str(number), PROMPT if number != 2 else PROMPT[::-1], max_tokens=3)
            while engine.has_work:
                with calls_recorded(recorded):
                    engine.step()
                turn.wait(0.001)
            assert all(rank.worker.flush(20.0) for rank in engine.ranks.ranks)
    finally:
        engine.close()
    assert engine.scheduler.counters["loaded_tokens"] > 0
    runtime = "kvtide.runtime.lookup"
    assert {f"{runtime}.submit", f"{runtime}.take", "kvtide.core.scheduler.match"} <= calls
    assert calls & WAITS == set()


class WatchedStore(WrapperStore):
    """Calls a function within every call of ``exists``."""

    def __init__(self, watch: Callable[[Sequence[str]], None]) -> None:
        super().__init__(MemoryStore())
        self._watch = watch

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Say that everything is there."""
        self._watch(keys)
        return [True] * len(keys)


def executor_of(
    coordinator: Coordinator, store: WrapperStore, tp_size: int = 1, **options: Any
) -> LookupExecutor:
    """Return an executor of lookups on so many ranks."""
    parts = Topology.undivided(len(coordinator.groups), ParallelSizes(tp_size)).all_parts()
    databases = coordinator.databases("ns", parts)
    return LookupExecutor(
        store, coordinator.boundaries, lambda _: databases, 1e9, max_bad_keys=8, **options
    )


def test_no_lock_is_held_while_keys_are_built_or_the_store_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """I8: submitting, taking and cancelling need not wait for the thread that looks up."""
    coordinator = Coordinator((FullAttention(16),), 16)
    query = coordinator.query(4097, fake_hashes(256))
    num_checks = 0

    def use(*_: Any) -> None:
        """Call from another thread what the scheduling thread calls, while this one is busy."""

        def call_all() -> None:
            executor.submit(99, query, "ns")
            executor.take(99)
            executor.cancel(99)
            executor.take_counters()

        nonlocal num_checks
        num_checks += 1
        other = threading.Thread(target=call_all, daemon=True)
        other.start()
        other.join(20.0)
        assert not other.is_alive(), "it waits for a lock"

    executor = executor_of(coordinator, WatchedStore(use), threaded=False)
    name = ChunkedTokenDatabase.keys_named

    def watched_name(database: ChunkedTokenDatabase, hexes: Sequence[str]) -> list[str]:
        use()
        return name(database, hexes)

    monkeypatch.setattr(ChunkedTokenDatabase, "keys_named", watched_name)
    executor.submit(1, query, "ns")
    executor.run_pending()
    hit = executor.take(1)
    assert hit is not None
    assert hit.hit_token == 4096
    assert num_checks == 3 + 3  # three batches, each built and asked for
    executor.close()


class WatchedLock:
    """A lock that knows which threads hold one of its kind."""

    holders: ClassVar[Counter[int]] = Counter()

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """See ``threading.Lock``."""
        is_mine = self._lock.acquire(blocking, timeout)
        self.holders[threading.get_ident()] += is_mine
        return is_mine

    def release(self) -> None:
        """See ``threading.Lock``."""
        self.holders[threading.get_ident()] -= 1
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class LocklessStore(WrapperStore):
    """Notes the calls that a thread makes while it holds a lock of kvtide's."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.calls: list[tuple[str, int]] = []

    def note(self, method: str) -> None:
        """Take note of a call, and of how many locks its thread holds."""
        self.calls.append((method, WatchedLock.holders[threading.get_ident()]))

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Note the call."""
        self.note("exists")
        return super().exists(keys)

    def put(self, batch: Batch) -> list[Status]:
        """Note the call."""
        self.note("put")
        return super().put(batch)

    def get(self, batch: Batch) -> list[Status]:
        """Note the call."""
        self.note("get")
        return super().get(batch)


def test_no_thread_holds_a_lock_while_it_copies_tags_verifies_or_asks_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """I8: so whoever takes a lock, as the engine's thread does, waits for a few lines at most."""
    proxy = ModuleType("threading")
    proxy.__dict__.update(threading.__dict__)
    proxy.Lock = WatchedLock  # type: ignore[attr-defined]
    proxy.Condition = lambda lock=None: threading.Condition(lock or WatchedLock())  # type: ignore[attr-defined]
    for module in (bad_keys, ledger, lookups, service, slab):
        monkeypatch.setattr(module, "threading", proxy)
    store = LocklessStore()

    def noting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            store.note(name)
            return call(*arguments)

        return noted

    for name in ("write_tag", "verify"):
        monkeypatch.setattr(values, name, noting(name, getattr(values, name)))
    for name in ("read", "write"):
        monkeypatch.setattr(FakeBlocks, name, noting(name, getattr(FakeBlocks, name)))
    engine = ScriptedEngine(store, EngineSetup(threaded=True))
    try:
        for number in range(2):
            engine.pool.drop_cached()
            engine.add(str(number), PROMPT, max_tokens=3)
            while engine.has_work:
                engine.step()
                time.sleep(0.001)
            assert all(rank.worker.flush(20.0) for rank in engine.ranks.ranks)
    finally:
        engine.close()
    names = {name for name, _ in store.calls}
    assert names == {"exists", "put", "get", "write_tag", "verify", "read", "write"}
    assert not {name for name, num_held in store.calls if num_held}
    with service.threading.Lock():  # the control: a lock that is held is seen
        store.exists([])
    assert store.calls[-1] == ("exists", 1)


@pytest.mark.parametrize("tp_size", [1, 8])
@pytest.mark.parametrize("num_lookups", [1, 20])
def test_few_keys_are_built_between_two_chances_for_others_to_run(
    monkeypatch: pytest.MonkeyPatch, num_lookups: int, tp_size: int
) -> None:
    """I8: a batch of one lookup, or a store call's worth of small ones; each 0.1 us of Python."""
    groups = (FullAttention(16), SlidingWindow(16, 4096))
    coordinator = Coordinator(groups, 16)
    num_built = 0
    bursts: list[int] = []
    calls: list[int] = []

    def end_burst(*_: Any) -> None:
        nonlocal num_built
        bursts.append(num_built)
        num_built = 0

    def ask(keys: Sequence[str]) -> None:
        calls.append(len(keys))
        end_burst()

    name = ChunkedTokenDatabase.keys_named

    def counted_name(database: ChunkedTokenDatabase, hexes: Sequence[str]) -> list[str]:
        nonlocal num_built
        num_built += len(hexes)
        return name(database, hexes)

    monkeypatch.setattr(ChunkedTokenDatabase, "keys_named", counted_name)
    monkeypatch.setattr(lookups, "let_others_run", end_burst)
    executor = executor_of(coordinator, WatchedStore(ask), tp_size, threaded=False)
    for ticket in range(num_lookups):
        query = coordinator.query(131073, fake_hashes(8192, seed=str(ticket)))
        executor.submit(ticket, query, "ns")
    executor.run_pending()
    assert sum(bursts) == sum(calls) == num_lookups * tp_size * (8192 + 256)
    assert max(bursts) <= MAX_PROBE_KEYS
    assert max(calls) <= MAX_ROUND_KEYS
    executor.close()
