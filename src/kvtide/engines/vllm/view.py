"""vLLM's request as the core sees it: read in ranges, never copied whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvtide.core.jobs import NULL_BLOCK_ID


@dataclass(frozen=True, slots=True)
class EngineTables:
    """vLLM's cache manager, and how the core's groups map to its own.

    ``group_ids[i]`` is the engine's number of the core's group ``i``; ``hash_block_size`` is in
    tokens.
    """

    manager: Any
    group_ids: tuple[int, ...]
    hash_block_size: int

    def block(self, block_id: int) -> Any:
        """Return vLLM's ``KVCacheBlock`` of an id."""
        return self.manager.block_pool.blocks[block_id]

    def pin(self, block_ids: Sequence[int]) -> None:
        """Take a reference to each block, so that vLLM gives none of them to anybody else."""
        self.manager.block_pool.touch([self.block(block_id) for block_id in block_ids])

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Give the references back; blocks are evicted in the order given."""
        self.manager.block_pool.free_blocks([self.block(block_id) for block_id in block_ids])


class VllmRequestView:
    """Implements :class:`kvtide.core.transfer.RequestView` on a live ``vllm.v1.request.Request``.

    Nothing is cached: vLLM truncates the hashes of streaming sessions and replaces the block
    tables of resumed requests.
    """

    __slots__ = ("_tables", "request")

    def __init__(self, request: Any, tables: EngineTables) -> None:
        self.request = request
        self._tables = tables

    @property
    def request_id(self) -> str:
        """VLLM's id of the request."""
        return str(self.request.request_id)

    @property
    def num_tokens(self) -> int:
        """Prompt tokens and accepted output tokens."""
        return int(self.request.num_tokens)

    @property
    def num_hashes(self) -> int:
        """How many full hash blocks vLLM has hashed."""
        return len(self.request.block_hashes)

    def hashes(self, first: int, end: int) -> Sequence[bytes]:
        """Return the hashes ``[first, end)``."""
        hashes: Sequence[bytes] = self.request.block_hashes[first:end]
        return hashes

    def block_ids(self, group_id: int, first_chunk: int, end_chunk: int) -> Sequence[int]:
        """Return a part of a group's block table; costs the part, not the table."""
        return [block.block_id for block in self._blocks(group_id)[first_chunk:end_chunk]]

    def _blocks(self, group_id: int) -> Sequence[Any]:
        blocks: Sequence[Any] = self._tables.manager.get_blocks(self.request_id).blocks[
            self._tables.group_ids[group_id]
        ]
        return blocks

    def target_ids(self, group_id: int, first_chunk: int, end_chunk: int) -> Sequence[int]:
        """Return a part of a group's block table, with null for blocks that are cached already.

        What has a hash may be found by other requests, and so be read while it is written.
        """
        return [
            NULL_BLOCK_ID if block.block_hash is not None else block.block_id
            for block in self._blocks(group_id)[first_chunk:end_chunk]
        ]

    def local_hit_hint(self) -> int:
        """Guess the local hit by bisection over vLLM's prefix cache, about log2(chunks) probes.

        Blocks are evicted from the end of a chain, so presence is nearly downward closed; where
        it is not, the guess is wrong and a second lookup covers the gap.
        """
        pool, hashes = self._tables.manager.block_pool, self.request.block_hashes
        group_ids = list(self._tables.group_ids)
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high) // 2
            if pool.get_cached_block(hashes[middle], group_ids) is None:
                high = middle
            else:
                low = middle + 1
        return low * self._tables.hash_block_size
