"""What a lookup of 131,072 tokens costs, beside that of vLLM's in-tree store connector.

    python benchmarks/bench_lookup_cost.py [--rounds 25]

Both sides look the same request up in the same store, which answers at once and counts, in turns.
CPU time is that of the whole lookup on one thread, without the store's own. The scheduling thread's
share is measured on vLLM's own requests and cache manager, with kvtide's lookups on their thread
and the in-tree lookup behind its socket.
"""

from __future__ import annotations

import argparse
import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from statistics import median
from typing import Any
from unittest.mock import patch

from bench_lookup_keys import MODELS, NUM_TOKENS, Model
from lookup_sides import (
    CountingStore,
    EngineCache,
    InTreeScheduler,
    InTreeSide,
    KVTideSide,
    Timed,
)
from measuring import Row, at_most, figure, left_out, report, times_less

from kvtide.core.transfer import RequestView
from kvtide.runtime import lookup as lookups
from kvtide.testing.requests import RecordingRequest, fake_hashes

BENCH = "lookup_cost"
HELD_SHARE = 0.95
NUM_TOGETHER = 8
WARM_UP_ROUNDS = 3
NAMES = ("full", "full + window 4,096", "like DeepSeek-V4", "full + states")
STATES = {
    "cold miss": (0.0, 0.0),
    "half hit": (0.5, 0.0),
    "full hit": (1.0, 0.0),
    "95 % held locally": (1.0, HELD_SHARE),
}
"""Per case what share of the prompt the store has, and what share the engine holds."""
MAX_KEYS = {
    ("full", "cold miss"): 64,
    ("full + window 4,096", "cold miss"): 128,
    ("full + window 4,096", "full hit"): 8512,
}
GOAL_MODELS = ("full", "full + window 4,096")
TIMES_LESS = {"cold miss": 50.0, "full hit": 6.0}
"""At least so many times less CPU than the peer, with one rank."""


def models() -> list[Model]:
    """Return the models of the bench; those with eight ranks have parts on each of them."""
    chosen = [model for model in MODELS if model.name in NAMES]
    several = [
        replace(model, name=f"{model.name}, TP 8", tp_size=8)
        for model in chosen
        if model.name != "like DeepSeek-V4"  # whose ranks all hold the same bytes
    ]
    return chosen + several


class Case:
    """A model's request, and both sides around one store."""

    def __init__(self, model: Model, *, with_vllm: bool) -> None:
        self.model = model
        self.store = CountingStore()
        self.ours = KVTideSide(model, self.store)
        self.peer = InTreeSide(model, self.store) if with_vllm else None
        self._unit = model.coordinator.hash_block_size
        self.hashes = fake_hashes(NUM_TOKENS // self._unit)

    def rows(self, state: str, rounds: int) -> Iterator[Row]:
        """Look the request up on both sides in turns; yield keys, calls and CPU time."""
        stored, held = STATES[state]
        self.store.present = frozenset(
            value.hex() for value in self.hashes[: int(stored * len(self.hashes))]
        )
        held_token = self.model.coordinator.last_boundary(int(held * NUM_TOKENS))
        expected = max(held_token, self.model.coordinator.last_boundary(int(stored * NUM_TOKENS)))
        ours: list[Timed] = []
        theirs: list[Timed] = []
        for number in range(rounds + WARM_UP_ROUNDS):
            if number == WARM_UP_ROUNDS:  # the interpreter knows by now what both do
                ours.clear()
                theirs.clear()
            ours.append(self._our_lookup(held_token))
            our_counts = self.store.num_keys, self.store.num_calls
            if self.peer is not None:
                theirs.append(self.peer.lookup(NUM_TOKENS + 1, self.hashes))
        their_counts = (self.store.num_keys, self.store.num_calls) if theirs else (None, None)
        hits = {max(timed.hit_token, held_token) for timed in ours + theirs}
        assert hits == {expected}, f"{self.model.name}, {state}: {hits}, not {expected}"
        yield self._count_row(state, our_counts[0], their_counts[0])
        case = f"{self.model.name}, {state}: calls"
        yield figure(BENCH, case, "calls", our_counts[1], their_counts[1])
        yield self._cpu_row(state, ours, theirs)

    def _our_lookup(self, held_token: int) -> Timed:
        view = RecordingRequest(
            num_tokens=NUM_TOKENS + 1, hashes=self.hashes, local_hit_tokens=held_token
        )
        return self.ours.lookup(view, held_token)

    def _count_row(self, state: str, ours: int, theirs: int | None) -> Row:
        goal = MAX_KEYS.get((self.model.name, state))
        if self.model.name == "full" and STATES[state][1]:
            goal = int(0.06 * NUM_TOKENS / 16)
        case = f"{self.model.name}, {state}: keys"
        if goal is None:
            return figure(BENCH, case, "keys", ours, theirs)
        return at_most(BENCH, case, "keys", ours, goal, peer=theirs)

    def _cpu_row(self, state: str, ours: Sequence[Timed], theirs: Sequence[Timed]) -> Row:
        case = f"{self.model.name}, {state}: CPU"
        ours_us = [timed.cpu_s * 1e6 for timed in ours]
        if not theirs:
            return figure(BENCH, case, "us", median(ours_us))
        goal = TIMES_LESS.get(state) if self.model.name in GOAL_MODELS else None
        return times_less(BENCH, case, "us", ours_us, [t.cpu_s * 1e6 for t in theirs], goal)


def lookup_rows(rounds: int, *, with_vllm: bool) -> Iterator[Row]:
    """Yield the rows of every model and state."""
    for model in models():
        case = Case(model, with_vllm=with_vllm)
        for state in STATES:
            yield from case.rows(state, rounds)


class BurstStore(CountingStore):
    """Notes how long its caller's thread computed before each call, in CPU seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.bursts_s: list[float] = []
        self._since_s = 0.0

    def begin(self) -> None:
        """Start counting: at the beginning, or where others have had a chance to run."""
        self._since_s = time.thread_time()

    def end(self) -> None:
        """End a burst, and begin the next."""
        self.bursts_s.append(time.thread_time() - self._since_s)
        self.begin()

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Answer; the call is no part of a burst, as a store's own work holds no lock."""
        self.end()
        answers = super().exists(keys)
        self.begin()
        return answers


def burst_rows(rounds: int) -> Iterator[Row]:
    """Yield the longest burst of Python on the lookups' thread, with many lookups at once."""
    for model in models():
        store = BurstStore()
        side = KVTideSide(model, store)
        num_hashes = NUM_TOKENS // model.coordinator.hash_block_size
        views = [
            RecordingRequest(
                str(n), num_tokens=NUM_TOKENS + 1, hashes=fake_hashes(num_hashes, seed=str(n))
            )
            for n in range(NUM_TOGETHER)
        ]
        store.present = frozenset(value.hex() for view in views for value in view.block_hashes)
        rounds_s: list[list[float]] = []
        for _ in range(rounds):
            for view in views:
                side.submit(view)
            store.bursts_s = []
            store.begin()
            with patch.object(lookups, "let_others_run", store.end):
                side.run()
            rounds_s.append(store.bursts_s)
            for view in views:
                assert side.collect(view, 0) == NUM_TOKENS
                side.end(view)
        # Burst by burst, since another process may interrupt any of them.
        longest_ms = max(median(burst) for burst in zip(*rounds_s, strict=True)) * 1e3
        case = f"{model.name}, {NUM_TOGETHER} full hits at once: longest burst"
        yield at_most(BENCH, case, "ms", longest_ms, 1)


class GatedStore(CountingStore):
    """Lets lookups wait while ``gate`` is not set."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Answer once the gate is open."""
        self.gate.wait()
        return super().exists(keys)


class Stopwatch:
    """Times the scheduling thread over the calls of one lookup."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = 0.0

    def run(self, call: Callable[[], Any]) -> Any:
        """Return what ``call`` returns, and add what it took."""
        wall, cpu = time.perf_counter(), time.thread_time()
        result = call()
        self.cpu_s += time.thread_time() - cpu
        self.wall_s += time.perf_counter() - wall
        return result

    def add(self, other: Stopwatch) -> None:
        """Add what another one measured."""
        self.wall_s += other.wall_s
        self.cpu_s += other.cpu_s


def our_turn(side: KVTideSide, views: Sequence[RequestView], held_token: int) -> list[Stopwatch]:
    """Time the submission of lookups, and their collection once their thread has the answers."""
    watches = [Stopwatch() for _ in views]
    for view, watch in zip(views, watches, strict=True):
        watch.run(lambda: side.submit(view))  # noqa: B023 - called here
    for view, watch in zip(views, watches, strict=True):
        asked = Stopwatch()
        while asked.run(lambda: side.collect(view, held_token)) is None:  # noqa: B023
            time.sleep(0.05)  # what is timed is the collection of an answer
            asked = Stopwatch()
        watch.add(asked)
        side.end(view)
    return watches


def waiting_turn(
    side: KVTideSide, store: GatedStore, views: Sequence[RequestView], held_token: int
) -> list[Stopwatch]:
    """Time what the engine is answered while a lookup is under way: that there is no answer yet."""
    watches = [Stopwatch() for _ in views]
    store.gate.clear()
    for view in views:
        side.submit(view)
    for view, watch in zip(views, watches, strict=True):
        assert watch.run(lambda: side.collect(view, held_token)) is None  # noqa: B023
    store.gate.set()
    for view in views:
        while side.collect(view, held_token) is None:
            time.sleep(0.01)
        side.end(view)
    return watches


def their_turn(side: InTreeScheduler, requests: Sequence[Any], held_token: int) -> list[Stopwatch]:
    """Time the engine's question, which is all there is of a lookup."""
    watches = [Stopwatch() for _ in requests]
    for request, watch in zip(requests, watches, strict=True):
        watch.run(lambda: side.match(request, held_token))  # noqa: B023 - called here
    return watches


def median_cpu_us(watches: Sequence[Stopwatch]) -> float:
    """Return the median CPU time of some lookups, in microseconds."""
    return median(watch.cpu_s for watch in watches) * 1e6


def scheduling_rows(rounds: int) -> Iterator[Row]:
    """Yield how long lookups hold vLLM's scheduling thread, on vLLM's own requests and cache.

    In each round some requests arrive together. The first finds the processor's caches cold, as
    requests do that arrive one by one. A wait is what the engine is told while a lookup runs.
    """
    model = next(model for model in MODELS if model.name == "full")
    store = GatedStore()
    ours, theirs = KVTideSide(model, store, threaded=True), InTreeSide(model, store)
    scheduler = InTreeScheduler(model, theirs)
    num_blocks = (NUM_TOGETHER * len(STATES) + 1) * NUM_TOKENS // 16
    cache = EngineCache(model.coordinator, NUM_TOKENS + 1, num_blocks)
    try:
        for state, (stored, held) in STATES.items():
            held_token = model.coordinator.last_boundary(int(held * NUM_TOKENS))
            requests = [
                cache.request(f"{state} {number}", NUM_TOKENS + 1, held_token)
                for number in range(NUM_TOGETHER)
            ]
            store.present = frozenset(
                value.hex()
                for request in requests
                for value in request.block_hashes[: int(stored * len(request.block_hashes))]
            )
            views = [cache.view(request) for request in requests]
            firsts, our_times, waits, their_times = [], [], [], []
            for _ in range(rounds):
                first, *others = our_turn(ours, views, held_token)
                firsts.append(first)
                our_times += [first, *others]
                waits += waiting_turn(ours, store, views, held_token)
                their_times += their_turn(scheduler, requests, held_token)
            case = f"scheduling thread, full, {state}"
            held_us, their_us = (
                [watch.wall_s * 1e6 for watch in each] for each in (our_times, their_times)
            )
            yield times_less(BENCH, f"{case}: held", "us", held_us, their_us)
            yield at_most(BENCH, f"{case}: CPU", "us", median_cpu_us(our_times), 50)
            cold = f"{case}: CPU of the first of {NUM_TOGETHER}"
            yield at_most(BENCH, cold, "us", median_cpu_us(firsts), 50)
            yield figure(BENCH, f"{case}: CPU of a wait", "us", median_cpu_us(waits))
    finally:
        ours.close()
        scheduler.close()


def main() -> None:
    """Run every case and write build/bench/lookup_cost.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    with_vllm = find_spec("vllm") is not None
    rows = [] if with_vllm else [left_out(BENCH, "the peer: vLLM is not installed")]
    gc.disable()  # its passes would meet whoever is running
    rows += lookup_rows(options.rounds, with_vllm=with_vllm)
    rows += burst_rows(options.rounds)
    if with_vllm:
        rows += scheduling_rows(options.rounds)
    print(f"written: {report(BENCH, rows)}")


if __name__ == "__main__":
    main()
