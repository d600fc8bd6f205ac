"""A circuit breaker: calls of a backend that is gone fail at once, until a probe finds it back."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from kvtide.errors import StoreLostError

FIRST_PAUSE_S = 0.25
MAX_PAUSE_S = 2.0
_JOIN_TIMEOUT_S = 10.0


class CircuitBreaker:
    """Closed while the backend answers; once tripped, open until ``probe`` returns True.

    Probes run on a thread of their own that lives only while the circuit is open: no caller ever
    waits for one, and the backend is found again whether anyone calls or not. The pause between
    probes doubles from ``first_pause_s`` to ``max_pause_s``.
    """

    def __init__(
        self,
        name: str,
        probe: Callable[[], bool],
        *,
        first_pause_s: float = FIRST_PAUSE_S,
        max_pause_s: float = MAX_PAUSE_S,
    ) -> None:
        self._name = name
        self._probe = probe
        self._first_pause_s = first_pause_s
        self._max_pause_s = max_pause_s
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._reason = ""
        self._thread: threading.Thread | None = None
        self._counters: Counter[str] = Counter()

    @property
    def is_open(self) -> bool:
        """Whether calls are refused."""
        return bool(self._reason)

    def require_closed(self) -> None:
        """Do nothing while the backend answers.

        Raises:
            StoreLostError: the circuit is open; nothing was asked of the backend.
        """
        if self._reason:
            with self._lock:
                self._counters["refused_store_calls"] += 1
            raise StoreLostError(f"{self._name} is gone ({self._reason}); it is probed for")

    def trip(self, reason: str) -> None:
        """Open the circuit, if it is not open, and begin to probe."""
        with self._lock:
            if self._reason or self._stopped.is_set():
                return
            self._reason = reason
            self._counters["store_outages"] += 1
            self._thread = threading.Thread(
                target=self._probe_until_back, name="kvtide-probe", daemon=True
            )
            self._thread.start()

    def take_counters(self) -> Counter[str]:
        """Return what was counted since the last call."""
        with self._lock:
            taken, self._counters = self._counters, Counter()
        return taken

    def close(self, timeout_s: float = _JOIN_TIMEOUT_S) -> bool:
        """End the probing for good; False if a probe still runs after ``timeout_s``."""
        self._stopped.set()
        thread = self._thread
        if thread is None:
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def _probe_until_back(self) -> None:
        pause_s = self._first_pause_s
        while not self._stopped.wait(pause_s):
            if self._is_back():
                with self._lock:
                    self._reason = ""
                return
            pause_s = min(2 * pause_s, self._max_pause_s)

    def _is_back(self) -> bool:
        try:
            return self._probe()
        except Exception:  # noqa: BLE001 - a probe that fails has not found the backend
            return False
