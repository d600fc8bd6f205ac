"""A store that fails on a script, for tests of whatever must survive a bad store."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from kvtide.core.batch import Batch
from kvtide.errors import StoreClosedError, StoreLostError
from kvtide.stores.base import Status, Store
from kvtide.stores.wrappers import WrapperStore

_CALLS = frozenset({"exists", "put", "get", "remove"})


class FaultKind(Enum):
    """What goes wrong, and in which calls it can."""

    LOST = "lost"
    """The call raises :class:`~kvtide.errors.StoreLostError`. Any call."""
    DELAY = "delay"
    """The call takes ``delay_s`` longer. Any call."""
    HANG = "hang"
    """The call does not return before :meth:`FaultyStore.release` or ``close``. Any call."""
    FAILED = "failed"
    """The keys are FAILED, and nothing is done to them (``exists`` says False). Any call."""
    NO_SPACE = "no_space"
    """The keys are NO_SPACE and not stored. ``put``."""
    VANISHED = "vanished"
    """``exists`` says True and ``get`` says MISSING, whatever the store holds."""
    SHORT = "short"
    """``get`` says OK, but the second half of the value is not written."""
    FLIPPED = "flipped"
    """``get`` says OK, but one bit in the middle of the value is wrong."""


_METHODS = {
    FaultKind.NO_SPACE: frozenset({"put"}),
    FaultKind.VANISHED: frozenset({"exists", "get"}),
    FaultKind.SHORT: frozenset({"get"}),
    FaultKind.FLIPPED: frozenset({"get"}),
}
_WHOLE_CALL = (FaultKind.LOST, FaultKind.DELAY, FaultKind.HANG)


@dataclass(frozen=True, slots=True)
class Fault:
    """One rule of a script.

    Args:
        kind: what goes wrong.
        method: the call it happens in; None for every call in which it can.
        calls: the numbers of the calls, counted per method from 0 (any container:
            ``range(3, 5)``, ``{0}``); None for all.
        keys: which keys; None for all. A fault of the whole call happens if any key matches.
        delay_s: how long DELAY takes, in seconds.

    Raises:
        ValueError: the kind cannot happen in the method.
    """

    kind: FaultKind
    method: str | None = None
    calls: Container[int] | None = None
    keys: Callable[[str], bool] | None = None
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        if self.method is not None and self.method not in _METHODS.get(self.kind, _CALLS):
            raise ValueError(f"a {self.kind.name} fault cannot happen in {self.method!r}")

    def matches_call(self, method: str, number: int) -> bool:
        """Tell whether the rule speaks about call ``number`` of ``method``."""
        if method not in _METHODS.get(self.kind, _CALLS) or self.method not in (None, method):
            return False
        return self.calls is None or number in self.calls

    def matching(self, keys: Sequence[str]) -> list[int]:
        """Return the indices of the keys that the rule speaks about."""
        return [i for i, key in enumerate(keys) if self.keys is None or self.keys(key)]


class FaultyStore(WrapperStore):
    """Fails as ``script`` says, and is a lawful store where it says nothing.

    >>> store = FaultyStore(inner, [Fault(FaultKind.HANG, "put", calls={2})])

    The third put hangs, until ``store.release()``. The first rule that speaks about a key decides.
    ``script`` may be replaced at any time. ``injected`` counts the faults that happened, per kind:
    a test whose fault never happened proves nothing.

    Args:
        inner: the store that does the work.
        script: the rules.
        hang_limit_s: no hang outlasts it, so that a broken test ends; then the call raises
            :class:`~kvtide.errors.StoreLostError`.
    """

    def __init__(
        self, inner: Store, script: Iterable[Fault] = (), *, hang_limit_s: float = 60.0
    ) -> None:
        super().__init__(inner)
        self.script: tuple[Fault, ...] = tuple(script)
        self.injected: Counter[FaultKind] = Counter()
        self._num_calls: Counter[str] = Counter()
        self._hang_limit_s = hang_limit_s
        self._condition = threading.Condition()
        self._num_hanging = 0
        self._num_releases = 0
        self._is_closed = False

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """See :meth:`Store.exists`."""
        faults = self._begin("exists", keys)
        answers = super().exists(keys)
        for index, kind in faults.items():
            answers[index] = kind is FaultKind.VANISHED
        return answers

    def put(self, batch: Batch) -> list[Status]:
        """See :meth:`Store.put`."""
        faults = self._begin("put", batch.keys)
        if not faults:
            return super().put(batch)
        sound = [index for index in range(len(batch)) if index not in faults]
        statuses = _statuses(faults, len(batch))
        for index, status in zip(sound, super().put(batch.select(sound)), strict=True):
            statuses[index] = status
        return statuses

    def get(self, batch: Batch) -> list[Status]:
        """See :meth:`Store.get`."""
        faults = self._begin("get", batch.keys)
        if not faults:
            return super().get(batch)
        statuses = _statuses(faults, len(batch))
        answered = (FaultKind.FAILED, FaultKind.VANISHED)
        asked = [index for index in range(len(batch)) if faults.get(index) not in answered]
        kept = {
            index: _read(_second_half(batch, index))
            for index, kind in faults.items()
            if kind is FaultKind.SHORT
        }
        for index, status in zip(asked, super().get(batch.select(asked)), strict=True):
            statuses[index] = status
            if status is Status.OK and index in faults:
                _spoil(batch, index, kept.get(index))
        return statuses

    def remove(self, keys: Sequence[str]) -> list[Status]:
        """See :meth:`Store.remove`."""
        faults = self._begin("remove", keys)
        sound = [index for index in range(len(keys)) if index not in faults]
        statuses = _statuses(faults, len(keys))
        removed = super().remove([keys[index] for index in sound])
        for index, status in zip(sound, removed, strict=True):
            statuses[index] = status
        return statuses

    def release(self) -> None:
        """End every hang under way; the calls go on as if nothing had been.

        Later calls hang as the script says: take the rule out to heal the store.
        """
        with self._condition:
            self._num_releases += 1
            self._condition.notify_all()

    def wait_until_hanging(self, num_calls: int = 1, timeout_s: float = 30.0) -> bool:
        """Wait until ``num_calls`` calls hang; False if that took longer than ``timeout_s``."""
        with self._condition:
            return self._condition.wait_for(lambda: self._num_hanging >= num_calls, timeout_s)

    def close(self) -> None:
        """End every hang with :class:`~kvtide.errors.StoreClosedError`, and close ``inner``."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
        super().close()

    def _begin(self, method: str, keys: Sequence[str]) -> dict[int, FaultKind]:
        """Do what happens to the whole call; return what happens to each key."""
        with self._condition:
            number = self._num_calls[method]
            self._num_calls[method] += 1
            if self._is_closed:
                return {}  # the inner store refuses the call
        faults: dict[int, FaultKind] = {}
        for rule in self.script:
            if not rule.matches_call(method, number):
                continue
            indices = rule.matching(keys)
            if rule.kind not in _WHOLE_CALL:
                for index in indices:
                    faults.setdefault(index, rule.kind)
            elif indices or rule.keys is None:
                self._fail_call(rule)
        with self._condition:
            self.injected.update(faults.values())
        return faults

    def _fail_call(self, rule: Fault) -> None:
        with self._condition:
            self.injected[rule.kind] += 1
        if rule.kind is FaultKind.LOST:
            raise StoreLostError("the script says that the store is lost")
        if rule.kind is FaultKind.DELAY:
            time.sleep(rule.delay_s)
            return
        with self._condition:
            self._num_hanging += 1
            self._condition.notify_all()
            begun_after = self._num_releases
            ended = self._condition.wait_for(
                lambda: self._num_releases > begun_after or self._is_closed, self._hang_limit_s
            )
            self._num_hanging -= 1
            if self._is_closed:
                raise StoreClosedError("the store was closed while the call hung")
        if not ended:
            raise StoreLostError(f"the call hung for {self._hang_limit_s} s, the limit")


def _statuses(faults: dict[int, FaultKind], num_keys: int) -> list[Status]:
    by_kind = {FaultKind.NO_SPACE: Status.NO_SPACE, FaultKind.VANISHED: Status.MISSING}
    statuses = [Status.FAILED] * num_keys
    for index, kind in faults.items():
        statuses[index] = by_kind.get(kind, Status.FAILED)
    return statuses


def _second_half(batch: Batch, index: int) -> list[tuple[int, int]]:
    """Return the (address, bytes) pairs of the second half of a value."""
    skip = batch.value_bytes(index) // 2
    pieces = []
    for address, num_bytes in zip(batch.addresses[index], batch.sizes[index], strict=True):
        skipped = min(skip, num_bytes)
        skip -= skipped
        if num_bytes > skipped:
            pieces.append((address + skipped, num_bytes - skipped))
    return pieces


def _read(pieces: Sequence[tuple[int, int]]) -> list[bytes]:
    return [ctypes.string_at(address, num_bytes) for address, num_bytes in pieces]


def _spoil(batch: Batch, index: int, kept: Sequence[bytes] | None) -> None:
    """Make a value that was read short (``kept`` is what was there before), or flip a bit of it."""
    pieces = _second_half(batch, index)
    if kept is None:
        for address, _ in pieces[:1]:
            ctypes.memset(address, ctypes.string_at(address, 1)[0] ^ 1, 1)
        return
    for (address, num_bytes), before in zip(pieces, kept, strict=True):
        ctypes.memmove(address, before, num_bytes)
