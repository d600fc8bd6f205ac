"""Random histories of a store beside a dict."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtide.core.batch import Batch
from kvtide.stores.base import Status, Store
from kvtide.testing.values import Arena, value_of

_KEYS = (
    "a",
    "b",
    "kvtide@m@" + "0f" * 32,
    "k" * 511,
    "k" * 600 + "1",
    "k" * 600 + "2",
    "ключ",
    "z",
)
keys = st.sampled_from(_KEYS)
sizes = st.one_of(st.integers(0, 300), st.integers(4_090, 4_100), st.integers(20_000, 90_000))


@st.composite
def _segments(draw: st.DrawFn, num_bytes: int) -> list[int]:
    cuts = sorted(draw(st.lists(st.integers(0, num_bytes), max_size=3)))
    return [end - start for start, end in zip([0, *cuts], [*cuts, num_bytes], strict=True)]


class StoreMachine(RuleBasedStateMachine):
    """Subclass with :meth:`open`; run its ``TestCase`` (or ``run_state_machine_as_test``).

    The model is a dict and uses nothing of the store. With ``may_evict`` values may vanish, and the
    store is small enough that some do.
    """

    may_evict: ClassVar[bool] = False
    holds_empty_values: ClassVar[bool] = True
    """As in :class:`~kvtide.testing.StoreTests`."""
    reads_in_place: ClassVar[bool] = False
    """As in :class:`~kvtide.testing.StoreTests`."""

    @abstractmethod
    def open(self) -> Store:
        """Return an empty store: one of 8 MiB or more, with ``may_evict`` one of 256 KiB."""

    @initialize()
    def start(self) -> None:
        """Open the store."""
        self.store = self.open()
        self.arena = Arena(self.store, 2 << 20)
        self.model: dict[str, bytes] = {}
        self.num_values = 0

    def teardown(self) -> None:
        """Close the store."""
        if hasattr(self, "store"):
            self.store.close()

    @rule(asked=st.lists(st.tuples(keys, sizes), max_size=5), data=st.data())
    def put(self, asked: list[tuple[str, int]], data: st.DataObject) -> None:
        """Put a batch, new keys and known ones, in segments: the first value of a key stays."""
        values = [(key, self._new_value(key, size)) for key, size in asked]
        segments = [data.draw(_segments(len(value))) for _, value in values]
        order = data.draw(st.sampled_from([None, range(len(asked))]))
        batch = self.arena.batch([key for key, _ in asked], segments, order)
        self.arena.write(0, b"".join(value for _, value in values))
        if self.may_evict:
            self._forget_vanished()
        statuses = self.store.put(batch)
        assert len(statuses) == len(asked)
        for (key, value), status in zip(values, statuses, strict=True):
            if not value and not self.holds_empty_values:
                assert status is Status.FAILED
                continue
            assert status is Status.OK or (self.may_evict and status is Status.NO_SPACE)
            if status is Status.OK and key not in self.model:
                self.model[key] = value
        if self.may_evict:
            self._forget_vanished()

    @rule(asked=st.lists(keys, max_size=5), data=st.data())
    def get(self, asked: list[str], data: st.DataObject) -> None:
        """Get a batch in segments cut elsewhere: what the model has, or MISSING."""
        if self.may_evict:
            self._forget_vanished()
        wanted = [len(self.model.get(key, b"x" * 50)) for key in asked]
        segments = [data.draw(_segments(size)) for size in wanted]
        self.arena.fill()
        statuses = self.store.get(self.arena.batch(asked, segments))
        assert len(statuses) == len(asked)
        offset = 0
        for key, size, status in zip(asked, wanted, statuses, strict=True):
            found = self.arena.read(offset, size)
            offset += size
            if key in self.model:
                assert status is Status.OK
                assert found == self.model[key]
            else:
                assert status is Status.MISSING

    @rule(key=keys, size=sizes)
    def get_of_the_wrong_size(self, key: str, size: int) -> None:
        """Get with another size: FAILED, and not a byte is written."""
        if self.may_evict:
            self._forget_vanished()
        if len(self.model.get(key, b"")) == size:
            return
        status, found = self.arena.get([(key, size)])[0]
        is_askable = size or self.holds_empty_values
        absent = Status.MISSING if is_askable else Status.FAILED
        assert status is (Status.FAILED if key in self.model else absent)
        assert self.reads_in_place or set(found) <= {0xEE}

    @rule(asked=st.lists(keys, max_size=4, unique=True))
    def remove(self, asked: list[str]) -> None:
        """Remove a batch: OK where present, MISSING elsewhere."""
        expected = [Status.OK if key in self.model else Status.MISSING for key in asked]
        assert self.store.remove(asked) == expected
        for key in asked:
            self.model.pop(key, None)

    @rule()
    def empty_calls(self) -> None:
        """No keys, no answers."""
        assert self.store.put(Batch([], [], [])) == []
        assert self.store.exists([]) == []

    @invariant()
    def same_keys(self) -> None:
        """The store has the model's keys and no others."""
        if hasattr(self, "store"):
            assert self.store.exists(_KEYS) == [key in self.model for key in _KEYS]

    def _new_value(self, key: str, size: int) -> bytes:
        if self.may_evict and key in self.model:
            # It may be evicted by this very put before its turn comes, and then be stored anew:
            # with equal bytes the model need not know.
            return self.model[key]
        self.num_values += 1
        return value_of(f"{self.num_values}", size)

    def _forget_vanished(self) -> None:
        # ``exists`` is believed when it says no: that a value is gone is lawful. What it says yes
        # to is compared byte by byte in ``get``.
        for key, present in zip(_KEYS, self.store.exists(_KEYS), strict=True):
            if not present:
                self.model.pop(key, None)
