"""What saving costs, hop by hop, beside vLLM's in-tree MooncakeStoreConnector.

    python benchmarks/bench_save_path.py [--rounds 20] [--only a,b,c,d,h]

Both connectors' own code is driven in turns, on the same requests of vLLM, with a store that
answers at once: (a) the scheduler's thread, (b) the metadata, (c) a worker's CPU, (d) many requests
that complete a block in the same step, (h) memory. Times are CPU times of the threads concerned, so
other processes do not count; each ratio is the median of those of single rounds. The letters are
those of docs/performance.md, which says what is in each figure.
"""

from __future__ import annotations

import argparse
import gc
import os
import pickle
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from statistics import median
from typing import Any, Self

from measuring import Row, at_most, context_name, figure, left_out, report, times_less

BENCH = "save_path"
CONTEXTS = (2 << 10, 8 << 10, 32 << 10, 128 << 10, 512 << 10)
JUDGED = 128 << 10
JUDGED_CROWD = 64
ALLOWANCE_US = 15.0
CROWD_TOKENS = 512
CROWD_BLOCKS = 16
BURST = 5
"""A round takes the least of so many repetitions: caches are warm in every case."""


# ------------------------------------------------------------------ a, b: the scheduler's process


class Held:
    """A request at one context, both scheduler halves, and the steps that lead to its last token.

    A decode's last token is the one with which its half saves something.
    """

    def __init__(self, num_tokens: int, num_blocks: int) -> None:
        from scheduler_halves import make_halves
        from vllm_engine import STEP_TOKENS, HeldEngine

        self.num_tokens = num_tokens
        self.engine = HeldEngine(num_tokens, num_blocks)
        self.halves = make_halves(self.engine)
        self.steps = {
            "prefill job": self.engine.step(num_tokens - STEP_TOKENS, STEP_TOKENS),
            "decode job": self.engine.step(num_tokens - 1, 1),
        }
        self._num_new = {
            kind: {
                half: STEP_TOKENS if kind == "prefill job" else half.decode_job_tokens
                for half in self.halves.values()
            }
            for kind in self.steps
        }
        self._admissions = {
            num_new: self.engine.admission(num_tokens - num_new)
            for each in self._num_new.values()
            for num_new in each.values()
        }

    def num_blocks(self, side: str, kind: str) -> int:
        """Return how many blocks a side's job has."""
        from vllm_engine import BLOCK

        return max(1, self._num_new[kind][self.halves[side]] // BLOCK)

    def rewind(self, half: Any, kind: str) -> None:
        """Put the request back in front of the job's tokens, as if it had just resumed there."""
        num_new = self._num_new[kind][half]
        computed = self.num_tokens - num_new
        for request in self.engine.requests:
            request.num_computed_tokens = computed
        with self.engine.known(self.num_tokens if kind == "prefill job" else computed + 1):
            half.take(half.report_on(half.emit(self._admissions[num_new])))
        assert not half.has_pins

    def run_admitted(self, half: Any, request: Any, kind: str) -> None:
        """Let a request arrive, and run it through the step."""
        half.admit(request)
        self.run(half, kind)

    def run(self, half: Any, kind: str) -> tuple[float, Any]:
        """Emit a job and release it; return the CPU seconds of that and the metadata."""
        self.rewind(half, kind)
        step = self.steps[kind]
        start = time.thread_time()
        metadata = half.emit(step)
        emitted = time.thread_time()
        assert half.num_jobs(metadata) == 1
        assert half.has_pins
        ended = half.report_on(metadata)
        reported = time.thread_time()
        half.take(ended)
        freed = time.thread_time()
        assert not half.has_pins
        return emitted - start + freed - reported, metadata


def hold(contexts: Sequence[int]) -> list[Held]:
    """Return requests of these contexts, each in a pool of the same size, filled alike."""
    num_blocks = max(contexts) // 8 + (1 << 10)
    cases = [Held(context, num_blocks) for context in contexts]
    gc.collect()
    gc.freeze()  # as vLLM does once it has started
    return cases


def scheduler_rows(cases: Sequence[Held], rounds: int) -> Iterator[Row]:
    """Time the scheduler's thread per save job: building it and pinning, and releasing."""
    for kind in ("prefill job", "decode job"):
        times: dict[int, dict[str, list[float]]] = {
            case.num_tokens: {side: [] for side in case.halves} for case in cases
        }
        for _ in range(rounds):
            for case in cases:
                for side, half in case.halves.items():
                    spent = min(case.run(half, kind)[0] for _ in range(BURST))
                    times[case.num_tokens][side].append(spent * 1e6)
        for context, each in times.items():
            goal = 40 if context == JUDGED else None
            where = f"a. scheduler, {kind} at {context_name(context)}"
            yield times_less(BENCH, where, "us", each["kvtide"], each["peer"], goal)
        first, last = cases[0].num_tokens, cases[-1].num_tokens
        base = median(times[first]["kvtide"])
        yield at_most(
            BENCH,
            f"a. scheduler, {kind}: {context_name(last)} beside {context_name(first)}",
            "us",
            median(times[last]["kvtide"]),
            1.2 * base + ALLOWANCE_US,
            goal=f"<= 1.2 x {base:.0f} + {ALLOWANCE_US:g} us",
        )


def metadata_rows(cases: Sequence[Held], rounds: int) -> Iterator[Row]:
    """Measure a step's metadata: its bytes, and the CPU of pickling and unpickling it."""
    for kind in ("prefill job", "decode job"):
        for case in cases:
            blobs: dict[str, bytes] = {}
            times: dict[str, list[float]] = {side: [] for side in case.halves}
            for _ in range(rounds):
                for side, half in case.halves.items():
                    _, metadata = case.run(half, kind)
                    start = time.thread_time()
                    blobs[side] = pickle.dumps(metadata, pickle.HIGHEST_PROTOCOL)
                    pickle.loads(blobs[side])  # noqa: S301 - made right here
                    times[side].append((time.thread_time() - start) * 1e6)
            sizes: dict[str, float] = {side: len(blob) for side, blob in blobs.items()}
            where = f"b. metadata, {kind} at {context_name(case.num_tokens)}"
            is_judged = case.num_tokens == JUDGED
            goal = 40 if is_judged and kind == "prefill job" else None
            yield times_less(BENCH, where, "bytes", [sizes["kvtide"]], [sizes["peer"]], goal)
            if is_judged and kind == "decode job":
                ours, theirs = (sizes[side] / case.num_blocks(side, kind) for side in sizes)
                yield at_most(BENCH, f"{where}: a block", "bytes", ours, 400, peer=theirs)
            if is_judged:
                yield times_less(
                    BENCH, f"{where}: pickled, unpickled", "us", times["kvtide"], times["peer"]
                )


def crowd_rows(num_requests: int, rounds: int) -> Iterator[Row]:
    """Time the scheduler's thread where many requests decode and complete blocks in the same steps.

    All steps count, those in which nothing is due as well.
    """
    from scheduler_halves import make_halves
    from vllm_engine import BLOCK, HeldEngine

    engine = HeldEngine(CROWD_TOKENS, num_requests * CROWD_TOKENS // 8 + (1 << 10), num_requests)
    first_token = CROWD_TOKENS - (CROWD_BLOCKS + 1) * BLOCK
    admission = engine.admission(first_token)
    steps = [engine.step(computed, 1) for computed in range(first_token, CROWD_TOKENS - 1)]
    halves = make_halves(engine)
    num_blocks = num_requests * CROWD_BLOCKS
    times: dict[str, list[float]] = {side: [] for side in halves}
    for _ in range(rounds):
        for side, half in halves.items():
            with engine.known(first_token + 1):
                half.take(half.report_on(half.emit(admission)))
            times[side].append(_save_crowd(half, steps, num_blocks) / num_blocks * 1e6)
    where = f"d. scheduler, {num_requests} requests decode: a block (16 steps)"
    yield times_less(BENCH, where, "us", times["kvtide"], times["peer"])


def _save_crowd(half: Any, steps: Sequence[Any], num_blocks: int) -> float:
    """Run steps that complete so many blocks, and return the scheduling thread's CPU seconds."""
    spent = 0.0
    num_saved = 0
    for step in steps:
        start = time.thread_time()
        metadata = half.emit(step)
        emitted = time.thread_time()
        num_saved += half.num_pinned_blocks if half.num_jobs(metadata) else 0
        ended = half.report_on(metadata)
        reported = time.thread_time()
        half.take(ended)
        spent += emitted - start + time.thread_time() - reported
        assert not half.has_pins
    assert num_saved >= num_blocks, "not every block was saved"
    return spent


# ------------------------------------------------------------------ c, d: a worker's CPU


def metadata_of(
    engine: Any, first_token: int, last_token: int, step_tokens: int
) -> dict[str, list[bytes]]:
    """Return by side the pickled metadata of the steps to ``last_token`` that save something."""
    from scheduler_halves import make_halves

    pickled: dict[str, list[bytes]] = {}
    for side, half in make_halves(engine).items():
        for request in engine.requests:
            request.num_computed_tokens = first_token
        # What is computed token by token is decoded.
        with engine.known(first_token + 1 if step_tokens == 1 else last_token):
            half.take(half.report_on(half.emit(engine.admission(first_token))))
        pickled[side] = []
        for computed in range(first_token, last_token, step_tokens):
            metadata = half.emit(engine.step(computed, step_tokens))
            if half.num_jobs(metadata):
                pickled[side].append(pickle.dumps(metadata, pickle.HIGHEST_PROTOCOL))
            half.take(half.report_on(metadata))
    return pickled


class Workload:
    """What each worker took to save all blocks of some steps, by round."""

    def __init__(
        self, engine: Any, first_token: int, num_blocks: int, pickled: dict[str, list[bytes]]
    ) -> None:
        self.first_token = first_token
        self.request_ids = [request.request_id for request in engine.requests]
        self.pickled = pickled
        self.num_blocks = num_blocks
        self.num_keys = len(self.request_ids) * num_blocks
        self.us_per_key: dict[str, list[float]] = {}
        self.calls_per_block: dict[str, float] = {}

    @classmethod
    def prefill(cls, engine: Any, step_tokens: int) -> Self:
        """Return the steps that compute all tokens of the requests."""
        from vllm_engine import BLOCK

        num_tokens = engine.num_tokens
        pickled = metadata_of(engine, 0, num_tokens, step_tokens)
        return cls(engine, 0, num_tokens // BLOCK, pickled)

    @classmethod
    def decode(cls, engine: Any, num_blocks: int) -> Self:
        """Return the steps that save as many blocks of each request, token by token.

        That is a multiple of what is saved at once. The last block but one is the last to be saved,
        so that its step may leave some to the next.
        """
        from vllm_engine import BLOCK

        num_tokens = engine.num_tokens
        first_token = num_tokens - (num_blocks + 1) * BLOCK
        return cls(
            engine, first_token, num_blocks, metadata_of(engine, first_token, num_tokens - 1, 1)
        )

    def run(self, side: str, worker: Any) -> None:
        """Let a worker save all steps, one after the other."""
        from worker_halves import cpu_of_step

        worker.begin(self.request_ids, self.first_token)
        num_keys, num_calls = worker.num_keys, worker.num_calls
        pickled = self.pickled["peer" if side == "peer" else "kvtide"]
        spent = sum(cpu_of_step(worker, pickle.loads(blob)) for blob in pickled)  # noqa: S301
        assert worker.num_keys - num_keys == self.num_keys, "not everything was saved"
        self.us_per_key.setdefault(side, []).append(spent / self.num_keys * 1e6)
        self.calls_per_block[side] = (worker.num_calls - num_calls) / self.num_blocks


def make_workers(num_blocks: int) -> dict[str, Any]:
    """Return the workers that are compared, over one KV cache."""
    from vllm_engine import kv_caches
    from worker_halves import InTreeWorker, KVTideWorker

    caches = kv_caches(num_blocks)
    return {
        "kvtide": KVTideWorker(caches),
        "without copy and tag": KVTideWorker(caches, with_copy=False),
        "peer": InTreeWorker(caches),
    }


def worker_rows(context: int, many: Sequence[int], rounds: int) -> Iterator[Row]:
    """Measure a worker's CPU per new key: a long prompt, a decode, and many decodes at once."""
    from vllm_engine import STEP_TOKENS, HeldEngine

    num_blocks = max(context // 8, max(many, default=0) * 64) + (5 << 10)
    engine = HeldEngine(context, num_blocks)
    workloads = {
        "prefill": Workload.prefill(engine, STEP_TOKENS),
        "prefill in steps four times as long": Workload.prefill(engine, 4 * STEP_TOKENS),
        "decode": Workload.decode(engine, 64),
    }
    for count in many:
        crowd = HeldEngine(CROWD_TOKENS, num_blocks, count)
        workloads[f"{count} requests"] = Workload.decode(crowd, CROWD_BLOCKS)
    workers = make_workers(num_blocks)
    gc.collect()
    gc.freeze()
    for _ in range(rounds):
        for workload in workloads.values():
            for side, worker in workers.items():
                workload.run(side, worker)
    for what, workload in workloads.items():
        yield from _rows_of_worker(what, workload, context)
    for worker in workers.values():
        worker.close()


def _rows_of_worker(what: str, workload: Workload, context: int) -> Iterator[Row]:
    """Judge what users run, and beside it what would be left without copy and tag."""
    us = workload.us_per_key
    goal = {"prefill": 3, "decode": 5}.get(what)
    where = f"c. worker, a key of {what} at {context_name(context)}"
    if what.endswith("requests"):
        goal = 5
        where = f"c. worker, a key of {what} that decode"
        yield from _crowd_rows_of_worker(what, workload)
    for side, case in by_side(us, where).items():
        yield times_less(BENCH, case, "us", us[side], us["peer"], goal)


def _crowd_rows_of_worker(what: str, workload: Workload) -> Iterator[Row]:
    """Judge what many requests cost that complete their blocks in the same steps."""
    us, calls = workload.us_per_key, workload.calls_per_block
    where = f"d. {what} decode: calls for a block of each"
    if len(workload.request_ids) <= JUDGED_CROWD:
        yield at_most(BENCH, where, "calls", calls["kvtide"], 2, peer=calls["peer"])
    else:
        yield figure(BENCH, where, "calls", calls["kvtide"], calls["peer"])
    for side, case in by_side(us, f"d. {what} decode: a key").items():
        yield at_most(BENCH, case, "us", median(us[side]), 5, peer=median(us["peer"]))


def by_side(sides: Iterable[str], case: str) -> dict[str, str]:
    """Return the case as each of kvtide's workers has it."""
    suffixes = {side: "" if side == "kvtide" else f", {side}" for side in sides if side != "peer"}
    return {side: case + suffix for side, suffix in suffixes.items()}


# ------------------------------------------------------------------ h: memory


def memory_rows(context: int) -> Iterator[Row]:
    """Measure what a live request and a job that has not ended hold, in bytes of Python objects.

    Not in it: the engine's own objects, and the staging memory, which has one size for all.
    """
    from vllm_engine import kv_caches
    from worker_halves import InTreeWorker, KVTideWorker

    held = Held(context, context // 8 + (1 << 10))
    caches = kv_caches(held.engine.config.num_blocks)
    workers: dict[str, Any] = {
        "kvtide": KVTideWorker(caches, is_held=True),
        "peer": InTreeWorker(caches, is_held=True),
    }
    found: dict[str, dict[str, float]] = {}
    for side, half in held.halves.items():
        for what, value in _memory_of(held, half, workers[side]).items():
            found.setdefault(what, {})[side] = value
    for what, each in found.items():
        unit = "blocks" if what.startswith("blocks") else "bytes"
        where = f"h. {what} at {context_name(context)}"
        yield times_less(BENCH, where, unit, [each["kvtide"]], [each["peer"]])


def _memory_of(held: Held, half: Any, worker: Any) -> dict[str, float]:
    """Return what one side holds for a request, and for the job of its last step."""
    [request] = held.engine.requests
    half.forget(request)  # it has started what it starts once
    held.run_admitted(half, request, "prefill job")
    half.forget(request)
    tracemalloc.start()
    try:
        before = _held_bytes()
        held.run_admitted(half, request, "prefill job")
        live = _held_bytes()
        held.rewind(half, "prefill job")
        rewound = _held_bytes()
        step = held.steps["prefill job"]
        pickled = pickle.dumps(half.emit(step), pickle.HIGHEST_PROTOCOL)
        pending = _held_bytes() - sys.getsizeof(pickled)
        worker.take(pickle.loads(pickled))  # noqa: S301 - made right here
        taken = _held_bytes() - sys.getsizeof(pickled)
    finally:
        tracemalloc.stop()
    return {
        "a live request in the scheduler": live - before,
        "a job under way in the scheduler": pending - rewound,
        "a job under way in a worker": taken - pending,
        "blocks pinned by a job": half.num_pinned_blocks,
    }


def _held_bytes() -> int:
    """Return how much traced memory is in use once lookups have ended and cycles are gone."""
    time.sleep(0.2)
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


# ------------------------------------------------------------------ the whole


def main() -> None:
    """Run the benches and write build/bench/save_path.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default="a,b,c,d,h", help="letters of the benches to run")
    options = parser.parse_args()
    only = set(options.only.split(","))
    if find_spec("vllm") is None:
        report(BENCH, [left_out(BENCH, "vLLM is not installed")])
        return
    rows: list[Row] = []
    if only & {"a", "b"}:
        cases = hold(CONTEXTS)
        benches: dict[str, Callable[[Sequence[Held], int], Iterator[Row]]] = {
            "a": scheduler_rows,
            "b": metadata_rows,
        }
        for letter in sorted(only & set(benches)):
            rows += benches[letter](cases, options.rounds)
        del cases
    for count in (64, 256) if "d" in only else ():
        rows += crowd_rows(count, options.rounds)
    if only & {"c", "d"}:
        rows += worker_rows(JUDGED, (64, 256) if "d" in only else (), options.rounds)
    if "h" in only:
        rows += memory_rows(JUDGED)
    print(f"written: {report(BENCH, rows)}")
    # vLLM's sending thread has no end, and its libraries complain at a regular one.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
