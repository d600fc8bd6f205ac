"""Run as a script: an ``AsyncLLM`` in processes of its own, paused and shut down; timings as JSON.

usage: python async_scenario.py MODEL STORE_URL    (an empty STORE_URL: without kvtide)
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import psutil

from tests.engines.vllm.engines import BLOCK, one_request, prompt_of


def cpu_s() -> float:
    """CPU seconds of all processes below this one."""
    total = 0.0
    for child in psutil.Process().children(recursive=True):
        times = child.cpu_times()
        total += times.user + times.system
    return total


def engine_processes() -> list[psutil.Process]:
    """What the engine has started; Python's own helper stays as long as this process."""
    found = psutil.Process().children(recursive=True)
    return [child for child in found if "resource_tracker" not in " ".join(child.cmdline())]


async def tokens_of(engine: Any, request_id: str, prompt: list[int]) -> list[int]:
    """The greedy tokens after a prompt."""
    from vllm import SamplingParams

    parameters = SamplingParams(
        temperature=0.0, max_tokens=16, min_tokens=16, ignore_eos=True, detokenize=False
    )
    tokens: list[int] = []
    async for output in engine.generate({"prompt_token_ids": prompt}, parameters, request_id):
        tokens = list(output.outputs[0].token_ids)
    return tokens


async def run(model: str, store: str) -> dict[str, Any]:
    """Generate, idle, pause in each mode, resume, generate again, shut down."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments: dict[str, Any] = {}
    if store:
        arguments["kv_transfer_config"] = {
            "kv_connector": "KVTideConnector",
            "kv_connector_module_path": "kvtide.engines.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"store": store},
        }
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model,
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=True,
            block_size=BLOCK,
            max_num_batched_tokens=256,
            enable_prefix_caching=True,
            seed=0,
            **one_request(480),
            **arguments,
        )
    )
    result: dict[str, Any] = {"pause_s": {}}
    for number, mode in enumerate(("abort", "wait")):
        # Early enough that a load may be under way.
        first = asyncio.create_task(tokens_of(engine, f"first-{mode}", prompt_of(400, seed=number)))
        await asyncio.sleep(0.5)
        begun = time.monotonic()
        await engine.pause_generation(mode=mode)
        result["pause_s"][f"{mode}-first"] = time.monotonic() - begun
        await engine.resume_generation()
        await asyncio.wait([first], timeout=10)
        first.cancel()
    result["tokens"] = [await tokens_of(engine, "a", prompt_of(400))]
    await asyncio.sleep(1.0)  # what is under way after the answer
    before = cpu_s()
    await asyncio.sleep(2.0)
    result["idle_cpu_s"] = cpu_s() - before
    for mode in ("wait", "abort", "keep"):
        begun = time.monotonic()
        await engine.pause_generation(mode=mode)
        result["pause_s"][mode] = time.monotonic() - begun
        await engine.resume_generation()
    result["tokens"].append(await tokens_of(engine, "b", prompt_of(400, seed=1)))
    running = asyncio.create_task(tokens_of(engine, "c", prompt_of(400, seed=2)))
    await asyncio.sleep(0.05)
    begun = time.monotonic()
    await engine.pause_generation(mode="abort")
    result["pause_s"]["abort-running"] = time.monotonic() - begun
    await asyncio.wait([running], timeout=10)
    running.cancel()
    children = engine_processes()
    begun = time.monotonic()
    engine.shutdown()
    _, alive = psutil.wait_procs(children, timeout=20)
    result["shutdown_s"] = time.monotonic() - begun
    result["left_over"] = len(alive)
    return result


if __name__ == "__main__":
    print("RESULT " + json.dumps(asyncio.run(run(sys.argv[1], sys.argv[2]))), flush=True)  # noqa: T201
