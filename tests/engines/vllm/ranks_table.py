"""The table of engines of several ranks that kvtide was run with: ``make ranks``.

usage: python -m tests.engines.vllm.ranks_table [--starts N] [CASE ...]

Ends with 1 where a row says no.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.engines.vllm.environment import ENVIRONMENT

os.environ.update(ENVIRONMENT)

from tests.engines.vllm.ranks_cases import cases
from tests.engines.vllm.ranks_lab import Lab, Row, VllmCannotError

_COLUMNS = [
    ("engines", 20),
    ("model", 14),
    ("store", 8),
    ("loaded", 8),
    ("tokens", 6),
    ("parts", 30),
    ("KiB by rank", 15),
    ("zeros", 5),
    ("s", 4),
    ("note", 0),
]
_LEGEND = """\
engines  who runs; "A -> B": A stores, B loads; in-tree: vLLM's own Mooncake connector
loaded   tokens of the prompt that the last engine took from the pool instead of computing them
tokens   engines without kvtide, with an empty pool and with a full one generate the same tokens
parts    keys in the pool of each part (ranks that hold the same bytes have one), by group; all were
         written once
KiB      what each rank wrote; together it is what one rank writes, and ranks of one part take turns
zeros    with zeros for the loaded values other tokens follow
s        seconds for all engines of the case"""


def cells(row: Row, seconds: str) -> list[str]:
    """The cells of a row."""

    def says(name: str, seen: str = "") -> str:
        verdict = {True: "yes", False: "NO", None: ""}[row.verdicts.get(name)]
        return f"{seen} {verdict}".strip()

    return [
        row.engines,
        row.model,
        row.store,
        says("loaded", row.loaded),
        says("tokens"),
        says("parts", row.parts),
        says("bytes", row.saved),
        says("zeros"),
        seconds,
        says("note", row.note),
    ]


def say(line: Sequence[str]) -> None:
    """Print a row."""
    widths = [width for _, width in _COLUMNS]
    padded = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
    print("  ".join(padded).rstrip(), flush=True)  # noqa: T201


def run_case(lab: Lab, name: str, num_starts: int) -> bool:
    """Print the rows of a case; tell whether they say yes."""
    begun_s = time.monotonic()
    try:
        rows = list(cases(num_starts)[name](lab))
    except VllmCannotError as error:
        rows = [Row(name, "", "", note=f"vLLM cannot, without kvtide: {error}")]
    except AssertionError as error:
        rows = [Row(name, "", "", verdicts={"note": False}, note=str(error))]
    seconds = [""] * (len(rows) - 1) + [f"{time.monotonic() - begun_s:.0f}"]
    for row, cell in zip(rows, seconds, strict=True):
        say(cells(row, cell))
    return all(verdict for row in rows for verdict in row.verdicts.values())


def main(arguments: Sequence[str]) -> int:
    """Print the rows of each case."""
    parser = argparse.ArgumentParser(prog="ranks_table")
    parser.add_argument("--starts", type=int, default=2, help="of data parallel engines")
    parser.add_argument("names", nargs="*", metavar="CASE", help="default: all")
    options = parser.parse_args(arguments)
    say([name for name, _ in _COLUMNS])
    with (
        tempfile.TemporaryDirectory(prefix="kvtide-models-") as folder,
        Lab(Path(folder)) as lab,
    ):
        names = options.names or cases(options.starts)
        verdicts = [run_case(lab, name, options.starts) for name in names]
    print(_LEGEND)  # noqa: T201
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
