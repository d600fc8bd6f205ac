"""The circuit breaker: open at once, closed by its own probes, and never in a caller's way."""

from __future__ import annotations

import threading
import time

import pytest

from kvtide.errors import StoreLostError
from kvtide.stores.circuit import CALM_PAUSES, CircuitBreaker

DEADLINE_S = 10.0


class Backend:
    """Answers probes as told, and counts them."""

    def __init__(self) -> None:
        self.is_up = False
        self.times_s: list[float] = []
        self.probed = threading.Event()

    def probe(self) -> bool:
        self.times_s.append(time.monotonic())
        self.probed.set()
        return self.is_up


def wait_until_closed(breaker: CircuitBreaker) -> None:
    """Wait for the probing thread to find the backend."""
    give_up_s = time.monotonic() + DEADLINE_S
    while breaker.is_open and time.monotonic() < give_up_s:
        time.sleep(0.005)
    assert not breaker.is_open


def threads() -> int:
    """Return how many probing threads run."""
    return sum(thread.name == "kvtide-probe" for thread in threading.enumerate())


def test_a_closed_circuit_lets_calls_through_and_has_no_thread() -> None:
    """A closed circuit lets calls through and has no thread."""
    breaker = CircuitBreaker("a", Backend().probe)
    breaker.require_closed()
    assert threads() == 0
    assert not breaker.take_counters()


def test_a_tripped_circuit_refuses_at_once_and_says_why() -> None:
    """A tripped circuit refuses at once and says why."""
    breaker = CircuitBreaker("the pool", Backend().probe)
    breaker.trip("no answer")
    began_s = time.monotonic()
    with pytest.raises(StoreLostError, match=r"the pool is gone \(no answer\)"):
        breaker.require_closed()
    assert time.monotonic() - began_s < 0.1
    assert breaker.take_counters() == {"store_outages": 1, "refused_store_calls": 1}
    assert breaker.close(DEADLINE_S)


def test_the_backend_is_found_again_though_nobody_calls() -> None:
    """The backend is found again though nobody calls."""
    backend = Backend()
    breaker = CircuitBreaker("a", backend.probe, first_pause_s=0.01, max_pause_s=0.02)
    breaker.trip("gone")
    assert backend.probed.wait(DEADLINE_S)
    backend.is_up = True
    wait_until_closed(breaker)
    breaker.require_closed()
    assert breaker.close(DEADLINE_S)
    assert threads() == 0


def test_pauses_between_probes_double_up_to_the_longest() -> None:
    """Pauses between probes double up to the longest."""
    backend = Backend()
    breaker = CircuitBreaker("a", backend.probe, first_pause_s=0.02, max_pause_s=0.08)
    began_s = time.monotonic()
    breaker.trip("gone")
    while len(backend.times_s) < 5:
        time.sleep(0.01)
    backend.is_up = True
    assert backend.times_s[4] - began_s >= 0.02 + 0.04 + 3 * 0.08
    assert breaker.close(DEADLINE_S)


def test_a_backend_lost_again_at_once_is_probed_for_at_the_pause_of_before() -> None:
    """One that answers probes and little else costs few calls their time."""
    backend = Backend()
    backend.is_up = True
    breaker = CircuitBreaker("a", backend.probe, first_pause_s=0.01, max_pause_s=0.2)
    began_s = time.monotonic()
    for _ in range(5):
        breaker.trip("gone")
        wait_until_closed(breaker)
    assert time.monotonic() - began_s >= 0.01 + 0.02 + 0.04 + 0.08 + 0.16
    assert breaker.close(DEADLINE_S)


def test_a_backend_that_stayed_is_probed_for_as_if_it_was_never_lost() -> None:
    """After a calm of some of the longest pauses."""
    backend = Backend()
    breaker = CircuitBreaker("a", backend.probe, first_pause_s=0.01, max_pause_s=0.05)
    breaker.trip("gone")
    while len(backend.times_s) < 5:
        time.sleep(0.01)
    backend.is_up = True
    wait_until_closed(breaker)
    time.sleep((CALM_PAUSES + 1) * 0.05)
    began_s = time.monotonic()
    breaker.trip("gone")
    wait_until_closed(breaker)
    assert backend.times_s[-1] - began_s < 0.05
    assert breaker.close(DEADLINE_S)


def test_without_a_thread_to_probe_the_circuit_stays_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rather ask a lost backend than never again."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    breaker = CircuitBreaker("a", Backend().probe)
    breaker.trip("gone")
    breaker.require_closed()
    assert breaker.close(DEADLINE_S)


def test_tripping_twice_is_one_outage_with_one_thread() -> None:
    """Tripping twice is one outage with one thread."""
    breaker = CircuitBreaker("a", Backend().probe)
    breaker.trip("gone")
    breaker.trip("gone again")
    assert threads() == 1
    assert breaker.take_counters()["store_outages"] == 1
    assert breaker.close(DEADLINE_S)


def test_a_second_outage_is_probed_for_as_the_first() -> None:
    """A second outage is probed for as the first."""
    backend = Backend()
    backend.is_up = True
    breaker = CircuitBreaker("a", backend.probe, first_pause_s=0.01)
    for _ in range(2):
        breaker.trip("gone")
        wait_until_closed(breaker)
    assert breaker.take_counters()["store_outages"] == 2
    assert breaker.close(DEADLINE_S)


def test_closing_ends_the_probing_and_says_if_a_probe_hangs() -> None:
    """Closing ends the probing and says if a probe hangs."""
    release = threading.Event()
    breaker = CircuitBreaker("a", lambda: release.wait(DEADLINE_S), first_pause_s=0.001)
    breaker.trip("gone")
    time.sleep(0.05)
    assert not breaker.close(0.05)
    release.set()
    assert breaker.close(DEADLINE_S)


def test_a_closed_breaker_begins_no_probing() -> None:
    """A closed breaker begins no probing."""
    breaker = CircuitBreaker("a", Backend().probe)
    assert breaker.close(DEADLINE_S)
    breaker.trip("gone")
    assert threads() == 0


def test_a_probe_that_raises_counts_as_not_back() -> None:
    """A probe that raises counts as not back."""
    backend = Backend()

    def probe() -> bool:
        if not backend.probe():
            raise OSError("no")
        return True

    breaker = CircuitBreaker("a", probe, first_pause_s=0.01)
    breaker.trip("gone")
    assert backend.probed.wait(DEADLINE_S)
    backend.is_up = True
    wait_until_closed(breaker)
    assert breaker.close(DEADLINE_S)
