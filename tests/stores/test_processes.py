"""Processes known for good: real ones, their ends, and whoever gets their pid later."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvtide.stores.processes import ProcessId, start_detached

EXIT = {"x86_64": 60, "aarch64": 93}[os.uname().machine]
"""The system call that ends one thread."""

pytestmark = pytest.mark.timeout(60)


def start(code: str = "") -> tuple[ProcessId, "subprocess.Popen[str]"]:
    """Start a process that runs ``code``, then says so, then waits."""
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", f"{code}\nprint(flush=True)\nimport time\ntime.sleep(60)"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    child.stdout.readline()
    process = ProcessId.of(child.pid)
    assert process is not None
    return process, child


@pytest.fixture
def sleeper() -> Iterator[ProcessId]:
    """Return a process that only waits."""
    process, child = start()
    yield process
    end(child)


def end(child: "subprocess.Popen[str]") -> None:
    """End and forget a child, which the test may have ended already."""
    child.kill()
    child.communicate()


def test_a_process_is_alive_until_it_ends(sleeper: ProcessId) -> None:
    """It does not count as alive while it waits to be reaped."""
    assert sleeper.is_alive()
    assert "sleep(60)" in sleeper.command()
    os.kill(sleeper.pid, signal.SIGKILL)
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is a zombie
    assert not sleeper.is_alive()
    assert ProcessId.of(sleeper.pid) is None
    assert ProcessId.of_unreaped(sleeper.pid) == sleeper


def test_a_process_is_alive_until_its_last_thread_has_ended() -> None:
    """Until then it holds its files and ports, whatever has become of its first thread."""
    leave = (
        "import ctypes, threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()"
    )
    process, child = start(f"{leave}\nprint(flush=True)\nctypes.CDLL(None).syscall({EXIT}, 0)")
    try:
        while " Z " not in Path(f"/proc/{child.pid}/stat").read_text():
            time.sleep(0.001)
        assert process.is_alive()
        assert not process.wait(0.05)
        process.kill()
        assert not process.is_alive()
    finally:
        end(child)


def test_a_pid_that_nobody_has_is_no_process(sleeper: ProcessId) -> None:
    """Neither before it was given out nor after it was reaped."""
    sleeper.kill()
    assert ProcessId.of(sleeper.pid) is None
    assert sleeper.command() == ""
    with pytest.raises(ProcessLookupError):
        ProcessId.of_unreaped(sleeper.pid)


@pytest.mark.parametrize("change", [{"start_ticks": 1}, {"boot_id": "another"}])
def test_who_gets_the_pid_later_is_left_alone(sleeper: ProcessId, change: dict[str, int]) -> None:
    """Another start time, or another boot: the process that was meant is gone."""
    gone = replace(sleeper, **change)
    assert not gone.is_alive()
    assert not gone.is_stopped()
    assert not gone.send(signal.SIGKILL)
    assert gone.stop(1.0)
    gone.kill()
    gone.pause()
    assert sleeper.is_alive()
    assert not sleeper.is_stopped()


def test_a_name_cannot_disguise_a_process() -> None:
    """The kernel prints it unquoted, in front of what is read."""
    rename = "import ctypes; ctypes.CDLL(None).prctl(15, b'x) Z 1 (', 0, 0, 0)"
    process, child = start(rename)
    try:
        assert b"(x) Z 1 ()" in Path(f"/proc/{child.pid}/stat").read_bytes()
        assert process.is_alive()
        assert process.start_ticks > 1
    finally:
        end(child)


def test_a_process_that_obeys_is_ended_by_asking(sleeper: ProcessId) -> None:
    """Stopping it again is harmless."""
    assert sleeper.stop(grace_s=20)
    assert not sleeper.is_alive()
    assert sleeper.stop(grace_s=20)


def test_a_process_that_does_not_obey_is_killed() -> None:
    """It is gone all the same."""
    process, child = start("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    try:
        assert not process.stop(grace_s=0.1)
        assert not process.is_alive()
    finally:
        end(child)


def test_a_paused_process_is_stopped_without_waiting(sleeper: ProcessId) -> None:
    """It cannot hear that it should end."""
    sleeper.pause()
    assert sleeper.is_alive()
    assert sleeper.is_stopped()
    sleeper.resume()
    assert not sleeper.is_stopped()
    sleeper.pause()
    begin = time.monotonic()
    sleeper.stop(grace_s=20)
    assert time.monotonic() - begin < 10
    assert not sleeper.is_alive()


def test_waiting_ends_with_the_time_or_the_process(sleeper: ProcessId) -> None:
    """Whichever comes first."""
    assert not sleeper.wait(0.05)
    sleeper.send(signal.SIGTERM)
    assert sleeper.wait(20)


def test_a_detached_process_has_a_session_of_its_own(tmp_path: Path) -> None:
    """Its terminal may close; it appends to its log, and when it has ended no zombie is left."""
    log = tmp_path / "out.log"
    log.write_text("before\n")
    code = "import os, sys; print(os.environ['WHO'], flush=True); sys.stderr.write('x'); input()"
    process = start_detached([sys.executable, "-c", code], log, {"WHO": "me"})
    assert process.wait(20)  # its input is empty
    lines = log.read_text().splitlines()
    assert lines[:2] == ["before", "me"]
    assert lines[-1].startswith("EOFError")
    with pytest.raises(ChildProcessError):
        os.waitpid(process.pid, os.WNOHANG)
    sleeper = start_detached([sys.executable, "-c", "import time; time.sleep(60)"], log, {})
    assert os.getsid(sleeper.pid) == sleeper.pid
    sleeper.kill()
    assert not sleeper.is_alive()
