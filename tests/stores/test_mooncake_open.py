"""A Mooncake pool that cannot be opened: one message with the remedy, within the time limit."""

from __future__ import annotations

import http.server
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtide.errors import ConfigError, StoreLostError, StoreOpenError
from kvtide.stores import Status, open_store, url_for_lookups
from kvtide.stores.ports import free_ports
from kvtide.testing import Arena
from kvtide.testing.mooncake import MooncakePool

SETUP_TIMEOUT_S = 3.0
CALL_TIMEOUT_S = 1.0
LIMITS = "setup_timeout_ms=3000&call_timeout_ms=1000"
PROXY = Path(__file__).with_name("proxy_of_another_version.py")


@contextmanager
def refusal(limit_s: float = SETUP_TIMEOUT_S + CALL_TIMEOUT_S) -> Iterator[list[str]]:
    """Expect an error within the limit, and give its message."""
    said: list[str] = []
    began_s = time.monotonic()
    with pytest.raises((StoreOpenError, ConfigError)) as caught:
        yield said
    assert time.monotonic() - began_s < limit_s + 1.0
    said.append(str(caught.value))


def test_a_host_that_does_not_exist() -> None:
    """The name is told, at once."""
    with refusal() as said:
        open_store(f"mooncake://no-such-host.invalid:50051?{LIMITS}")
    assert "'no-such-host.invalid' is not known here" in said[0]
    assert "correct the store URL" in said[0]


def test_a_port_where_nothing_listens() -> None:
    """The address is told, and how to start a master."""
    (port,) = free_ports(1)
    with refusal() as said:
        open_store(f"mooncake://127.0.0.1:{port}?{LIMITS}")
    assert f"no Mooncake master listens at 127.0.0.1:{port}" in said[0]
    assert "kvtide pool up" in said[0]


def test_a_master_that_comes_late_is_waited_for() -> None:
    """An engine and its pool may be started together."""
    with MooncakePool() as pool:
        pool.kill_master()
        timer = threading.Timer(1.0, pool.start_master)
        timer.start()
        store = open_store(f"{pool.url}?setup_timeout_ms=20000&call_timeout_ms=1000")
        timer.join()
        arena = Arena(store)
        assert arena.put([("a", b"value")]) == [Status.OK]
        store.close()


def test_a_port_where_something_silent_listens() -> None:
    """What listens is no master; the port that is meant is named."""
    with socket.create_server(("127.0.0.1", 0)) as listener, refusal() as said:
        open_store(f"mooncake://127.0.0.1:{listener.getsockname()[1]}?{LIMITS}")
    assert "does not answer as a Mooncake master" in said[0]
    assert "rpc_port" in said[0]


class _Quiet(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """Say nothing."""


def test_a_port_where_a_web_server_listens() -> None:
    """The master's own metrics are such a server."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Quiet)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with refusal() as said:
            open_store(f"mooncake://127.0.0.1:{server.server_address[1]}?{LIMITS}")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert "does not answer as a Mooncake master" in said[0]


def test_a_master_of_another_version() -> None:
    """The master answers, and the client refuses it: the message says to install one version."""
    with MooncakePool() as pool:
        (port,) = free_ports(1)
        proxy = subprocess.Popen([sys.executable, str(PROXY), str(port), str(pool.port)])
        try:
            with refusal(SETUP_TIMEOUT_S + 5 * CALL_TIMEOUT_S) as said:
                open_store(f"mooncake://127.0.0.1:{port}?{LIMITS}")
        finally:
            proxy.kill()
            proxy.wait()
    assert "another version" in said[0]
    assert "same version on both sides" in said[0]


def test_a_host_name_of_ones_own_changes_nothing_about_the_wait() -> None:
    """It only says where this process is reached."""
    (port,) = free_ports(1)
    with refusal() as said:
        open_store(f"mooncake://127.0.0.1:{port}?hostname=127.0.0.1&{LIMITS}")
    assert f"no Mooncake master listens at 127.0.0.1:{port}" in said[0]


def test_a_start_waits_as_long_as_it_is_told() -> None:
    """Whatever the time limit of calls is."""
    (port,) = free_ports(1)
    began_s = time.monotonic()
    with pytest.raises(StoreOpenError):
        open_store(f"mooncake://127.0.0.1:{port}?setup_timeout_ms=1500&call_timeout_ms=5000")
    assert 1.0 < time.monotonic() - began_s < 3.0


def test_each_store_of_a_process_has_its_own_time_limit() -> None:
    """Also after one with another limit, for what the client is told is not the operator's."""
    with MooncakePool() as first, MooncakePool() as second:
        stores = [
            open_store(f"{first.url}?call_timeout_ms=4000"),
            open_store(f"{second.url}?call_timeout_ms=500"),
        ]
        second.pause_master()
        began_s = time.monotonic()
        with pytest.raises(StoreLostError):
            stores[1].exists(["a"])
        assert time.monotonic() - began_s < 2.0
        second.resume_master()
        for store in stores:
            store.close()


FORKS = """
import os, sys
from kvtide.errors import StoreOpenError
from kvtide.stores import open_store
open_store(sys.argv[1]).close()
child = os.fork()
if child == 0:
    try:
        open_store(sys.argv[1])
    except StoreOpenError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
open_store(sys.argv[1]).close()
"""


def test_a_child_of_a_process_that_used_mooncake_is_refused() -> None:
    """Its client would hang in the making; the parent goes on."""
    with MooncakePool() as pool:
        done = subprocess.run(
            [sys.executable, "-c", FORKS, pool.url],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    assert "start the process with spawn" in done.stdout


ENDS_IN_A_CALL = """
import sys, threading, time
from kvtide.errors import StoreClosedError
from kvtide.stores import open_store
from kvtide.testing import Arena
store = open_store(sys.argv[1])
def call():
    arena = Arena(store, 1 << 20)
    arena.put([("a", bytes(1 << 20))])
    while True:
        try:
            arena.get([("a", 1 << 20)])
            store.exists(["a"] * 100)
        except StoreClosedError:  # to print it while Python ends could end it for good
            return
for _ in range(3):
    threading.Thread(target=call, daemon=True).start()
time.sleep(0.5)
print("ends", flush=True)
"""


def test_a_process_may_end_while_its_threads_are_in_calls() -> None:
    """As an engine that is not told to shut down: Python would abort it."""
    with MooncakePool() as pool:
        for _ in range(3):
            done = subprocess.run(
                [sys.executable, "-c", ENDS_IN_A_CALL, pool.url],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert done.stdout == "ends\n"
            assert "Traceback" not in done.stderr
            assert done.returncode == 0


def test_a_segment_larger_than_memory() -> None:
    """It is refused before anything is asked of the machine."""
    with refusal(1.0) as said:
        open_store(f"mooncake://127.0.0.1:1?segment=900TiB&{LIMITS}")
    assert "more than the" in said[0]
    assert "free here" in said[0]


def test_rdma_without_a_device() -> None:
    """The parameter to add is named."""
    with refusal(1.0) as said:
        open_store(f"mooncake://127.0.0.1:1?protocol=rdma&{LIMITS}")
    assert "device=" in said[0]


def test_unknown_parameters() -> None:
    """The one that is meant is suggested."""
    with refusal(1.0) as said:
        open_store(f"mooncake://127.0.0.1:1?tenants=a&{LIMITS}")
    assert "did you mean 'tenant'?" in said[0]


def test_an_engine_may_give_memory_to_the_pool() -> None:
    """A segment of this process holds values, and goes with it."""
    with MooncakePool(segment_bytes=16 << 20) as pool:
        before = pool.metrics().capacity_bytes
        store = open_store(f"{pool.url}?segment=32MiB&call_timeout_ms=2000")
        assert pool.metrics().capacity_bytes == before + (32 << 20)
        arena = Arena(store)
        values = [(f"key-{i}", bytes([i]) * (1 << 20)) for i in range(30)]
        for value in values:
            assert arena.put([value]) == [Status.OK]
        assert sum(store.exists([key for key, _ in values])) > 16
        store.close()
        assert pool.metrics().capacity_bytes == before


QUOTAS = """{"version": 1, "tenants": [
    {"name": "red", "quota": "8MB"}, {"name": "blue", "quota": "8MB"}]}"""


def test_who_only_asks_gives_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler beside its workers, by URL and by file, in one process or in two."""
    with MooncakePool(segment_bytes=16 << 20) as pool:
        path = tmp_path / "mooncake.json"
        path.write_text(
            f'{{"master_server_address": "127.0.0.1:{pool.port}", "protocol": "tcp",'
            ' "metadata_server": "P2PHANDSHAKE", "global_segment_size": "0.03125GB"}'
        )
        monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(path))
        before = pool.metrics().capacity_bytes
        for url in (f"{pool.url}?segment=32MiB&call_timeout_ms=2000", "mooncake://"):
            asking = open_store(url_for_lookups(url))
            assert pool.metrics().capacity_bytes == before
            giving = open_store(url)
            assert pool.metrics().capacity_bytes == before + (32 << 20)
            assert Arena(giving).put([(url, b"value")]) == [Status.OK]
            assert asking.exists([url]) == [True]
            giving.close()
            asking.close()
        assert url_for_lookups(f"{pool.url}?call_timeout_ms=5") == f"{pool.url}?call_timeout_ms=5"
        assert url_for_lookups("local:///dev/shm/kvtide") == "local:///dev/shm/kvtide"


def test_a_wrong_port_in_a_file_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not the URL, which says nothing of it."""
    path = tmp_path / "mooncake.json"
    (port,) = free_ports(1)
    path.write_text(
        f'{{"master_server_address": "127.0.0.1:{port}", "protocol": "tcp",'
        ' "mode": "standalone-store"}'
    )
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(path))
    with refusal() as said:
        open_store("mooncake://?setup_timeout_ms=500")
    assert f"correct master_server_address in {path}" in said[0]


def test_tenants_have_keys_of_their_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where the master keeps tenants apart; one that it does not know is told once in the log."""
    policy = tmp_path / "tenants.yaml"
    policy.write_text(QUOTAS)
    flags = {"enable_multi_tenants": "true", "tenant_quota_connector_uri": str(policy)}
    with MooncakePool(master_flags=flags) as pool:
        for tenant in ("red", "blue"):
            store = open_store(f"{pool.url}?tenant={tenant}&call_timeout_ms=2000")
            arena = Arena(store)
            assert store.exists(["a"]) == [False]
            assert arena.put([("a", tenant.encode())]) == [Status.OK]
            assert arena.get([("a", len(tenant))]) == [(Status.OK, tenant.encode())]
            store.close()
        assert not caplog.records
        store = open_store(f"{pool.url}?tenant=green&call_timeout_ms=2000")
        arena = Arena(store)
        for key in "ab":
            assert arena.put([(key, b"value")]) == [Status.FAILED]
        assert store.exists(["a", "b"]) == [False, False]
        store.close()
        (record,) = caplog.records
        assert "knows no tenant 'green'" in record.getMessage()
