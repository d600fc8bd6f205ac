"""Transfer plans: what of a request's token range becomes a job, and with which blocks.

Pure functions of a :class:`RequestView`, the engine's request as the core sees it. They read only
the hashes and the block-table entries of the range at hand; tests prove it with recording views.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvtide.core.coordinator import Coordinator
from kvtide.core.jobs import (
    NULL_BLOCK_ID,
    BoundaryJob,
    BoundaryPut,
    LoadJob,
    SaveJob,
    StoreJob,
    pack_ints,
)
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
    def num_prompt_tokens(self) -> int:
        """The tokens the request came with."""

    @property
    def shared_token(self) -> int:
        """Up to here the engine's own cache shows a prefix that some groups lack; 0: nothing."""

    @property
    def num_hashes(self) -> int:
        """The hash blocks that exist now; only accepted tokens are hashed."""

    @property
    def hash_list(self) -> Sequence[bytes]:
        """The engine's own list of hashes, which may grow: to be read later, on any thread."""

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


class HandOff(NamedTuple):
    """A state the engine offers: ``block_id`` of a state group holds it after ``boundary`` tokens.

    It stays as it is for the step of the offer only, unless it is pinned.
    """

    group_id: int
    block_id: int
    boundary: int


class Scheduled(NamedTuple):
    """One request of a step: ``num_computed_tokens`` before it, ``num_scheduled_tokens`` in it.

    ``is_admission`` says that the engine (re)admits the request in this step.
    """

    view: RequestView
    num_computed_tokens: int
    num_scheduled_tokens: int
    is_admission: bool


class PlannedStore(NamedTuple):
    """A job, the blocks that must stay as they are until every rank has staged it, and a count.

    ``num_null`` chunks were worth storing, but the engine has freed their blocks.
    """

    job: SaveJob
    pinned_block_ids: list[int]
    num_null: int


def plan_store(
    view: RequestView,
    coordinator: Coordinator,
    *,
    job_id: int,
    prefix_id: int,
    start_token: int,
    end_token: int,
    kept: Sequence[int] = (),
) -> PlannedStore:
    """Plan the store of ``[start_token, end_token)``, both multiples of ``lcm_block_size``.

    ``kept`` are the coordinator's kept boundaries. What the store mask leaves out becomes null,
    like what the engine has freed. Nulls stay in the job (the worker skips them), unpinned.
    """
    unit = coordinator.hash_block_size
    pinned: list[int] = []
    num_wanted = 0
    first_chunks: list[int] = []
    tables: list[bytes] = []
    all_runs = coordinator.stored_runs(start_token, end_token, kept)
    for group_id, runs in enumerate(all_runs):
        table: Sequence[int] = ()
        first = 0
        if runs:
            first, stop = runs[0].start, runs[-1].stop
            table = _masked(view.block_ids(group_id, first, stop), first, runs)
        first_chunks.append(first)
        tables.append(pack_ints(table))
        pinned.extend(_without_nulls(table))
        num_wanted += sum(map(len, runs))
    first_hash = start_token // unit
    hashes = BlockHashes.pack(view.hashes(first_hash, end_token // unit), first=first_hash)
    job = StoreJob(
        job_id, prefix_id, start_token, end_token, hashes, tuple(first_chunks), tuple(tables)
    )
    return PlannedStore(job, pinned, num_wanted - len(pinned))


def _masked(block_ids: Sequence[int], first_chunk: int, runs: Sequence[range]) -> Sequence[int]:
    """Return a part of a block table with null for what lies outside ``runs``."""
    if len(runs) == 1:
        return block_ids
    masked = [NULL_BLOCK_ID] * len(block_ids)
    for run in runs:
        part = slice(run.start - first_chunk, run.stop - first_chunk)
        masked[part] = block_ids[part]
    return masked


def _without_nulls(block_ids: Sequence[int]) -> Sequence[int]:
    """Return the ids of a part of a block table that stand for blocks: mostly all of them."""
    if NULL_BLOCK_ID not in block_ids:
        return block_ids
    return [block_id for block_id in block_ids if block_id != NULL_BLOCK_ID]


def plan_boundary(
    view: RequestView,
    coordinator: Coordinator,
    states: Sequence[HandOff],
    *,
    job_id: int,
    prefix_id: int,
    boundary: int,
    certain_span: tuple[int, int],
    kept: Sequence[int] = (),
) -> PlannedStore:
    """Plan what beside store jobs is needed to resume at ``boundary``: its ``states``, cut chunks.

    Of the chunks only those whose end has become certain, past the first token of ``certain_span``
    and up to its second: the boundary's proof may not be computed yet.
    """
    groups = coordinator.groups
    puts = [
        BoundaryPut(
            state.group_id,
            (boundary - 1) // groups[state.group_id].block_size,
            boundary,
            state.block_id,
        )
        for state in states
        if state.block_id != NULL_BLOCK_ID
    ]
    num_null = len(states) - len(puts)
    saved_token = coordinator.aligned(certain_span[1])
    needed = coordinator.boundary_chunks(boundary, kept, saved_token=saved_token)
    for group_id, chunks in enumerate(needed):
        if not chunks:
            continue
        first, stop = chunks[0][0], chunks[-1][0] + 1
        table = view.block_ids(group_id, first, stop)
        for chunk, end_token in chunks:
            if not certain_span[0] < end_token <= certain_span[1]:
                continue
            block_id = table[chunk - first]
            if block_id == NULL_BLOCK_ID:
                num_null += 1
            else:
                puts.append(BoundaryPut(group_id, chunk, end_token, block_id))
    unit = coordinator.hash_block_size
    hashes = tuple(
        bytes(view.hashes(put.end_token // unit - 1, put.end_token // unit)[0]) for put in puts
    )
    job = BoundaryJob(job_id, prefix_id, tuple(puts), hashes)
    return PlannedStore(job, [put.block_id for put in puts], num_null)


def plan_load(
    view: RequestView,
    coordinator: Coordinator,
    *,
    job_id: int,
    prefix_id: int,
    num_computed_tokens: int,
    hit_token: int,
    tail_tokens: Sequence[int] = (),
) -> LoadJob:
    """Plan the load that lets a request resume at ``hit_token``.

    ``tail_tokens`` is the lookup's answer: which hash names each group's last chunk. A target the
    engine gave out that somebody else may read is replaced by the null block: the worker reports a
    chunk without a target as failed, and the request recomputes.
    """
    first_chunks: list[int] = []
    tables: list[bytes] = []
    for group_id, chunks in enumerate(coordinator.load_mask(hit_token, num_computed_tokens)):
        targets = list(view.target_ids(group_id, chunks.start, chunks.stop))
        targets.extend([NULL_BLOCK_ID] * (len(chunks) - len(targets)))
        first_chunks.append(chunks.start)
        tables.append(pack_ints(targets))
    unit = coordinator.hash_block_size
    first = min(
        chunk * group.block_size // unit
        for chunk, group in zip(first_chunks, coordinator.groups, strict=True)
    )
    tails = tuple(tail_tokens) or (hit_token,) * len(coordinator.groups)
    hashes = view.hashes(first, max(tails) // unit)
    return LoadJob(
        job_id=job_id,
        request_id=view.request_id,
        prefix_id=prefix_id,
        start_token=num_computed_tokens,
        end_token=hit_token,
        hashes=BlockHashes.pack(hashes, first=first),
        first_chunks=tuple(first_chunks),
        tail_tokens=tails,
        block_ids=tuple(tables),
    )
