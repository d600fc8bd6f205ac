"""Many processes on one local pool, some of which die or stop at the worst moment."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtide.stores import Status
from kvtide.stores.local import LocalStore
from kvtide.testing import Arena, value_of
from tests.stores.local_checks import check_extents
from tests.stores.local_writer import NUM_KEYS, PHASES, choose, seeded, size_of

POOL_BYTES = 2 << 20
WAIT_S = 30.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    """A pool that is soon full."""
    store = LocalStore(tmp_path / "pool", POOL_BYTES, lock_timeout_s=20.0)
    yield store
    store.close()


@contextmanager
def writer(
    store: LocalStore, seed: int, *, sends: str = "SIGKILL", phase: str, after: int = 10**9
) -> Iterator[subprocess.Popen[str]]:
    """Run a writing process, killed at the end of the block if it still lives."""
    script = Path(__file__).with_name("local_writer.py")
    command = [sys.executable, script, store.path, str(seed), sends, phase, str(after)]
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait(WAIT_S)
        assert process.stdout is not None
        process.stdout.close()


@contextmanager
def reading(store: LocalStore) -> Iterator[list[str]]:
    """Get random keys in two threads for the length of the block; yields the list of faults."""
    stop, faults = threading.Event(), []

    def read(seed: int) -> None:
        arena, generator = Arena(store), seeded(seed)
        while not stop.is_set():
            asked = [(key, size_of(key)) for key, _ in choose(generator, 4)]
            for (key, size), (status, found) in zip(asked, arena.get(asked), strict=True):
                if status is Status.OK and found != value_of(key, size):
                    faults.append(f"{key} has wrong bytes")
                if status is Status.FAILED:
                    faults.append(f"{key} failed")

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield faults
    finally:
        stop.set()
        for thread in threads:
            thread.join(WAIT_S)


def check_quiet(store: LocalStore) -> int:
    """Check, with nobody else writing, that every key that exists is whole; return how many do."""
    arena = Arena(store, 4 << 20)
    own = [f"own-{seed}-{number}" for seed in range(40) for number in range(12)]
    keys = [*(f"key-{i}" for i in range(NUM_KEYS)), *own]
    present = [key for key, found in zip(keys, store.exists(keys), strict=True) if found]
    for key in present:
        assert arena.get([(key, size_of(key))]) == [(Status.OK, value_of(key, size_of(key)))]
    check_extents(store)
    return len(present)


def check_whole_capacity(store: LocalStore) -> None:
    """Check that one value can still take the whole pool: nothing is reserved for ever."""
    arena = Arena(store)
    assert arena.put([("whole", value_of("whole", POOL_BYTES))]) == [Status.OK]
    assert arena.get([("whole", POOL_BYTES)]) == [(Status.OK, value_of("whole", POOL_BYTES))]
    assert check_extents(store) == {"free": 0, "value": POOL_BYTES // 4096, "reserved": 0}


def test_writers_killed_in_every_phase_of_a_put(store: LocalStore) -> None:
    """24 writers die by SIGKILL, in each phase of a put and anywhere, while others read and write.

    No get returns wrong bytes, no key is left without its value, no page stays reserved.
    """
    arena = Arena(store)
    arena.put(choose(seeded(0), 40))
    with reading(store) as faults, writer(store, 99, phase="anywhere") as survivor:
        for seed in range(24):
            phase = PHASES[seed % len(PHASES)]
            with writer(store, seed, phase=phase, after=seed // len(PHASES) + 1) as victim:
                assert victim.stdout is not None
                victim.stdout.readline()
                arena.put(choose(seeded(1_000 + seed), 3))
                if phase != "anywhere":
                    assert victim.wait(WAIT_S) == -signal.SIGKILL
        assert survivor.poll() is None
    assert faults == []
    assert check_quiet(store) > 0
    check_whole_capacity(store)


@pytest.mark.parametrize("phase", PHASES[:-1])
def test_a_single_death_leaves_a_full_pool_sound(store: LocalStore, phase: str) -> None:
    """After one death in a full pool, and before anyone writes, every key still has its value."""
    arena, generator = Arena(store), seeded(1)
    for _ in range(30):
        arena.put(choose(generator, 4))
    with writer(store, 0, phase=phase, after=1) as victim:
        assert victim.wait(WAIT_S) == -signal.SIGKILL
    assert check_quiet(store) > 0
    check_whole_capacity(store)


def test_a_stopped_writer_keeps_its_pages(store: LocalStore) -> None:
    """A writer that stops in the middle of its copy is not overtaken: its value is right."""
    with writer(store, 7, sends="SIGSTOP", phase="copied", after=0) as stopped:
        wait_until_stopped(stopped)
        arena = Arena(store)
        generator = seeded(3)
        for _ in range(60):
            statuses = arena.put(choose(generator, 4))
            assert set(statuses) <= {Status.OK, Status.NO_SPACE}
        assert check_extents(store)["reserved"] > 0
        stopped.send_signal(signal.SIGCONT)
        assert stopped.stdout is not None
        assert stopped.stdout.readline().split() == ["0", "ok", "ok", "ok", "ok"]
    check_quiet(store)
    check_whole_capacity(store)


def test_a_writer_stopped_with_the_lock_fails_others_in_time(store: LocalStore) -> None:
    """Who waits for a stopped writer's lock is answered FAILED; gets go on; the lock returns."""
    arena = Arena(store)
    arena.put([("a", b"abc")])
    store._lock_timeout_s = 0.05
    with writer(store, 8, sends="SIGSTOP", phase="before publishing commits", after=0) as stopped:
        wait_until_stopped(stopped)
        assert arena.put([("b", b"x")]) == [Status.FAILED]
        assert arena.get([("a", 3)]) == [(Status.OK, b"abc")]
    store._lock_timeout_s = 20.0
    assert arena.put([("b", b"x")]) == [Status.OK]
    check_quiet(store)
    check_whole_capacity(store)


def test_processes_see_what_others_put(store: LocalStore) -> None:
    """A key put by one process exists in another."""
    # The other stops in its second put, before it can evict what it put first.
    with writer(store, 5, sends="SIGSTOP", phase="reserved", after=1) as other:
        wait_until_stopped(other)
        assert other.stdout is not None
        assert other.stdout.readline().startswith("0 ")
        assert store.exists(["own-5-0"]) == [True]
        assert store._locks.others_alive()


def wait_until_stopped(process: subprocess.Popen[str]) -> None:
    """Wait until the kernel says that ``process`` is stopped."""
    for _ in range(int(WAIT_S / 0.01)):
        state = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        if state == "T":
            return
        threading.Event().wait(0.01)
    raise AssertionError("the process did not stop")
