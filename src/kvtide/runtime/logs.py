"""Logging of faults that may repeat thousands of times a second."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable

from kvtide.errors import StoreError

_INTERVAL_S = 60.0


class FaultLog:
    """Logs each kind of fault at most once per interval, with how many were left out.

    Call it from an ``except`` block: the traceback goes with the first of a kind, unless the error
    is a store's, which says what is the matter.
    """

    def __init__(
        self,
        logger: logging.Logger,
        *,
        interval_s: float = _INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._clock = clock
        self._lock = threading.Lock()
        self._last_s: dict[str, float] = {}
        self._num_skipped: dict[str, int] = {}

    @property
    def seen(self) -> frozenset[str]:
        """The kinds of fault met so far."""
        return frozenset(self._last_s)

    def exception(self, what: str) -> None:
        """Log ``what`` (a constant text: it names the kind) and the exception being handled."""
        now_s = self._clock()
        with self._lock:
            last_s = self._last_s.get(what)
            if last_s is not None and now_s - last_s < self._interval_s:
                self._num_skipped[what] = self._num_skipped.get(what, 0) + 1
                return
            self._last_s[what] = now_s
            num_skipped = self._num_skipped.pop(what, 0)
        error = sys.exc_info()[1]
        if isinstance(error, StoreError):  # it says itself what is the matter, and where
            what = f"{what}: {error}"
        suffix = f" (and {num_skipped} more since the last message)" if num_skipped else ""
        with_traceback = not isinstance(error, StoreError)
        self._logger.warning("%s%s", what, suffix, exc_info=with_traceback)
