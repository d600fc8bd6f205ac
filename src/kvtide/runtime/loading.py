"""How a load is cut into parts that fit the receiving slab, in token order across groups.

In token order, because a load stops at the first chunk that is not proven: then everything before
that token is known to be in the store, whatever groups there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtide.core.chunks import ChunkedTokenDatabase
from kvtide.core.jobs import NULL_BLOCK_ID, LoadJob, unpack_ints
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


@dataclass(frozen=True, slots=True)
class PartValues:
    """The values of a part, column by column: names, first tokens, places in the slab, sizes."""

    keys: list[str]
    tokens: list[int]
    chunks: list[int]
    offsets: list[int]
    payload_bytes: list[int]

    def __len__(self) -> int:
        return len(self.keys)

    def rotated(self, first: int) -> PartValues:
        """Return the same values, from the one at ``first`` on."""
        return PartValues(*([*column[first:], *column[:first]] for column in self._columns()))

    def below(self, token: int) -> PartValues:
        """Return the values that start before ``token``."""
        kept = [index for index, start in enumerate(self.tokens) if start < token]
        return PartValues(*([column[index] for index in kept] for column in self._columns()))

    def _columns(self) -> tuple[list[Any], ...]:
        return self.keys, self.tokens, self.chunks, self.offsets, self.payload_bytes


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
    order = _Order(job, num_parts, block_sizes)
    sizes = np.asarray(row_bytes)[order.groups]
    is_blocked = (order.block_ids == NULL_BLOCK_ID) | (sizes > capacity_bytes)
    blocked = int(is_blocked.argmax()) if is_blocked.any() else len(sizes)
    end_bytes = np.cumsum(sizes)
    end_keys = np.cumsum(np.asarray(num_parts)[order.groups])
    first = 0
    while True:
        done_bytes = end_bytes[first - 1] if first else 0
        done_keys = end_keys[first - 1] if first else 0
        # Until the bytes are used up, and with the chunk that reaches the number of keys.
        stop = int(np.searchsorted(end_bytes, done_bytes + capacity_bytes, side="right"))
        stop = min(stop, int(np.searchsorted(end_keys, done_keys + MAX_PART_KEYS)) + 1, blocked)
        next_token = int(order.tokens[stop]) if stop < len(sizes) else None
        yield LoadPart(
            order.runs(first, stop, row_bytes), next_token, is_blocked=stop == blocked < len(sizes)
        )
        if stop == blocked:
            return
        first = stop


def part_values(
    part: LoadPart,
    databases: Sequence[Sequence[ChunkedTokenDatabase]],
    job: LoadJob,
    layout: StoreLayout,
) -> PartValues:
    """Return the values of a part, run after run; ``databases`` are by group and part.

    Raises:
        IndexError: the job does not carry the hashes of its chunks.
    """
    values = PartValues([], [], [], [], [])
    for run in part.runs:
        block_size = databases[run.group_id][0].block_size
        num_parts = len(databases[run.group_id])
        rows = run.rows.divided(num_parts)
        tail_token = job.tail_tokens[run.group_id]
        # Only the load's last chunk of a group has the tail inside it.
        is_last = tail_token <= run.chunks.stop * block_size
        tail = tail_token if is_last else None
        values.keys.extend(
            interleaved(
                [
                    database.keys(job.hashes, run.chunks, tail)
                    for database in databases[run.group_id]
                ]
            )
        )
        chunks = [chunk for chunk in run.chunks for _ in range(num_parts)]
        values.chunks.extend(chunks)
        values.tokens.extend(chunk * block_size for chunk in chunks)
        values.offsets.extend(range(rows.offset, rows.offset + rows.num_bytes, rows.row_bytes))
        values.payload_bytes.extend([layout.groups[run.group_id].payload_bytes] * rows.num_rows)
    return values


class _Order:
    """A load's chunks in token order, at one token by group: ``tokens`` are where they start."""

    def __init__(self, job: LoadJob, num_parts: Sequence[int], block_sizes: Sequence[int]) -> None:
        self._first_chunks = job.first_chunks
        self._tables = [np.asarray(unpack_ints(packed), dtype=np.int64) for packed in job.block_ids]
        group_ids = [number for number, parts in enumerate(num_parts) if parts]
        columns = [
            np.concatenate([np.empty(0, dtype=np.int64), *arrays])
            for arrays in (
                [self._starts(number, block_sizes[number]) for number in group_ids],
                [np.full(len(self._tables[number]), number) for number in group_ids],
                [self._tables[number] for number in group_ids],
            )
        ]
        if len(group_ids) > 1:
            order = columns[0].argsort(kind="stable")
            columns = [column[order] for column in columns]
        self.tokens, self.groups, self.block_ids = columns
        self._num_done = [0] * len(num_parts)

    def _starts(self, group_id: int, block_size: int) -> npt.NDArray[np.int64]:
        first = self._first_chunks[group_id]
        return np.arange(first, first + len(self._tables[group_id])) * block_size

    def runs(self, first: int, stop: int, row_bytes: Sequence[int]) -> tuple[LoadRun, ...]:
        """Return the next chunks, which are those from ``first`` to ``stop``, as runs of groups."""
        runs: list[LoadRun] = []
        offset = 0
        counts = np.bincount(self.groups[first:stop], minlength=len(self._num_done))
        for group_id, count in enumerate(counts.tolist()):
            if not count:
                continue
            done = self._num_done[group_id]
            self._num_done[group_id] = done + count
            start = self._first_chunks[group_id] + done
            rows = Rows(offset, count, row_bytes[group_id])
            block_ids = self._tables[group_id][done : done + count].tolist()
            runs.append(LoadRun(group_id, range(start, start + count), block_ids, rows))
            offset += rows.num_bytes
        return tuple(runs)
