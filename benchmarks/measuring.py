"""What the benchmarks share: alternating rounds, medians, a table, and rows in build/bench."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

OUTPUT = Path(__file__).resolve().parents[1] / "build" / "bench"


@dataclass(frozen=True, slots=True)
class Row:
    """One result: ``peer`` is what it is compared with, ``goal`` bounds ``ratio`` or ``kvtide``.

    ``spread``, where the rounds tell one, has the quartiles of the ratio. A row without a result
    is of a bench that was left out; its case says why.
    """

    bench: str
    case: str
    unit: str
    kvtide: float | None
    peer: float | None
    ratio: float | None
    goal: str | None
    met: bool | None
    spread: tuple[float, float] | None = None


def seconds(call: Callable[[], object]) -> float:
    """Return how long one call took, in seconds."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def take_turns(
    contenders: Mapping[str, Callable[[], object]], num_rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of each round per contender, run in turns so that noise meets them all."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(num_rounds):
        for name, call in contenders.items():
            times[name].append(seconds(call))
    return times


def alternate(contenders: Mapping[str, Callable[[], object]], num_rounds: int) -> dict[str, float]:
    """Return the median seconds per contender, run in turns so that noise meets all of them."""
    times = take_turns(contenders, num_rounds)
    return {name: statistics.median(each) for name, each in times.items()}


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the bounds of the middle half of ``values``; of a single one, itself twice."""
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def compared(
    bench: str,
    case: str,
    unit: str,
    kvtide: Sequence[float],
    peer: Sequence[float],
    at_least: float | None = None,
) -> Row:
    """Return the row of two contenders, of whom more is better, measured in the same rounds.

    Each round gives a ratio; the row has their median, which a burst of noise in one round leaves
    alone.
    """
    ratios = [ours / theirs for ours, theirs in zip(kvtide, peer, strict=True)]
    ratio = statistics.median(ratios)
    return Row(
        bench,
        case,
        unit,
        statistics.median(kvtide),
        statistics.median(peer),
        ratio,
        None if at_least is None else f">= {at_least:g}",
        None if at_least is None else ratio >= at_least,
        quartiles(ratios),
    )


def times_less(
    bench: str,
    case: str,
    unit: str,
    kvtide: Sequence[float],
    peer: Sequence[float],
    at_least: float | None = None,
) -> Row:
    """Return the row of two contenders, of whom less is better, measured in the same rounds.

    The ratio is again kvtide's figure by the peer's; ``at_least`` 50 bounds it to 1/50.
    """
    row = compared(bench, case, unit, kvtide, peer)
    if at_least is None or row.ratio is None:
        return row
    return replace(row, goal=f"<= 1/{at_least:g}", met=row.ratio <= 1 / at_least)


def left_out(bench: str, reason: str) -> Row:
    """Return the row of a bench that cannot be run here."""
    return Row(bench, f"left out: {reason}", "", None, None, None, None, None)


def report(name: str, rows: Sequence[Row]) -> Path:
    """Print the rows as a table and write them to ``build/bench/<name>.json``."""
    width = max(36, *(len(row.case) for row in rows))
    header = f"{'case':{width}} {'unit':8} {'kvtide':>9} {'peer':>9} {'ratio':>7} {'':15}  goal"
    print(header, "-" * len(header), sep="\n")
    for row in rows:
        kvtide, peer = _number(row.kvtide), _number(row.peer)
        ratio = "" if row.ratio is None else f"{row.ratio:.3g}"
        spread = "" if row.spread is None else f"({row.spread[0]:.2g}..{row.spread[1]:.2g})"
        goal = "" if row.goal is None else f"{row.goal} {'met' if row.met else 'NOT MET'}"
        print(
            f"{row.case:{width}} {row.unit:8} {kvtide:>9} {peer:>9} {ratio:>7} {spread:15}  {goal}"
        )
    OUTPUT.mkdir(parents=True, exist_ok=True)
    path = OUTPUT / f"{name}.json"
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    return path


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def merge() -> Path:
    """Join the rows of all benchmarks in ``build/bench/summary.json`` and tell the goals missed."""
    path = OUTPUT / "summary.json"
    rows: list[dict[str, object]] = []
    for part in sorted(OUTPUT.glob("*.json")):
        if part != path:
            rows += json.loads(part.read_text(encoding="utf-8"))
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    judged = [row for row in rows if row["goal"] is not None]
    print(f"{len(rows)} rows, {len(judged)} with a goal, in {path}")
    for row in rows:
        if row["kvtide"] is None:
            print(f"{row['bench']}: {row['case']}")
    for row in judged:
        if not row["met"]:
            print(f"NOT MET: {row['bench']}, {row['case']}: {row['kvtide']} (goal {row['goal']})")
    return path


if __name__ == "__main__":
    merge()
