"""Plots cost against context, from the rows in build/bench; writes them as Markdown tables, too.

    python benchmarks/plot_costs.py [save_path ...]
    python benchmarks/plot_costs.py --table save_path lookup_cost:keys
    python benchmarks/plot_costs.py --fill docs/performance.md

Rows whose case has a context, such as "at 128k" or "at 128k: worker", become points of a line for
each side, if there are three of them or more. ``--fill`` replaces the table below each line
``<!-- table: save_path -->`` of a page. A name with a measure, ``lookup_cost:keys``, is a table of
what has that measure first, with one line for all measures of a case ("miss: keys", "miss: CPU").
Plots need matplotlib (the extra ``bench``); tables need nothing.
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

import measuring
from measuring import written, written_ratio

_CONTEXT = re.compile(r"(?P<what>.+) at (?P<thousands>\d+)k(?P<measure>: .+)?$")
_PLACE = re.compile(r"^(<!-- table: (\S+) -->)\n(?:\n(?:\|.*\n)+)?", re.MULTILINE)
Rows = Sequence[Mapping[str, Any]]
Points = Mapping[str, Sequence[tuple[int, float, float]]]


def series(rows: Rows) -> dict[str, Points]:
    """Return by unit and name what to plot: ``(tokens of context, kvtide's, the peer's)``."""
    found: dict[str, dict[str, list[tuple[int, float, float]]]] = defaultdict(dict)
    for row in rows:
        match = _CONTEXT.match(row["case"])
        if match and row["kvtide"] is not None and row["peer"] is not None:
            point = (int(match["thousands"]) << 10, row["kvtide"], row["peer"])
            line = match["what"] + (match["measure"] or "")
            found[row["unit"]].setdefault(line, []).append(point)
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
            panel.plot(contexts, theirs, f"C1--{marker}", label=f"{name}: peer")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(contexts, [f"{context >> 10}k" for context in contexts])
        panel.set_xlabel("tokens of context")
        panel.set_ylabel(unit)
        panel.grid(visible=True, alpha=0.3)
        panel.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def table(rows: Rows) -> str:
    """Return the rows as a Markdown table."""
    lines = [["case", "unit", "kvtide", "peer", "ratio", "spread", "goal", "met"]]
    for row in rows:
        figures = map(written, (row["kvtide"], row["peer"]))
        ratio = written_ratio(row["ratio"], row["spread"])
        met = {None: "", True: "yes", False: "no"}[row["met"]]
        lines.append([row["case"], row["unit"], *figures, *ratio, row["goal"] or "", met])
    return _markdown(lines)


def joined(rows: Rows, first: str) -> str:
    """Return a Markdown table of what has the measure ``first`` first, a line for each case.

    A cell is "kvtide : peer"; the ratio is that of the last measure whose rounds tell a spread.
    """
    cases: dict[str, dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for row in rows:
        case, _, measure = row["case"].rpartition(": ")
        cases[case][measure] = row
    chosen = {case: each for case, each in cases.items() if next(iter(each)) == first}
    if not chosen:
        raise SystemExit(f"no case has the measure {first!r} first")
    measures = next(iter(chosen.values()))
    spread = [measure for measure, row in measures.items() if row["spread"]][-1:]
    has_goals = any(row["goal"] for each in chosen.values() for row in each.values())
    lines = [["case", *(_titled(measure, row["unit"]) for measure, row in measures.items())]]
    lines[0] += [text for measure in spread for text in (f"ratio of {measure}", "spread")]
    lines[0] += ["goals"] * has_goals
    for case, each in chosen.items():
        cells = [case, *map(_both, each.values())]
        for measure in spread:
            cells += written_ratio(each[measure]["ratio"], each[measure]["spread"])
        goals = [_judged(measure, row) for measure, row in each.items() if row["goal"]]
        lines.append(cells + [", ".join(goals)] * has_goals)
    return _markdown(lines)


def _titled(measure: str, unit: str) -> str:
    return measure if unit == measure else f"{measure}, {unit}"


def _both(row: Mapping[str, Any]) -> str:
    figures = (row["kvtide"], row["peer"])
    return " : ".join(written(figure) for figure in figures if figure is not None)


def _judged(measure: str, row: Mapping[str, Any]) -> str:
    return f"{measure} {row['goal']}" + ("" if row["met"] else " (missed)")


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    head, *rest = ["| " + " | ".join(cells) + " |" for cells in lines]
    return "\n".join([head, "|" + "---|" * len(lines[0]), *rest])


def table_of(name: str) -> str:
    """Return the table of a bench, or of one of its measures: ``lookup_cost:keys``."""
    bench, _, measure = name.partition(":")
    rows = json.loads((measuring.OUTPUT / f"{bench}.json").read_text(encoding="utf-8"))
    return joined(rows, measure.replace("_", " ")) if measure else table(rows)


def filled(page: str) -> str:
    """Return the page with the tables of all benches that have run here."""

    def fill(match: re.Match[str]) -> str:
        has_run = (measuring.OUTPUT / f"{match[2].partition(':')[0]}.json").exists()
        return f"{match[1]}\n\n{table_of(match[2])}\n" if has_run else match[0]

    return _PLACE.sub(fill, page)


def draw(name: str) -> None:
    """Plot a bench, if it has something to plot."""
    lines = series(json.loads((measuring.OUTPUT / f"{name}.json").read_text(encoding="utf-8")))
    if lines and find_spec("matplotlib") is None:
        print(f"{name} is not plotted: matplotlib is not installed (the extra bench)")
    elif lines:
        path = measuring.OUTPUT / f"{name}.png"
        plot(lines, path)
        print(f"written: {path}")


def main() -> None:
    """Plot one bench, or all that have something to plot; or write tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bench", nargs="*", help="names of JSON files in build/bench")
    parser.add_argument("--table", action="store_true", help="print the rows, plot nothing")
    parser.add_argument("--fill", type=Path, help="a page whose tables are written anew")
    options = parser.parse_args()
    if options.fill:
        options.fill.write_text(filled(options.fill.read_text(encoding="utf-8")), encoding="utf-8")
        return
    all_paths = sorted(measuring.OUTPUT.glob("*.json"))
    all_names = [path.stem for path in all_paths if path.stem != "summary"]
    for name in options.bench or all_names:
        if options.table:
            print(table_of(name))
        else:
            draw(name)


if __name__ == "__main__":
    main()
