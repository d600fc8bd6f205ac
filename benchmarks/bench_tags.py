"""What the tag of a value costs: of a copy, and of saving to and loading from the local store.

    python benchmarks/bench_tags.py [--path /dev/shm/kvtide-bench] [--rounds 15]

First which share of the CPU time of copying blocks with their tags goes into the tags: value by
value, where the processor's cache still has what was copied, and all tags after all copies. Then
the real worker with all its threads on the local store: the same blocks as tagged and as bare
values, in turns. There staging copies and tags while the sender puts what was staged before.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
from bench_lookup_keys import NAMESPACE
from measuring import Row, compared, cpu_s, quartiles, report, seconds, times_less

from kvtide.core.coordinator import Coordinator
from kvtide.core.groups import FullAttention
from kvtide.core.jobs import StepPlan
from kvtide.core.transfer import plan_load, plan_store
from kvtide.runtime.limits import WorkerLimits
from kvtide.runtime.prefixes import PrefixDatabases
from kvtide.runtime.slab import Slab
from kvtide.runtime.values import BARE, TAGGED, ValueFormat
from kvtide.runtime.worker import PoolWorker
from kvtide.stores import open_store
from kvtide.testing.blocks import FakeBlocks, byte_layout
from kvtide.testing.requests import RecordingRequest, fake_hashes

BENCH = "tags"
KIB = 1 << 10
MIB = 1 << 20
PAYLOADS = (64 * KIB, 512 * KIB, 2048 * KIB)
TOTAL_BYTES = 64 * MIB
JOB_BYTES = 4 * MIB
BLOCK = 16
MAX_SHARE = 15.0
MIN_SPEED = 0.95
"""Of saving tagged values by saving bare ones: the tag is written beside the put."""
DEFAULT_PATH = Path("/dev/shm/kvtide-bench")  # noqa: S108 - removed before and after
_turns = itertools.count()


class Copies:
    """Blocks, rows of a slab, and the ways of copying between them."""

    def __init__(self, payload_bytes: int) -> None:
        num_chunks = TOTAL_BYTES // payload_bytes
        row_bytes = TAGGED.row_bytes(payload_bytes)
        blocks = np.full((num_chunks, payload_bytes), 7, dtype=np.uint8)
        rows = Slab(num_chunks * row_bytes).buffer.reshape(num_chunks, row_bytes)
        keys = [f"kvtide:{'f' * 32}@pp:0@shard:0@dcp:0@group:0@{n:064x}" for n in range(num_chunks)]
        self._payload_bytes = payload_bytes
        self._all = list(zip(blocks, rows, keys, strict=True))
        self.write(with_tags=True)  # memory is touched for the first time

    def write(self, *, with_tags: bool) -> None:
        """Copy blocks to rows."""
        num_bytes = self._payload_bytes
        for block, row, key in self._all:
            row[:num_bytes] = block
            if with_tags:
                TAGGED.seal(row, key, num_bytes)

    def write_then_tag(self) -> None:
        """Copy all blocks, and then write all tags."""
        self.write(with_tags=False)
        for _, row, key in self._all:
            TAGGED.seal(row, key, self._payload_bytes)

    def read(self, *, with_tags: bool) -> None:
        """Copy rows to blocks."""
        num_bytes = self._payload_bytes
        for block, row, key in self._all:
            if with_tags:
                assert TAGGED.is_whole(row, key, num_bytes)
            block[:] = row[:num_bytes]

    def verify_then_read(self) -> None:
        """Verify all tags, and then copy all rows."""
        for _, row, key in self._all:
            assert TAGGED.is_whole(row, key, self._payload_bytes)
        self.read(with_tags=False)


def share_rows(payload_bytes: int, rounds: int) -> Iterator[Row]:
    """Yield which share of a copy with its tag is the tag, in CPU time."""
    copies = Copies(payload_bytes)
    ways: dict[str, tuple[Callable[[], None], ...]] = {
        "write": (
            lambda: copies.write(with_tags=False),
            lambda: copies.write(with_tags=True),
            copies.write_then_tag,
        ),
        "verify": (
            lambda: copies.read(with_tags=False),
            lambda: copies.read(with_tags=True),
            copies.verify_then_read,
        ),
    }
    for what, calls in ways.items():
        rounds_s = [[cpu_s(call) for call in calls] for _ in range(rounds)]
        for index, order in enumerate(("value by value", "all values, then all tags"), 1):
            shares = [100 * (1 - times[0] / times[index]) for times in rounds_s]
            share = median(shares)
            goal = MAX_SHARE if payload_bytes == 512 * KIB and index == 1 else None
            yield Row(
                BENCH,
                f"{what} tags of {payload_bytes // KIB} KiB, {order}: share of copy and tag",
                "%",
                share,
                None,
                None,
                None if goal is None else f"<= {goal:g}",
                None if goal is None else share <= goal,
                quartiles(shares),
            )


class Turn(NamedTuple):
    """Bytes per second of saving and loading some values, and the CPU seconds of all threads."""

    saved: float
    loaded: float
    save_cpu_s: float
    load_cpu_s: float


class Side:
    """A worker that saves and loads values of one format."""

    def __init__(self, url: str, values: ValueFormat, payload_bytes: int) -> None:
        self._coordinator = Coordinator((FullAttention(BLOCK),), BLOCK)
        self._num_chunks = TOTAL_BYTES // payload_bytes
        self._blocks = FakeBlocks(byte_layout((BLOCK, payload_bytes)), self._num_chunks + 1)
        self._blocks.data[0][:] = 7
        self._store = open_store(url)
        self._databases = PrefixDatabases([BLOCK], BLOCK)
        self._worker = PoolWorker(
            self._blocks,
            open_store(url),
            self._databases,
            limits=WorkerLimits(
                staging_bytes=2 * TOTAL_BYTES, load_staging_bytes=JOB_BYTES + MIB, stage_wait_s=60
            ),
            values=values,
        )
        self._worker.take_over(StepPlan({0: f"{NAMESPACE}{values.overhead_bytes}"}))

    def turn(self) -> Turn:
        """Save and load some new values."""
        hashes = fake_hashes(self._num_chunks, seed=str(next(_turns)))
        num_tokens = self._num_chunks * BLOCK
        view = RecordingRequest(num_tokens=num_tokens + 1, hashes=hashes)
        step = max(1, JOB_BYTES * self._num_chunks // TOTAL_BYTES) * BLOCK
        stores = tuple(
            plan_store(
                view,
                self._coordinator,
                job_id=start,
                prefix_id=0,
                start_token=start,
                end_token=min(start + step, num_tokens),
            ).job
            for start in range(0, num_tokens, step)
        )
        load = plan_load(
            view,
            self._coordinator,
            job_id=num_tokens,
            prefix_id=0,
            num_computed_tokens=0,
            hit_token=num_tokens,
        )
        marks = [time.process_time()]
        saved_s = seconds(lambda: self._save(StepPlan(stores=stores)))
        marks.append(time.process_time())
        loaded_s = seconds(lambda: self._load(StepPlan(loads=(load,))))
        marks.append(time.process_time())
        report = self._worker.take_report()
        assert report is not None
        counters = report.counters
        assert counters["saved_chunks"] == counters["loaded_chunks"] == self._num_chunks
        keys = self._databases[0][0][0].keys(load.hashes, range(self._num_chunks))
        self._store.remove(keys)
        cpu = (marks[1] - marks[0], marks[2] - marks[1])
        return Turn(TOTAL_BYTES / saved_s, TOTAL_BYTES / loaded_s, *cpu)

    def _save(self, plan: StepPlan) -> None:
        self._worker.take_over(plan)
        assert self._worker.flush(60.0)

    def _load(self, plan: StepPlan) -> None:
        self._worker.take_over(plan)
        while not (results := self._worker.poll()).finished_loads:
            time.sleep(0.0005)
        assert not results.failed_loads

    def close(self) -> None:
        """End the worker."""
        self._worker.close()
        self._store.close()


def worker_rows(path: Path, payload_bytes: int, rounds: int) -> Iterator[Row]:
    """Yield the throughput of tagged values, with that of bare ones as the peer."""
    shutil.rmtree(path, ignore_errors=True)
    url = f"local://{path}?size={8 * TOTAL_BYTES}"
    sides = [Side(url, values, payload_bytes) for values in (TAGGED, BARE)]
    try:
        for side in sides:  # the store's file grows
            side.turn()
        turns = [[side.turn() for side in sides] for _ in range(rounds)]
    finally:
        for side in sides:
            side.close()
        shutil.rmtree(path, ignore_errors=True)
    for index, what in enumerate(("save", "load")):
        case = f"{what} {payload_bytes // KIB} KiB, tagged and bare"
        tagged, bare = ([turn[side][index] / MIB for turn in turns] for side in (0, 1))
        at_least = MIN_SPEED if what == "save" else None
        yield compared(BENCH, case, "MiB/s", tagged, bare, at_least)
        tagged, bare = ([turn[side][index + 2] * 1e3 for turn in turns] for side in (0, 1))
        yield times_less(BENCH, f"{case}: CPU of {TOTAL_BYTES // MIB} MiB", "ms", tagged, bare)


def main() -> None:
    """Run every case and write build/bench/tags.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", type=Path, default=DEFAULT_PATH)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    rows: list[Row] = []
    for payload_bytes in PAYLOADS:
        rows += share_rows(payload_bytes, options.rounds)
    for payload_bytes in PAYLOADS:
        rows += worker_rows(options.path, payload_bytes, options.rounds)
    print(f"written: {report(BENCH, rows)}")


if __name__ == "__main__":
    main()
