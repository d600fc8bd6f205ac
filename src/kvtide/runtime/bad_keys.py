"""Keys whose stored value did not verify: they count as absent until they are whole again."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

DISTRUST_S = 60.0
"""How long a bad key counts as absent. Then it may cost a failed load again: somebody else may have
made it whole, and who only loads would never learn of it."""


class BadKeys:
    """A bounded set of keys, each for :data:`DISTRUST_S`; any thread may call.

    When ``max_keys`` is reached the key that was used longest ago is forgotten: it costs at worst
    one more load that fails.
    """

    def __init__(self, max_keys: int, clock: Callable[[], float] = time.monotonic) -> None:
        if max_keys <= 0:
            raise ValueError(f"max_keys must be positive, not {max_keys}")
        self._max_keys = max_keys
        self._clock = clock
        self._lock = threading.Lock()
        self._until_s: OrderedDict[str, float] = OrderedDict()

    def add(self, keys: Iterable[str]) -> None:
        """Remember ``keys`` as bad."""
        until_s = self._clock() + DISTRUST_S
        with self._lock:
            for key in keys:
                self._until_s[key] = until_s
                self._until_s.move_to_end(key)
            while len(self._until_s) > self._max_keys:
                self._until_s.popitem(last=False)

    def discard(self, keys: Iterable[str]) -> set[str]:
        """Forget ``keys``, and return those that were known."""
        with self._lock:
            known = {key for key in keys if key in self._until_s}
            for key in known:
                del self._until_s[key]
            return known

    def among(self, keys: Iterable[str]) -> frozenset[str]:
        """Return those of ``keys`` that are bad; being asked for counts as use."""
        if not self._until_s:  # nearly always: not worth a lock
            return frozenset()
        now_s = self._clock()
        with self._lock:
            known = [key for key in keys if key in self._until_s]
            found = frozenset(key for key in known if now_s < self._until_s[key])
            for key in known:
                if key in found:
                    self._until_s.move_to_end(key)
                else:
                    self._until_s.pop(key, None)
            return found

    def __contains__(self, key: str) -> bool:
        return bool(self.among((key,)))

    def __len__(self) -> int:
        return len(self._until_s)

    def __repr__(self) -> str:
        return f"<BadKeys {len(self)} of {self._max_keys}>"
