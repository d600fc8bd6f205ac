"""What the scripted engine's own prefix cache holds of a request: the longest joint hit.

By brute force, boundary after boundary, from what a token may read: not by the pool's search.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvtide.core.jobs import NULL_BLOCK_ID
from kvtide.testing.engine_attention import first_needed_token
from kvtide.testing.engine_blocks import EngineBlockPool
from kvtide.testing.engine_setup import EngineSetup


class LocalHit(NamedTuple):
    """``tables[g]`` begins the block table of group ``g``, null where nothing is needed."""

    num_tokens: int
    tables: list[list[int]]


class LocalCache:
    """Finds hits in the engine's blocks."""

    def __init__(self, setup: EngineSetup, pool: EngineBlockPool) -> None:
        self._setup = setup
        self._pool = pool
        self._unit = setup.hash_block_size

    def find(self, num_tokens: int, hashes: Sequence[bytes]) -> LocalHit:
        """Return the longest hit of a request that must compute its last token."""
        return self._below(num_tokens - 1, hashes)

    def guess(self, num_tokens: int, hashes: Sequence[bytes]) -> int:
        """Guess the length of the hit by bisection in the groups that keep all, as connectors do.

        Blocks may be missing in the middle, so it may be too long.
        """
        limit = num_tokens - 1
        for group_id, group in enumerate(self._setup.groups):
            if not group.is_downward_closed:
                continue
            low, high = 0, limit // group.block_size
            while low < high:
                middle = (low + high) // 2
                if self._find(group_id, (middle + 1) * group.block_size, hashes) is None:
                    high = middle
                else:
                    low = middle + 1
            limit = min(limit, low * group.block_size)
        alignment = self._setup.alignment
        others = [i for i, group in enumerate(self._setup.groups) if not group.is_downward_closed]
        for hit in range(limit // alignment * alignment, 0, -alignment):
            if all(self._blocks(group_id, hit, hashes) is not None for group_id in others):
                return hit
        return 0

    def _below(self, limit: int, hashes: Sequence[bytes]) -> LocalHit:
        groups, alignment = self._setup.groups, self._setup.alignment
        for group_id, group in enumerate(groups):
            if group.is_downward_closed:
                limit = min(limit, self._bound(group_id, limit, hashes))
        for hit in range(limit // alignment * alignment, 0, -alignment):
            tables = [self._blocks(group_id, hit, hashes) for group_id in range(len(groups))]
            found = [table for table in tables if table is not None]
            if len(found) == len(groups):
                return LocalHit(hit, found)
        return LocalHit(0, [[] for _ in groups])

    def _bound(self, group_id: int, limit: int, hashes: Sequence[bytes]) -> int:
        """Return a length that a group without gaps cannot exceed."""
        size = self._setup.groups[group_id].block_size
        chunk = 0
        while chunk * size < limit and self._find(group_id, (chunk + 1) * size, hashes) is not None:
            chunk += 1
        return (chunk + self._setup.partial_hits) * size

    def _blocks(self, group_id: int, hit: int, hashes: Sequence[bytes]) -> list[int] | None:
        """Return a group's table for a hit, ``None`` if a block or the proof is missing."""
        group = self._setup.groups[group_id]
        size, end_token = group.block_size, hit + group.proof_tokens
        if end_token > len(hashes) * self._unit:
            return None
        first = first_needed_token(group, hit) // size
        table = [NULL_BLOCK_ID] * first
        for chunk in range(first, -(-end_token // size)):
            # A state, and a block that the request goes on to fill, are copied: they must be there.
            is_copied = group.is_state or chunk * size < hit < (chunk + 1) * size
            at = min((chunk + 1) * size, end_token)
            last = at if group.is_state else (chunk + 1) * size
            ends = range(at, last + 1, self._unit)
            ids = [self._find(group_id, end, hashes, may_be_fresh=not is_copied) for end in ends]
            block_id = next((found for found in ids if found is not None), None)
            if block_id is None:
                return None
            table.append(block_id)
        return table[: -(-hit // size)]

    def _find(
        self, group_id: int, end_token: int, hashes: Sequence[bytes], *, may_be_fresh: bool = True
    ) -> int | None:
        """Return a block that the hash at ``end_token`` names."""
        number = end_token // self._unit - 1
        if number >= len(hashes):
            return None
        if not may_be_fresh and (group_id, hashes[number]) in self._pool.fresh:
            return None
        return self._pool.find(group_id, hashes[number])
