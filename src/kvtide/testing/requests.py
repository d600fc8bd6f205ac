"""Stand-ins for what the core reads of an engine: a request that records every read."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import overload

from kvtide.core.jobs import NULL_BLOCK_ID


def fake_hashes(num_hashes: int, *, seed: str = "") -> list[bytes]:
    """Return a chain of block hashes; chains of one seed share their beginning."""
    chain: list[bytes] = []
    parent = seed.encode()
    for _ in range(num_hashes):
        parent = hashlib.sha256(parent).digest()
        chain.append(parent)
    return chain


class _RecordedList(Sequence[bytes]):
    """A list that may grow or be cut off, and a record of the indexes that are read of it."""

    def __init__(self, values: list[bytes], reads: list[range]) -> None:
        self._values = values
        self._reads = reads

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | Sequence[bytes]:
        if isinstance(index, slice):
            self._reads.append(range(*index.indices(len(self._values))))
        else:
            self._reads.append(range(index, index + 1))
        return self._values[index]


class RecordingRequest:
    """A :class:`~kvtide.core.transfer.RequestView` whose every read is on record.

    ``hash_reads`` and ``block_reads`` hold the ranges that were asked for, in order; block reads
    as ``(group_id, first_chunk, end_chunk)``. ``list_reads`` has what was read of ``hash_list``,
    which is for lookups. ``tables[g]`` is the block table of group ``g``; by default chunk ``i``
    lies in block ``i + 1``.
    """

    def __init__(
        self,
        request_id: str = "r",
        *,
        num_tokens: int = 0,
        hashes: Sequence[bytes] = (),
        tables: Sequence[list[int]] | None = None,
        local_hit_tokens: int = 0,
        num_prompt_tokens: int | None = None,
    ) -> None:
        self.request_id = request_id
        self.num_tokens = num_tokens
        self.num_prompt_tokens = num_tokens if num_prompt_tokens is None else num_prompt_tokens
        self.block_hashes = list(hashes)
        default = [list(range(1, len(self.block_hashes) + 1))]
        self.tables = [list(table) for table in tables or default]
        self.local_hit_tokens = local_hit_tokens
        self.shared_token = 0
        self.cached_blocks: set[int] = set()
        """Blocks that somebody else may be reading."""
        self.hash_reads: list[range] = []
        self.block_reads: list[tuple[int, int, int]] = []
        self.list_reads: list[range] = []

    @property
    def num_hashes(self) -> int:
        """The hash blocks that exist now."""
        return len(self.block_hashes)

    @property
    def hash_list(self) -> Sequence[bytes]:
        """The list of all hashes; what is read of it is on record in ``list_reads``."""
        return _RecordedList(self.block_hashes, self.list_reads)

    def hashes(self, first: int, end: int) -> Sequence[bytes]:
        """Return the hashes ``[first, end)``."""
        self.hash_reads.append(range(first, end))
        return self.block_hashes[first:end]

    def block_ids(self, group_id: int, first_chunk: int, end_chunk: int) -> Sequence[int]:
        """Return a part of a group's block table."""
        self.block_reads.append((group_id, first_chunk, end_chunk))
        return self.tables[group_id][first_chunk:end_chunk]

    def target_ids(self, group_id: int, first_chunk: int, end_chunk: int) -> Sequence[int]:
        """Return a part of a group's block table, with null for blocks that somebody may read."""
        return [
            NULL_BLOCK_ID if block_id in self.cached_blocks else block_id
            for block_id in self.block_ids(group_id, first_chunk, end_chunk)
        ]

    def local_hit_hint(self) -> int:
        """Return what the test says the engine holds."""
        return self.local_hit_tokens
