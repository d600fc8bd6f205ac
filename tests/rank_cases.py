"""Engines of many ranks for the scripted engine: every combination that vLLM itself accepts."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from kvtide.core.groups import ChunkedLocal, FullAttention, Group, Mamba, SlidingWindow
from kvtide.core.topology import ParallelSizes, Split
from kvtide.testing.engine import ScriptedEngine
from kvtide.testing.engine_attention import first_needed_token
from kvtide.testing.engine_requests import EngineRequest
from kvtide.testing.engine_setup import EngineSetup

BLOCK = 4
_ONE_EACH = 8
"""As many heads as the largest engine has ranks: no rank has a copy. So it is with states."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of model: its groups, and the key-value heads of each (MLA: one)."""

    groups: tuple[Group, ...]
    num_heads: tuple[int, ...]

    def accepts(self, tp_size: int, dcp_size: int) -> bool:
        """Tell whether vLLM runs it with decode-context parallelism (size 1: without)."""
        if dcp_size == 1:
            return True
        is_plain = all(group.is_downward_closed for group in self.groups)
        max_dcp_size = min(tp_size // num_heads for num_heads in self.num_heads)
        return is_plain and tp_size % dcp_size == 0 and dcp_size <= max_dcp_size


KINDS = {
    "heads": Kind((FullAttention(BLOCK),), (_ONE_EACH,)),
    "grouped heads": Kind((FullAttention(BLOCK),), (2,)),
    "latent": Kind((FullAttention(BLOCK), FullAttention(2 * BLOCK)), (1, 1)),
    "window": Kind((FullAttention(BLOCK), SlidingWindow(BLOCK, window=6)), (2, 2)),
    "local": Kind((FullAttention(BLOCK), ChunkedLocal(BLOCK, chunk_size=8)), (2, _ONE_EACH)),
    "state": Kind((FullAttention(BLOCK), Mamba(BLOCK)), (2, _ONE_EACH)),
}


@dataclass(frozen=True, slots=True)
class Case:
    """An engine's ranks and its kind of model."""

    kind: str
    sizes: ParallelSizes

    def __str__(self) -> str:
        sizes = self.sizes
        axes = {"tp": sizes.tp_size, "pp": sizes.pp_size, "pcp": sizes.pcp_size}
        axes["dcp"] = sizes.dcp_size
        return "-".join([self.kind, *(f"{name}{size}" for name, size in axes.items() if size > 1)])

    @property
    def splits(self) -> tuple[Split, ...]:
        """How each group is divided: as many shards as heads, at most one for each rank."""
        tp_size, is_token_sharded = self.sizes.tp_size, self.sizes.dcp_size > 1
        heads = KINDS[self.kind].num_heads
        return tuple(Split(min(num_heads, tp_size), is_token_sharded) for num_heads in heads)

    @property
    def has_copies(self) -> bool:
        """Whether some ranks hold the same bytes of a group."""
        ranks = self.sizes.tp_size * self.sizes.pcp_size
        return any(split.num_shards * self.sizes.dcp_size < ranks for split in self.splits)

    def setup(self, **how: Any) -> EngineSetup:
        """Return the setup of such an engine."""
        return EngineSetup(
            groups=KINDS[self.kind].groups, sizes=self.sizes, splits=self.splits, **how
        )


CASES = [
    Case(name, ParallelSizes(tp_size, pp_size, dcp_size=dcp_size))
    for name, kind in KINDS.items()
    for tp_size, pp_size, dcp_size in itertools.product((1, 2, 4, 8), (1, 2), (1, 2, 4))
    if kind.accepts(tp_size, dcp_size)
]
"""Every combination."""
PCP_CASES = [
    Case("heads", ParallelSizes(2, pcp_size=2)),
    Case("latent", ParallelSizes(2, 2, pcp_size=2)),
    Case("latent", ParallelSizes(2, pcp_size=2, dcp_size=4)),
    Case("grouped heads", ParallelSizes(4, pcp_size=2, dcp_size=2)),
]
"""And some with prefill-context parallel ranks, which have copies or other tokens."""
WITH_COPIES = [case for case in (*CASES, *PCP_CASES) if case.has_copies]
"""Those in which some ranks hold the same bytes of a group."""


def longest_hit(engine: ScriptedEngine, request: EngineRequest, present: set[str]) -> int:
    """Where a prompt may resume at most, by brute force: every part of every chunk is there."""
    setup, databases = engine.setup, engine.databases()
    last = (len(request.prompt) - 1) // setup.alignment * setup.alignment
    for boundary in range(last, 0, -setup.alignment):
        needed = [
            database.key_for(request.block_hashes[(chunk + 1) * size // setup.hash_block_size - 1])
            for group, parts in zip(setup.groups, databases, strict=True)
            for size in [group.block_size]
            for chunk in range(first_needed_token(group, boundary) // size, -(-boundary // size))
            for database in parts
        ]
        if present.issuperset(needed):
            return boundary
    return 0
