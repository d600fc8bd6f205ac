"""The caller's side of the guard: programs that end with this process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from kvtide.errors import StoreOpenError
from kvtide.stores.processes import ProcessId
from kvtide.testing import guard

_MOST_TO_END_S = 30.0


class GuardedPrograms:
    """Starts programs from any thread; they end with :meth:`close`, or with this process.

    ``environment`` is that of the programs. ``folder`` is removed when they have ended.
    """

    def __init__(self, environment: Mapping[str, str], folder: Path | None = None) -> None:
        argv = [sys.executable, "-I", "-S", str(guard.__file__), str(os.getpid())]
        self._folder = folder
        self._lock = threading.Lock()
        self._guard = subprocess.Popen(  # noqa: S603 - our own script, under this interpreter
            [*argv, str(folder)] if folder is not None else argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,
        )

    def start(self, argv: Sequence[str], log: Path) -> ProcessId:
        """Start a program, whose output is appended to ``log``.

        Raises:
            StoreOpenError: it cannot be started, or everything was ended by :meth:`close`.
        """
        request = json.dumps({"argv": list(argv), "log": str(log)}).encode() + b"\n"
        with self._lock:
            assert self._guard.stdin is not None
            assert self._guard.stdout is not None
            try:
                self._guard.stdin.write(request)
                self._guard.stdin.flush()
                answer = json.loads(self._guard.stdout.readline() or b"{}")
            except (OSError, ValueError):
                answer = {}
        if "pid" not in answer:
            reason = answer.get("error", "its guard was closed, or killed")
            raise StoreOpenError(f"{argv[0]} cannot be started: {reason}")
        try:
            return ProcessId.of_unreaped(answer["pid"])  # the guard waits for none before the end
        except ProcessLookupError as error:
            raise StoreOpenError(f"{argv[0]} ended with its guard, which was killed") from error

    def close(self) -> None:
        """End all programs; when this returns they are gone. Harmless when repeated."""
        with self._lock:
            assert self._guard.stdin is not None
            assert self._guard.stdout is not None
            with suppress(BrokenPipeError):  # it was killed, and with it what it had started
                self._guard.stdin.close()
            try:
                self._guard.wait(_MOST_TO_END_S)
            finally:
                self._guard.kill()
                self._guard.wait()
                self._guard.stdout.close()
                if self._folder is not None:  # for a guard that was killed
                    shutil.rmtree(self._folder, ignore_errors=True)
