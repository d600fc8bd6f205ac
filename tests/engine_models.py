"""Models of every attention kind for the scripted engine: the groups, and how the engine hits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from kvtide.core.groups import ChunkedLocal, FullAttention, Group, Mamba, SlidingWindow
from kvtide.core.topology import ParallelSizes, Split
from kvtide.testing.engine_setup import EngineSetup


@dataclass(frozen=True, slots=True)
class Model:
    """The groups of a model, the unit of hashes, and whether requests may resume inside blocks."""

    groups: tuple[Group, ...]
    hash_block_size: int = 4
    partial_hits: bool = False

    def setup(self, *, retention_units: int | None = None, **how: Any) -> EngineSetup:
        """Return the setup of an engine that runs it; retention in units of saving."""
        unit = math.lcm(*(group.block_size for group in self.groups))
        return EngineSetup(
            groups=self.groups,
            hash_block_size=self.hash_block_size,
            partial_hits=self.partial_hits,
            retention_interval=None if retention_units is None else retention_units * unit,
            **how,
        )


@dataclass(frozen=True, slots=True)
class Division:
    """How a model's groups are divided among ranks: engines of all these ``sizes`` share a pool.

    ``num_shards`` are those of every group. With ``is_token_sharded`` decode-context parallel ranks
    hold different tokens of full attention; with ``is_staged`` a group is on one of two stages.
    """

    sizes: tuple[ParallelSizes, ...] = (ParallelSizes(),)
    num_shards: int = 1
    is_token_sharded: bool = False
    is_staged: bool = False

    def apply(self, setup: EngineSetup, number: int = 0) -> EngineSetup:
        """Return the setup of the engine of that number."""
        splits = tuple(
            Split(
                self.num_shards,
                self.is_token_sharded and group.is_downward_closed,
                (group_id % 2,) if self.is_staged else (),
            )
            for group_id, group in enumerate(setup.groups)
        )
        return replace(setup, sizes=self.sizes[number % len(self.sizes)], splits=splits)


_ONE, _TWO = ParallelSizes(), ParallelSizes(tp_size=2)

DIVISIONS = {
    "one rank": Division(),
    "two shards": Division((_TWO, _ONE), 2),
    "copies": Division((_TWO, _ONE)),
    "more shards than ranks": Division((_ONE, _TWO), 4),
    "more ranks than shards": Division((ParallelSizes(tp_size=4), _TWO), 2),
    "stages": Division((ParallelSizes(pp_size=2), ParallelSizes(tp_size=2, pp_size=2))),
    "a stage without layers": Division((ParallelSizes(pp_size=2),), is_staged=True),
    "tokens": Division((ParallelSizes(tp_size=2, dcp_size=2),), is_token_sharded=True),
    "prefill contexts": Division((ParallelSizes(pcp_size=2), _ONE)),
}
"""The first is the simplest, as in :data:`MODELS`."""

_FULL, _STATE = FullAttention(4), Mamba(8)
_DRAFT = FullAttention(4, proof_tokens=4)

MODELS = {
    "full": Model((_FULL,)),
    "full, two sizes": Model((_FULL, FullAttention(8))),
    "window": Model((_FULL, SlidingWindow(4, window=6))),
    "windows, two sizes": Model(
        (FullAttention(8), SlidingWindow(4, window=5), SlidingWindow(4, window=13))
    ),
    "window alone": Model((SlidingWindow(4, window=9),)),
    "local": Model((_FULL, ChunkedLocal(4, chunk_size=8))),
    "state": Model((_FULL, Mamba(4))),
    "state alone": Model((_STATE,)),
    "window and state": Model((_FULL, SlidingWindow(4, window=6), _STATE)),
    "state, cut blocks": Model((FullAttention(8), _STATE), partial_hits=True),
    "state, two sizes, cut blocks": Model((_FULL, _STATE), hash_block_size=2, partial_hits=True),
    "window and state, cut blocks": Model(
        (FullAttention(8), SlidingWindow(8, window=10), _STATE), partial_hits=True
    ),
    "drafts": Model((_FULL, _DRAFT)),
    "window and drafts": Model((_FULL, SlidingWindow(4, window=6), _DRAFT)),
    "short window and drafts": Model((FullAttention(8), SlidingWindow(4, window=6), _DRAFT)),
    "state and drafts": Model((_FULL, Mamba(4), _DRAFT)),
    "state and drafts, cut blocks": Model(
        (FullAttention(8), _STATE, FullAttention(8, proof_tokens=4)), partial_hits=True
    ),
}
"""The first is the simplest: failing histories shrink to it where they can."""
HYBRIDS = {name: model for name, model in MODELS.items() if not name.startswith("full")}


def best_hit(setup: EngineSetup, num_tokens: int) -> int:
    """Return where a repetition of ``num_tokens`` tokens resumes, if nothing was lost.

    Where retention is sparse, the engine keeps a draft model's windows and states a unit lower than
    a proof would allow.
    """
    own = setup.reusable_state_token(num_tokens, setup.alignment)
    proof = max(group.proof_tokens for group in setup.groups)
    if not proof or any(group.is_state for group in setup.groups):
        return own
    hashed = num_tokens // setup.hash_block_size * setup.hash_block_size
    best = max(0, min(num_tokens - 1, hashed - proof)) // setup.alignment * setup.alignment
    interval = setup.retention_interval
    is_kept = interval is None or (interval and best % interval == 0)
    is_dense = all(group.is_downward_closed for group in setup.groups)
    return best if is_kept or is_dense else own
