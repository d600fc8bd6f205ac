"""Runs programs that must not outlive the process that asked for them, however that ends.

A script of its own, started as ``python -I -S guard.py PID [FOLDER]``. Each line on its standard
input is a JSON object with ``argv`` and ``log``; it starts that program and answers with its pid,
or with why it could not. When its input ends, or process PID does, it ends what it started and
removes FOLDER. Where the guard itself is killed the kernel ends its programs.

That last part, ``PR_SET_PDEATHSIG``, is why the guard exists: the signal comes when the *thread*
that started a program ends, and it has to be asked for between fork and exec, where a process
with threads may run no Python. This one has a single thread.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def main(parent_pid: int, folder: str | None) -> None:
    """Serve the process ``parent_pid`` until it has had enough, and clean up behind it."""
    # Nobody is waited for before the end, so that no pid is given to somebody else in between.
    children: list[subprocess.Popen[bytes]] = []
    try:
        parent = os.pidfd_open(parent_pid)
        if os.getppid() == parent_pid:
            serve(parent, children)
    finally:
        for child in children:
            child.kill()
        for child in children:
            child.wait()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def serve(parent: int, children: list[subprocess.Popen[bytes]]) -> None:
    """Start what is asked for, until the input or the process behind handle ``parent`` ends."""
    asked = b""
    wakes = select.poll()
    wakes.register(parent, select.POLLIN)
    wakes.register(0, select.POLLIN)
    while True:
        # The input may stay open beyond the parent: its children by fork have that end, too.
        if any(handle == parent for handle, _ in wakes.poll()):
            return
        read = os.read(0, 1 << 16)
        if not read:
            return
        *lines, asked = (asked + read).split(b"\n")
        for line in lines:
            request = json.loads(line)
            try:
                children.append(start(request["argv"], request["log"]))
                answer = json.dumps({"pid": children[-1].pid})
            except OSError as error:
                answer = json.dumps({"error": str(error)})
            os.write(1, answer.encode() + b"\n")


def start(argv: list[str], log: str) -> subprocess.Popen[bytes]:
    """Start one program; what it says is appended to ``log``."""
    guard_pid = os.getpid()

    def die_with_guard() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard_pid:
            os._exit(1)

    with open(log, "ab") as output:  # noqa: PTH123 - importing pathlib takes longer than the rest
        return subprocess.Popen(  # noqa: S603 - what the caller asks for
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the caller, who then ends it
            preexec_fn=die_with_guard,  # noqa: PLW1509 - there is one thread
        )


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
