"""A service's thread starts when needed, outlives faults and ends when told."""

from __future__ import annotations

import logging
import queue

import pytest

from kvtide.runtime.logs import FaultLog
from kvtide.runtime.service import Service
from tests.runtime_harness import WAIT_S


class Echo(Service[int, int]):
    """Passes numbers on; negative ones are faults."""

    def __init__(self, *, threaded: bool = True) -> None:
        super().__init__("kvtide-echo", threaded=threaded)
        self.seen: queue.Queue[int] = queue.Queue()

    def _pop(self) -> int:
        return self._queue.popleft()

    def _serve(self, work: int) -> None:
        if work < 0:
            raise RuntimeError("negative")
        self.seen.put(work)


def test_no_thread_before_the_first_item() -> None:
    """An idle pool costs no threads (and an engine may fork before its first step)."""
    service = Echo()
    assert not service.is_running
    assert service.submit(1)
    assert service.seen.get(timeout=WAIT_S) == 1
    assert service.is_running
    service.close()
    assert service.join(WAIT_S)
    assert not service.is_running


def test_thread_outlives_faults() -> None:
    """An exception costs the item that raised it, never the thread."""
    service = Echo()
    for item in (-1, -2, 3):
        assert service.submit(item)
    assert service.seen.get(timeout=WAIT_S) == 3
    service.close()
    assert service.join(WAIT_S)


def test_close_serves_what_is_queued_and_takes_no_more() -> None:
    """Closing loses nothing that was taken."""
    service = Echo()
    for item in range(50):
        assert service.submit(item)
    service.close()
    assert not service.submit(99)
    assert service.join(WAIT_S)
    assert [service.seen.get_nowait() for _ in range(50)] == list(range(50))


def test_runs_without_a_thread() -> None:
    """The same work can be done in the caller's thread."""
    service = Echo(threaded=False)
    assert service.submit(1)
    assert service.submit(-1)
    assert service.run_pending() == 2
    assert not service.is_running
    assert len(service) == 0


def test_process_without_threads_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no thread can be started, the item is refused and the caller told."""

    def refuse(_self: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refuse)
    assert not Echo().submit(1)


def test_a_repeated_fault_is_logged_once_an_interval(caplog: pytest.LogCaptureFixture) -> None:
    """A store that fails a thousand times a second does not fill the log."""
    now_s = [0.0]
    log = FaultLog(logging.getLogger("kvtide.test"), interval_s=10, clock=lambda: now_s[0])

    def fail(what: str) -> None:
        try:
            int("no number")
        except ValueError:
            log.exception(what)

    for _ in range(3):
        fail("a")
    fail("b")
    now_s[0] = 10.0
    fail("a")
    assert [record.getMessage() for record in caplog.records] == [
        "a",
        "b",
        "a (and 2 more since the last message)",
    ]


def test_an_item_whose_signal_was_lost_is_served_with_the_next() -> None:
    """A process that is told to end may raise between the two; nothing may lag behind for ever."""
    service = Echo()
    signals = service._signals
    service._signals = queue.SimpleQueue()
    assert service.submit(1)
    service._signals = signals
    assert service.submit(2)
    assert [service.seen.get(timeout=WAIT_S) for _ in range(2)] == [1, 2]
    service.close()
    assert service.join(WAIT_S)
