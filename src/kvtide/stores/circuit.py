"""A circuit breaker: calls of a backend that is gone fail at once, until a probe finds it back."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable

from kvtide.errors import StoreLostError

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.25
MAX_PAUSE_S = 1.0
CALM_PAUSES = 10
"""A backend that stayed for so many of the longest pauses is probed for as if it was never lost."""
_JOIN_TIMEOUT_S = 10.0


class CircuitBreaker:
    """Closed while the backend answers; once tripped, open until ``probe`` returns True.

    Probes run on a thread of their own that lives only while the circuit is open: no caller ever
    waits for one, and the backend is found again whether anyone calls or not. The pause between
    probes doubles from ``first_pause_s`` to ``max_pause_s``. A backend that is lost again soon
    after it was found is given the pause of before, so that one which answers probes and little
    else costs few calls their time.
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
        self._pause_s = first_pause_s
        self._found_at_s = self._lost_at_s = -math.inf
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
            if time.monotonic() - self._found_at_s > CALM_PAUSES * self._max_pause_s:
                self._pause_s = self._first_pause_s
            thread = threading.Thread(
                target=self._probe_until_back, name="kvtide-probe", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # no thread to be had: rather ask a lost backend than never again
                return
            self._thread, self._reason = thread, reason
            self._counters["store_outages"] += 1
            self._lost_at_s = time.monotonic()
        logger.warning("%s is lost (%s): every call fails until it is back", self._name, reason)

    def take_counters(self) -> Counter[str]:
        """Return what was counted since the last call."""
        if not self._counters:  # nearly always: not worth a lock in every step
            return Counter()
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
        while not self._stopped.wait(self._pause_s):
            self._pause_s = min(2 * self._pause_s, self._max_pause_s)
            if self._is_back():
                with self._lock:
                    self._reason = ""
                    self._found_at_s = time.monotonic()
                logger.warning(
                    "%s is back after %.1f s", self._name, self._found_at_s - self._lost_at_s
                )
                return

    def _is_back(self) -> bool:
        try:
            return self._probe()
        except Exception:  # noqa: BLE001 - a probe that fails has not found the backend
            return False
