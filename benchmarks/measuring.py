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

    ``ratio`` is kvtide's figure by the peer's, in every row: of speeds 10 is ten times as fast, of
    costs 1/50 fifty times less. ``spread``, where the rounds tell one, has the quartiles of the
    ratio, or of kvtide's figure where there is no ratio. A row without a result is of a bench that
    was left out; its case says why.
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


def cpu_s(call: Callable[[], object]) -> float:
    """Return the CPU seconds of this thread that a call took."""
    start = time.thread_time()
    call()
    return time.thread_time() - start


def context_name(num_tokens: int) -> str:
    """Return a length of contexts as people write it, such as 128k."""
    return f"{num_tokens >> 10}k"


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

    A goal of ``at_least`` 50 times less bounds the ratio to 1/50.
    """
    row = compared(bench, case, unit, kvtide, peer)
    if at_least is None or row.ratio is None:
        return row
    return replace(row, goal=f"<= 1/{at_least:g}", met=row.ratio <= 1 / at_least)


def figure(bench: str, case: str, unit: str, kvtide: float, peer: float | None = None) -> Row:
    """Return the row of a figure without a goal."""
    return Row(bench, case, unit, kvtide, peer, kvtide / peer if peer else None, None, None)


def at_most(
    bench: str,
    case: str,
    unit: str,
    kvtide: float,
    bound: float,
    *,
    peer: float | None = None,
    goal: str | None = None,
) -> Row:
    """Return the row of a figure of kvtide's that is bounded; ``goal`` words it otherwise."""
    row = figure(bench, case, unit, kvtide, peer)
    return replace(row, goal=goal or f"<= {bound:,g}", met=kvtide <= bound)


def written(value: float | None) -> str:
    """Return a number with three significant digits, of large ones all in front of the point."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def written_ratio(ratio: float | None, spread: Sequence[float] | None = None) -> tuple[str, str]:
    """Return a ratio and its spread: 1/50 where it is less than 1/2."""
    if ratio is None:
        return "", "" if spread is None else " to ".join(map(written, spread))
    if 0 < ratio < 0.5 and all(value > 0 for value in spread or ()):
        ends = [f"1/{written(1 / value)}" for value in reversed(spread or ())]
        return f"1/{written(1 / ratio)}", " to ".join(ends)
    return written(ratio), " to ".join(map(written, spread or ()))


def left_out(bench: str, reason: str) -> Row:
    """Return the row of a bench that cannot be run here."""
    return Row(bench, f"left out: {reason}", "", None, None, None, None, None)


def report(name: str, rows: Sequence[Row]) -> Path:
    """Print the rows as a table and write them to ``build/bench/<name>.json``."""
    width = max(36, *(len(row.case) for row in rows))
    header = f"{'case':{width}} {'unit':8} {'kvtide':>9} {'peer':>9} {'ratio':>7} {'':18}  goal"
    print(header, "-" * len(header), sep="\n")
    for row in rows:
        ratio, spread = written_ratio(row.ratio, row.spread)
        goal = "" if row.goal is None else f"{row.goal} {'met' if row.met else 'NOT MET'}"
        print(
            f"{row.case:{width}} {row.unit:8} {written(row.kvtide):>9} {written(row.peer):>9} "
            f"{ratio:>7} {spread and f'({spread})':18}  {goal}"
        )
    OUTPUT.mkdir(parents=True, exist_ok=True)
    path = OUTPUT / f"{name}.json"
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    return path


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
