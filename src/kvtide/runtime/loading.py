"""How a load is cut into parts that fit the receiving slab, in token order across groups.

In token order, because a load stops at the first chunk that is not proven: then everything before
that token is known to be in the store, whatever groups there are.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtide.core.chunks import ChunkedTokenDatabase
from kvtide.core.jobs import NULL_BLOCK_ID, LoadJob, unpack_block_ids
from kvtide.core.layout import StoreLayout
from kvtide.runtime.prefixes import interleaved
from kvtide.runtime.slab import Rows

MAX_PART_KEYS = 256
"""Chunks that are planned, named and verified in one go: well under a millisecond of Python."""


@dataclass(frozen=True, slots=True)
class LoadRun:
    """Consecutive chunks of one group, their target blocks, and the rows they pass through.

    A chunk takes one row, which holds the values of all its parts.
    """

    group_id: int
    chunks: range
    block_ids: list[int]
    rows: Rows


@dataclass(frozen=True, slots=True)
class LoadPart:
    """What is fetched in one call.

    ``next_token`` is where the rest of the load starts, ``None`` if there is no rest; where
    ``is_blocked`` the chunk there cannot be loaded, and the load fails at it.
    """

    runs: tuple[LoadRun, ...]
    next_token: int | None
    is_blocked: bool = False


class PartValue(NamedTuple):
    """One value of a part: its name, where it starts in tokens and where it lies in the slab."""

    key: str
    token: int
    chunk: int
    offset: int
    payload_bytes: int


def first_token(job: LoadJob, block_sizes: Sequence[int]) -> int:
    """Return the start of the first chunk the job loads (its own start if it loads none)."""
    starts = [
        first * block_size
        for first, packed, block_size in zip(
            job.first_chunks, job.block_ids, block_sizes, strict=False
        )
        if packed
    ]
    return min(starts, default=job.start_token)


def split_load(
    job: LoadJob,
    row_bytes: Sequence[int],
    num_parts: Sequence[int],
    block_sizes: Sequence[int],
    capacity_bytes: int,
) -> Iterator[LoadPart]:
    """Yield the parts of a load, each with at most ``capacity_bytes`` of rows.

    ``row_bytes`` is what a chunk of each group takes, ``num_parts`` how many values it has (0 for
    groups of which this rank has nothing), ``block_sizes`` are in tokens. Stops at the first chunk
    whose target is the null block or whose value exceeds the capacity.
    """
    plan = _PartPlan(job, row_bytes, num_parts)
    for token, group_id, chunk in heapq.merge(
        *(
            _starts(job, group_id, block_size)
            for group_id, block_size in enumerate(block_sizes)
            if num_parts[group_id]
        )
    ):
        is_blocked = not plan.can_ever_hold(group_id, chunk, capacity_bytes)
        if is_blocked or not plan.has_room(group_id, capacity_bytes):
            yield plan.finish(token, is_blocked=is_blocked)
            if is_blocked:
                return
        plan.add(group_id, chunk)
    yield plan.finish(None)


def part_values(
    part: LoadPart,
    databases: Sequence[Sequence[ChunkedTokenDatabase]],
    job: LoadJob,
    layout: StoreLayout,
) -> list[PartValue]:
    """Return the values of a part, run after run; ``databases`` are by group and part.

    Raises:
        IndexError: the job does not carry the hashes of its chunks.
    """
    values: list[PartValue] = []
    for run in part.runs:
        block_size = databases[run.group_id][0].block_size
        num_parts = len(databases[run.group_id])
        rows = run.rows.divided(num_parts)
        payload_bytes = layout.groups[run.group_id].payload_bytes
        tail_token = job.tail_tokens[run.group_id]
        # Only the load's last chunk of a group has the tail inside it.
        is_last = tail_token <= run.chunks.stop * block_size
        tail = tail_token if is_last else None
        keys = interleaved(
            [database.keys(job.hashes, run.chunks, tail) for database in databases[run.group_id]]
        )
        for row, key in enumerate(keys):
            chunk = run.chunks[row // num_parts]
            offset = rows.offset + row * rows.row_bytes
            values.append(PartValue(key, chunk * block_size, chunk, offset, payload_bytes))
    return values


def _starts(job: LoadJob, group_id: int, block_size: int) -> Iterator[tuple[int, int, int]]:
    """Yield ``(start token, group, chunk)`` of a group's chunks."""
    first = job.first_chunks[group_id]
    num_chunks = len(unpack_block_ids(job.block_ids[group_id]))
    for chunk in range(first, first + num_chunks):
        yield chunk * block_size, group_id, chunk


class _PartPlan:
    """The part that is being filled."""

    def __init__(self, job: LoadJob, row_bytes: Sequence[int], num_parts: Sequence[int]) -> None:
        self._first_chunks = job.first_chunks
        self._block_ids = [unpack_block_ids(packed) for packed in job.block_ids]
        self._row_bytes = row_bytes
        self._num_parts = num_parts
        self._chunks: dict[int, range] = {}
        self._num_bytes = self._num_keys = 0

    def can_ever_hold(self, group_id: int, chunk: int, capacity_bytes: int) -> bool:
        block_id = self._block_ids[group_id][chunk - self._first_chunks[group_id]]
        return block_id != NULL_BLOCK_ID and self._row_bytes[group_id] <= capacity_bytes

    def has_room(self, group_id: int, capacity_bytes: int) -> bool:
        fits = self._num_bytes + self._row_bytes[group_id] <= capacity_bytes
        return fits and self._num_keys < MAX_PART_KEYS

    def add(self, group_id: int, chunk: int) -> None:
        known = self._chunks.get(group_id, range(chunk, chunk))
        self._chunks[group_id] = range(known.start, chunk + 1)
        self._num_bytes += self._row_bytes[group_id]
        self._num_keys += self._num_parts[group_id]

    def finish(self, next_token: int | None, *, is_blocked: bool = False) -> LoadPart:
        """Return the part and begin the next."""
        runs: list[LoadRun] = []
        offset = 0
        for group_id, chunks in self._chunks.items():
            rows = Rows(offset, len(chunks), self._row_bytes[group_id])
            first = self._first_chunks[group_id]
            block_ids = self._block_ids[group_id][chunks.start - first : chunks.stop - first]
            runs.append(LoadRun(group_id, chunks, list(block_ids), rows))
            offset += rows.num_bytes
        self._chunks = {}
        self._num_bytes = self._num_keys = 0
        return LoadPart(tuple(runs), next_token, is_blocked)
