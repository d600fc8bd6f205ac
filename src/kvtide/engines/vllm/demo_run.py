"""One engine's part of the demo, in a process of its own: start vLLM, answer one prompt, report.

Run as ``python -m kvtide.engines.vllm.demo_run SPEC RESULT``: reads a :class:`RunSpec` as JSON and
writes a :class:`RunResult` as JSON. vLLM talks a lot, so nothing is said on stdout that matters.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BLOCK_SIZE = 32
"""The least CPU attention wants; its default of 128 would leave more of the prompt to compute."""

CHUNK_TOKENS = 2048
"""Prefill tokens per step: alike in all runs, because it decides how sums are rounded."""

SETTLE_PAUSE_S = 0.3
"""Between two looks at the counters, which the connector writes at most five times a second."""


@dataclass(frozen=True, slots=True)
class RunSpec:
    """What one engine is to do.

    ``store`` is the pool's URL, or ``None`` to run without kvtide; then ``stats_path`` is unused.
    Prompts are token ids.
    """

    name: str
    model: str
    prompt: list[int]
    warmup: list[int]
    output_tokens: int
    store: str | None
    stats_path: str
    settle_s: float = 60.0


@dataclass(frozen=True, slots=True)
class RunResult:
    """What one engine did: the tokens it generated, and what became of the prompt's KV cache."""

    tokens: list[int]
    ttft_s: float
    loaded_tokens: int
    saved_bytes: int
    loaded_bytes: int


def engine_arguments(spec: RunSpec) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM``, which differ between runs only by the connector."""
    room = len(spec.prompt) + spec.output_tokens
    arguments: dict[str, Any] = {
        "model": spec.model,
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "block_size": BLOCK_SIZE,
        "max_model_len": -(-room // BLOCK_SIZE) * BLOCK_SIZE,
        "max_num_batched_tokens": CHUNK_TOKENS,
        "max_num_seqs": 4,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "seed": 0,
    }
    if spec.store is not None:
        arguments["kv_transfer_config"] = {
            "kv_connector": "KVTideConnector",
            "kv_connector_module_path": "kvtide.engines.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "store": spec.store,
                "stats_path": spec.stats_path,
                # On a busy machine a thread may not run for 50 ms, and a miss would show nothing.
                "lookup_wait_ms": 1000,
            },
        }
    return arguments


def read_counters(path: str) -> dict[str, int]:
    """Return the connector's counters, or none where it has not written any yet."""
    try:
        counters: dict[str, int] = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return counters


class Engine:
    """A vLLM engine that answers token ids with token ids."""

    def __init__(self, spec: RunSpec, llm: Any) -> None:
        self._spec = spec
        self._llm = llm

    @classmethod
    def start(cls, spec: RunSpec) -> Engine:
        """Start vLLM; this takes 15 to 30 seconds."""
        from vllm import LLM

        return cls(spec, LLM(**engine_arguments(spec)))

    def generate(self, prompt: list[int], tokens: int) -> Any:
        """Return vLLM's ``RequestOutput`` for ``prompt``, with exactly ``tokens`` greedy tokens."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False
        )
        [output] = self._llm.generate(
            [{"prompt_token_ids": prompt}], sampling_params=sampling, use_tqdm=False
        )
        return output

    def settle(self) -> dict[str, int]:
        """Wait until what was saved is in the store, and return the connector's counters.

        The connector keeps them in ``stats_path`` from its start on; read are ``jobs_open``, which
        counts jobs without their end report, ``saved_bytes``, ``loaded_bytes`` and
        ``loaded_tokens``.

        Reports travel with the engine's steps, and an idle engine takes none: a prompt too short to
        fill a block makes it take two, without changing what is measured.
        """
        if self._spec.store is None:
            return {}
        deadline = time.monotonic() + self._spec.settle_s
        before: dict[str, int] | None = None
        while time.monotonic() < deadline:
            self.generate([3, 4, 5], 2)
            now = read_counters(self._spec.stats_path)
            idle = self._llm.reset_prefix_cache() and now.get("jobs_open", 0) == 0
            if idle and now and now == before:
                return now
            before = now
            time.sleep(SETTLE_PAUSE_S)
        raise TimeoutError(
            f"saving did not end within {self._spec.settle_s:g} s; counters: {before or 'none'}"
        )


def run(spec: RunSpec) -> RunResult:
    """Start an engine and send it the prompt, after a short one that wakes up what is lazy.

    What is saved and loaded comes from the connector's counters: vLLM's ``num_cached_tokens`` has
    its own prefix cache's hits in it.
    """
    engine = Engine.start(spec)
    engine.generate(spec.warmup, 2)
    before = engine.settle()
    output = engine.generate(spec.prompt, spec.output_tokens)
    counted = Counter(engine.settle())
    counted.subtract(before)
    return RunResult(
        tokens=list(output.outputs[0].token_ids),
        ttft_s=float(output.metrics.first_token_latency),
        loaded_tokens=counted["loaded_tokens"],
        saved_bytes=counted["saved_bytes"],
        loaded_bytes=counted["loaded_bytes"],
    )


def main(spec_path: str, result_path: str) -> None:
    """Read the spec, run it, write the result; a failure is a traceback and a non-zero exit."""
    spec = RunSpec(**json.loads(Path(spec_path).read_text(encoding="utf-8")))
    result = run(spec)
    Path(result_path).write_text(json.dumps(asdict(result)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
