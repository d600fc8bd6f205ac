"""A vLLM engine in a process of its own, which answers prompts and tells how long each step took.

Several live side by side, and are asked in turns; one that is not asked takes no step. Run as a
script it is that process, which answers one line of JSON per line:

    python benchmarks/engine_process.py '{"model": ..., "kv_transfer": ...}'
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from connector_counts import counts_of

BLOCK = 32
_RESULT = "RESULT "
_START_LIMIT_S = 180.0
_ANSWER_LIMIT_S = 180.0
_DRAIN_LIMIT_S = 20.0
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the engine: its seconds, and those of them that vLLM's scheduler took.

    ``scheduler_s`` includes the arrival of requests since the step before. ``beside_cpu_s`` is the
    CPU time of the process's other threads. ``has_run`` says whether the model ran, ``num_ended``
    how many requests had ended before the step.
    """

    seconds: float
    scheduler_s: float
    beside_cpu_s: float
    has_run: bool
    num_ended: int


@dataclass(frozen=True, slots=True)
class Answers:
    """What came of some prompts: their tokens, the seconds to the first of each, and every step.

    ``num_cached`` are the tokens of each prompt that were not computed; ``num_loaded`` those of all
    that came from kvtide's pool. ``num_saved`` are the chunks that the connector stored meanwhile.
    """

    tokens: list[list[int]]
    first_token_s: list[float]
    steps: list[Step]
    num_cached: list[int]
    num_loaded: int
    num_saved: int

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Return what another process told of itself."""
        return cls(**{**fields, "steps": [Step(**step) for step in fields["steps"]]})


class EngineProcess:
    """The engine, seen from the benchmark; for the time of a ``with`` block.

    The model has ``num_threads``, which keep their cores busy also while they wait for each other.
    """

    def __init__(
        self,
        model: Path,
        kv_transfer: dict[str, Any] | None,
        *,
        num_threads: int = 1,
        **arguments: Any,
    ) -> None:
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - closed in close
        how = {"model": str(model), "kv_transfer": kv_transfer, "arguments": arguments}
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(how)],
            env={**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": str(num_threads)},
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
        self,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        *,
        forget: bool = True,
        late: Sequence[Sequence[int]] = (),
        is_connected: bool = True,
    ) -> Answers:
        """Answer prompts together, after emptying the engine's own cache with ``forget``.

        ``late`` prompts come one by one while the others are answered. Unless ``is_connected`` the
        engine works as if it had been started without its connector.
        """
        assert self._process.stdin is not None
        order = {
            "prompts": list(map(list, prompts)),
            "num_tokens": num_tokens,
            "forget": forget,
            "late": list(map(list, late)),
            "is_connected": is_connected,
        }
        print(json.dumps(order), file=self._process.stdin, flush=True)
        return Answers.from_json(self._read(_ANSWER_LIMIT_S))

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def _read(self, limit_s: float) -> Any:
        assert self._process.stdout is not None
        timer = threading.Timer(limit_s, self._process.kill)
        timer.start()
        try:
            for line in self._process.stdout:
                if line.startswith(_RESULT):
                    return json.loads(line.removeprefix(_RESULT))
        finally:
            timer.cancel()
        self._log.seek(0)
        raise RuntimeError(f"no answer within {limit_s:.0f} s: {self._log.read()[-3000:]}")


class _Engine:
    """The engine, in its process."""

    def __init__(self, how: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        arguments = {
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "block_size": BLOCK,
            "max_model_len": 16384,
            "max_num_batched_tokens": 2048,
            "max_num_seqs": 16,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
            "seed": 0,
            **how["arguments"],
        }
        if how["kv_transfer"]:
            arguments["kv_transfer_config"] = how["kv_transfer"]
        from kvtide.engines.vllm import features

        # The loop below is a server's: it rests, and goes on while the connector has work.
        features.has_own_loop = lambda: True
        self._llm = LLM(model=how["model"], **arguments)
        self._engine = self._llm.llm_engine
        self._core = self._engine.engine_core.engine_core
        self._core.post_step = self._post_step
        self._connector = self._core.scheduler.connector
        self._worker_connector = get_kv_transfer_group() if has_kv_transfer_group() else None
        self._counts = counts_of(self._connector, self._worker_connector)
        self._next_id = 0
        self._has_run = False
        self._scheduler_s = 0.0
        for part in ("add_request", "schedule", "update_from_output"):
            call = getattr(self._core.scheduler, part)
            setattr(self._core.scheduler, part, self._timed(call))

    def answer(
        self,
        prompts: list[list[int]],
        num_tokens: int,
        late: list[list[int]],
        *,
        forget: bool,
        is_connected: bool,
    ) -> Answers:
        if forget:
            self._forget()
        self._connect(is_connected=is_connected)
        num_loaded, num_saved = self._counts.num_loaded(), self._counts.num_saved()
        answered = self._answer_all(prompts, num_tokens, late)
        self._connect(is_connected=True)
        self._drain()
        return Answers(
            **answered,
            num_loaded=self._counts.num_loaded() - num_loaded,
            num_saved=self._counts.num_saved() - num_saved,
        )

    def _answer_all(
        self, prompts: list[list[int]], num_tokens: int, late: list[list[int]]
    ) -> dict[str, Any]:
        """Return the fields of :class:`Answers` that do not concern a connector."""
        waiting, begun, ended = list(late), {}, {}
        first_s: dict[str, float] = {}
        steps: list[Step] = []
        self._scheduler_s = 0.0
        ids = [self._add(prompt, num_tokens, begun) for prompt in prompts]
        while len(ended) < len(ids) or waiting:
            if waiting and len(steps) % 8 == 4:
                ids.append(self._add(waiting.pop(0), 1, begun))
            num_ended = len(ended)
            beside_s, step_s = _beside_cpu_s(), time.perf_counter()
            outputs = self._engine.step()
            now_s = time.perf_counter()
            beside_s = _beside_cpu_s() - beside_s
            steps.append(
                Step(now_s - step_s, self._scheduler_s, beside_s, self._has_run, num_ended)
            )
            self._scheduler_s = 0.0
            for output in outputs:
                first_s.setdefault(output.request_id, now_s - begun[output.request_id])
                if output.finished:
                    ended[output.request_id] = output
        done = [ended[request_id] for request_id in ids]
        return {
            "tokens": [list(output.outputs[0].token_ids) for output in done],
            "first_token_s": [first_s[request_id] for request_id in ids],
            "steps": steps,
            "num_cached": [output.num_cached_tokens for output in done],
        }

    def _add(self, prompt: list[int], num_tokens: int, begun: dict[str, float]) -> str:
        from vllm import SamplingParams

        request_id = f"request-{self._next_id}"
        self._next_id += 1
        parameters = SamplingParams(
            temperature=0.0,
            max_tokens=num_tokens,
            min_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        begun[request_id] = time.perf_counter()
        self._engine.add_request(request_id, {"prompt_token_ids": prompt}, parameters)
        return request_id

    def _connect(self, *, is_connected: bool) -> None:
        """Hide both halves of the connector from vLLM, or show them again.

        One process that takes turns with itself: two of them differ by more than a connector costs
        only for where their memory lies.
        """
        from vllm.distributed.kv_transfer import kv_transfer_state

        self._core.scheduler.connector = self._connector if is_connected else None
        worker_side = self._worker_connector if is_connected else None
        kv_transfer_state._KV_CONNECTOR_AGENT = worker_side  # noqa: SLF001 - no other way to it

    def _post_step(self, model_executed: bool) -> None:  # noqa: FBT001 - vLLM's signature
        """Rest after a step without work, as vLLM's ``EngineCoreProc`` does in servers.

        Without it the loop would keep the interpreter from the threads that such a step waits for.
        """
        type(self._core).post_step(self._core, model_executed)
        self._has_run = model_executed
        if not model_executed and self._core.scheduler.has_requests():
            time.sleep(0.001)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``call``, which adds the time that it takes to the scheduler's of this step."""

        def timed(*arguments: Any, **options: Any) -> Any:
            start_s = time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                self._scheduler_s += time.perf_counter() - start_s

        return timed

    def _drain(self) -> None:
        """Let what is staged be stored, and its reports arrive: they travel with steps."""
        give_up_s = time.monotonic() + _DRAIN_LIMIT_S
        num_turns = 0
        while num_turns < 3 or (self._counts.is_saving() and time.monotonic() < give_up_s):
            num_turns += 1
            time.sleep(0.1)
            self._add([3, 4, 5], 2, {})
            while self._engine.has_unfinished_requests():
                self._engine.step()

    def _forget(self) -> None:
        for _ in range(20):
            if self._llm.reset_prefix_cache():
                return
            self._drain()
        raise RuntimeError("blocks stay pinned")


def _beside_cpu_s() -> float:
    """Return what the process's other threads have computed so far."""
    return time.process_time() - time.thread_time()


def main() -> None:
    """Be the process: answer until the input ends."""
    how = json.loads(sys.argv[1])
    if (how["kv_transfer"] or {}).get("kv_connector") == "MooncakeStoreConnector":
        from kvtide.stores.mooncake_package import mooncake_module

        mooncake_module()  # vLLM's connector imports it without looking for its libraries
    engine = _Engine(how)
    print(_RESULT + json.dumps("ready"), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        answers = engine.answer(
            order["prompts"],
            order["num_tokens"],
            order["late"],
            forget=order["forget"],
            is_connected=order["is_connected"],
        )
        print(_RESULT + json.dumps(asdict(answers)), flush=True)


if __name__ == "__main__":
    main()
