"""What the benchmarks share: alternating rounds, medians, a table, and rows in build/bench."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

OUTPUT = Path(__file__).resolve().parents[1] / "build" / "bench"


@dataclass(frozen=True, slots=True)
class Row:
    """One result: ``peer`` is what it is compared with, ``goal`` bounds ``ratio`` or ``kvtide``."""

    bench: str
    case: str
    unit: str
    kvtide: float
    peer: float | None
    ratio: float | None
    goal: str | None
    met: bool | None


def seconds(call: Callable[[], object]) -> float:
    """Return how long one call took, in seconds."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def alternate(contenders: Mapping[str, Callable[[], object]], num_rounds: int) -> dict[str, float]:
    """Return the median seconds per contender, run in turns so that noise meets all of them."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(num_rounds):
        for name, call in contenders.items():
            times[name].append(seconds(call))
    return {name: statistics.median(each) for name, each in times.items()}


def report(name: str, rows: Sequence[Row]) -> Path:
    """Print the rows as a table and write them to ``build/bench/<name>.json``."""
    width = max(36, *(len(row.case) for row in rows))
    header = f"{'case':{width}} {'unit':8} {'kvtide':>9} {'peer':>9} {'ratio':>6}  goal"
    print(header, "-" * len(header), sep="\n")
    for row in rows:
        peer = "" if row.peer is None else f"{row.peer:.3f}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        goal = "" if row.goal is None else f"{row.goal} {'met' if row.met else 'NOT MET'}"
        print(f"{row.case:{width}} {row.unit:8} {row.kvtide:9.3f} {peer:>9} {ratio:>6}  {goal}")
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
    for row in judged:
        if not row["met"]:
            print(f"NOT MET: {row['bench']}, {row['case']}: {row['kvtide']} (goal {row['goal']})")
    return path


if __name__ == "__main__":
    merge()
