"""The workers of the scripted engine: memory, forward passes, and the order of the hooks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtide.core.jobs import NULL_BLOCK_ID, JobReport, StepPlan
from kvtide.core.topology import RankRole
from kvtide.runtime.prefixes import PrefixDatabases
from kvtide.runtime.worker import PoolWorker
from kvtide.stores.base import Store
from kvtide.stores.wrappers import CountingStore
from kvtide.testing.blocks import FakeBlocks, byte_layout
from kvtide.testing.engine_attention import (
    TOKEN_BYTES,
    KvChain,
    TokenChain,
    block_bytes,
    first_needed_token,
    make_chain,
    sample,
)
from kvtide.testing.engine_model import GroupPart, KvModel
from kvtide.testing.engine_requests import EngineRequest
from kvtide.testing.engine_setup import EngineSetup, HookOrder


class SharedStore(CountingStore):
    """One user's handle of a store that others use too: closing it leaves the store open."""

    def close(self) -> None:
        """Do nothing."""


@dataclass(slots=True)
class StepOutput:
    """What the ranks hand back with one step, or with several when it comes late."""

    report: JobReport = field(default_factory=JobReport)
    finished_loads: set[str] = field(default_factory=set)
    failed_loads: set[str] = field(default_factory=set)

    def merge(self, other: StepOutput) -> StepOutput:
        """Return both as one."""
        return StepOutput(
            self.report.merge(other.report),
            self.finished_loads | other.finished_loads,
            self.failed_loads | other.failed_loads,
        )


class RankChain(NamedTuple):
    """A rank's computation of one part: value ``number`` of a block of the group."""

    rank: EngineRank
    name: GroupPart
    number: int
    chain: KvChain


class EngineRank:
    """One rank: a worker of the pool, blocks, and the model's forward pass over them.

    ``held`` are the parts that it holds, by group, in the order in which a block has them.
    """

    def __init__(
        self,
        role: RankRole,
        setup: EngineSetup,
        model: KvModel,
        store: Store,
        clock: Callable[[], float],
    ) -> None:
        self.rank = role.rank
        self.held = [
            [GroupPart(group_id, part) for part in parts]
            for group_id, parts in enumerate(role.parts)
        ]
        self.store = SharedStore(store, per_key=True)
        self._model = model
        payloads = [block_bytes(group) for group in setup.groups]
        layout = byte_layout(
            *zip(setup.block_sizes, payloads, strict=True),
            values_per_block=[len(parts) for parts in role.parts],
        )
        self.blocks = FakeBlocks(layout, setup.num_blocks)
        self.worker = PoolWorker(
            self.blocks,
            self.store,
            PrefixDatabases(setup.block_sizes, setup.hash_block_size, role.parts),
            limits=setup.worker,
            role=role,
            clock=clock,
            threaded=setup.threaded,
        )

    def attended(self, group_id: int, number: int, table: Sequence[int], num_tokens: int) -> bytes:
        """Return the KV that the next token may read, or the state, as the blocks hold it now.

        That is of the group's value ``number``.
        """
        group = self._model.groups[group_id]
        if not num_tokens:
            return b""
        data, size = self.blocks.values[group_id][:, number], group.block_size
        first_token = first_needed_token(group, num_tokens)
        first = first_token // size
        rows = data[list(table[first : -(-num_tokens // size)])].tobytes()
        if group.is_state:
            return rows
        start = first * size
        return rows[(first_token - start) * TOKEN_BYTES : (num_tokens - start) * TOKEN_BYTES]

    def chains(self, tables: Sequence[Sequence[int]], num_computed: int) -> list[RankChain]:
        """Attend to what a request's blocks hold."""
        model = self._model
        return [
            RankChain(
                self,
                name,
                number,
                make_chain(
                    model.groups[group_id],
                    model.seed(name),
                    num_computed,
                    self.attended(group_id, number, tables[group_id], num_computed),
                ),
            )
            for group_id, names in enumerate(self.held)
            for number, name in enumerate(names)
        ]

    def write(
        self,
        group_id: int,
        number: int,
        table: Sequence[int],
        first_token: int,
        kv: Sequence[bytes],
    ) -> None:
        """Issue the writes of consecutive tokens to the group's value ``number``.

        They are done by :meth:`FakeBlocks.complete`.
        """
        group = self._model.groups[group_id]
        size, end = group.block_size, first_token + len(kv)
        for chunk in range(first_token // size, -(-end // size)):
            low, high = max(first_token, chunk * size), min(end, (chunk + 1) * size)
            if group.is_state:
                if table[chunk] != NULL_BLOCK_ID:
                    state = kv[high - 1 - first_token]
                    self.blocks.issue(group_id, table[chunk], state, number)
                continue
            content = bytearray(self.blocks.values[group_id][table[chunk], number])
            piece = b"".join(kv[low - first_token : high - first_token])
            at = (low - chunk * size) * TOKEN_BYTES
            content[at : at + len(piece)] = piece
            self.blocks.issue(group_id, table[chunk], bytes(content), number)

    def hooks(self, order: HookOrder, *, is_empty: bool) -> StepOutput:
        """Call the worker's hooks that follow a forward pass."""
        is_skipped = order is HookOrder.NEVER or (order is HookOrder.NOT_WHEN_EMPTY and is_empty)
        if order is HookOrder.REPORT_THEN_SAVE:
            output = self._results()
            self.worker.fence()
            return output
        if not is_skipped:
            self.worker.fence()
        return self._results()

    def _results(self) -> StepOutput:
        results = self.worker.poll()
        return StepOutput(
            self.worker.take_report() or JobReport(), results.finished_loads, results.failed_loads
        )


class Ranks:
    """All ranks of an engine: one plan for all, their answers joined as vLLM joins them.

    A load counts as finished once every rank has said so, and as failed if any said so; reports
    are merged at once.
    """

    def __init__(
        self, setup: EngineSetup, model: KvModel, store: Store, clock: Callable[[], float]
    ) -> None:
        topology = setup.topology
        self.ranks = [
            EngineRank(topology.role(rank), setup, model, store, clock)
            for rank in range(topology.num_ranks)
        ]
        self.order = setup.order
        self._model = model
        self._num_spoils = 0
        self._finishes: Counter[str] = Counter()
        self._failures: set[str] = set()

    def take_over(self, plans: Sequence[StepPlan]) -> None:
        """Bind a step's metadata, one copy for each rank."""
        for rank, plan in zip(self.ranks, plans, strict=True):
            rank.worker.take_over(plan)

    def forward(self, request: EngineRequest, num_tokens: int) -> list[int]:
        """Compute tokens on every rank; return those sampled, none while the prompt goes on.

        Attention reads the blocks, so what a wrong load left there shows in the output.
        """
        self.complete()  # it may attend to what another request computes in this step
        first = request.num_computed
        tokens = (request.tokens + request.drafts)[first : first + num_tokens]
        names = TokenChain(request.tokens[:first])
        chains = [chain for rank in self.ranks for chain in rank.chains(request.tables, first)]
        copies: dict[GroupPart, list[KvChain]] = {name: [] for name in self._model.names}
        for held in chains:
            copies[held.name].append(held.chain)
        sampled: list[int] = []
        kv: list[list[bytes]] = [[] for _ in chains]
        for position, token in enumerate(tokens, first):
            draft = position - len(request.tokens)
            if draft >= 0 and token != sampled[draft]:
                break  # what follows a wrong draft is computed for nothing
            name = names.extend(token)
            for values, held in zip(kv, chains, strict=True):
                values.append(held.chain.extend(name))
            if position >= len(request.tokens) - 1:
                sampled.append(sample(copies.values()))
        end = first + len(kv[0])
        follower = sampled[-1] if sampled else request.tokens[end]
        name = names.extend(follower)
        rejected = [b"\0" * TOKEN_BYTES] * (first + num_tokens - end)
        for values, held in zip(kv, chains, strict=True):
            if not held.chain.is_sampled:
                values.append(held.chain.extend(name))
                del values[0]
            group_id = held.name.group_id
            written = values if self._model.groups[group_id].is_state else values + rejected
            held.rank.write(group_id, held.number, request.tables[group_id], first, written)
        return sampled

    def copy(self, group_id: int, source: int, target: int) -> None:
        """Copy a block at once; what was issued before is done."""
        self.complete()
        for rank in self.ranks:
            rank.blocks.data[group_id][target] = rank.blocks.data[group_id][source]

    def spoil(self, block_ids: Sequence[int]) -> None:
        """Overwrite blocks whose content nobody may read any more, each time with other bytes."""
        self._num_spoils += 1
        for rank in self.ranks:
            for data in rank.blocks.data:
                data[list(block_ids)] = 1 + self._num_spoils % 255

    def complete(self) -> None:
        """Let the devices do what was issued."""
        for rank in self.ranks:
            rank.blocks.complete()

    def collect(self, *, is_empty: bool) -> StepOutput:
        """Call the hooks on every rank and join what they answer."""
        joined = StepOutput()
        for rank in self.ranks:
            output = rank.hooks(self.order, is_empty=is_empty)
            joined.report = joined.report.merge(output.report)
            self._finishes.update(output.finished_loads)
            self._failures |= output.failed_loads
        for request_id, count in list(self._finishes.items()):
            if count == len(self.ranks):
                del self._finishes[request_id]
                joined.finished_loads.add(request_id)
        joined.failed_loads = joined.finished_loads & self._failures
        self._failures -= joined.failed_loads
        return joined
