"""Run as a script: two data parallel engines side by side, one after the other asked, as JSON.

usage: python -m tests.engines.vllm.data_parallel_scenario MODEL STORE_URL STATS_PATH

Each engine has a scheduler, a cache and both halves of kvtide of its own. An empty STORE_URL means
without kvtide.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.engines.vllm.engines import BLOCK, prompt_of
from tests.engines.vllm.environment import report, run_script
from tests.engines.vllm.ranks_scenario import (
    NUM_OUTPUT_TOKENS,
    PATIENT,
    PROMPT_TOKENS,
    cores_of,
)


def run(model: Path, store: str, stats_path: str = "") -> list[dict[str, Any]]:
    """Return per engine its tokens, how many were not computed, and the file of its counters."""
    found: list[dict[str, Any]] = run_script(
        "data_parallel_scenario", str(model), store, stats_path, timeout_s=300.0
    )
    return found


async def _answer(engine: Any, dp_rank: int, prompt: list[int]) -> dict[str, Any]:
    from vllm import SamplingParams

    parameters = SamplingParams(
        temperature=0.0,
        max_tokens=NUM_OUTPUT_TOKENS,
        min_tokens=NUM_OUTPUT_TOKENS,
        ignore_eos=True,
        detokenize=False,
    )
    last = None
    async for output in engine.generate(
        {"prompt_token_ids": prompt},
        parameters,
        f"rank-{dp_rank}-{len(prompt)}",
        data_parallel_rank=dp_rank,
    ):
        last = output
    assert last is not None
    return {
        "tokens": list(last.outputs[0].token_ids),
        "num_cached_tokens": last.num_cached_tokens,
    }


async def _run(model: str, store: str, stats_path: str) -> list[dict[str, Any]]:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments: dict[str, Any] = {}
    if store:
        arguments["kv_transfer_config"] = {
            "kv_connector": "KVTideConnector",
            "kv_connector_module_path": "kvtide.engines.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "store": store,
                "stats_path": stats_path,
                **PATIENT,
            },
        }
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model,
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=True,
            block_size=BLOCK,
            max_model_len=1024,
            max_num_batched_tokens=256,
            enable_prefix_caching=True,
            data_parallel_size=2,
            data_parallel_address="127.0.0.1",
            seed=0,
            **arguments,
        )
    )
    try:
        answers = []
        for dp_rank in range(2):
            answers.append(await _answer(engine, dp_rank, prompt_of(PROMPT_TOKENS)))
            await asyncio.sleep(1.0)  # until what is staged is stored
            await _answer(engine, dp_rank, [3, 4, 5])  # reports travel with a step
        return answers
    finally:
        engine.shutdown()


def main(model: str, store: str, stats_path: str) -> None:
    """Run the scenario; read the counters when both engines have stopped."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    os.environ.update(cores_of(2))
    answers = asyncio.run(_run(model, store, stats_path))
    for dp_rank, answer in enumerate(answers):
        path = Path(f"{stats_path}.dp{dp_rank}" if dp_rank else stats_path)
        answer["counters"] = json.loads(path.read_text()) if stats_path and path.exists() else {}
    report(answers)


if __name__ == "__main__":
    main(*sys.argv[1:4])
