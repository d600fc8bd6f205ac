"""A real vLLM engine in this process, driven by hand, with a look at kvtide's two halves."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

BLOCK = 32
NUM_OUTPUT_TOKENS = 16


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    """Random token ids, the same for the same seed."""
    random = Random(seed)
    return [random.randrange(3, 1024) for _ in range(num_tokens)]


class InProcessEngine:
    """One engine; use :func:`engine` to open it.

    Nobody steps an in-process engine after ``generate`` has returned: :meth:`settle` does.
    """

    def __init__(self, model: Path, *, store: str | None, **arguments: Any) -> None:
        from vllm import LLM

        # vLLM's thread spins while a request waits in this process: give the other threads time.
        options = {"lookup_wait_ms": 1000, **arguments.pop("options", {})}
        role = arguments.pop("kv_role", "kv_both")
        module = arguments.pop("module", "kvtide.engines.vllm")
        if store is not None:
            arguments["kv_transfer_config"] = {
                "kv_connector": "KVTideConnector",
                "kv_connector_module_path": module,
                "kv_role": role,
                "kv_connector_extra_config": {"store": store, **options},
            }
        settings: dict[str, Any] = {
            "model": str(model),
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "block_size": BLOCK,
            "max_model_len": 1024,
            "max_num_batched_tokens": 256,
            "max_num_seqs": 8,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
            "seed": 0,
        }
        self.llm = LLM(**{**settings, **arguments})
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.steps = 0
        self.most_pinned = 0
        """The most blocks that were pinned at one time; a test may set it back."""
        if store is not None:
            self._watch_pins()

    def _watch_pins(self) -> None:
        side = self.connector._scheduler_side
        build = side.build_metadata

        def build_and_note(scheduler_output: Any) -> Any:
            metadata = build(scheduler_output)
            self.most_pinned = max(self.most_pinned, self.pool.num_pinned_blocks)
            return metadata

        side.build_metadata = build_and_note

    @property
    def pin_budget(self) -> int:
        """The blocks that jobs may hold at one time."""
        budget: int = self.pool._saving._limits.max_pinned_blocks
        return budget

    @property
    def connector(self) -> Any:
        """The scheduler's connector."""
        return self.core.scheduler.connector

    @property
    def pool(self) -> Any:
        """The core's scheduler."""
        return self.connector._scheduler_side._scheduler

    @property
    def worker(self) -> Any:
        """The rank's worker."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._worker_side._worker

    @property
    def counters(self) -> Counter[str]:
        """What was counted so far, lookups included."""
        return Counter(self.connector._scheduler_side._totals())

    def generate(
        self, *prompts: list[int], num_tokens: int = NUM_OUTPUT_TOKENS, **sampling: Any
    ) -> list[list[int]]:
        """Return the greedy tokens after each prompt."""
        return [
            list(output.outputs[0].token_ids)
            for output in self.run(*prompts, num_tokens=num_tokens, **sampling)
        ]

    def run(
        self, *prompts: list[int], num_tokens: int = NUM_OUTPUT_TOKENS, **sampling: Any
    ) -> list[Any]:
        """Return vLLM's outputs for the prompts, computed together."""
        from vllm import SamplingParams

        parameters = SamplingParams(
            temperature=0.0,
            max_tokens=num_tokens,
            min_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
            **sampling,
        )
        return self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            sampling_params=parameters,
            use_tqdm=False,
        )

    def step_until(self, done: Callable[[], bool], *, limit_s: float = 30.0) -> None:
        """Step the engine until ``done``; a bounded number of times, for a bounded time."""
        end_s = time.monotonic() + limit_s
        while not done():
            assert time.monotonic() < end_s, f"never done: {self.pool!r} {self.worker!r}"
            self.core.step()
            self.steps += 1
            time.sleep(0.001)  # an idle engine polls as often

    def settle(self, *, limit_s: float = 30.0) -> None:
        """Step until no pin is left and every job has ended everywhere.

        An idle engine takes no step, so the last reports travel with tiny requests. Staging
        memory under a store call that hangs stays taken.
        """
        end_s = time.monotonic() + limit_s
        self.step_until(lambda: not self.core.scheduler.has_requests())
        while self.pool.num_open_jobs or self.worker.usage()["loads"]:
            assert time.monotonic() < end_s, f"never ended: {self.pool!r} {self.worker!r}"
            self.generate([3, 4, 5], num_tokens=2)

    def forget_local(self) -> None:
        """Empty vLLM's own prefix cache, so that only the pool can help."""
        assert self.llm.reset_prefix_cache(), "a block is still pinned"

    def close_connectors(self) -> None:
        """Shut only kvtide's two halves down, as vLLM would."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        get_kv_transfer_group().shutdown()
        self.connector.shutdown()

    def close(self) -> None:
        """Shut the engine down, and let go of it: its finalizer would shut the next one down."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm, self.core
        gc.collect()


def forget_halves() -> None:
    """Clear what an engine that was refused at start leaves behind in this process."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    ensure_kv_transfer_shutdown()
    cleanup_dist_env_and_memory()


@contextmanager
def engine(model: Path, store: str | None, **arguments: Any) -> Iterator[InProcessEngine]:
    """Open an engine for the time of a ``with`` block."""
    try:
        opened = InProcessEngine(model, store=store, **arguments)
    except Exception:
        forget_halves()
        raise
    try:
        yield opened
    finally:
        opened.close()


def one_request(max_model_len: int = 512) -> Mapping[str, int]:
    """Return the arguments of an engine whose KV cache holds just one request."""
    return {
        "max_model_len": max_model_len,
        "num_gpu_blocks_override": -(-max_model_len // BLOCK) + 1,
    }
