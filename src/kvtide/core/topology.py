"""Topology: which rank holds which bytes of a block, who stores them, and whose a hit must have.

An engine's ranks differ in up to four ways. *Pipeline* stages have different layers. *Tensor
parallel* ranks have different heads, or copies where there are more ranks than heads.
*Decode-context parallel* ranks have different tokens of a block; vLLM forms them of the tensor and
prefill-context parallel ranks it has. *Prefill-context parallel* ranks, without that, have copies.
(*Data parallel* engines have everything of their own; nothing here knows of them.)

What a group's block holds on one or more ranks alike is a :class:`Part`, stored once under one key.
A rank may hold several parts: where engines of different tensor parallel sizes share a pool, values
are cut as finely as the finest of them needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


class Part(NamedTuple):
    """One of the values that make up a chunk: of a stage, a shard of heads, and of some tokens.

    ``shard_id`` counts shards of the heads, ``dcp_rank`` the decode-context parallel ranks that
    have different tokens of a block.
    """

    pp_rank: int = 0
    shard_id: int = 0
    dcp_rank: int = 0


WHOLE = Part()
"""The only part where one rank has everything."""


class RankPlace(NamedTuple):
    """Where a rank stands in each of an engine's kinds of parallelism."""

    pp_rank: int = 0
    pcp_rank: int = 0
    tp_rank: int = 0
    dcp_rank: int = 0


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """How many ranks an engine has in each kind of parallelism; ``dcp_size`` adds no ranks.

    Raises:
        ValueError: a size is not positive, or the decode-context parallel size does not divide the
            ranks that it is formed of.
    """

    tp_size: int = 1
    pp_size: int = 1
    pcp_size: int = 1
    dcp_size: int = 1

    def __post_init__(self) -> None:
        if min(self.tp_size, self.pp_size, self.pcp_size, self.dcp_size) < 1:
            raise ValueError(f"parallel sizes must be positive: {self}")
        if self.ranks_per_stage % self.dcp_size:
            raise ValueError(f"dcp_size must divide the ranks of a stage: {self}")

    @property
    def ranks_per_stage(self) -> int:
        """The ranks that have the same layers."""
        return self.tp_size * self.pcp_size

    @property
    def num_ranks(self) -> int:
        """All ranks of the engine."""
        return self.pp_size * self.ranks_per_stage

    def place(self, rank: int) -> RankPlace:
        """Return where the rank of number ``rank`` stands.

        As vLLM numbers ranks: tensor parallel ranks are next to each other, pipeline stages
        furthest apart, and decode-context parallel groups run over prefill-context parallel ranks
        first (``vllm.distributed.parallel_state.initialize_model_parallel``).
        """
        pp_rank, in_stage = divmod(rank, self.ranks_per_stage)
        pcp_rank, tp_rank = divmod(in_stage, self.tp_size)
        dcp_rank = (tp_rank * self.pcp_size + pcp_rank) % self.dcp_size
        return RankPlace(pp_rank, pcp_rank, tp_rank, dcp_rank)


@dataclass(frozen=True, slots=True)
class Split:
    """How the blocks of one group are divided among the ranks of a stage.

    Tensor parallel ranks hold ``num_shards`` different shards: ranks in a row hold copies of one
    where they are more, and one rank holds several in a row where they are fewer.
    ``is_token_sharded``: decode-context parallel ranks hold different tokens. ``stages`` are the
    pipeline stages that have layers of the group (empty: all).
    """

    num_shards: int
    is_token_sharded: bool = False
    stages: tuple[int, ...] = ()

    def shards_held(self, tp_rank: int, tp_size: int) -> range:
        """Return the shards that a tensor parallel rank holds."""
        if self.num_shards <= tp_size:
            shard_id = tp_rank * self.num_shards // tp_size
            return range(shard_id, shard_id + 1)
        per_rank = self.num_shards // tp_size
        return range(tp_rank * per_rank, (tp_rank + 1) * per_rank)


@dataclass(frozen=True, slots=True)
class StoreShare:
    """Which chunks of a group a rank stores.

    ``put_step`` ranks hold the same bytes, and this one stores the chunks whose absolute index is
    ``put_step_rank`` modulo ``put_step``.
    """

    put_step: int = 1
    put_step_rank: int = 0


@dataclass(frozen=True, slots=True)
class RankRole:
    """What one rank of ``num_ranks`` holds and stores: per group its parts, and its share of them.

    ``parts[g]`` is empty where the rank has no layers of group ``g``.
    """

    rank: int
    num_ranks: int
    parts: tuple[tuple[Part, ...], ...]
    shares: tuple[StoreShare, ...]

    def without(self, group_ids: Iterable[int]) -> RankRole:
        """Return the role of a rank that has no layers of the groups ``group_ids``."""
        absent = set(group_ids)
        parts = tuple(() if g in absent else held for g, held in enumerate(self.parts))
        return replace(self, parts=parts)

    @classmethod
    def alone(cls, num_groups: int) -> RankRole:
        """Return the role of an engine's only rank."""
        return Topology.undivided(num_groups).role(0)


@dataclass(frozen=True, slots=True)
class Topology:
    """The ranks of one engine, and how each group's blocks are divided among them.

    Raises:
        ValueError: a group cannot be divided so: its shards neither divide the tensor parallel
            ranks nor are a multiple, a shard has fewer ranks than its tokens are divided among, or
            a stage does not exist.
    """

    sizes: ParallelSizes
    splits: tuple[Split, ...]

    def __post_init__(self) -> None:
        for group_id, split in enumerate(self.splits):
            fault = self._fault_of(split)
            if fault:
                raise ValueError(f"group {group_id}: {fault}")

    def _fault_of(self, split: Split) -> str:
        """Return why a group cannot be divided as ``split`` says, or nothing."""
        tp_size, dcp_size = self.sizes.tp_size, self.sizes.dcp_size
        num_shards = split.num_shards
        if num_shards < 1 or (num_shards % tp_size and tp_size % num_shards):
            return f"{num_shards} shards do not fit {tp_size} tensor parallel ranks"
        ranks_per_shard = max(1, tp_size // num_shards) * self.sizes.pcp_size
        if split.is_token_sharded and ranks_per_shard < dcp_size:
            return (
                f"each shard is on {ranks_per_shard} ranks of a stage, and its tokens are to be "
                f"divided among {dcp_size}"
            )
        if not set(split.stages) <= set(range(self.sizes.pp_size)):
            return f"there are {self.sizes.pp_size} pipeline stages, not all of {split.stages}"
        return ""

    @classmethod
    def undivided(cls, num_groups: int, sizes: ParallelSizes | None = None) -> Topology:
        """Return the topology in which each tensor parallel rank has bytes of its own."""
        sizes = sizes if sizes is not None else ParallelSizes()
        return cls(sizes, (Split(sizes.tp_size),) * num_groups)

    @property
    def num_ranks(self) -> int:
        """All ranks of the engine."""
        return self.sizes.num_ranks

    def parts_held(self, group_id: int, rank: int) -> tuple[Part, ...]:
        """Return the parts of a group that a rank holds, in the order in which its memory does."""
        place, split = self.sizes.place(rank), self.splits[group_id]
        if split.stages and place.pp_rank not in split.stages:
            return ()
        dcp_rank = place.dcp_rank if split.is_token_sharded else 0
        return tuple(
            Part(place.pp_rank, shard_id, dcp_rank)
            for shard_id in split.shards_held(place.tp_rank, self.sizes.tp_size)
        )

    def parts(self, group_id: int) -> tuple[Part, ...]:
        """Return all parts of a group's chunk: a hit needs each of them."""
        held = (self.parts_held(group_id, rank) for rank in range(self.num_ranks))
        return tuple(dict.fromkeys(part for parts in held for part in parts))

    def all_parts(self) -> list[tuple[Part, ...]]:
        """Return :meth:`parts` of every group."""
        return [self.parts(group_id) for group_id in range(len(self.splits))]

    def share(self, group_id: int, rank: int) -> StoreShare:
        """Return which chunks of a group a rank stores, of those that others hold alike.

        The phase is turned by the group, so that the groups' first chunks go to different ranks.
        """
        held = self.parts_held(group_id, rank)
        holders = [r for r in range(self.num_ranks) if self.parts_held(group_id, r) == held]
        return StoreShare(len(holders), (holders.index(rank) + group_id) % len(holders))

    def role(self, rank: int) -> RankRole:
        """Return what a rank holds and stores."""
        groups: Sequence[int] = range(len(self.splits))
        return RankRole(
            rank,
            self.num_ranks,
            tuple(self.parts_held(group_id, rank) for group_id in groups),
            tuple(self.share(group_id, rank) for group_id in groups),
        )
