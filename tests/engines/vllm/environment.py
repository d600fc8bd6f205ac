"""The environment in which the tests run vLLM; to be set before vLLM is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # One thread on every side of a comparison: a connector changes vLLM's default.
    "VLLM_CPU_OMP_THREADS_BIND": str(min(os.sched_getaffinity(0))),
    # The engine in this process: it starts in seconds, and a test can look inside.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

_RESULT = "RESULT "


def run_script(module: str, *arguments: str, timeout_s: float = 200.0) -> Any:
    """Run a scenario in a process of its own, and return what it handed to :func:`report`."""
    path = os.pathsep.join(folder for folder in sys.path if folder)
    child = subprocess.run(
        [sys.executable, "-m", f"tests.engines.vllm.{module}", *arguments],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    lines = [line for line in child.stdout.splitlines() if line.startswith(_RESULT)]
    assert lines, f"exit {child.returncode}: {child.stdout[-1000:]}{child.stderr[-3000:]}"
    return json.loads(lines[0].removeprefix(_RESULT))


def report(result: Any) -> None:
    """Hand a scenario's result, JSON data, to the process that waits for it."""
    print(_RESULT + json.dumps(result), flush=True)  # noqa: T201
