"""A vLLM engine under load while the master of its Mooncake pool is killed and started again.

    python benchmarks/bench_mooncake_restart.py [--restarts 5]

A small Llama on the CPU answers four requests at a time, of prompts that come back; its own cache
holds five of them, so that the pool matters. kvtide has its default options. Each request's
tokens are compared with those of an engine without kvtide. A killed master takes along all that it
knew: after each return the pool is empty, and the engine must find it by itself.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

from measuring import Row, left_out, report

from kvtide.errors import StoreOpenError
from kvtide.stores.mooncake_package import mooncake_module
from kvtide.testing.mooncake import MooncakePool

BENCH = "mooncake_restart"
BLOCK = 32
PROMPT_TOKENS = 400
OUTPUT_TOKENS = 16
NUM_PROMPTS = 24
NUM_AT_ONCE = 4
MAX_TOKENS = 480
NUM_BLOCKS = 5 * MAX_TOKENS // BLOCK + 1
UP_S, DOWN_S = 1.0, 2.0
RESUMED_WITHIN_S = 5.0
GIVE_UP_S = 60.0
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": str(min(os.sched_getaffinity(0))),
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


class Load:
    """An engine that always has ``NUM_AT_ONCE`` requests to answer."""

    def __init__(self, model: Path, kv_transfer: dict[str, Any] | None) -> None:
        from vllm import LLM, SamplingParams

        arguments = {"kv_transfer_config": kv_transfer} if kv_transfer else {}
        self._llm = LLM(
            model=str(model),
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=True,
            block_size=BLOCK,
            max_model_len=MAX_TOKENS,
            max_num_batched_tokens=256,
            max_num_seqs=NUM_AT_ONCE,
            num_gpu_blocks_override=NUM_BLOCKS,
            enable_prefix_caching=True,
            seed=0,
            **arguments,
        )
        self._engine = self._llm.llm_engine
        self._parameters = SamplingParams(
            temperature=0.0,
            max_tokens=OUTPUT_TOKENS,
            min_tokens=OUTPUT_TOKENS,
            ignore_eos=True,
            detokenize=False,
        )
        generator = random.Random(3)  # noqa: S311 - the same prompts in every engine
        self._prompts = [
            [generator.randrange(3, 1024) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)
        ]
        self._running: dict[str, int] = {}
        self._numbers = count()

    def ask(self, prompts: Iterator[int]) -> None:
        """Submit as many requests as may run, of the prompts of these numbers."""
        while len(self._running) < NUM_AT_ONCE:
            number = next(prompts, None)
            if number is None:
                return
            request_id = f"request-{next(self._numbers)}"
            prompt = {"prompt_token_ids": self._prompts[number]}
            self._engine.add_request(request_id, prompt, self._parameters)
            self._running[request_id] = number

    def step(self) -> Iterator[tuple[int, list[int] | None]]:
        """Step once; yield the prompt and the tokens, or none, of each request that ended."""
        for output in self._engine.step():
            if output.finished:
                [answer] = output.outputs
                is_whole = answer.finish_reason == "length"
                number = self._running.pop(output.request_id)
                yield number, list(answer.token_ids) if is_whole else None

    @property
    def is_idle(self) -> bool:
        """Whether every request has ended."""
        return not self._running

    def close(self) -> None:
        """Shut the engine down."""
        self._engine.engine_core.shutdown()
        del self._llm, self._engine


@dataclass(slots=True)
class Master:
    """Kills the master and starts it again, on a thread of its own, so that the load goes on."""

    pool: MooncakePool
    num_restarts: int
    returned_at_s: list[float] = field(default_factory=list)
    down_s: list[float] = field(default_factory=list)
    is_in_use: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Restart it as often as asked; each time once the pool is seen to be used."""
        for _ in range(self.num_restarts):
            self.is_in_use.wait()
            self.is_in_use.clear()
            time.sleep(UP_S)
            killed_at_s = time.monotonic()
            self.pool.kill_master()
            time.sleep(DOWN_S)
            self.pool.start_master()
            self.down_s.append(time.monotonic() - killed_at_s)
            self.returned_at_s.append(time.monotonic())


@dataclass(slots=True)
class Watch:
    """What became of the requests, and when saving and loading were seen to work.

    ``saving_s`` and ``loading_s`` are counted from the start, and then from each return.
    """

    expected: list[list[int]]
    stats_path: Path
    num_requests: int = 0
    num_failed: int = 0
    num_different: int = 0
    saving_s: list[float] = field(default_factory=list)
    loading_s: list[float] = field(default_factory=list)
    _begun_s: float = field(default_factory=time.monotonic)
    _before: Counter[str] = field(default_factory=Counter)

    def counters(self) -> Counter[str]:
        """Return kvtide's counters as it published them last."""
        try:
            return Counter(json.loads(self.stats_path.read_text(encoding="utf-8")))
        except OSError:
            return Counter()

    def note(self, number: int, tokens: list[int] | None) -> None:
        """Judge an answer."""
        self.num_requests += 1
        self.num_failed += tokens is None
        self.num_different += tokens is not None and tokens != self.expected[number]

    def begin(self, begun_s: float) -> None:
        """Wait for saving and loading anew."""
        self._begun_s, self._before = begun_s, self.counters()

    def is_in_use(self) -> bool:
        """Tell whether both were seen to work by now, and note since when."""
        counters, now_s = self.counters(), time.monotonic() - self._begun_s
        if len(self.saving_s) == len(self.loading_s):
            if counters["saved_bytes"] > self._before["saved_bytes"]:
                self.saving_s.append(now_s)
        elif counters["loaded_tokens"] > self._before["loaded_tokens"]:
            self.loading_s.append(now_s)
            return True
        assert now_s < GIVE_UP_S, f"the pool is never used: {counters}"
        return False


def answers(model: Path) -> list[list[int]]:
    """Return what an engine without kvtide answers to each prompt."""
    load = Load(model, None)
    found: dict[int, list[int]] = {}
    numbers = iter(range(NUM_PROMPTS))
    while len(found) < NUM_PROMPTS:
        load.ask(numbers)
        for number, tokens in load.step():
            assert tokens is not None
            found[number] = tokens
    load.close()
    return [found[number] for number in range(NUM_PROMPTS)]


def under_load(load: Load, master: Master, watch: Watch) -> None:
    """Answer requests until the pool is used again after the last restart of its master."""
    order = random.Random(7)  # noqa: S311 - the same load each time
    forever = iter(lambda: order.randrange(NUM_PROMPTS), None)
    thread = threading.Thread(target=master.run, daemon=True)
    thread.start()
    watch.begin(time.monotonic())
    num_seen, is_waiting = 0, True
    while is_waiting or num_seen < master.num_restarts:
        load.ask(forever)
        for number, tokens in load.step():
            watch.note(number, tokens)
        if is_waiting and watch.is_in_use():
            is_waiting = False
            master.is_in_use.set()
        elif len(master.returned_at_s) > num_seen:
            watch.begin(master.returned_at_s[num_seen])
            num_seen, is_waiting = num_seen + 1, True
    thread.join()
    while not load.is_idle:
        for number, tokens in load.step():
            watch.note(number, tokens)


@contextmanager
def demo_model() -> Iterator[Path]:
    """Give a model with random weights, the same each time."""
    from kvtide.engines.vllm.demo_model import build

    with tempfile.TemporaryDirectory(prefix="kvtide-bench-") as folder:
        model = Path(folder) / "model"
        build(model)
        yield model


def measure(model: Path, num_restarts: int) -> Watch:
    """Run the load through ``num_restarts`` restarts; the first time is that of the start."""
    expected = answers(model)
    with tempfile.TemporaryDirectory(prefix="kvtide-bench-") as folder, MooncakePool() as pool:
        watch = Watch(expected, Path(folder) / "stats.json")
        load = Load(
            model,
            {
                "kv_connector": "KVTideConnector",
                "kv_connector_module_path": "kvtide.engines.vllm",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "store": pool.url,
                    "stats_path": str(watch.stats_path),
                },
            },
        )
        master = Master(pool, num_restarts)
        under_load(load, master, watch)
        counters = watch.counters()
        load.close()
    names = ("saved_bytes", "loaded_tokens", "store_outages", "lost_jobs", "failed_loads")
    print(f"{watch.num_requests} requests; {', '.join(f'{n} {counters[n]}' for n in names)}")
    for down_s, saving_s, loading_s in zip(
        master.down_s, watch.saving_s[1:], watch.loading_s[1:], strict=True
    ):
        print(
            f"master down for {down_s:.1f} s; after its return"
            f" saving resumed in {saving_s:.2f} s, loading in {loading_s:.2f} s"
        )
    return watch


def rows_of(watch: Watch) -> Iterator[Row]:
    """Return what is judged."""
    for number, saving_s in enumerate(watch.saving_s[1:], start=1):
        is_met = saving_s <= RESUMED_WITHIN_S
        goal = f"<= {RESUMED_WITHIN_S:g}"
        case = f"return {number} of the master: saving resumed after"
        yield Row(BENCH, case, "s", saving_s, None, None, goal, is_met)
    for what, value in (("failed", watch.num_failed), ("with other tokens", watch.num_different)):
        case = f"of {watch.num_requests} requests, {what}"
        yield Row(BENCH, case, "requests", value, None, None, "<= 0", value == 0)


def main() -> None:
    """Run it and write build/bench/mooncake_restart.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--restarts", type=int, default=5)
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("MC_LOG_LEVEL", "FATAL")
    logging.disable(logging.ERROR)  # the engine tells that its store is lost, as it should
    if find_spec("vllm") is None:
        rows = [left_out(BENCH, "vLLM is not installed")]
    else:
        try:
            mooncake_module()
            with demo_model() as model:
                rows = list(rows_of(measure(model, options.restarts)))
        except StoreOpenError as error:
            rows = [left_out(BENCH, str(error))]
    print(f"written: {report(BENCH, rows)}")


if __name__ == "__main__":
    main()
