"""Saving into a Mooncake pool that others keep full, while their lookups lease what is in it.

    python benchmarks/bench_mooncake_full_pool.py [--seconds 6] [--turns 3] [--asking-first]

The peer is the sending thread of vLLM's in-tree ``MooncakeStoreConnector``; ``saving_sides`` says
how both are driven. Around them ``pool_traffic`` keeps a pool of 256 MiB full: half of it are
popular prefixes that are asked for all the time, a fifth the newest of the values that another
client goes on putting, which are asked for as well. Mooncake leases for 10 s what is asked for, its
default, and evicts nothing that is leased. The sides take turns; counted are the bytes that the
store took, by its answers to puts.

With ``--asking-first`` kvtide is compared with itself asking ``exists`` before each put instead,
which leases the keys that it finds. New keys are never found, so there half of each prompt is that
of an earlier one as well. Which keys a put found present its answers do not tell: there, what was
stored is counted by the master.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from measuring import Row, compared, left_out, report

from kvtide.errors import StoreOpenError
from kvtide.stores import open_store
from kvtide.stores.mooncake_package import mooncake_module
from kvtide.testing.mooncake import MooncakePool

if TYPE_CHECKING:
    from saving_sides import Side

BENCH = "mooncake_full_pool"
MIB = 1 << 20
POOL_BYTES = 256 * MIB
VALUE_BYTES = 64 << 10
HOT, RECENT, WRITER_MIB = 0.5, 0.2, 20
FAST_STEP_S, SLOW_STEP_S = 0.01, 0.1
GOAL = 2.0


class Surroundings:
    """The pool and the traffic around the sides."""

    def __init__(self, pool: MooncakePool, traffic: subprocess.Popen[str]) -> None:
        self.pool = pool
        self._traffic = traffic

    @property
    def master(self) -> str:
        """The master's address."""
        return f"{self.pool.host}:{self.pool.port}"

    def num_stored(self) -> int:
        """Return how many values the sides stored, by what the master says."""
        assert self._traffic.stdin is not None
        assert self._traffic.stdout is not None
        self._traffic.stdin.write("?\n")
        self._traffic.stdin.flush()
        by_traffic = int(json.loads(self._traffic.stdout.readline()).get("put", 0))
        return self.pool.metrics().num_puts - by_traffic


@contextmanager
def full_pool() -> Iterator[Surroundings]:
    """Give a pool that is kept full."""
    with MooncakePool(segment_bytes=POOL_BYTES) as pool:
        script = Path(__file__).with_name("pool_traffic.py")
        values = {"values": POOL_BYTES // VALUE_BYTES, "hot": HOT, "recent": RECENT}
        options = {**values, "rate": WRITER_MIB}
        written = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        with subprocess.Popen(
            [sys.executable, str(script), f"{pool.host}:{pool.port}", *written],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as traffic:
            assert traffic.stdin is not None
            assert traffic.stdout is not None
            try:
                assert traffic.stdout.readline() == "full\n"
                yield Surroundings(pool, traffic)
            finally:
                traffic.stdin.close()  # it ends


class Turns:
    """What each side did in each of its turns, in MiB per second."""

    def __init__(self, names: Sequence[str]) -> None:
        self.answered: dict[str, list[float]] = {name: [] for name in names}
        self.by_master: dict[str, list[float]] = {name: [] for name in names}
        self.refused: dict[str, list[float]] = {name: [] for name in names}
        self.back_offs: dict[str, list[float]] = {name: [] for name in names}


def take_turns(
    around: Surroundings,
    sides: Mapping[str, Side],
    seconds: float,
    turns: int,
    *,
    step_s: float,
    shared: float = 0.0,
) -> Turns:
    """Let the sides save in turns."""
    from saving_sides import Engine, drive

    seen = Turns(list(sides))
    for _ in range(turns):
        for name, side in sides.items():
            stored = side.stored
            before = stored.num_tried, stored.num_refused, side.num_back_offs
            num_before = around.num_stored()
            speed = drive(side, Engine(step_s, shared), seconds)
            num_stored = around.num_stored() - num_before
            tried = max(1, stored.num_tried - before[0])
            seen.answered[name].append(speed / MIB)
            # What was under way at the end is in it; a side that stored nothing still compares.
            seen.by_master[name].append(max(num_stored, 1) * VALUE_BYTES / seconds / MIB)
            seen.refused[name].append((stored.num_refused - before[1]) / tried * 100)
            seen.back_offs[name].append((side.num_back_offs - before[2]) * 60 / seconds)
            assert not stored.num_failed, f"{name}: puts failed"
    return seen


def beside_peer_rows(what: str, seen: Turns, goal: float | None) -> Iterator[Row]:
    """Compare kvtide with the in-tree connector."""
    ours, theirs = seen.answered["kvtide"], [max(v, 0.01) for v in seen.answered["in-tree"]]
    yield compared(BENCH, f"{what}: stored", "MiB/s", ours, theirs, goal)
    for name, unit, values in (
        ("keys of puts refused", "%", seen.refused),
        ("pauses (peer: jobs skipped)", "/min", seen.back_offs),
    ):
        medians = [statistics.median(values[side]) for side in ("kvtide", "in-tree")]
        yield Row(BENCH, f"{what}: {name}", unit, *medians, None, None, None)


def in_tree_rows(around: Surroundings, seconds: float, turns: int) -> Iterator[Row]:
    """Compare kvtide with the in-tree connector, on a fast and on a slow engine."""
    from saving_sides import InTreeSide, KVTideSide

    # vLLM's first: what kvtide's client puts into the environment comes later.
    peer = InTreeSide(around.master)
    sides: dict[str, Side] = {"in-tree": peer, "kvtide": KVTideSide(open_store(around.pool.url))}
    try:
        for step_s, goal in ((FAST_STEP_S, GOAL), (SLOW_STEP_S, None)):
            seen = take_turns(around, sides, seconds, turns, step_s=step_s)
            what = f"new prompts, {speed_of(step_s)}"
            yield from beside_peer_rows(what, seen, goal)
    finally:
        for side in sides.values():
            side.close()


def asking_first_rows(around: Surroundings, seconds: float, turns: int) -> Iterator[Row]:
    """Compare kvtide with itself asking ``exists`` before each put."""
    from saving_sides import KVTideSide

    url = around.pool.url
    sides: dict[str, Side] = {
        "kvtide": KVTideSide(open_store(url)),
        "asks first": KVTideSide(open_store(url), checks=True),
    }
    try:
        for shared, what in ((0.0, "new prompts"), (0.5, "half-known prompts")):
            seen = take_turns(around, sides, seconds, turns, step_s=FAST_STEP_S, shared=shared)
            case = f"{what}, {speed_of(FAST_STEP_S)}: stored, beside asking first"
            ours, theirs = seen.by_master["kvtide"], seen.by_master["asks first"]
            yield compared(BENCH, case, "MiB/s", ours, theirs)
    finally:
        for side in sides.values():
            side.close()


def speed_of(step_s: float) -> str:
    """Return how fast an engine computes KV cache."""
    from saving_sides import STEP_BYTES

    return f"{STEP_BYTES / MIB / step_s:.0f} MiB/s"


def main() -> None:
    """Run every case and write build/bench/mooncake_full_pool.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=6.0, help="of one turn of one side")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--asking-first", action="store_true", help="compare kvtide with itself")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # the peer warns of each refusal
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    case_rows = asking_first_rows if options.asking_first else in_tree_rows
    if find_spec("vllm") is None:
        rows = [left_out(BENCH, "the peer is vLLM's own connector, and vLLM is not installed")]
    else:
        try:
            mooncake_module()
            with full_pool() as around:
                rows = list(case_rows(around, options.seconds, options.turns))
        except StoreOpenError as error:
            rows = [left_out(BENCH, str(error))]
    name = f"{BENCH}_asking_first" if options.asking_first else BENCH
    print(f"written: {report(name, rows)}")


if __name__ == "__main__":
    main()
