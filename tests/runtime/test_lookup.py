"""Lookups run beside the scheduling thread; what the store does not say in time is a miss."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from kvtide.core.chunks import ChunkedTokenDatabase
from kvtide.core.groups import FullAttention
from kvtide.core.keys import HashWindow, KeyMetadata
from kvtide.core.lookup import LookupHit, LookupQuery
from kvtide.core.probes import FIRST_PROBE_KEYS, Boundaries
from kvtide.core.topology import Part
from kvtide.errors import StoreLostError
from kvtide.runtime import lookup as lookup_module
from kvtide.runtime.lookup import LookupExecutor
from kvtide.testing.requests import fake_hashes
from tests.runtime_harness import NAMESPACE, WAIT_S, Clock, Hang, ScriptedStore, hashes_of

RANKS = 2


def databases_for(namespace: str) -> list[list[ChunkedTokenDatabase]]:
    """One group of 4-token blocks, whose hits need both ranks."""
    if namespace == "unknown":
        raise KeyError(namespace)
    return [
        [
            ChunkedTokenDatabase.for_group(
                KeyMetadata(namespace, Part(shard_id=rank), 0), block_size=4, hash_block_size=4
            )
            for rank in range(RANKS)
        ]
    ]


class Lookups:
    """An executor with its store; without a thread unless asked."""

    def __init__(self, *, threaded: bool = False, timeout_s: float = 5.0) -> None:
        self.store = ScriptedStore()
        self.clock = Clock()
        self.executor = LookupExecutor(
            self.store,
            Boundaries((FullAttention(4),), 4, 4),
            databases_for,
            timeout_s,
            100,
            clock=self.clock,
            threaded=threaded,
        )

    def save(self, name: str, chunks: Sequence[int], ranks: Sequence[int] = range(RANKS)) -> None:
        """Let ranks have stored chunks."""
        for rank in ranks:
            for chunk in chunks:
                self.store.values[self.key(name, chunk, rank)] = b""

    def key(self, name: str, chunk: int, rank: int = 0) -> str:
        """The key of a chunk."""
        database = databases_for(NAMESPACE)[0][rank]
        return database.keys(hashes_of(name, chunk + 1), range(chunk, chunk + 1))[0]

    def submit(
        self, ticket: int, name: str, num_chunks: int, start: int = 0, namespace: str = NAMESPACE
    ) -> None:
        """Look up a request of so many chunks, from chunk ``start`` on."""
        query = LookupQuery(4 * start, 4 * num_chunks, hashes_of(name, num_chunks, start))
        self.executor.submit(ticket, query, namespace)

    def run(self) -> None:
        """Do all rounds in this thread."""
        while self.executor._active:
            self.executor.run_round()

    def take_soon(self, ticket: int) -> LookupHit:
        """Take an answer that the thread will give."""
        turn = threading.Event()
        for _ in range(int(WAIT_S / 0.002)):
            hit = self.executor.take(ticket)
            if hit is not None:
                return hit
            turn.wait(0.002)
        raise AssertionError("no answer")


def test_answers_are_taken_once_they_are_there() -> None:
    """None first, then the hit, then nothing is kept."""
    lookups = Lookups()
    lookups.save("a", range(5))
    lookups.submit(1, "a", 8)
    assert lookups.executor.take(1) is None
    lookups.run()
    assert lookups.executor.take(1) == LookupHit(0, 20)
    assert len(lookups.executor) == 0
    assert lookups.executor.take(1) == LookupHit(0, 0)


def test_a_hit_needs_every_rank() -> None:
    """A chunk that one rank lacks ends the hit."""
    lookups = Lookups()
    lookups.save("a", range(8), ranks=[0])
    lookups.save("a", range(3), ranks=[1])
    lookups.submit(1, "a", 8)
    lookups.run()
    assert lookups.executor.take(1) == LookupHit(0, 12)


def test_a_lookup_under_way_tells_when_it_last_found_something() -> None:
    """So that whoever waits can tell a long prefix from a slow store."""
    lookups = Lookups()
    lookups.save("a", range(100))
    lookups.submit(1, "a", 200)
    lookups.submit(2, "b", 200)
    assert lookups.executor.last_found_s(1) is None
    lookups.executor.run_round()
    assert lookups.executor.last_found_s(1) == lookups.executor._clock()
    assert lookups.executor.last_found_s(2) is None
    assert lookups.executor.last_found_s(3) is None


def test_a_lookup_is_abandoned_when_it_has_found_nothing_for_its_timeout() -> None:
    """One that goes on finding is not, up to ten times that: many long ones may be under way."""
    lookups = Lookups()
    for database in databases_for(NAMESPACE)[0]:
        keys = database.keys(hashes_of("a", 10_000), range(10_000))
        lookups.store.values.update(dict.fromkeys(keys, b""))
    timeout_s = lookups.executor._timeout_s
    lookups.submit(1, "a", 10_000)
    for _ in range(3):
        lookups.clock.now_s += 0.9 * timeout_s
        lookups.executor.run_round()
        assert lookups.executor.take(1) is None
    lookups.clock.now_s += 1.1 * timeout_s
    assert lookups.executor.take(1) == LookupHit(0, 0)
    lookups.submit(2, "a", 10_000)
    for _ in range(10):
        lookups.clock.now_s += 0.99 * timeout_s
        lookups.executor.run_round()
        assert lookups.executor.take(2) is None
    lookups.clock.now_s += 0.2 * timeout_s
    assert lookups.executor.take(2) == LookupHit(0, 0)


def test_pending_lookups_share_one_call_a_round() -> None:
    """Many waiting requests cost a call per round, and a shared key is asked once."""
    lookups = Lookups()
    for ticket, name in enumerate(["a", "b", "c", "a"]):
        lookups.submit(ticket, name, 4)
    lookups.run()
    assert [len(keys) for _, keys in lookups.store.calls] == [12]
    assert [lookups.executor.take(ticket) for ticket in range(4)] == [LookupHit(0, 0)] * 4


def test_calls_are_bounded_and_everyone_gets_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long lookups do not make calls grow, nor keep later ones waiting."""
    monkeypatch.setattr(lookup_module, "MAX_ROUND_KEYS", 10)
    lookups = Lookups()
    for name in "abc":
        lookups.save(name, range(6))
    for ticket, name in enumerate("abc"):
        lookups.submit(ticket, name, 6)
    lookups.run()
    assert {len(keys) for _, keys in lookups.store.calls} == {6}
    assert [lookups.executor.take(ticket) for ticket in range(3)] == [LookupHit(0, 24)] * 3


def test_a_cold_miss_costs_one_small_batch() -> None:
    """However long the request, nothing found means nothing more asked."""
    lookups = Lookups()
    lookups.submit(1, "a", 8000)
    lookups.run()
    assert [len(keys) for _, keys in lookups.store.calls] == [FIRST_PROBE_KEYS]


def test_bad_keys_count_as_absent() -> None:
    """A value that did not verify is never promised, though the store has it."""
    lookups = Lookups()
    lookups.save("a", range(8))
    lookups.executor.bad_keys.add([lookups.key("a", 3, rank=1)])
    lookups.submit(1, "a", 8)
    lookups.run()
    assert lookups.executor.take(1) == LookupHit(0, 12)


@pytest.mark.parametrize("fault", ["lost", "bug", "short"])
def test_a_store_that_fails_is_a_miss(fault: str) -> None:
    """The request computes from what the engine has; the next lookup asks again."""
    lookups = Lookups()
    lookups.save("a", range(8))

    def hook(keys: Sequence[str]) -> Any:
        if fault == "short":
            return [True] * (len(keys) - 1)
        raise StoreLostError("gone") if fault == "lost" else RuntimeError("bug")

    lookups.store.hooks["exists"] = hook
    lookups.submit(1, "a", 8, start=2)
    lookups.run()
    assert lookups.executor.take(1) == LookupHit(8, 8)
    assert lookups.executor.take_counters()["lookup_errors"] == 1
    lookups.store.hooks.clear()
    lookups.submit(2, "a", 8)
    lookups.run()
    assert lookups.executor.take(2) == LookupHit(0, 32)


def test_a_query_that_makes_no_sense_is_a_miss_for_itself_alone() -> None:
    """Hashes that are missing, or a namespace nobody knows, do not touch other lookups."""
    lookups = Lookups()
    lookups.save("a", range(8))
    lookups.executor.submit(1, LookupQuery(0, 32, hashes_of("a", 8, 4)), NAMESPACE)
    lookups.submit(2, "a", 8, start=1, namespace="unknown")
    lookups.submit(3, "a", 8)
    lookups.run()
    assert lookups.executor.take(1) == LookupHit(0, 0)
    assert lookups.executor.take(2) == LookupHit(4, 4)
    assert lookups.executor.take(3) == LookupHit(0, 32)


def test_a_cancelled_lookup_asks_nothing() -> None:
    """A request that is gone costs no more keys."""
    lookups = Lookups()
    lookups.submit(1, "a", 8)
    lookups.executor.cancel(1)
    lookups.executor.cancel(2)
    lookups.run()
    assert lookups.store.calls == []
    assert len(lookups.executor) == 0


def test_a_ticket_can_be_used_again() -> None:
    """A second lookup of a request replaces the first, whose answer goes nowhere."""
    lookups = Lookups()
    lookups.save("b", range(2))
    lookups.submit(1, "a", 8)
    lookups.submit(1, "b", 8)
    lookups.run()
    assert lookups.executor.take(1) == LookupHit(0, 8)


def test_lookups_beyond_the_bound_are_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is submitted and never taken is bounded, too."""
    monkeypatch.setattr(lookup_module, "MAX_PENDING", 2)
    lookups = Lookups()
    for ticket in range(10):
        lookups.submit(ticket, "a", 8, start=1)
    assert len(lookups.executor) == 4
    assert lookups.executor.take(9) == LookupHit(4, 4)
    assert lookups.executor.take_counters()["lookups_refused"] == 8


def test_a_store_that_hangs_is_a_miss_after_the_timeout() -> None:
    """The scheduling thread judges the time itself, and later lookups do not wait at all."""
    lookups = Lookups(threaded=True)
    lookups.save("a", range(8))
    hang = Hang()
    lookups.store.hooks["exists"] = hang
    lookups.submit(1, "a", 8, start=1)
    assert hang.entered.wait(WAIT_S)
    assert lookups.executor.take(1) is None
    lookups.clock.now_s += 5.0
    assert lookups.executor.take(1) == LookupHit(4, 4)
    lookups.submit(2, "a", 8, start=2)
    assert lookups.executor.take(2) == LookupHit(8, 8)
    counters = lookups.executor.take_counters()
    assert (counters["lookups_timed_out"], counters["lookups_refused"]) == (1, 1)
    hang.released.set()
    lookups.store.hooks.clear()
    # Closing waits for the call to come back, so from here on the executor is not stuck.
    lookups.executor.close(WAIT_S)
    assert lookups.executor._call_since_s is None
    assert lookups.store.num_closes == 1


def test_lookups_work_again_after_a_timeout() -> None:
    """A call that came back late is forgotten: the next lookup is answered by the store."""
    lookups = Lookups()
    lookups.save("a", range(8))

    def late(_keys: Sequence[str]) -> None:
        lookups.clock.now_s += 5.0

    lookups.store.hooks["exists"] = late
    lookups.submit(1, "a", 8)
    lookups.run()
    lookups.submit(2, "a", 8)
    lookups.run()
    assert lookups.executor.take(2) == LookupHit(0, 32)
    lookups.executor.close()
    assert lookups.store.num_closes == 1


def test_only_the_lookup_thread_calls_the_store() -> None:
    """Submitting, taking and cancelling never do."""
    lookups = Lookups(threaded=True)
    callers: set[str] = set()

    def note(_keys: Sequence[str]) -> None:
        callers.add(threading.current_thread().name)

    lookups.store.hooks["exists"] = note
    for ticket in range(5):
        lookups.submit(ticket, "a", 8)
    for ticket in range(5):
        lookups.take_soon(ticket)
    assert callers == {"kvtide-lookup"}
    lookups.executor.close()


def test_close_abandons_a_call_that_hangs() -> None:
    """It returns in bounded time and does not close the store under the call."""
    lookups = Lookups(threaded=True)
    hang = Hang()
    lookups.store.hooks["exists"] = hang
    lookups.submit(1, "a", 8)
    assert hang.entered.wait(WAIT_S)
    lookups.executor.close(timeout_s=0.05)
    assert lookups.store.num_closes == 0
    lookups.submit(2, "a", 8, start=1)
    assert lookups.executor.take(2) == LookupHit(4, 4)
    hang.released.set()


def test_close_twice_is_harmless() -> None:
    """The store is closed once."""
    lookups = Lookups()
    lookups.executor.close()
    lookups.executor.close()
    assert lookups.store.num_closes == 1
    assert "closed" in repr(lookups.executor)


def test_a_session_that_is_cut_off_while_it_is_looked_up_misses_quietly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its hashes are gone because it goes on from an earlier token: nothing is wrong."""
    lookups = Lookups()
    lookups.save("a", range(8))
    hashes = fake_hashes(8)
    lookups.executor.submit(1, LookupQuery(0, 32, HashWindow(hashes)), NAMESPACE)
    del hashes[2:]
    lookups.executor.run_pending()
    assert lookups.executor.take(1) == LookupHit(0, 0)
    assert "lookup_errors" not in lookups.executor.take_counters()
    assert not caplog.records
