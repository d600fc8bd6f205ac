"""vLLM's request as the core sees it: read in ranges, never copied whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvtide.core.coordinator import Coordinator
from kvtide.core.jobs import NULL_BLOCK_ID
from kvtide.core.search import Ask, Found, SearchRange, search
from kvtide.core.transfer import HandOff

MAX_HINT_PROBES = 256
"""A hint costs the engine's thread so many look-ups in its own cache, beside a bisection."""
_SHORT_RUN = 16
"""A run of more blocks than this is bisected: it seldom has holes."""


@dataclass(frozen=True, slots=True)
class EngineTables:
    """vLLM's cache manager, and how the core's groups map to its own.

    ``group_ids[i]`` is the engine's number of the core's group ``i``.
    """

    manager: Any
    group_ids: tuple[int, ...]
    coordinator: Coordinator

    def pin(self, block_ids: Sequence[int]) -> None:
        """Take a reference to each block, so that vLLM gives none of them to anybody else."""
        pool = self.manager.block_pool
        pool.touch(list(map(pool.blocks.__getitem__, block_ids)))

    @property
    def is_in_use(self) -> bool:
        """Whether requests or jobs hold blocks: vLLM empties its prefix cache only if none does."""
        pool = self.manager.block_pool
        num_null = 1
        return bool(pool.num_gpu_blocks - pool.get_num_free_blocks() != num_null)

    def hand_offs(self, offers: Sequence[tuple[int, int, int]]) -> list[HandOff]:
        """Return vLLM's ``(group, block, boundary)`` offers of states in the core's words."""
        states = {
            self.group_ids[number]: number
            for number, group in enumerate(self.coordinator.groups)
            if group.is_state
        }
        return [
            HandOff(states[group_id], block_id, boundary)
            for group_id, block_id, boundary in offers
            if group_id in states
        ]

    def find_cached(self, group_id: int) -> Callable[[bytes], object]:
        """Return what finds a block of the core's group ``group_id`` in vLLM's own prefix cache.

        By the block's hash; ``None`` where vLLM does not hold it.
        """
        group_ids = [self.group_ids[group_id]]
        get: Callable[[bytes, list[int]], object] = self.manager.block_pool.get_cached_block
        return lambda block_hash: get(block_hash, group_ids)

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Give the references back; blocks are evicted in the order given."""
        pool = self.manager.block_pool
        pool.free_blocks(map(pool.blocks.__getitem__, block_ids))


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
    def num_prompt_tokens(self) -> int:
        """The tokens the request came with."""
        return int(self.request.num_prompt_tokens)

    @property
    def shared_token(self) -> int:
        """What vLLM keeps a boundary for, because requests that begin alike part there."""
        return int(getattr(self.request, "shared_prefix_boundary", 0))

    @property
    def num_hashes(self) -> int:
        """How many full hash blocks vLLM has hashed."""
        return len(self.request.block_hashes)

    @property
    def hash_list(self) -> Sequence[bytes]:
        """VLLM's own list, which it appends to."""
        hashes: Sequence[bytes] = self.request.block_hashes
        return hashes

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
        """Guess the local hit, with a bounded number of probes of vLLM's prefix cache.

        Where it is wrong, a second lookup covers the gap.
        """
        coordinator = self._tables.coordinator
        covered = self._covered_hint()
        if coordinator.may_shorten or not covered:
            return max(0, covered - coordinator.max_proof_tokens)
        end_token = min(covered, max(0, self.num_tokens - 1))
        where = SearchRange(0, end_token, self.num_hashes)
        steps = search(coordinator.boundaries, where, covered_token=covered)
        num_left = MAX_HINT_PROBES
        try:
            ask = next(steps)
            while True:
                probed, answers = self._probe(ask, num_left)
                num_left -= probed
                ask = steps.send(answers)
        except StopIteration as stop:
            found: Found = stop.value
            return found.hit_token

    def _covered_hint(self) -> int:
        """Guess how far the groups reach whose blocks are all kept, by bisection: log2 probes.

        Blocks are evicted from the end of a chain, so presence is nearly downward closed.
        """
        coordinator = self._tables.coordinator
        unit = coordinator.hash_block_size
        covered = self.num_hashes * unit
        for group_id, group in enumerate(coordinator.groups):
            if group.is_downward_closed:
                ratio = group.block_size // unit
                names = range(ratio - 1, covered // unit, ratio)
                covered = self._num_cached(group_id, names) * group.block_size
        return covered

    def _num_cached(self, group_id: int, names: Sequence[int]) -> int:
        """Guess how many blocks of a run vLLM holds before the first that it does not."""
        hashes, find = self.request.block_hashes, self._tables.find_cached(group_id)
        if not names or find(hashes[names[0]]) is None:
            return 0  # the usual case of a new prompt costs one probe
        low, high = 1, len(names)
        while low < high:
            middle = (low + high) // 2
            if find(hashes[names[middle]]) is not None:
                low = middle + 1
            else:
                high = middle
        return low

    def _probe(self, ask: Ask, num_left: int) -> tuple[int, list[bool]]:
        """Answer a question of the search from vLLM's own prefix cache, and say at what cost.

        What is not probed for want of budget counts as absent: the hint is too low then.
        """
        hashes, names = self.request.block_hashes, ask.hash_indexes
        group = self._tables.coordinator.groups[ask.group_id]
        is_run = not group.is_state and len(names) > _SHORT_RUN and names[0] < names[-1]
        if is_run:
            num_cached = self._num_cached(ask.group_id, names)
            return len(names).bit_length(), [i < num_cached for i in range(len(names))]
        # Of states the last is the best, of others the first asked.
        probed = names[max(0, len(names) - num_left) :] if group.is_state else names[:num_left]
        find = self._tables.find_cached(ask.group_id)
        answers = [find(hashes[name]) is not None for name in probed]
        unprobed = [False] * (len(names) - len(probed))
        return len(probed), unprobed + answers if group.is_state else answers + unprobed
