"""A queue of work and the daemon thread that serves it, started when there is something to do."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from queue import SimpleQueue
from typing import Generic, TypeVar

from kvtide.runtime.logs import FaultLog

KEYS_PER_BURST = 64
"""Values whose bytes are copied, tagged or verified in one go: well under a millisecond of Python,
about 5 us each."""

_Item = TypeVar("_Item")
_Work = TypeVar("_Work")


def let_others_run() -> None:
    """Give the interpreter to whoever waits for it, such as the engine: between two bursts."""
    time.sleep(0)


class Service(ABC, Generic[_Item, _Work]):
    """Serves items in order, one piece of work at a time; no exception ends its thread.

    The work is done in plain methods, so that a test runs them without the thread
    (:meth:`run_pending`). The thread is a daemon: work that hangs never keeps a process alive.
    """

    def __init__(self, name: str, *, threaded: bool = True) -> None:
        self.name = name
        self.faults = FaultLog(logging.getLogger("kvtide.runtime"))
        self._threaded = threaded
        self._lock = threading.Lock()
        # One signal for each item; a condition would cost a wake-up several times as much.
        self._signals: SimpleQueue[None] = SimpleQueue()
        self._queue: deque[_Item] = deque()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @abstractmethod
    def _serve(self, work: _Work) -> None:
        """Do one piece of work."""

    @abstractmethod
    def _pop(self) -> _Work | None:
        """Take one piece of work off the queue; called under the queue's lock."""

    def submit(self, item: _Item) -> bool:
        """Queue an item; False if the service is closed or its thread cannot be started."""
        with self._lock:
            if self._is_closed or not self._start():
                return False
            self._queue.append(item)
        if self._threaded:
            self._signals.put(None)
        return True

    def _start(self) -> bool:
        if self._thread is not None or not self._threaded:
            return True
        thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the process may have no more threads
            self.faults.exception(f"{self.name} could not start")
            return False
        self._thread = thread
        return True

    def run_pending(self) -> int:
        """Do what is queued now in the caller's thread, and return how many pieces it was."""
        num_served = 0
        while True:
            work = self._take()
            if work is None:
                return num_served
            self._guarded(work)
            num_served += 1

    def _take(self) -> _Work | None:
        with self._lock:
            return self._pop() if self._queue else None

    def _run(self) -> None:
        while not (self._is_closed and not self._queue):
            self._signals.get()
            # All that is there: a piece of work may be several items, and the signal of one may
            # have been lost to an exception on its way (a process that is asked to end).
            self.run_pending()

    def _guarded(self, work: _Work) -> None:
        try:
            self._serve(work)
        except BaseException:  # noqa: BLE001 - a panic of a native client is no Exception
            # Logged there; a thread that ended would take saving or loading with it for good.
            self.faults.exception(f"{self.name} met a fault")

    def close(self) -> None:
        """Take no more work; the thread ends once its queue is empty."""
        with self._lock:
            self._is_closed = True
        self._signals.put(None)

    def clear(self) -> list[_Item]:
        """Empty the queue and return what was in it."""
        with self._lock:
            items = list(self._queue)
            self._queue.clear()
            return items

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end after :meth:`close`; False if it still runs."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(max(0.0, timeout_s))
        return not thread.is_alive()

    @property
    def is_running(self) -> bool:
        """Whether its thread is alive."""
        return self._thread is not None and self._thread.is_alive()

    def __len__(self) -> int:
        return len(self._queue)
