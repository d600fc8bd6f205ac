"""The table of the families of models that kvtide was run with: ``make families``.

usage: python -m tests.engines.vllm.families_table [MODEL ...]

Ends with 1 where a row says no.
"""

from __future__ import annotations

import os
import sys
import tempfile
from itertools import groupby
from pathlib import Path

from tests.engines.vllm.environment import ENVIRONMENT
from tests.engines.vllm.families import BY_MODEL

os.environ.update(ENVIRONMENT)

from tests.engines.vllm.family_runs import Evidence, gather
from tests.engines.vllm.pools import local_pool

_COLUMNS = [
    ("model", 12),
    ("groups, tokens per block", 36),
    ("prompt", 6),
    ("loaded", 6),
    ("part", 5),
    ("turn", 5),
    ("tokens", 6),
    ("bytes", 9),
    ("zeros", 5),
    ("s", 3),
]
_LEGEND = """\
prompt, loaded  tokens of the prompt, and of them loaded from the pool by a fresh process
part, turn      tokens loaded of a prompt that shares the first 400, and of the next turn
tokens          plain, cold and warm engine generate the same 40 tokens after each of the prompts
bytes           so many chunks were loaded, each with the bytes that the cold engine computed
zeros           with zeros for the loaded values of any one kind of group other tokens follow
s               seconds for all engines of the row"""


def verdicts(seen: Evidence) -> dict[str, bool]:
    """What a row says yes or no to."""
    family, plain, cold, warm = seen.family, seen.plain, seen.cold, seen.warm
    right = plain.first[family.num_decoded :]
    want = {"again": right, "partial": plain.partial, "turn": plain.turn}
    return {
        "tokens": cold.tokens == plain.first and warm.tokens == want,
        "bytes": all(
            cold.in_blocks[place] == cold.in_pool[place] == warm.in_blocks.get(place)
            for place in family.loaded_places
        ),
        "zeros": all(tokens != right for tokens in warm.controls.values()),
    }


def row(seen: Evidence) -> list[str]:
    """The cells of a family."""
    family, warm = seen.family, seen.warm
    says = {name: "yes" if verdict else "NO" for name, verdict in verdicts(seen).items()}
    groups = [f"{len(list(same))} x {spec}" for spec, same in groupby(seen.plain.specs)]
    return [
        family.model,
        ", ".join(groups),
        str(family.num_prompt_tokens + family.num_decoded),
        str(warm.loaded_tokens),
        str(warm.hits["partial"]),
        str(warm.hits["turn"]),
        says["tokens"],
        f"{warm.loaded_chunks} {says['bytes']}",
        says["zeros"],
        f"{seen.seconds:.0f}",
    ]


def say(cells: list[str]) -> None:
    """Print a row."""
    widths = [width for _, width in _COLUMNS]
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
    print("  ".join(padded).rstrip(), flush=True)  # noqa: T201


def main(models: list[str]) -> int:
    """Print a row for each model."""
    is_good = True
    say([name for name, _ in _COLUMNS])
    with tempfile.TemporaryDirectory(prefix="kvtide-models-") as folder:
        for model in models or BY_MODEL:
            with local_pool() as url:
                seen = gather(BY_MODEL[model], Path(folder), url)
            say(row(seen))
            is_good = is_good and all(verdicts(seen).values())
    print(_LEGEND)  # noqa: T201
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
