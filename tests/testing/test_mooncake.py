"""The Mooncake pool for tests, with real processes: what it gives, and that it leaves nothing."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtide.errors import StoreLostError, StoreOpenError
from kvtide.stores.mooncake_metrics import read_metrics
from kvtide.stores.mooncake_package import mooncake_module
from kvtide.stores.processes import ProcessId
from kvtide.testing import MooncakePool

pytestmark = pytest.mark.timeout(60)

VALUE = bytes(range(256)) * 256


def until(condition: Callable[[], Any], timeout_s: float = 10.0) -> bool:
    """Wait for a condition; whether it came true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def processes(pool: MooncakePool) -> list[ProcessId]:
    """Return the master and the owner."""
    assert pool._master is not None
    assert pool._owner is not None
    return [pool._master, pool._owner]


@pytest.fixture
def pool() -> Iterator[MooncakePool]:
    """Return a running pool that gives up dead owners after a second."""
    with MooncakePool(lease_ms=100, master_flags={"client_ttl": 1}) as pool:
        yield pool


@pytest.fixture
def client(pool: MooncakePool) -> Iterator[Any]:
    """Return one of Mooncake's own clients, which gives the pool no memory."""
    client = mooncake_module().MooncakeDistributedStore()
    master = pool.url.removeprefix("mooncake://")
    assert client.setup(pool.host, "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master) == 0
    yield client
    client.close()


def test_a_client_stores_and_loads_in_the_pool(pool: MooncakePool, client: Any) -> None:
    """The bytes come back, and the master's metrics count them."""
    assert pool.metrics().capacity_bytes == 64 << 20
    assert client.put("key", VALUE) == 0
    assert client.get("key") == VALUE
    assert client.is_exist("nobody") == 0
    metrics = pool.metrics()
    assert (metrics.num_keys, metrics.used_bytes) == (1, len(VALUE))
    assert (metrics.num_hits, metrics.hit_bytes, metrics.num_puts) == (1, len(VALUE), 1)
    assert metrics.num_checks == 1
    assert metrics.num_gets >= 1


def test_a_killed_master_comes_back_empty_at_its_port(pool: MooncakePool, client: Any) -> None:
    """Clients and the owner find it again; what was stored is gone."""
    assert client.put("key", VALUE) == 0
    pool.kill_master()
    with pytest.raises(StoreLostError, match="no Mooncake master answers"):
        pool.metrics()
    assert client.put("other", VALUE) != 0
    before = pool.port
    pool.start_master()
    assert pool.port == before
    assert (pool.metrics().num_keys, pool.metrics().capacity_bytes) == (0, 64 << 20)
    assert until(lambda: client.put("again", VALUE) == 0)
    assert client.get("again") == VALUE


def test_a_killed_owner_takes_its_segment_along(pool: MooncakePool) -> None:
    """The master gives it up after ``client_ttl``; a new owner brings another one."""
    [first] = pool.metrics().segments
    pool.kill_owner()
    assert until(lambda: not pool.metrics().segments)
    pool.start_owner()
    [second] = pool.metrics().segments
    assert second != first


def test_a_paused_master_hangs_until_it_is_resumed(pool: MooncakePool) -> None:
    """It neither answers nor refuses, and goes on as if nothing had been."""
    pool.pause_master()
    with pytest.raises(StoreLostError, match="timed out"):
        read_metrics(pool.host, pool.metrics_port, timeout_s=0.2)
    pool.resume_master()
    assert pool.metrics().capacity_bytes == 64 << 20


def test_a_paused_owner_is_given_up_and_mounts_again(pool: MooncakePool) -> None:
    """To the master an owner that hangs is dead, until it is heard again."""
    pool.pause_owner()
    assert processes(pool)[1].is_stopped()
    assert until(lambda: not pool.metrics().segments)
    pool.resume_owner()
    assert until(lambda: pool.metrics().segments)


def test_a_master_started_beside_a_paused_owner_does_not_wait_for_it(pool: MooncakePool) -> None:
    """The segment is there once the owner is resumed."""
    pool.kill_master()
    pool.pause_owner()
    pool.start_master()
    assert not pool.metrics().segments
    pool.resume_owner()
    assert until(lambda: pool.metrics().segments)


def test_what_runs_is_not_started_again(pool: MooncakePool) -> None:
    """Two masters of one port would be a fault of the test."""
    for start in (pool.start_master, pool.start_owner):
        with pytest.raises(StoreOpenError, match="runs already"):
            start()


def test_programs_outlive_the_thread_that_started_them(pool: MooncakePool) -> None:
    """A test may restart the master from a helper thread."""

    def restart() -> None:
        pool.kill_master()
        pool.start_master()

    thread = threading.Thread(target=restart)
    thread.start()
    thread.join()
    assert not until(lambda: not processes(pool)[0].is_alive(), timeout_s=0.3)


def test_nothing_is_left_when_the_test_fails() -> None:
    """Processes, paused ones included, and the folder are gone after the ``with``."""
    pool = MooncakePool()

    def fail() -> None:
        with pool:
            pool.pause_owner()
            _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        fail()
    assert "is down" in repr(pool)
    assert not any(process.is_alive() for process in processes(pool))
    assert not pool.master_log.parent.exists()
    pool.close()
    with pytest.raises(StoreOpenError, match="make another"), pool:
        pytest.fail("it started again")


def test_a_given_folder_keeps_the_logs(tmp_path: Path) -> None:
    """Where a test names a folder, it can read them afterwards."""
    with MooncakePool(folder=tmp_path) as pool:
        pass
    assert "Master service started" in (tmp_path / "master.log").read_text()
    assert pool.owner_log == tmp_path / "owner.log"
    assert pool.owner_log.exists()


KILLED = """
import os, signal, time
from kvtide.testing import MooncakePool

with MooncakePool() as pool:
    forked = os.fork()
    if forked == 0:  # it has all files open that this process has, and lives on
        os.close(1)
        time.sleep(20)
        os._exit(0)
    guard = pool._programs._guard.pid
    print(forked, pool._master.pid, pool._owner.pid, guard, pool.master_log.parent, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_is_left_when_the_test_process_is_killed() -> None:
    """Not even where a child of it, which has its open files, lives on."""
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )
    forked, *pids, folder = child.communicate(timeout=20)[0].split()
    assert child.returncode == -signal.SIGKILL
    assert len(pids) == 3
    assert until(lambda: not any(ProcessId.of(int(pid)) for pid in pids))
    assert until(lambda: not Path(folder).exists())
    lived_on = ProcessId.of(int(forked))
    assert lived_on is not None
    lived_on.kill()


def test_the_programs_end_with_a_killed_guard() -> None:
    """The kernel sees to it; closing the pool is still harmless."""
    with MooncakePool() as pool:
        assert pool._programs is not None
        os.kill(pool._programs._guard.pid, signal.SIGKILL)
        assert until(lambda: not any(process.is_alive() for process in processes(pool)))
        with pytest.raises(StoreOpenError, match="guard"):
            pool.start_master()
    assert not pool.master_log.parent.exists()


def test_a_master_that_refuses_its_flags_is_quoted(tmp_path: Path) -> None:
    """The message has the end of its log."""
    with (
        pytest.raises(StoreOpenError, match="unknown command line flag 'no_such_flag'"),
        MooncakePool(master_flags={"no_such_flag": 1}, folder=tmp_path),
    ):
        pytest.fail("it started")


def test_an_owner_that_cannot_have_its_memory_is_quoted() -> None:
    """The same, and the master that had started is ended."""
    pool = MooncakePool(segment_bytes=1000)
    with pytest.raises(StoreOpenError, match="at least 16777216"), pool:
        pytest.fail("it started")
    assert pool._master is not None
    assert not pool._master.is_alive()


def test_a_pool_outside_a_with_statement_says_so() -> None:
    """Nothing was started yet."""
    pool = MooncakePool()
    for use in (pool.kill_master, pool.pause_owner, pool.start_master, pool.start_owner):
        with pytest.raises(StoreOpenError, match="`with` statement"):
            use()
