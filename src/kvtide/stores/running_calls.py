"""Calls that are running: counted, so that a close from another thread can wait for their end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from kvtide.errors import StoreClosedError, StoreLostError


class RunningCalls:
    """Stands around every call of a store, as a context manager that any thread may enter.

    Args:
        name: the store, for messages.
        check: called at the start of each call; what it raises ends the call.
        lost_errors: errors of the backend that mean that the store is lost.
    """

    def __init__(
        self,
        name: str,
        check: Callable[[], None],
        lost_errors: type[Exception] | tuple[type[Exception], ...],
    ) -> None:
        self._name = name
        self._check = check
        self._lost_errors = lost_errors
        self._condition = threading.Condition(threading.Lock())
        self._num_running = 0
        self._is_stopped = False

    def __enter__(self) -> None:
        with self._condition:
            if self._is_stopped:
                raise StoreClosedError(f"the store in {self._name} is closed")
            self._num_running += 1
        try:
            self._check()
        except BaseException:
            self._end()
            raise

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()
        if isinstance(exc, self._lost_errors):
            raise StoreLostError(f"the store in {self._name} failed: {exc}") from exc

    def stop(self, timeout_s: float) -> bool:
        """Refuse further calls and wait for those that run; True if the caller is to clean up.

        False: it was stopped before, or some call is still running after ``timeout_s``.
        """
        with self._condition:
            if self._is_stopped:
                return False
            self._is_stopped = True
            return self._condition.wait_for(lambda: self._num_running == 0, timeout_s)

    def _end(self) -> None:
        with self._condition:
            self._num_running -= 1
            if self._is_stopped:
                self._condition.notify_all()
