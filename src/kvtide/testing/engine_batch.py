"""The scripted engine's batch scheduler: who computes how much in a step, and in which blocks.

The passes of vLLM's scheduler, in its order: running requests first, preempting from the back when
blocks run out; then, unless somebody was preempted, waiting requests in order. A request that may
load is asked about, gets its blocks, and waits until its load has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvtide.testing.engine_blocks import EngineBlockPool
from kvtide.testing.engine_requests import EngineRequest, EngineState
from kvtide.testing.engine_setup import EngineSetup

Match = Callable[[EngineRequest, int], "int | None"]
Allocated = Callable[[EngineRequest, int], None]


@dataclass(slots=True)
class Decisions:
    """What one step does. ``admitted`` are the ids that come new or again in this step."""

    scheduled: list[tuple[EngineRequest, int]] = field(default_factory=list)
    admitted: set[str] = field(default_factory=set)
    preempted: list[EngineRequest] = field(default_factory=list)

    @property
    def num_tokens(self) -> dict[str, int]:
        """How many tokens are computed, by request."""
        return {request.request_id: count for request, count in self.scheduled}


class BatchScheduler:
    """Keeps the queues and gives out blocks; ``match`` and ``allocated`` ask and tell the pool."""

    def __init__(
        self, setup: EngineSetup, pool: EngineBlockPool, match: Match, allocated: Allocated
    ) -> None:
        self._setup = setup
        self._pool = pool
        self._match = match
        self._allocated = allocated
        self.waiting: list[EngineRequest] = []
        self.running: list[EngineRequest] = []
        self._preempted: list[EngineRequest] = []

    @property
    def has_requests(self) -> bool:
        """Whether any request has not ended."""
        return bool(self.waiting or self.running)

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Tell whether a request of ``num_tokens`` fits into an empty cache."""
        return self._num_blocks(num_tokens) < self._setup.num_blocks

    def remove(self, request: EngineRequest) -> None:
        """Take a request off its queue."""
        queue = self.running if request.state is EngineState.RUNNING else self.waiting
        queue.remove(request)

    def preempt(self, request: EngineRequest) -> None:
        """Take a running request's blocks and put it first in the waiting queue."""
        self.running.remove(request)
        self._pool.free(request.drop_blocks())
        request.state = EngineState.PREEMPTED
        request.drafts = []
        request.num_preemptions += 1
        self.waiting.insert(0, request)
        self._preempted.append(request)

    def schedule(self) -> Decisions:
        """Decide on one step."""
        decisions = Decisions()
        num_before = len(self._preempted)
        budget = self._schedule_running(decisions, self._setup.max_tokens_per_step)
        if len(self._preempted) == num_before:
            self._schedule_waiting(decisions, budget)
        decisions.preempted, self._preempted = self._preempted, []
        return decisions

    # ------------------------------------------------------------------ running requests

    def _schedule_running(self, decisions: Decisions, budget: int) -> int:
        index = 0
        while index < len(self.running) and budget:
            request = self.running[index]
            wanted = len(request.tokens) + len(request.drafts) - request.num_computed
            num_tokens = min(wanted, budget)
            while not self._allocate(request, request.num_computed + num_tokens):
                victim = self.running[-1]
                self.preempt(victim)
                if victim is request:
                    return budget
            self._compute(decisions, request, num_tokens)
            budget -= num_tokens
            index += 1
        return budget

    def _compute(self, decisions: Decisions, request: EngineRequest, num_tokens: int) -> None:
        decisions.scheduled.append((request, num_tokens))
        self._publish(request, min(request.num_computed + num_tokens, len(request.tokens)))

    # ------------------------------------------------------------------ waiting requests

    def _schedule_waiting(self, decisions: Decisions, budget: int) -> None:
        # Requests that hold blocks come first: nobody else may wait for those blocks meanwhile.
        for request in sorted(self.waiting, key=lambda request: not request.held_blocks):
            if not budget or len(self.running) >= self._setup.max_running:
                return
            if request.state is EngineState.LOADING and not self._promote(request):
                continue
            local: list[list[int]] = [[] for _ in request.tables]
            num_external = 0
            if not request.num_computed:
                local, num_local = self._local_hit(request)
                external = self._ask(request, num_local)
                if external is None:
                    continue
                num_external = external
                num_computed = num_local + num_external
            else:
                num_computed = request.num_computed
            num_tokens = 0 if num_external else min(len(request.tokens) - num_computed, budget)
            if not self._admit(request, local, num_computed + num_tokens, is_load=num_external > 0):
                return
            self._allocated(request, num_external)
            request.num_computed = num_computed
            if num_external:
                request.state = EngineState.LOADING
                request.num_loads += 1
                request.num_external = num_external
                continue
            self.waiting.remove(request)
            self.running.append(request)
            request.state = EngineState.RUNNING
            decisions.admitted.add(request.request_id)
            self._compute(decisions, request, num_tokens)
            budget -= num_tokens

    def _promote(self, request: EngineRequest) -> bool:
        """Let a request whose load has ended go on; False while it has not."""
        if not request.is_loaded:
            return False
        if request.has_failed_load:
            self._pool.free(request.drop_blocks())
            request.has_failed_load = False
        else:
            self._publish(request, request.num_computed)
        request.is_loaded = False
        request.state = EngineState.PREEMPTED if request.num_preemptions else EngineState.WAITING
        return True

    def _local_hit(self, request: EngineRequest) -> tuple[list[list[int]], int]:
        """Return per group the cached blocks of the longest common hit, and its tokens."""
        tables: list[list[int]] = [[] for _ in request.tables]
        if not request.may_load:
            return tables, 0
        hit = (len(request.tokens) - 1) // self._setup.lcm_block_size * self._setup.lcm_block_size
        for group_id, size in enumerate(self._setup.block_sizes):
            ratio = size // self._setup.hash_block_size
            for chunk in range(hit // size):
                name = request.block_hashes[(chunk + 1) * ratio - 1]
                block_id = self._pool.find(group_id, name)
                if block_id is None:
                    break
                tables[group_id].append(block_id)
            hit = min(hit, len(tables[group_id]) * size)
        hit = hit // self._setup.lcm_block_size * self._setup.lcm_block_size
        return [
            table[: hit // size]
            for table, size in zip(tables, self._setup.block_sizes, strict=True)
        ], hit

    def _ask(self, request: EngineRequest, num_local: int) -> int | None:
        """Ask the pool, and grant no more than the script allows."""
        external = self._match(request, num_local)
        if external and not request.may_load:
            return 0
        limit = self._setup.grant_limit
        if external and limit is not None:
            return min(external, limit // self._setup.lcm_block_size * self._setup.lcm_block_size)
        return external

    # ------------------------------------------------------------------ blocks

    def _num_blocks(self, num_tokens: int) -> int:
        return sum(-(-num_tokens // size) for size in self._setup.block_sizes)

    def _admit(
        self, request: EngineRequest, local: list[list[int]], num_tokens: int, *, is_load: bool
    ) -> bool:
        """Give a waiting request its blocks, if all its tokens would fit.

        A load keeps its blocks until it ends, so it must leave room for the prefills under way:
        else two of them could hold what neither can finish with.
        """
        found = [block_id for table in local for block_id in table]
        missing = self._num_blocks(len(request.tokens)) - len(found) - len(request.held_blocks)
        reserved = self._reserved_blocks() if is_load else 0
        needed = missing + self._pool.num_free_among(found)
        if needed > self._pool.num_free - reserved:
            return False
        self._pool.touch(found)
        for group_id, table in enumerate(local):
            request.tables[group_id] += table
            request.num_cached[group_id] += len(table)
        return self._allocate(request, num_tokens)

    def _reserved_blocks(self) -> int:
        """Return what prefills and loads under way still need."""
        loading = [request for request in self.waiting if request.held_blocks]
        prefilling = [
            request for request in self.running if request.num_computed < len(request.tokens)
        ]
        return sum(
            max(0, self._num_blocks(len(request.tokens)) - len(request.held_blocks))
            for request in loading + prefilling
        )

    def _allocate(self, request: EngineRequest, num_tokens: int) -> bool:
        """Extend a request's tables to ``num_tokens``; False, and nothing, if that is too much."""
        wanted = [
            max(0, -(-num_tokens // size) - len(table))
            for size, table in zip(self._setup.block_sizes, request.tables, strict=True)
        ]
        if sum(wanted) > self._pool.num_free:
            return False
        for table, count in zip(request.tables, wanted, strict=True):
            table.extend(self._pool.allocate(count))
        return True

    def _publish(self, request: EngineRequest, num_tokens: int) -> None:
        """Let full blocks be found by their hashes.

        Done when they are scheduled, as in vLLM: whoever finds them in the same step reads them
        after they were written.
        """
        for group_id, size in enumerate(self._setup.block_sizes):
            ratio = size // self._setup.hash_block_size
            first, end = request.num_cached[group_id], num_tokens // size
            if end <= first:
                continue
            hashes = [request.block_hashes[(i + 1) * ratio - 1] for i in range(first, end)]
            self._pool.cache(group_id, request.tables[group_id][first:end], hashes)
            request.num_cached[group_id] = end
