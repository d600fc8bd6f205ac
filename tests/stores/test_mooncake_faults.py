"""What becomes of calls when the master, an owner or space is gone, and how it is counted."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from kvtide.errors import StoreLostError
from kvtide.stores import Status, Store, open_store
from kvtide.stores.mooncake_client import TCP_LANES
from kvtide.stores.mooncake_transfer import MAX_PER_TCP_CALL
from kvtide.testing import Arena
from kvtide.testing.mooncake import MooncakePool
from tests.stores.mooncake_pools import CALL_TIMEOUT_MS, url_of

BACK_WITHIN_S = 10.0
AT_ONCE_S = 0.25
MIB = 1 << 20


@pytest.fixture(scope="module")
def pool() -> Iterator[MooncakePool]:
    """A pool whose leases are long, and which gives a dead owner up after a second."""
    with MooncakePool(lease_ms=5000, master_flags={"client_ttl": 1}) as pool:
        yield pool


@pytest.fixture
def store(pool: MooncakePool) -> Iterator[Store]:
    """A store on the pool."""
    store = open_store(url_of(pool))
    yield store
    store.close()


def calls_of(store: Store, arena: Arena) -> list[Callable[[], object]]:
    """Return one call of each kind."""
    return [
        lambda: store.exists(["a"]),
        lambda: arena.put([("new", b"x" * 8)]),
        lambda: arena.get([("a", 8)]),
        lambda: store.remove(["a"]),
    ]


def wait_until(is_so: Callable[[], bool], limit_s: float = BACK_WITHIN_S) -> float:
    """Wait, and return how long it took; a lost store counts as not yet."""
    began_s = time.monotonic()
    while True:
        try:
            if is_so():
                return time.monotonic() - began_s
        except StoreLostError:
            pass
        assert time.monotonic() - began_s < limit_s
        time.sleep(0.02)


def num_probing() -> int:
    """Return how many threads probe for a master."""
    return sum(thread.name == "kvtide-probe" for thread in threading.enumerate())


def test_a_killed_master_fails_every_call_at_once_and_is_found_again(
    pool: MooncakePool, store: Store
) -> None:
    """The first call finds out; the others cost nothing; nobody need ask for the return."""
    arena = Arena(store)
    assert arena.put([("a", b"x" * 8)]) == [Status.OK]
    pool.kill_master()
    with pytest.raises(StoreLostError):
        store.exists(["a"])
    began_s = time.monotonic()
    for _ in range(25):
        for call in calls_of(store, arena):
            with pytest.raises(StoreLostError, match="gone"):
                call()
    assert time.monotonic() - began_s < AT_ONCE_S
    assert num_probing() == 1
    pool.start_master()
    assert wait_until(lambda: store.exists(["a"]) == [False]) < BACK_WITHIN_S
    wait_until(lambda: arena.put([("b", b"y" * 8)]) == [Status.OK])
    counters = store.take_counters()
    assert counters["store_outages"] == 1
    assert counters["refused_store_calls"] >= 100
    assert num_probing() == 0
    assert store.take_counters() == Counter()


def test_five_outages_in_a_row_are_each_survived(pool: MooncakePool, store: Store) -> None:
    """What was stored is gone with the master; what is stored after is there."""
    arena = Arena(store)
    for number in range(5):
        key = f"outage-{number}"
        wait_until(lambda key=key: arena.put([(key, b"v" * 100)]) == [Status.OK])  # type: ignore[misc]
        assert arena.get([(key, 100)]) == [(Status.OK, b"v" * 100)]
        pool.kill_master()
        with pytest.raises(StoreLostError):
            store.exists([key])
        pool.start_master()
    wait_until(lambda: store.exists(["outage-4"]) == [False])
    assert store.take_counters()["store_outages"] == 5


def test_a_master_that_hangs_costs_one_call_its_time_limit(
    pool: MooncakePool, store: Store
) -> None:
    """It is lost until it answers again, though its port can be dialled all the while."""
    arena = Arena(store)
    wait_until(lambda: arena.put([("c", b"x" * 8)]) == [Status.OK])
    pool.pause_master()
    try:
        began_s = time.monotonic()
        with pytest.raises(StoreLostError):
            store.exists(["c"])
        assert time.monotonic() - began_s < CALL_TIMEOUT_MS / 1000 + 1
        began_s = time.monotonic()
        for call in calls_of(store, arena):
            with pytest.raises(StoreLostError):
                call()
        assert time.monotonic() - began_s < AT_ONCE_S
    finally:
        pool.resume_master()
    # The master, too, gave its owner up for the time it hung, and takes it back.
    wait_until(lambda: arena.put([("c", b"x" * 8)]) == [Status.OK])
    assert arena.get([("c", 8)]) == [(Status.OK, b"x" * 8)]


def test_closing_a_lost_store_takes_a_moment_and_ends_its_thread(pool: MooncakePool) -> None:
    """Also while the master hangs, and the probe with it: the engine is on its way out."""
    store = open_store(url_of(pool))
    pool.pause_master()
    try:
        with pytest.raises(StoreLostError):
            store.exists(["a"])
        assert num_probing() == 1
        time.sleep(0.4)  # so that a probe hangs
        began_s = time.monotonic()
        store.close()
        assert time.monotonic() - began_s < 2.0
        wait_until(lambda: num_probing() == 0)
    finally:
        pool.resume_master()


def test_values_of_a_dead_owner_are_misses_and_saving_goes_on_with_another(
    pool: MooncakePool, store: Store
) -> None:
    """The pool is not lost: keys fail, each for itself, until the master gives the owner up."""
    arena = Arena(store)
    wait_until(lambda: arena.put([("d", b"x" * MIB)]) == [Status.OK])
    pool.kill_owner()
    status, _ = arena.get([("d", MIB)])[0]
    assert status in (Status.FAILED, Status.MISSING)
    if status is Status.FAILED:
        assert store.take_counters()["failed_transfers"] >= 1
    wait_until(lambda: store.exists(["d"]) == [False])
    assert arena.get([("d", MIB)])[0][0] is Status.MISSING
    assert arena.put([("e", b"x" * 8)]) == [Status.NO_SPACE]
    pool.start_owner()
    wait_until(lambda: arena.put([("e", b"x" * 8)]) == [Status.OK])
    assert store.take_counters()["store_outages"] == 0


def test_an_owner_that_hangs_costs_a_batch_its_time_limit_and_writes_nothing_afterwards(
    pool: MooncakePool, store: Store
) -> None:
    """What waits in line for it has failed before the call is left, and the rest is not tried.

    Mooncake by itself leaves a call after a minute, and carries it out when the owner is back: into
    memory that may hold another value by then.
    """
    arena = Arena(store)
    keys = [f"hangs-{number}" for number in range(300)]
    wait_until(lambda: store.remove(["hangs"]) == [Status.MISSING])
    assert set(arena.put([(key, b"x" * 8192) for key in keys])) == {Status.OK}
    batch = arena.batch(keys, [[8192]] * len(keys))
    num_rounds = MAX_PER_TCP_CALL / TCP_LANES
    pool.pause_owner()
    try:
        began_s = time.monotonic()
        assert set(store.get(batch)) == {Status.FAILED}
        assert time.monotonic() - began_s < num_rounds * (CALL_TIMEOUT_MS / 1000 + 1)
        arena.fill()
    finally:
        pool.resume_owner()
    time.sleep(1.0)
    assert set(arena.buffer.tolist()) == {0xEE}
    wait_until(lambda: arena.put([("h", b"x" * 8)]) == [Status.OK])


def test_a_leased_value_cannot_be_removed_until_the_lease_ends(store: Store) -> None:
    """It is FAILED and counted, and goes once nobody reads it."""
    arena = Arena(store)
    assert arena.put([("f", b"x" * 8)]) == [Status.OK]
    assert store.exists(["f"]) == [True]
    assert store.remove(["f", "absent"]) == [Status.FAILED, Status.MISSING]
    assert store.take_counters()["refused_by_lease"] == 1
    wait_until(lambda: store.remove(["f"]) == [Status.OK])


def test_a_put_leases_nothing_and_asks_nothing(pool: MooncakePool, store: Store) -> None:
    """Known keys and new ones: so a full pool can evict what is only being saved."""
    arena = Arena(store)
    assert not store.checks_before_put
    before = pool.metrics().num_checks
    for _ in range(2):
        assert arena.put([("g", b"x" * 8), ("h", b"y" * 8)]) == [Status.OK, Status.OK]
    assert store.remove(["g", "h"]) == [Status.OK, Status.OK]
    assert pool.metrics().num_checks == before
    assert store.take_counters()["refused_by_lease"] == 0


def test_a_put_waits_for_a_full_pool_to_evict(pool: MooncakePool, store: Store) -> None:
    """Twice what the pool holds, one value after another: each finds room."""
    arena = Arena(store)
    for number in range(128):
        assert arena.put([(f"full-{number}", bytes([number]) * MIB)]) == [Status.OK]
    assert pool.metrics().num_evicted_keys > 0


def test_a_pool_full_of_leased_values_has_no_space_and_says_so_soon(store: Store) -> None:
    """Nothing can be evicted: the put is refused within its wait, and later succeeds."""
    arena = Arena(store)
    keys = []
    while True:
        keys.append(f"leased-{len(keys)}")
        statuses = arena.put([(keys[-1], b"z" * MIB)])
        store.exists(keys)
        if statuses == [Status.NO_SPACE]:
            break
        assert len(keys) < 200
    began_s = time.monotonic()
    assert arena.put([("one more", b"z" * MIB)]) == [Status.NO_SPACE]
    assert time.monotonic() - began_s < 1.0
    wait_until(lambda: arena.put([("one more", b"z" * MIB)]) == [Status.OK])
