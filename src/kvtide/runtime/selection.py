"""What a rank stores of a job: chunks, their blocks, and the hashes that name them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvtide.core.jobs import (
    NULL_BLOCK_ID,
    BoundaryJob,
    JoinedJob,
    SaveJob,
    StoreJob,
    unpack_ints,
)
from kvtide.core.keys import BlockHashes
from kvtide.core.topology import RankRole, StoreShare

EVERY_CHUNK = StoreShare()


@dataclass(frozen=True, slots=True)
class Selection:
    """The chunks of one group to store: absolute indexes and, beside them, their blocks.

    ``names[i]`` is the index in ``hashes`` of the one that names ``chunks[i]``.
    """

    group_id: int
    chunks: Sequence[int]
    block_ids: Sequence[int]
    hashes: BlockHashes
    names: Sequence[int]


def select(job: SaveJob, role: RankRole, hashes_per_chunk: Sequence[int]) -> list[Selection]:
    """Return what a rank of this role stores of a job: null and other ranks' chunks left out.

    ``hashes_per_chunk`` has an entry for each group.
    """
    if isinstance(job, StoreJob):
        selections = _of_range(job, hashes_per_chunk)
    elif isinstance(job, JoinedJob):
        selections = _of_joined(job)
    else:
        selections = _of_puts(job)
    return [
        kept
        for selection in selections
        if role.parts[selection.group_id]
        if (kept := _kept(selection, role.shares[selection.group_id])) is not None
    ]


def _of_range(job: StoreJob, hashes_per_chunk: Sequence[int]) -> Iterator[Selection]:
    for group_id, packed in enumerate(job.block_ids):
        block_ids = unpack_ints(packed)
        first, ratio = job.first_chunks[group_id], hashes_per_chunk[group_id]
        chunks = range(first, first + len(block_ids))
        names = range((chunks.start + 1) * ratio - 1, (chunks.stop + 1) * ratio - 1, ratio)
        yield Selection(group_id, chunks, block_ids, job.hashes, names)


def _of_joined(job: JoinedJob) -> Iterator[Selection]:
    end = 0
    for group_id, (packed, block_ids) in enumerate(zip(job.chunks, job.block_ids, strict=True)):
        chunks = unpack_ints(packed)
        start, end = end, end + len(chunks)
        names = range(start, end)
        yield Selection(group_id, chunks, unpack_ints(block_ids), job.hashes, names)


def _of_puts(job: BoundaryJob) -> Iterator[Selection]:
    hashes = BlockHashes.pack(job.hashes)
    for group_id in sorted({put.group_id for put in job.puts}):
        names = [index for index, put in enumerate(job.puts) if put.group_id == group_id]
        chunks = [job.puts[index].chunk_id for index in names]
        block_ids = [job.puts[index].block_id for index in names]
        yield Selection(group_id, chunks, block_ids, hashes, names)


def _kept(selection: Selection, share: StoreShare) -> Selection | None:
    """Return the part of a selection that is a rank's own and not null, ``None`` for nothing."""
    if share == EVERY_CHUNK and NULL_BLOCK_ID not in selection.block_ids:
        return selection if selection.block_ids else None
    block_ids = np.asarray(selection.block_ids, dtype=np.int32)
    chunks = np.asarray(selection.chunks, dtype=np.int64)
    keep = (chunks % share.put_step == share.put_step_rank) & (block_ids != NULL_BLOCK_ID)
    if not keep.any():
        return None
    return Selection(
        selection.group_id,
        chunks[keep].tolist(),
        block_ids[keep].tolist(),
        selection.hashes,
        np.asarray(selection.names)[keep].tolist(),
    )
