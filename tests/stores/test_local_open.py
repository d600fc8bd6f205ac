"""Opening a local pool that something happened to: a message with a remedy, and never a wait."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvtide.stores import Status, local_files
from kvtide.stores.local import LocalStore
from kvtide.testing import Arena

_STOPS_IN_A_TRANSACTION = """
import os, signal, sys
from kvtide.stores.local import LocalStore
store = LocalStore(sys.argv[1])
with store._locks.writing(1.0), store._index._env.begin(write=True):
    print("stopping", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
print("resumed", flush=True)
store.close()
"""
_OPENS = """
import sys
from kvtide.errors import StoreOpenError
from kvtide.stores import local
local._OPEN_INDEX_TIMEOUT_S = 0.3
try:
    local.LocalStore(sys.argv[1]).close()
    print("opened")
except StoreOpenError as error:
    print(error)
"""
WAIT_S = 30.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A directory that is not there yet."""
    return tmp_path / "pool"


def opened_elsewhere(path: Path) -> str:
    """Open the pool in another process; return what that printed."""
    command = [sys.executable, "-c", _OPENS, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True)
    return done.stdout


def test_a_writer_that_is_stopped_is_named_to_who_opens(path: Path) -> None:
    """LMDB would wait for it without end; once it goes on, the pool can be opened."""
    LocalStore(path, 1 << 20).close()
    command = [sys.executable, "-c", _STOPS_IN_A_TRANSACTION, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stopped:
        try:
            assert stopped.stdout is not None
            assert stopped.stdout.readline() == "stopping\n"
            start = time.monotonic()
            assert "is stopped: resume or end it" in opened_elsewhere(path)
            assert time.monotonic() - start < WAIT_S / 2
            stopped.send_signal(signal.SIGCONT)
            assert stopped.stdout.readline() == "resumed\n"
            assert opened_elsewhere(path) == "opened\n"
        finally:
            stopped.kill()


def test_a_pool_in_use_without_its_marker_is_not_made_anew(path: Path) -> None:
    """Whoever uses it would go on in files that are gone; its close brings the marker back."""
    store = LocalStore(path, 1 << 20)
    Arena(store).put([("a", b"abc")])
    (path / local_files.MARKER).unlink()
    assert "in use: stop the processes" in opened_elsewhere(path)
    assert Arena(store).get([("a", 3)]) == [(Status.OK, b"abc")]
    store.close()
    store = LocalStore(path)
    assert store.exists(["a"]) == [True]
    store.close()
