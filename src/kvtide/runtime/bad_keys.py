"""Keys whose stored value did not verify: they count as absent until they are whole again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable


class BadKeys:
    """A bounded set of keys; any thread may call.

    When ``max_keys`` is reached the key that was used longest ago is forgotten: it costs at worst
    one more load that fails.
    """

    def __init__(self, max_keys: int) -> None:
        if max_keys <= 0:
            raise ValueError(f"max_keys must be positive, not {max_keys}")
        self._max_keys = max_keys
        self._lock = threading.Lock()
        self._keys: OrderedDict[str, None] = OrderedDict()

    def add(self, keys: Iterable[str]) -> None:
        """Remember ``keys`` as bad."""
        with self._lock:
            for key in keys:
                self._keys[key] = None
                self._keys.move_to_end(key)
            while len(self._keys) > self._max_keys:
                self._keys.popitem(last=False)

    def discard(self, keys: Iterable[str]) -> set[str]:
        """Forget ``keys``, and return those that were known."""
        with self._lock:
            known = {key for key in keys if key in self._keys}
            for key in known:
                del self._keys[key]
            return known

    def among(self, keys: Iterable[str]) -> frozenset[str]:
        """Return those of ``keys`` that are bad; being asked for counts as use."""
        if not self._keys:  # nearly always: not worth a lock
            return frozenset()
        with self._lock:
            found = frozenset(key for key in keys if key in self._keys)
            for key in found:
                self._keys.move_to_end(key)
            return found

    def __contains__(self, key: str) -> bool:
        return bool(self.among((key,)))

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return f"<BadKeys {len(self)} of {self._max_keys}>"
