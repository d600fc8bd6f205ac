"""Run as a script: vLLM's own Mooncake connector, on the model and prompt of ``test_many_layers``.

usage: python -m tests.engines.vllm.in_tree_scenario FOLDER [fail|recompute]

Two engines, one after the other, over TCP and at the connector's default settings: the first saves
a prompt's KV cache, the second is to load it. Prints what each answered and said. No test runs it:
it shows what kvtide is compared with. The second argument is the ``kv_load_failure_policy``, by
default vLLM's own.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvtide.testing.mooncake import MooncakePool
from tests.engines.vllm.engines import NUM_OUTPUT_TOKENS, prompt_of
from tests.engines.vllm.in_tree_engine import InTreeEngine, write_config
from tests.engines.vllm.models import build

LIMIT_S = 90.0
"""The prompt is computed in 2 s."""
_TELLING = (
    "queue-full rejection",
    "Failed to complete transfers",
    "Failed to get",
    "KV load failure",
)
_MOST_OF_A_KIND = 2


def main(folder: Path, policy: str) -> None:
    """Run the two on a pool of their own."""
    model = build("llama-32", folder)
    arguments = {"max_model_len": 6144, "max_num_batched_tokens": 2048}
    with MooncakePool(segment_bytes=256 << 20) as pool:
        config = write_config(pool, folder)
        for name in ("cold", "warm"):
            with InTreeEngine(model, config, arguments, {}, policy=policy) as one:
                try:
                    answer = str(one.answer(prompt_of(6000), NUM_OUTPUT_TOKENS, limit_s=LIMIT_S))
                except AssertionError:
                    answer = f"no answer within {LIMIT_S:g} s"
                print(f"--- {name} engine: {answer}", *_told(one.log()), sep="\n", flush=True)  # noqa: T201


def _told(log: str) -> list[str]:
    """Return the first lines of each kind that tell of transfers, and how many there are."""
    told = []
    for words in _TELLING:
        lines = [line[:180] for line in log.splitlines() if words in line]
        told += lines[:_MOST_OF_A_KIND]
        if len(lines) > _MOST_OF_A_KIND:
            told.append(f"    ({len(lines)} lines with {words!r})")
    return told


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:] or ["fail"])
