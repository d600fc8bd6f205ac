"""Run as a script: vLLM's own MooncakeStoreConnector, on a model and a prompt that it cannot load.

usage: python -m tests.engines.vllm.in_tree_scenario FOLDER [fail|recompute] [NUM_TOKENS]

Two engines, one after the other, over TCP: the first saves a prompt's KV cache, the second loads
it. Prints what each did and said. No test runs it: it shows what kvtide is compared with. The
second argument is the ``kv_load_failure_policy``, by default vLLM's own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from kvtide.stores.mooncake_package import program_environment
from tests.engines.vllm.environment import ENVIRONMENT

TIMEOUT_S = 90.0
"""An engine needs 20 s, the prompt 2 s."""
_IS_ENGINE = "KVTIDE_IN_TREE_ENGINE"
_TELLING = (
    "tokens loaded:",
    "queue-full rejection",
    "Failed to complete transfers",
    "Failed to get",
    "KV load failure",
)
_MOST_OF_A_KIND = 3


def run_engine(model: str, policy: str, num_tokens: str) -> None:
    """Be one of the engines."""
    from tests.engines.vllm.engines import engine, prompt_of

    arguments = {
        "max_model_len": int(num_tokens) + 64,
        "max_num_batched_tokens": 2048,
        "kv_transfer_config": {
            "kv_connector": "MooncakeStoreConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": policy,
        },
    }
    with engine(Path(model), None, **arguments) as one:
        [output] = one.run(prompt_of(int(num_tokens)))
        tokens = list(output.outputs[0].token_ids)
        print(f"tokens loaded: {output.num_cached_tokens}; answer: {tokens}", flush=True)  # noqa: T201
        for _ in range(20):  # reports of what was saved travel with steps
            one.generate([3, 4, 5], num_tokens=2)
        os._exit(0)  # the connector's way out crashes in this process


def main(folder: str, policy: str = "fail", num_tokens: str = "6000") -> None:
    """Run the two on a pool of their own, with the connector's default settings."""
    from tests.engines.vllm.models import build
    from tests.engines.vllm.pools import shared_mooncake

    model = build("llama-32", Path(folder))
    settings = Path(folder) / "mooncake.json"
    with shared_mooncake() as mooncake:
        values = {
            "mode": "standalone-store",
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": mooncake.emptied().removeprefix("mooncake://"),
            "protocol": "tcp",
            "device_name": "",
            "global_segment_size": 0,
        }
        settings.write_text(json.dumps(values))
        for name in ("cold", "warm"):
            log = Path(folder) / f"{name}.log"
            end = _end_of_engine([str(model), policy, num_tokens], settings, log)
            print(f"--- {name} engine: {end}")  # noqa: T201
            print(_said(log), flush=True)  # noqa: T201


def _end_of_engine(arguments: Sequence[str], settings: Path, log: Path) -> str:
    child_environment = {
        **program_environment(),
        **ENVIRONMENT,
        "VLLM_LOGGING_LEVEL": "INFO",
        "MOONCAKE_CONFIG_PATH": str(settings),
        _IS_ENGINE: "1",
    }
    with log.open("wb") as output:
        try:
            code = subprocess.run(
                [sys.executable, "-m", __spec__.name, *arguments],
                env=child_environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=TIMEOUT_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return f"no answer within {TIMEOUT_S:g} s"
    return f"exit code {code}"


def _said(log: Path) -> str:
    """Return what a log says of the transfer, with its first lines of each kind."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    kinds = {word: [line for line in lines if word in line] for word in _TELLING}
    kept = [line[:240] for found in kinds.values() for line in found[:_MOST_OF_A_KIND]]
    counts = [f"{word!r}: {len(found)}" for word, found in kinds.items() if found]
    return "\n".join([*kept, f"lines with {', '.join(counts)}; all of them in {log}"])


if __name__ == "__main__":
    (run_engine if os.environ.get(_IS_ENGINE) else main)(*sys.argv[1:])
