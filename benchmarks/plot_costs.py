"""Plots cost against context, from the rows in build/bench; prints them as a Markdown table, too.

    python benchmarks/plot_costs.py save_path [--table]

Rows whose case ends in a context, such as "at 128k", become points of a line for each side, if
there are three of them or more. Needs matplotlib (the extra ``bench``); the table needs nothing.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from measuring import OUTPUT

_CONTEXT = re.compile(r"(?P<what>.+) at (?P<thousands>\d+)k$")
Points = Mapping[str, Sequence[tuple[int, float, float]]]


def series(rows: Sequence[Mapping[str, Any]]) -> dict[str, Points]:
    """Return by unit and name what to plot: ``(tokens of context, kvtide's, the peer's)``."""
    found: dict[str, dict[str, list[tuple[int, float, float]]]] = defaultdict(dict)
    for row in rows:
        match = _CONTEXT.match(row["case"])
        if match and row["kvtide"] is not None and row["peer"] is not None:
            point = (int(match["thousands"]) << 10, row["kvtide"], row["peer"])
            found[row["unit"]].setdefault(match["what"], []).append(point)
    lines = {
        unit: {name: sorted(points) for name, points in each.items() if len(points) >= 3}
        for unit, each in found.items()
    }
    return {unit: each for unit, each in lines.items() if each}


def plot(lines: Mapping[str, Points], path: Path) -> None:
    """Draw one panel for each unit, both axes logarithmic, and write it as PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(lines), figsize=(5.5 * len(lines), 4), squeeze=False)
    for panel, (unit, each) in zip(panels[0], lines.items(), strict=True):
        for number, (name, points) in enumerate(each.items()):
            contexts, ours, theirs = zip(*points, strict=True)
            marker = "os^vD"[number % 5]
            panel.plot(contexts, ours, f"C0-{marker}", label=f"{name}: kvtide")
            panel.plot(contexts, theirs, f"C1--{marker}", label=f"{name}: in-tree")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(contexts, [f"{context >> 10}k" for context in contexts])
        panel.set_xlabel("tokens of context")
        panel.set_ylabel(unit)
        panel.grid(visible=True, alpha=0.3)
        panel.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| case | unit | kvtide | peer | ratio | spread | goal | met |", "|" + "---|" * 8]
    for row in rows:
        spread = "" if row["spread"] is None else "{:.1f} to {:.1f}".format(*row["spread"])
        met = "" if row["met"] is None else ("yes" if row["met"] else "no")
        cells = [row["case"], row["unit"], *map(_number, (row["kvtide"], row["peer"]))]
        lines.append(
            "| "
            + " | ".join([*cells, _number(row["ratio"]), spread, row["goal"] or "", met])
            + " |"
        )
    return "\n".join(lines)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def main() -> None:
    """Plot one bench, or all that have something to plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bench", nargs="*", help="names of JSON files in build/bench")
    parser.add_argument("--table", action="store_true", help="print the rows, plot nothing")
    options = parser.parse_args()
    names = options.bench or [path.stem for path in sorted(OUTPUT.glob("*.json"))]
    for name in names:
        if name == "summary":
            continue
        rows = json.loads((OUTPUT / f"{name}.json").read_text(encoding="utf-8"))
        if options.table:
            print(table(rows))
        elif lines := series(rows):
            if find_spec("matplotlib") is None:
                print(f"{name} is not plotted: matplotlib is not installed (the extra bench)")
                continue
            path = OUTPUT / f"{name}.png"
            plot(lines, path)
            print(f"written: {path}")


if __name__ == "__main__":
    main()
