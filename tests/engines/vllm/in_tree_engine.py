"""A vLLM engine with its in-tree Mooncake connector, in a process of its own.

In a test's process it could not be ended: its lookup server's socket is never closed, and the
interpreter waits for it. Run as a script it is that process, which answers one line per line:
    python -m tests.engines.vllm.in_tree_engine MODEL_FOLDER ARGUMENTS
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from kvtide.stores.mooncake_package import program_environment
from kvtide.testing.mooncake import MooncakePool
from tests.engines.vllm.environment import ENVIRONMENT

_START_LIMIT_S = 120.0
_ANSWER_LIMIT_S = 60.0
_RESULT = "RESULT "


class Answer(NamedTuple):
    """The tokens after a prompt, and how many of its own were taken from a cache."""

    tokens: list[int]
    hit: int


def write_config(pool: MooncakePool, folder: Path) -> Path:
    """Write the file by which vLLM's connector, and ``mooncake://``, find the pool."""
    path = folder / "mooncake.json"
    settings = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": f"{pool.host}:{pool.port}",
        "protocol": "tcp",
        "device_name": "",
        "mode": "standalone-store",
        "global_segment_size": 0,
        "local_buffer_size": 16 << 20,
    }
    path.write_text(json.dumps(settings), encoding="utf-8")
    return path


class InTreeEngine:
    """The engine, seen from a test; for the time of a ``with`` block."""

    def __init__(
        self,
        model: Path,
        config: Path,
        arguments: Mapping[str, Any],
        options: Mapping[str, Any],
        *,
        policy: str = "fail",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - closed in close
        self._said: list[str] = []
        path = os.pathsep.join(folder for folder in sys.path if folder)
        everything = json.dumps(
            {"arguments": dict(arguments), "options": dict(options), "policy": policy}
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.engines.vllm.in_tree_engine", str(model), everything],
            env={
                # Ranks of several are processes that import Mooncake without kvtide's help.
                **program_environment(),
                **ENVIRONMENT,
                "VLLM_LOGGING_LEVEL": "WARNING",
                "PYTHONPATH": path,
                "MOONCAKE_CONFIG_PATH": str(config),
                **(environment or {}),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def __enter__(self) -> Self:
        try:
            assert self._read(_START_LIMIT_S) == "ready"
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def answer(
        self, prompt: list[int], num_tokens: int, *, limit_s: float = _ANSWER_LIMIT_S
    ) -> Answer:
        """Answer a prompt from an empty cache of its own; what it saves is in the pool then."""
        assert self._process.stdin is not None
        print(json.dumps([prompt, num_tokens]), file=self._process.stdin, flush=True)
        return Answer(*self._read(limit_s))

    def log(self) -> str:
        """Return what the process has said so far, Mooncake on one stream and vLLM on the other."""
        self._log.seek(0)
        return self._log.read() + "".join(self._said)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def _read(self, limit_s: float) -> Any:
        """Read a result; a process that gives none in time is killed, and its log is shown."""
        assert self._process.stdout is not None
        timer = threading.Timer(limit_s, self._process.kill)
        timer.start()
        try:
            for line in self._process.stdout:
                if line.startswith(_RESULT):
                    return json.loads(line.removeprefix(_RESULT))
                self._said.append(line)
        finally:
            timer.cancel()
        raise AssertionError(f"no answer within {limit_s:.0f} s: {self.log()[-3000:]}")


def _report(result: Any) -> None:
    print(_RESULT + json.dumps(result), flush=True)  # noqa: T201


def main(model: Path, arguments: dict[str, Any], options: dict[str, Any], policy: str) -> None:
    """Be the process: answer until the input ends."""
    from kvtide.stores.mooncake_package import mooncake_module
    from tests.engines.vllm.engines import InProcessEngine

    mooncake_module()  # vLLM's connector imports it without looking for its libraries
    one = InProcessEngine(
        model,
        store=None,
        kv_transfer_config={
            "kv_connector": "MooncakeStoreConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": options,
        },
        **arguments,
    )
    _report("ready")
    for line in sys.stdin:
        prompt, num_tokens = json.loads(line)
        one.forget_local()
        [output] = one.run(prompt, num_tokens=num_tokens)
        while one.connector.connector_scheduler._pinned_saves:
            one.generate([3, 4, 5], num_tokens=2)  # what ended is reported with a step
        _report([list(output.outputs[0].token_ids), output.num_cached_tokens])


if __name__ == "__main__":
    main(Path(sys.argv[1]), **json.loads(sys.argv[2]))
