"""Processes that outlive whoever started them, told apart from those that get their pid later."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_BOOT_ID = _PROC / "sys/kernel/random/boot_id"
# Places in /proc/<pid>/stat behind the name, which is in parentheses and may hold anything.
_STATE, _START_TICKS = 0, 19


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process, for good: its pid, when it started (in ticks since boot), and which boot."""

    pid: int
    start_ticks: int
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """Return who has ``pid`` now; ``None`` where nobody does, or one that has ended."""
        try:
            found = cls.of_unreaped(pid)
        except ProcessLookupError:
            return None
        return found if found.is_alive() else None

    @classmethod
    def of_unreaped(cls, pid: int) -> ProcessId:
        """Return the process that was started as ``pid``, for which nobody has waited yet.

        It may have ended: its pid is its own until somebody waits for it.

        Raises:
            ProcessLookupError: there is none: somebody has waited for it.
        """
        stat = _stat(pid)
        if stat is None:
            raise ProcessLookupError(f"there is no process {pid}")
        return cls(pid, int(stat[_START_TICKS]), boot_id())

    def is_alive(self) -> bool:
        """Whether this very process runs, or is stopped."""
        return not self._has_ended(0)

    def is_stopped(self) -> bool:
        """Whether it is alive and was told to pause, as by ``SIGSTOP``."""
        stat = _stat(self.pid)
        return stat is not None and stat[_STATE] == "T" and self.is_alive()

    def send(self, number: signal.Signals) -> bool:
        """Send a signal; ``False`` where the process is gone, whoever may have its pid now."""
        with self._handle() as handle:
            if handle is None:
                return False
            try:
                signal.pidfd_send_signal(handle, number)
            except ProcessLookupError:
                return False
            return True

    def wait(self, timeout_s: float) -> bool:
        """Wait until the process has ended; ``False`` where it has not after ``timeout_s``."""
        if not self._has_ended(timeout_s):
            return False
        if self._has_pid():
            _reap(self.pid)
        return True

    def stop(self, grace_s: float) -> bool:
        """End the process: ``SIGTERM``, and after ``grace_s`` ``SIGKILL``.

        Returns whether it obeyed the first, or had ended before. When this returns it is gone.
        """
        if self.is_stopped():
            grace_s = 0  # it will not hear the first
        self.send(signal.SIGTERM)
        if self.wait(grace_s):
            return True
        self.kill()
        return False

    def kill(self) -> None:
        """End the process by ``SIGKILL``; when this returns it is gone."""
        self.send(signal.SIGKILL)
        self.wait(_MOST_TO_DIE_S)

    def pause(self) -> None:
        """Stop it where it is; when this returns it has stopped, or it is gone."""
        self.send(signal.SIGSTOP)
        deadline = time.monotonic() + _MOST_TO_DIE_S
        while self.is_alive() and not self.is_stopped() and time.monotonic() < deadline:
            time.sleep(0.001)

    def resume(self) -> None:
        """Let it go on."""
        self.send(signal.SIGCONT)

    def command(self) -> str:
        """Return its command line, empty where it cannot be read."""
        return command_of(self.pid)

    def _has_ended(self, timeout_s: float) -> bool:
        # In /proc a process is a zombie from the moment on when its first thread has ended. A
        # handle tells when the last one has, and with it all files and ports that were open.
        with self._handle() as handle:
            if handle is None:
                return True
            ends = select.poll()
            ends.register(handle, select.POLLIN)
            return bool(ends.poll(timeout_s * 1000))

    @contextmanager
    def _handle(self) -> Iterator[int | None]:
        # The handle is of whoever has the pid now, and stays his: so it is made before we look.
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            yield None
            return
        try:
            yield handle if self._has_pid() else None
        finally:
            os.close(handle)

    def _has_pid(self) -> bool:
        """Whether the pid is still this process's, if only as that of a zombie."""
        stat = _stat(self.pid)
        same_start = stat is not None and int(stat[_START_TICKS]) == self.start_ticks
        return same_start and self.boot_id == boot_id()


def start_detached(argv: Sequence[str], log: Path, environment: Mapping[str, str]) -> ProcessId:
    """Start a program that outlives this process, its terminal included; it appends to ``log``.

    Raises:
        OSError: it cannot be started.
    """
    with log.open("ab") as output:
        child = subprocess.Popen(  # noqa: S603 - what the caller asks for
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            cwd=log.parent,
            start_new_session=True,
        )
    child.returncode = 0  # it is not this object's any more, which else would complain of it
    return ProcessId.of_unreaped(child.pid)


_MOST_TO_DIE_S = 60.0
"""What is killed dies as soon as the kernel comes to it, which may have gigabytes to free."""


def boot_id() -> str:
    """Return what names this boot of the machine."""
    return _BOOT_ID.read_text(encoding="ascii").strip()


def command_of(pid: int) -> str:
    """Return the command line of ``pid``, empty where it cannot be read."""
    try:
        arguments = (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return ""
    return " ".join(arguments.decode(errors="replace").split("\0")).strip()


def _stat(pid: int) -> list[str] | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def _reap(pid: int) -> None:
    """Take the exit status of what may be a child of this process, so that no zombie stays."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return
