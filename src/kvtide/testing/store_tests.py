"""The laws of the store contract, each a test of its name, for a store's tests to inherit."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from kvtide.core.batch import Batch
from kvtide.errors import StoreClosedError, StoreLostError, UnregisteredMemoryError
from kvtide.metrics import COUNTERS
from kvtide.stores.base import Status, Store
from kvtide.stores.memory_buffer import aligned_buffer, region_of
from kvtide.testing.values import Arena, value_of

SMALL_BYTES = 1 << 20
"""What :meth:`StoreTests.open_small` holds, in bytes."""
UNTOUCHED = 0xEE
_NUM_THREADS = 4
_NUM_ROUNDS = 60
_DEADLINE_S = 30.0
LONG_KEYS = ("k" * 511, "k" * 512, "k" * 700 + "a", "k" * 700 + "b")


class StoreTests(ABC):
    """Inherit, say how the store is opened and how its backend is reached, and run under pytest.

    ``raw_put`` and ``raw_get`` must reach the backend without the store's own methods: a store that
    is wrong the same way in both directions is found by nothing else.
    """

    can_be_lost = False
    """Whether :meth:`lose` takes the backend away."""
    holds_empty_values = True
    """Whether a value may have no bytes; else its put is FAILED."""
    reads_in_place = False
    """Whether a get of the wrong size may write to the memory it was given before it fails."""
    evicts_at_will = False
    """Whether a value may vanish though nothing was put since, even one that was just put."""
    settles_in_s = 0.0
    """How long the store may take to make room, and to be found again by its clients."""

    @abstractmethod
    def open(self, directory: Path) -> Store:
        """Return an empty store that holds at least 16 MiB; ``directory`` is empty and its own."""

    @abstractmethod
    def open_small(self, directory: Path) -> Store:
        """Return an empty store that holds :data:`SMALL_BYTES` and no more."""

    @abstractmethod
    def raw_put(self, store: Store, key: str, value: bytes) -> None:
        """Place a value in the backend of ``store``."""

    @abstractmethod
    def raw_get(self, store: Store, key: str) -> bytes | None:
        """Return a value from the backend of ``store``, None where absent."""

    def lose(self, store: Store) -> None:
        """Take the backend away from ``store``, for good."""
        raise NotImplementedError

    def obstructed(self, store: Store) -> AbstractContextManager[object]:  # noqa: ARG002
        """Keep the backend from answering, for as long as the context lasts."""
        return nullcontext()

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        """An empty store, closed after the test."""
        store = self.open(tmp_path)
        yield store
        store.close()

    @pytest.fixture
    def small_store(self, tmp_path: Path) -> Iterator[Store]:
        """An empty store that is soon full, closed after the test."""
        store = self.open_small(tmp_path)
        yield store
        store.close()

    @pytest.fixture
    def arena(self, store: Store) -> Arena:
        """Memory registered with ``store``."""
        return Arena(store)

    def test_put_is_seen_by_raw_get(self, store: Store, arena: Arena) -> None:
        """What a put stores is what the backend then holds."""
        value = value_of("a", 5_000)
        assert arena.put([("a", value)]) == [Status.OK]
        assert self.raw_get(store, "a") == value
        assert self.raw_get(store, "b") is None

    def test_raw_put_is_seen_by_get(self, store: Store, arena: Arena) -> None:
        """What the backend holds is what exists and what a get returns."""
        value = value_of("a", 5_000)
        self.raw_put(store, "a", value)
        assert store.exists(["b", "a"]) == [False, True]
        assert arena.get([("a", 5_000)]) == [(Status.OK, value)]

    def test_answers_match_the_keys_in_number_and_order(self, store: Store, arena: Arena) -> None:
        """Each call answers one thing per key, in the keys' order."""
        names = [f"key-{i}" for i in range(50)]
        values = [(name, value_of(name, 100 + i)) for i, name in enumerate(names)]
        assert arena.put(values[::2]) == [Status.OK] * 25
        assert store.exists(names) == [i % 2 == 0 for i in range(50)]
        answers = arena.get([(name, len(value)) for name, value in values])
        for i, (status, found) in enumerate(answers):
            assert status is (Status.MISSING if i % 2 else Status.OK)
            assert i % 2 or found == values[i][1]
        assert store.remove(names) == [Status.MISSING if i % 2 else Status.OK for i in range(50)]
        assert store.exists(names) == [False] * 50

    def test_an_empty_batch_answers_nothing(self, store: Store) -> None:
        """No keys, no answers."""
        empty = Batch([], [], [])
        assert (store.exists([]), store.remove([])) == ([], [])
        assert (store.put(empty), store.get(empty)) == ([], [])

    @pytest.mark.parametrize("num_bytes", [10, 1_000, 20_000])
    def test_write_once(self, store: Store, arena: Arena, num_bytes: int) -> None:
        """A second put of a key is OK and leaves the first value, whatever its size."""
        first = value_of("first", 1_000)
        assert arena.put([("a", first)]) == [Status.OK]
        assert arena.put([("a", value_of("second", num_bytes))]) == [Status.OK]
        assert arena.get([("a", 1_000)]) == [(Status.OK, first)]
        assert self.raw_get(store, "a") == first

    def test_a_removed_key_can_be_put_again(self, store: Store, arena: Arena) -> None:
        """Write-once ends with the value."""
        arena.put([("a", b"old" * 100)])
        assert store.remove(["a"]) == [Status.OK]
        assert arena.get([("a", 300)])[0][0] is Status.MISSING
        assert arena.put([("a", b"new!")]) == [Status.OK]
        assert arena.get([("a", 4)]) == [(Status.OK, b"new!")]

    def test_segments_concatenate(self, store: Store, arena: Arena) -> None:
        """A value put as 100 + 200 bytes is got as 150 + 150, segments in any place."""
        value = value_of("a", 300)
        arena.write(5_000, value[:100])
        arena.write(1_000, value[100:])
        at = arena.address
        assert store.put(Batch(["a"], [[at + 5_000, at + 1_000]], [[100, 200]])) == [Status.OK]
        assert self.raw_get(store, "a") == value
        arena.fill(UNTOUCHED)
        asked = Batch(["a"], [[at + 9_000, at + 8_000]], [[150, 150]])
        assert store.get(asked) == [Status.OK]
        assert arena.read(9_000, 150) + arena.read(8_000, 150) == value
        assert arena.read(9_150, 50) == arena.read(8_150, 50) == bytes([UNTOUCHED]) * 50

    @pytest.mark.parametrize("num_bytes", [0, 1, 4_095, 4_096, 4_097, 1_000_000])
    def test_any_size(self, arena: Arena, num_bytes: int) -> None:
        """A value may have any size, none and more than a page among them."""
        if not num_bytes and not self.holds_empty_values:
            assert arena.put([("a", b""), ("b", b"b")]) == [Status.FAILED, Status.OK]
            return
        values = [("a", value_of("a", num_bytes)), ("b", value_of("b", num_bytes))]
        assert arena.put(values) == [Status.OK, Status.OK]
        answers = arena.get([("b", num_bytes), ("a", num_bytes)])
        assert answers == [(Status.OK, values[1][1]), (Status.OK, values[0][1])]

    @pytest.mark.parametrize("num_bytes", [0, 999, 1_001, 9_000])
    def test_a_get_of_the_wrong_size_fails(self, arena: Arena, num_bytes: int) -> None:
        """A get of the wrong size is FAILED and leaves no short read, nor harms its neighbours."""
        values = [(name, value_of(name, 1_000)) for name in "abc"]
        arena.put(values)
        before, wrong, after = arena.get([("a", 1_000), ("b", num_bytes), ("c", 1_000)])
        assert wrong[0] is Status.FAILED
        assert self.reads_in_place or wrong[1] == bytes([UNTOUCHED]) * num_bytes
        assert before == (Status.OK, values[0][1])
        assert after == (Status.OK, values[2][1])

    def test_an_absent_key_leaves_its_neighbours_untouched(self, arena: Arena) -> None:
        """An absent key is MISSING; the memory of it and around it is as before."""
        value = value_of("a", 100)
        arena.put([("a", value)])
        answers = arena.get([("x", 100), ("a", 100), ("y", 100)])
        assert answers[1] == (Status.OK, value)
        assert answers[0] == answers[2] == (Status.MISSING, bytes([UNTOUCHED]) * 100)

    def test_duplicates_in_a_batch_are_each_answered(self, store: Store, arena: Arena) -> None:
        """A key twice in a call is answered twice, and the first value put is the value."""
        first, second = value_of("1", 200), value_of("2", 300)
        assert arena.put([("a", first), ("b", b"x"), ("a", second)]) == [Status.OK] * 3
        assert store.exists(["a", "a", "c", "a"]) == [True, True, False, True]
        assert arena.get([("a", 200), ("a", 200)]) == [(Status.OK, first)] * 2
        removed = store.remove(["a", "a"])
        assert removed[0] is Status.OK
        assert len(removed) == 2

    def test_long_and_odd_keys_are_told_apart(self, store: Store, arena: Arena) -> None:
        """Keys of any length and alphabet are different keys if they differ anywhere."""
        names = [*LONG_KEYS, "ключ", "a b", "a", "A", "kvtide@m@" + "0" * 64]
        values = [(name, value_of(name, 64)) for name in names]
        assert arena.put(values) == [Status.OK] * len(names)
        assert arena.get([(name, 64) for name in names]) == [(Status.OK, v) for _, v in values]
        assert store.exists(["k" * 510, "k" * 700, "a ", ""]) == [False] * 4

    def test_a_value_larger_than_the_store(self, small_store: Store) -> None:
        """What can never fit is NO_SPACE, and the keys beside it are stored."""
        arena = Arena(small_store)
        values = [("a", b"a" * 100), ("huge", bytes(SMALL_BYTES + 4_096)), ("b", b"b" * 100)]
        assert arena.put(values) == [Status.OK, Status.NO_SPACE, Status.OK]
        present = small_store.exists(["a", "huge", "b"])
        assert present == [True, False, True] or (self.evicts_at_will and not present[1])

    def test_when_full_the_rest_is_stored(self, small_store: Store) -> None:
        """A batch larger than the store: some keys are NO_SPACE, the others are there and whole."""
        arena = Arena(small_store)
        values = [(f"key-{i}", value_of(f"key-{i}", 64 << 10)) for i in range(40)]
        statuses = arena.put(values, order=range(40))
        assert set(statuses) <= {Status.OK, Status.NO_SPACE}
        answers = arena.get([(key, len(value)) for key, value in values])
        assert {status for status, _ in answers} == {Status.OK, Status.MISSING}
        for (_, value), put, (got, found) in zip(values, statuses, answers, strict=True):
            has_vanished = self.evicts_at_will and got is Status.MISSING
            assert has_vanished or got is (Status.OK if put is Status.OK else Status.MISSING)
            assert got is Status.MISSING or found == value

    def test_a_value_may_vanish_but_is_whole(self, small_store: Store) -> None:
        """Put without end: every put finds room, and whatever is still there is right."""
        arena = Arena(small_store)
        sizes = [1_000, 70_000, 5_000, 300_000]
        for i in range(200):
            key, size = f"key-{i}", sizes[i % 4]
            assert self._put_once_settled(arena, key, value_of(key, size)) is Status.OK
        kept = 0
        for i in range(200):
            key, size = f"key-{i}", sizes[i % 4]
            present = small_store.exists([key])
            status, found = arena.get([(key, size)])[0]
            assert present == [status is Status.OK]
            assert status in (Status.OK, Status.MISSING)
            assert status is Status.MISSING or found == value_of(key, size)
            kept += status is Status.OK
        assert 0 < kept < 200

    @pytest.mark.parametrize("num_keys", [1, 100])
    def test_unregistered_memory_is_refused(
        self, store: Store, arena: Arena, num_keys: int
    ) -> None:
        """A batch that points outside registered memory raises, and nothing of it happens."""
        stranger = aligned_buffer(4_096)
        arena.put([("present", b"x" * 8)])
        names = [f"key-{i}" for i in range(num_keys)]
        end = arena.address + len(arena.buffer)
        for address in (stranger.ctypes.data, end - 7, 4_096, end):
            addresses = [[arena.address]] * (num_keys - 1) + [[address]]
            batch = Batch(names, addresses, [[8]] * num_keys)
            with pytest.raises(UnregisteredMemoryError):
                store.put(batch)
            with pytest.raises(UnregisteredMemoryError):
                store.get(Batch(["present"] * num_keys, addresses, [[8]] * num_keys))
        assert store.exists(names) == [False] * num_keys

    def test_regions_may_be_registered_twice_and_side_by_side(self, store: Store) -> None:
        """Registering again is harmless; a segment may span two regions that touch."""
        buffer = aligned_buffer(8_192)
        halves = [region_of(buffer[:4_096]), region_of(buffer[4_096:])]
        for region in (*halves, *halves):
            store.register(region)
        buffer[:] = 7
        assert store.put(Batch(["a"], [[buffer.ctypes.data]], [[8_192]])) == [Status.OK]
        assert self.raw_get(store, "a") == b"\7" * 8_192

    def test_any_thread_may_call(self, small_store: Store) -> None:
        """Threads put, get, ask and remove the same keys of a full store: never a wrong byte."""
        sizes = {f"key-{i}": 3_000 + 17_000 * (i % 7) for i in range(40)}

        def hammer(thread: int) -> int:
            arena, num_ok = Arena(small_store, 1 << 20), 0
            for i in range(_NUM_ROUNDS):
                keys = [f"key-{(thread * 7 + i * 3 + j * 11) % 40}" for j in range(4)]
                statuses = arena.put([(key, value_of(key, sizes[key])) for key in keys])
                assert set(statuses) <= {Status.OK, Status.NO_SPACE}
                assert len(small_store.exists(keys)) == 4
                for key, (status, found) in zip(
                    keys, arena.get([(key, sizes[key]) for key in keys]), strict=True
                ):
                    assert status in (Status.OK, Status.MISSING)
                    assert status is Status.MISSING or found == value_of(key, sizes[key])
                    num_ok += status is Status.OK
                if i % 5 == 0:
                    small_store.remove(keys[:1])
            return num_ok

        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            assert sum(threads.map(hammer, range(_NUM_THREADS))) > 0

    def test_racing_puts_of_one_key_leave_one_value(self, store: Store) -> None:
        """Threads that put different bytes under one key all hear OK; one whole value remains."""
        barrier = threading.Barrier(_NUM_THREADS)

        def race(thread: int) -> bytes:
            arena, seen = Arena(store, 1 << 20), b""
            for i in range(20):
                barrier.wait(_DEADLINE_S)
                value = bytes([thread]) * 50_000
                assert arena.put([(f"key-{i}", value)]) == [Status.OK]
                barrier.wait(_DEADLINE_S)
                status, found = arena.get([(f"key-{i}", 50_000)])[0]
                assert status is Status.OK
                assert len(set(found)) == 1
                seen += found[:1]
            return seen

        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            assert len(set(threads.map(race, range(_NUM_THREADS)))) == 1

    def test_every_call_ends_within_its_deadline(self, store: Store, arena: Arena) -> None:
        """With the backend not answering, every call still returns or raises what it may."""
        arena.put([("a", b"x" * 8)])

        def call_all() -> None:
            for call in _calls(store, arena):
                try:
                    call()
                except StoreLostError:
                    continue

        with self.obstructed(store):
            thread = threading.Thread(target=call_all, daemon=True)
            thread.start()
            thread.join(_DEADLINE_S)
            assert not thread.is_alive()
        assert self._put_once_settled(arena, "b", b"y" * 8) is Status.OK

    def test_only_a_lost_store_raises(self, store: Store, arena: Arena) -> None:
        """With the backend gone, a call fails its keys or raises ``StoreLostError``."""
        arena.put([("a", b"x" * 8)])
        if not self.can_be_lost:
            return
        self.lose(store)
        for call in _calls(store, arena):
            try:
                answers = call()
            except StoreLostError:
                continue
            assert set(answers) <= {Status.FAILED, Status.MISSING, Status.NO_SPACE, False}

    def test_what_was_counted_is_told_once(self, store: Store, arena: Arena) -> None:
        """Counters have listed names, are handed out once, and can be taken after a close too."""
        arena.put([("a", b"x" * 8)])
        for call in _calls(store, arena):
            call()
        assert set(store.take_counters()) <= set(COUNTERS)
        assert not +store.take_counters()
        store.close()
        assert not +store.take_counters()

    def test_closing_twice_is_harmless(self, store: Store, arena: Arena) -> None:
        """Close does nothing the second time."""
        arena.put([("a", b"x")])
        store.close()
        store.close()

    def test_a_call_after_close_raises(self, store: Store, arena: Arena) -> None:
        """After close every call raises ``StoreClosedError``."""
        arena.put([("a", b"x" * 8)])
        calls = _calls(store, arena)
        store.close()
        for call in calls:
            with pytest.raises(StoreClosedError):
                call()
        with pytest.raises(StoreClosedError):
            store.register(region_of(arena.buffer))

    def test_close_during_calls_is_safe(self, store: Store) -> None:
        """Close from one thread while others call: they end with an answer or the closed error."""
        started = threading.Barrier(_NUM_THREADS + 1)

        def call_until_closed(thread: int) -> int:
            arena, num_calls = Arena(store, 1 << 20), 0
            started.wait(_DEADLINE_S)
            while True:
                key = f"key-{thread}-{num_calls}"
                num_calls += 1
                try:
                    arena.put([(key, value_of(key, 20_000))])
                    status, found = arena.get([(key, 20_000)])[0]
                except StoreClosedError:
                    return num_calls
                assert status is not Status.OK or found == value_of(key, 20_000)

        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            results = [threads.submit(call_until_closed, i) for i in range(_NUM_THREADS)]
            started.wait(_DEADLINE_S)
            store.close()
            assert all(result.result(_DEADLINE_S) > 0 for result in results)

    def _put_once_settled(self, arena: Arena, key: str, value: bytes) -> Status:
        """Return what became of a put, asked again while the store may still be settling."""
        give_up_s = time.monotonic() + self.settles_in_s
        while True:
            try:
                (status,) = arena.put([(key, value)])
            except StoreLostError:
                status = Status.FAILED
            if status is Status.OK or time.monotonic() >= give_up_s:
                return status
            time.sleep(0.02)


def _calls(store: Store, arena: Arena) -> list[Callable[[], list[Status] | list[bool]]]:
    """Return one call of each method."""
    return [
        lambda: store.exists(["a"]),
        lambda: store.put(arena.batch(["new"], [[8]])),
        lambda: store.get(arena.batch(["a"], [[8]])),
        lambda: store.remove(["a"]),
    ]
