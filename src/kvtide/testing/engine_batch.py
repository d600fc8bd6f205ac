"""The scripted engine's batch scheduler: who computes how much in a step, and in which blocks.

The passes of vLLM's scheduler, in its order: running requests first, preempting from the back when
blocks run out; then, unless somebody was preempted, waiting requests in order. A request that may
load is asked about, gets its blocks, and waits until its load has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvtide.testing.engine_blocks import EngineBlockPool
from kvtide.testing.engine_hits import LocalHit
from kvtide.testing.engine_requests import EngineRequest, EngineState
from kvtide.testing.engine_setup import EngineSetup
from kvtide.testing.engine_tables import BlockTables, StepOffers

Match = Callable[[EngineRequest, int], "int | None"]
Allocated = Callable[[EngineRequest, int], None]


@dataclass(slots=True)
class Decisions:
    """What one step does. ``admitted`` are the ids that come new or again in this step."""

    scheduled: list[tuple[EngineRequest, int]] = field(default_factory=list)
    admitted: set[str] = field(default_factory=set)
    preempted: list[EngineRequest] = field(default_factory=list)
    offers: StepOffers = field(default_factory=StepOffers)

    @property
    def num_tokens(self) -> dict[str, int]:
        """How many tokens are computed, by request."""
        return {request.request_id: count for request, count in self.scheduled}


class BatchScheduler:
    """Keeps the queues and gives out blocks; ``match`` and ``allocated`` ask and tell the pool."""

    def __init__(
        self,
        setup: EngineSetup,
        pool: EngineBlockPool,
        tables: BlockTables,
        match: Match,
        allocated: Allocated,
    ) -> None:
        self._setup = setup
        self._pool = pool
        self._tables = tables
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
        return self._tables.num_blocks(num_tokens) < self._setup.num_blocks

    def remove(self, request: EngineRequest) -> None:
        """Take a request off its queue."""
        queue = self.running if request.state is EngineState.RUNNING else self.waiting
        queue.remove(request)

    def preempt(self, request: EngineRequest) -> None:
        """Take a running request's blocks and put it first in the waiting queue."""
        self.running.remove(request)
        self._tables.drop(request)
        request.state = EngineState.PREEMPTED
        request.drafts = []
        request.num_preemptions += 1
        self.waiting.insert(0, request)
        self._preempted.append(request)

    def schedule(self) -> Decisions:
        """Decide on one step."""
        decisions = Decisions()
        self._pool.fresh.clear()
        num_before = len(self._preempted)
        budget = self._schedule_running(decisions, self._setup.max_tokens_per_step)
        if len(self._preempted) == num_before:
            self._schedule_waiting(decisions, budget)
        decisions.preempted, self._preempted = self._preempted, []
        decisions.offers = self._tables.take_offers()
        return decisions

    # ------------------------------------------------------------------ running requests

    def _schedule_running(self, decisions: Decisions, budget: int) -> int:
        index = 0
        while index < len(self.running) and budget:
            request = self.running[index]
            wanted = len(request.tokens) + len(request.drafts) - request.num_computed
            num_tokens = self._cut(request, request.num_computed, min(wanted, budget))
            if not num_tokens:
                index += 1
                continue
            while not self._tables.allocate(request, request.num_computed + num_tokens):
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
        self._tables.publish(request, min(request.num_computed + num_tokens, len(request.tokens)))

    def _cut(self, request: EngineRequest, start: int, num_tokens: int) -> int:
        """Cut a prefill chunk so that it ends where a state is worth keeping; maybe to nothing.

        That is at whole units, at the last of them that can be reused, and at the prompt's last
        hash boundary where requests may resume inside blocks. (vLLM's block-aligned split.)
        """
        setup = self._setup
        prefill_end = max(request.num_prompt_tokens, len(request.tokens) - 1)
        if not setup.has_states or start >= prefill_end:
            return num_tokens
        unit = setup.lcm_block_size
        end = start + num_tokens
        if end < prefill_end:
            aligned = end // unit * unit
            if aligned > start or unit <= setup.max_tokens_per_step:
                end = aligned
        stops = [setup.reusable_state_token(len(request.tokens), unit)]
        if start % unit:
            stops.append((start // unit + 1) * unit)
        if setup.partial_hits:
            unit = setup.hash_block_size
            stops.append(setup.reusable_state_token(request.num_prompt_tokens, unit))
        return max(0, min([stop for stop in stops if start < stop < end], default=end) - start)

    # ------------------------------------------------------------------ waiting requests

    def _schedule_waiting(self, decisions: Decisions, budget: int) -> None:
        # Requests that hold blocks come first: nobody else may wait for those blocks meanwhile.
        for request in sorted(self.waiting, key=lambda request: not request.held_blocks):
            if not budget or len(self.running) >= self._setup.max_running:
                return
            if request.state is EngineState.LOADING and not self._promote(request):
                continue
            local = LocalHit(request.num_computed, [[] for _ in request.tables])
            num_external = 0
            if not request.num_computed:
                if request.may_load:
                    local = self._tables.find(request)
                external = self._ask(request, local.num_tokens)
                if external is None:
                    continue
                num_external = external
            num_computed = local.num_tokens + num_external
            num_tokens = 0
            if not num_external:
                wanted = min(len(request.tokens) - num_computed, budget)
                num_tokens = self._cut(request, num_computed, wanted)
                if not num_tokens:
                    return
            if not self._admit(request, local, num_external, num_computed + num_tokens):
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
            self._tables.drop(request)
            request.has_failed_load = False
        else:
            self._tables.publish(request, request.num_computed)
        request.is_loaded = False
        request.state = EngineState.PREEMPTED if request.num_preemptions else EngineState.WAITING
        return True

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

    def _admit(
        self, request: EngineRequest, local: LocalHit, num_external: int, num_tokens: int
    ) -> bool:
        """Give a waiting request its blocks, if all its tokens would fit.

        A load keeps its blocks until it ends, so it must leave room for the prefills under way:
        else two of them could hold what neither can finish with.
        """
        reserved = self._reserved_blocks() if num_external else 0
        needed = self._tables.num_to_admit(request, local, num_external)
        if needed > self._pool.num_free - reserved:
            return False
        if not request.num_computed:
            self._tables.adopt(request, local, num_external)
            request.num_computed = local.num_tokens + num_external
        assert self._tables.allocate(request, num_tokens), f"{request!r} was to fit"
        return True

    def _reserved_blocks(self) -> int:
        """Return what prefills and loads under way still need."""
        loading = [request for request in self.waiting if request.held_blocks]
        prefilling = [
            request for request in self.running if request.num_computed < len(request.tokens)
        ]
        return sum(
            self._tables.num_missing(request, len(request.tokens))
            for request in loading + prefilling
        )
