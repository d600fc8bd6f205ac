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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

BLOCK = 32
_RESULT = "RESULT "
_START_LIMIT_S = 180.0
_ANSWER_LIMIT_S = 180.0
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # One core for the model: what a connector does beside it has the other.
    "VLLM_CPU_OMP_THREADS_BIND": str(min(os.sched_getaffinity(0))),
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True, slots=True)
class Answers:
    """What came of some prompts: seconds to the first token and in all, and of each step.

    ``num_cached`` are the tokens of each prompt that were not computed; ``num_loaded`` those of all
    that came from kvtide's pool.
    """

    tokens: list[list[int]]
    first_token_s: list[float]
    seconds: float
    steps_s: list[float]
    num_cached: list[int]
    num_loaded: int


class EngineProcess:
    """The engine, seen from the benchmark; for the time of a ``with`` block."""

    def __init__(self, model: Path, kv_transfer: dict[str, Any] | None, **arguments: Any) -> None:
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - closed in close
        how = {"model": str(model), "kv_transfer": kv_transfer, "arguments": arguments}
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(how)],
            env={**os.environ, **ENVIRONMENT},
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
        return Answers(**self._read(_ANSWER_LIMIT_S))

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
        self._llm = LLM(model=how["model"], **arguments)
        self._engine = self._llm.llm_engine
        self._core = self._engine.engine_core.engine_core
        self._core.post_step = self._post_step
        self._connector = self._core.scheduler.connector
        self._worker_connector = get_kv_transfer_group() if has_kv_transfer_group() else None
        self._next_id = 0

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
        before = self._num_loaded()
        waiting, begun, ended = list(late), {}, {}
        first_s: dict[str, float] = {}
        steps_s: list[float] = []
        start_s = time.perf_counter()
        ids = [self._add(prompt, num_tokens, begun) for prompt in prompts]
        while len(ended) < len(ids) or waiting:
            if waiting and len(steps_s) % 8 == 4:
                ids.append(self._add(waiting.pop(0), 1, begun))
            step_s = time.perf_counter()
            outputs = self._engine.step()
            now_s = time.perf_counter()
            steps_s.append(now_s - step_s)
            for output in outputs:
                first_s.setdefault(output.request_id, now_s - begun[output.request_id])
                if output.finished:
                    ended[output.request_id] = output
        seconds = time.perf_counter() - start_s
        self._connect(is_connected=True)
        self._drain()
        done = [ended[request_id] for request_id in ids]
        return Answers(
            [list(output.outputs[0].token_ids) for output in done],
            [first_s[request_id] for request_id in ids],
            seconds,
            steps_s,
            [output.num_cached_tokens for output in done],
            self._num_loaded() - before,
        )

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
        if not model_executed and self._core.scheduler.has_requests():
            time.sleep(0.001)

    def _drain(self) -> None:
        """Let what is staged be stored, and its reports arrive: they travel with steps."""
        for _ in range(3):
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

    def _num_loaded(self) -> int:
        side = getattr(self._connector, "_scheduler_side", None)
        return 0 if side is None else int(side._totals()["loaded_tokens"])  # noqa: SLF001


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
