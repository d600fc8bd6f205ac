"""Transfer plans: what of a request's token range becomes a job, and with which blocks.

Pure functions of a :class:`RequestView`, the engine's request as the core sees it. They read only
the hashes and the block-table entries of the range at hand; tests prove it with recording views.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvtide.core.coordinator import Coordinator
from kvtide.core.jobs import NULL_BLOCK_ID, LoadJob, StoreJob, pack_block_ids
from kvtide.core.keys import BlockHashes


class RequestView(Protocol):
    """An engine's request, read in ranges. Group ids are the core's; chunks and hashes absolute."""

    @property
    def request_id(self) -> str:
        """The engine's name of the request; it may be reused once the request has ended."""

    @property
    def num_tokens(self) -> int:
        """The tokens that exist now: the prompt and what was generated."""

    @property
    def num_hashes(self) -> int:
        """The hash blocks that exist now; only accepted tokens are hashed."""

    def hashes(self, first: int, end: int) -> Sequence[bytes]:
        """Return the hashes of the hash blocks ``[first, end)``."""

    def block_ids(self, group_id: int, first_chunk: int, end_chunk: int) -> Sequence[int]:
        """Return the entries ``[first_chunk, end_chunk)`` of a group's block table."""

    def target_ids(self, group_id: int, first_chunk: int, end_chunk: int) -> Sequence[int]:
        """Return the entries ``[first_chunk, end_chunk)`` of a group's block table to load into.

        The null block stands for each that somebody else may be reading.
        """

    def local_hit_hint(self) -> int:
        """Guess how many tokens the engine's own prefix cache holds."""


class PlannedStore(NamedTuple):
    """A store job and the blocks that must stay as they are until every rank has staged it."""

    job: StoreJob
    pinned_block_ids: list[int]


def plan_store(
    view: RequestView,
    coordinator: Coordinator,
    *,
    job_id: int,
    prefix_id: int,
    start_token: int,
    end_token: int,
) -> PlannedStore:
    """Plan the store of ``[start_token, end_token)``, both multiples of ``lcm_block_size``.

    Null entries of a block table stay in the job (the worker skips them) and are not pinned.
    """
    unit = coordinator.hash_block_size
    first, end = start_token // unit, end_token // unit
    pinned: list[int] = []
    tables: list[bytes] = []
    for group_id, group in enumerate(coordinator.groups):
        ids = view.block_ids(
            group_id, start_token // group.block_size, end_token // group.block_size
        )
        tables.append(pack_block_ids(ids))
        pinned.extend(block_id for block_id in ids if block_id != NULL_BLOCK_ID)
    hashes = BlockHashes.pack(view.hashes(first, end), first=first)
    job = StoreJob(job_id, prefix_id, start_token, end_token, hashes, tuple(tables))
    return PlannedStore(job, pinned)


def plan_load(
    view: RequestView,
    coordinator: Coordinator,
    *,
    job_id: int,
    prefix_id: int,
    num_computed_tokens: int,
    hit_token: int,
) -> LoadJob:
    """Plan the load that lets a request resume at ``hit_token``.

    A target the engine gave out that somebody else may read is replaced by the null block: the
    worker reports a chunk without a target as failed, and the request recomputes.
    """
    first_chunks: list[int] = []
    tables: list[bytes] = []
    for group_id, chunks in enumerate(coordinator.load_mask(hit_token, num_computed_tokens)):
        targets = list(view.target_ids(group_id, chunks.start, chunks.stop))
        targets.extend([NULL_BLOCK_ID] * (len(chunks) - len(targets)))
        first_chunks.append(chunks.start)
        tables.append(pack_block_ids(targets))
    unit = coordinator.hash_block_size
    first = min(
        chunk * group.block_size // unit
        for chunk, group in zip(first_chunks, coordinator.groups, strict=True)
    )
    hashes = view.hashes(first, hit_token // unit)
    return LoadJob(
        job_id=job_id,
        request_id=view.request_id,
        prefix_id=prefix_id,
        start_token=num_computed_tokens,
        end_token=hit_token,
        hashes=BlockHashes.pack(hashes, first=first),
        first_chunks=tuple(first_chunks),
        block_ids=tuple(tables),
    )
