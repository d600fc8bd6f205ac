"""The block tables of the scripted engine: what each attention kind holds, frees and publishes.

As in vLLM: blocks behind a window are freed at the next allocation; a state's table is null but for
its last blocks; a state is materialised where a chunk ends, reused only at a block's end (or at the
prompt's last hash boundary, of which a copy is kept), and handed off in the step that names it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvtide.core.groups import ChunkedLocal, Group, SlidingWindow
from kvtide.core.jobs import NULL_BLOCK_ID
from kvtide.core.transfer import HandOff
from kvtide.testing.engine_attention import first_needed_token
from kvtide.testing.engine_blocks import EngineBlockPool
from kvtide.testing.engine_hits import LocalCache, LocalHit
from kvtide.testing.engine_requests import EngineRequest
from kvtide.testing.engine_setup import EngineSetup

Copy = Callable[[int, int, int], None]
"""Copies a block on every rank: group, source and target."""


@dataclass(slots=True)
class StepOffers:
    """The states offered in a step, by request, and blocks that are held only for it."""

    hand_offs: dict[str, list[HandOff]] = field(default_factory=dict)
    blocks: list[int] = field(default_factory=list)


class BlockTables:
    """Gives requests their blocks and takes them back."""

    def __init__(
        self, setup: EngineSetup, pool: EngineBlockPool, cache: LocalCache, copy: Copy
    ) -> None:
        self._setup = setup
        self._pool = pool
        self._cache = cache
        self._copy = copy
        self._offers = StepOffers()

    # ------------------------------------------------------------------ how much

    def num_blocks(self, num_tokens: int) -> int:
        """Return how many blocks a request of ``num_tokens`` holds at once, at most."""
        return sum(self._most_blocks(group, num_tokens) for group in self._setup.groups)

    def _most_blocks(self, group: Group, num_tokens: int) -> int:
        setup = self._setup
        reach = setup.max_tokens_per_step + setup.num_drafts
        if isinstance(group, SlidingWindow):
            reach += group.window
        elif isinstance(group, ChunkedLocal):
            reach += group.chunk_size
        elif group.is_state:
            reach = group.block_size + setup.num_drafts
        else:
            reach = num_tokens
        most = min(-(-num_tokens // group.block_size), -(-reach // group.block_size) + 1)
        return most + (setup.partial_hits and setup.has_states)

    def num_missing(self, request: EngineRequest, num_tokens: int) -> int:
        """Return how many more blocks a request of ``num_tokens`` may need at once."""
        return sum(
            max(0, self._most_blocks(group, num_tokens) - sum(map(bool, table)))
            for group, table in zip(self._setup.groups, request.tables, strict=True)
        )

    # ------------------------------------------------------------------ admission

    def find(self, request: EngineRequest) -> LocalHit:
        """Return what the engine's own cache holds of a request."""
        return self._cache.find(request.num_tokens, request.block_hashes)

    def num_to_admit(self, request: EngineRequest, hit: LocalHit, num_external: int) -> int:
        """Return how many free blocks a waiting request needs, for all of its tokens."""
        kept = [block_id for table in self._kept(hit, num_external) for block_id in table]
        num_kept = sum(map(bool, kept))
        missing = self.num_missing(request, request.num_tokens)
        return max(0, missing - num_kept) + self._pool.num_free_among(filter(None, set(kept)))

    def _kept(self, hit: LocalHit, num_external: int) -> list[list[int]]:
        """Return the tables of a hit with null for what the external tokens make superfluous."""
        tables = []
        for group, table in zip(self._setup.groups, hit.tables, strict=True):
            skipped = first_needed_token(group, hit.num_tokens + num_external) // group.block_size
            tables.append([NULL_BLOCK_ID] * min(skipped, len(table)) + table[skipped:])
        return tables

    def adopt(self, request: EngineRequest, hit: LocalHit, num_external: int) -> None:
        """Begin a request's tables with a local hit, and make room for what is to be loaded."""
        tables = self._kept(hit, num_external)
        for table in tables:
            self._pool.touch(filter(None, table))
        total = hit.num_tokens + num_external
        for group_id, (group, table) in enumerate(zip(self._setup.groups, tables, strict=True)):
            size = group.block_size
            request.tables[group_id] = table
            request.num_cached[group_id] = len(table)
            if hit.num_tokens % size and table and table[-1]:
                self._make_private(request, group_id)
            if num_external:
                skipped = first_needed_token(group, total) // size
                table.extend([NULL_BLOCK_ID] * (skipped - len(table)))
                table.extend(self._pool.allocate(-(-total // size) - len(table)))

    def _make_private(self, request: EngineRequest, group_id: int) -> None:
        """Replace the last block, which others may read, by a copy to write to."""
        table = request.tables[group_id]
        (private,) = self._pool.allocate(1)
        self._copy(group_id, table[-1], private)
        self._pool.free((table[-1],))
        table[-1] = private
        request.num_cached[group_id] -= 1

    # ------------------------------------------------------------------ growth

    def allocate(self, request: EngineRequest, num_tokens: int) -> bool:
        """Extend a request's tables to ``num_tokens``; False if there are not enough blocks.

        What is behind the windows is freed in any case.
        """
        self._free_behind(request)
        firsts: list[int] = []
        wanted = len(request.tails)
        for group, table in zip(self._setup.groups, request.tables, strict=True):
            first = len(table)
            if group.is_state:
                # Chunks end where a state is reused: between, none is kept. Drafted tokens may
                # turn out wrong, so there every block is needed.
                end_token = min(num_tokens, request.num_tokens)
                first = max(first, -(-end_token // group.block_size) - 1)
            firsts.append(first)
            wanted += max(0, -(-num_tokens // group.block_size) - first)
        if wanted > self._pool.num_free:
            return False
        self._keep_tails(request)
        for group, table, first in zip(self._setup.groups, request.tables, firsts, strict=True):
            count = -(-num_tokens // group.block_size) - first
            if count > 0:
                table.extend([NULL_BLOCK_ID] * (first - len(table)))
                table.extend(self._pool.allocate(count))
        return True

    def _free_behind(self, request: EngineRequest) -> None:
        for group, table in zip(self._setup.groups, request.tables, strict=True):
            end = first_needed_token(group, request.num_computed) // group.block_size
            freed = [chunk for chunk in range(min(end, len(table))) if table[chunk]]
            self._pool.free(table[chunk] for chunk in reversed(freed))
            for chunk in freed:
                table[chunk] = NULL_BLOCK_ID

    def _keep_tails(self, request: EngineRequest) -> None:
        """Copy the states that the coming tokens overwrite, and offer the copies."""
        for group_id, (source, boundary) in request.tails.items():
            (copy,) = self._pool.allocate(1)
            self._copy(group_id, source, copy)
            self._pool.move_names(source, copy)
            self._offers.blocks.append(copy)
            self._offer(request, HandOff(group_id, copy, boundary))
        request.tails.clear()

    # ------------------------------------------------------------------ publishing

    def publish(self, request: EngineRequest, num_tokens: int) -> None:
        """Let what is certain after this step be found by its hashes, and offer its states.

        Done when it is scheduled, as in vLLM: whoever finds it in the same step reads it after it
        was written.
        """
        for group_id, group in enumerate(self._setup.groups):
            ratio = group.block_size // self._setup.hash_block_size
            end = num_tokens // group.block_size
            table = request.tables[group_id]
            for chunk in range(request.num_cached[group_id], end):
                boundary = (chunk + 1) * group.block_size
                if not table[chunk] or not self._is_retained(request, group, boundary):
                    continue
                self._pool.cache(
                    group_id, table[chunk], request.block_hashes[(chunk + 1) * ratio - 1]
                )
                if group.is_state:
                    self._offer(request, HandOff(group_id, table[chunk], boundary))
            request.num_cached[group_id] = max(request.num_cached[group_id], end)
            if self._setup.partial_hits and self._setup.has_states:
                self._publish_tail(request, group_id, num_tokens)

    def _is_retained(self, request: EngineRequest, group: Group, boundary: int) -> bool:
        """Tell whether a state is worth keeping; other blocks always are."""
        interval = self._setup.retention_interval
        if interval is None or not group.is_state:
            return True
        num_tokens, unit = request.num_prompt_tokens, self._setup.lcm_block_size
        kept = {self._setup.reusable_state_token(num_tokens, unit)}
        kept.add(self._setup.reusable_state_token(num_tokens, self._setup.alignment))
        if self._setup.has_drafts:
            kept.add((num_tokens - 1) // unit * unit - unit)
        return boundary in kept or (interval > 0 and boundary % interval == 0)

    def _publish_tail(self, request: EngineRequest, group_id: int, num_tokens: int) -> None:
        """Name the block that the prompt's last hash boundary cuts by the hash there."""
        group, unit = self._setup.groups[group_id], self._setup.hash_block_size
        boundary = self._setup.reusable_state_token(request.num_prompt_tokens, unit)
        is_there = num_tokens == boundary
        if not group.is_state:
            limit = request.num_prompt_tokens - (not group.proof_tokens)
            boundary = limit // unit * unit
            is_there = num_tokens >= boundary
        if not is_there or boundary % group.block_size == 0:
            return
        block_id = request.tables[group_id][boundary // group.block_size]
        name = (group_id, request.block_hashes[boundary // unit - 1])
        if not block_id or name in self._pool.names[block_id]:
            return
        self._pool.cache(group_id, block_id, name[1])
        if group.is_state:
            request.tails[group_id] = (block_id, boundary)

    # ------------------------------------------------------------------ states handed off

    def _offer(self, request: EngineRequest, hand_off: HandOff) -> None:
        self._offers.hand_offs.setdefault(request.request_id, []).append(hand_off)

    def take_offers(self) -> StepOffers:
        """Return what is offered in this step; its blocks are to be freed once it is pinned."""
        offers, self._offers = self._offers, StepOffers()
        return offers

    def last_offers(self, request: EngineRequest) -> list[HandOff]:
        """Return the states that a request leaves behind which ends right at their boundary."""
        return [
            HandOff(group_id, block_id, boundary)
            for group_id, (block_id, boundary) in request.tails.items()
            if boundary == request.num_computed
        ]

    def drop(self, request: EngineRequest) -> None:
        """Take back all blocks of a request, and the offers that are not out yet."""
        self._offers.hand_offs.pop(request.request_id, None)
        self._pool.free(request.drop_blocks())
