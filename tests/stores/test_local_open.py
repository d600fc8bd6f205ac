"""Opening a local pool that something happened to: a message with a remedy, and never a wait."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvtide.errors import ConfigError, StoreOpenError
from kvtide.stores import Status, local_files, open_store
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


@pytest.mark.parametrize(
    "change",
    [
        {"size_bytes": "x"},
        {"size_bytes": None},
        {"size_bytes": True},
        {"size_bytes": 0},
        {"size_bytes": -4096},
        {"size_bytes": 1 << 20 | 1},
        {"size_bytes": 1 << 80},
        {"index_bytes": 1.5},
        {"index_bytes": 0},
        {"boot_id": 5},
        {"is_clean": "no"},
        {"format_version": "1"},
    ],
)
def test_a_marker_that_lies_is_refused(path: Path, change: dict[str, Any]) -> None:
    """A size of the wrong type or out of range is damage, and is named with its cure."""
    LocalStore(path, 1 << 20).close()
    marker = path / local_files.MARKER
    marker.write_text(json.dumps({**json.loads(marker.read_text()), **change}))
    with pytest.raises(StoreOpenError, match="remove the directory"):
        LocalStore(path)


def test_a_marker_too_deep_to_read_is_refused(path: Path) -> None:
    """What exhausts the JSON parser is not a marker."""
    LocalStore(path, 1 << 20).close()
    (path / local_files.MARKER).write_text("[" * 100_000)
    with pytest.raises(StoreOpenError, match="remove the directory"):
        LocalStore(path)


@pytest.mark.parametrize("name", ["locks", "slab", "index.lmdb"])
@pytest.mark.parametrize("kind", ["directory", "fifo"])
def test_what_should_be_a_file_and_is_not(path: Path, name: str, kind: str) -> None:
    """It is replaced where that is safe, and refused with the cure where not."""
    path.mkdir()
    make = os.mkdir if kind == "directory" else os.mkfifo
    make(path / name)
    if name != "locks" and kind == "fifo":
        LocalStore(path, 1 << 20).close()
        return
    with pytest.raises(StoreOpenError, match="remove the directory"):
        LocalStore(path, 1 << 20)


def test_a_corrupted_index_is_refused_with_its_cure(path: Path) -> None:
    """LMDB's own message does not say what to do."""
    LocalStore(path, 1 << 20).close()
    index = path / local_files.INDEX
    index.write_bytes(b"\xff" * index.stat().st_size)
    with pytest.raises(StoreOpenError, match="remove the directory"):
        LocalStore(path)


def test_a_damaged_state_is_refused_as_often_as_one_tries(path: Path) -> None:
    """A refused opening leaves nothing open, even while its error is kept."""
    store = LocalStore(path, 1 << 20)
    with store._index._env.begin(write=True) as txn:
        txn.put(b"state", b"?", db=store._index._meta)
    store.close()
    with pytest.raises(StoreOpenError, match="the index is damaged") as first:
        LocalStore(path)
    with pytest.raises(StoreOpenError, match="the index is damaged") as second:
        LocalStore(path)
    assert first.value is not second.value


def test_no_space_to_open_what_is_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk keeps the pool, and the message says what helps."""
    store = LocalStore(path, 1 << 20)
    Arena(store).put([("a", b"abc")])
    store.close()

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(StoreOpenError, match="free some space"):
            LocalStore(path)
    store = LocalStore(path)
    assert store.exists(["a"]) == [True]
    store.close()


@pytest.mark.parametrize("text", ["/tmp/a%00b", "/tmp/a\0b", "/tmp/a\ud800b"])
def test_a_path_that_cannot_be_is_refused(text: str) -> None:
    """A NUL and half a surrogate pair are faults of the URL, and of the path."""
    with pytest.raises(ConfigError, match="character that no path can have"):
        open_store(f"local://{text}?size=1MiB")
    with pytest.raises(StoreOpenError, match="choose another path"):
        LocalStore(text.replace("%00", "\0"), 1 << 20)


def test_a_loop_of_links_is_refused(path: Path) -> None:
    """A link to itself leads nowhere."""
    path.symlink_to(path)
    with pytest.raises(StoreOpenError, match="choose another path"):
        open_store(f"local://{path}?size=1MiB")


@pytest.mark.parametrize(
    "parameters, says",
    [
        ("lock_timeout_ms=9223372036854775", "a day"),
        (f"lock_timeout_ms={'9' * 5000}", "a day"),
        ("size=9999999999999999GiB", "more than any machine"),
    ],
)
def test_a_number_without_measure_is_refused(path: Path, parameters: str, says: str) -> None:
    """What would overflow later is a fault of the URL."""
    with pytest.raises(ConfigError, match=says):
        open_store(f"local://{path}?{parameters}")
