"""A paged cache's book-keeping: who holds which block, and which block holds what.

The same rules as vLLM's ``BlockPool``: a freed block keeps its hashes, and may be found again,
until it is given out anew; blocks are given out in the order in which they were freed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvtide.core.jobs import NULL_BLOCK_ID

BlockName = tuple[int, bytes]
"""Group and hash."""


class EngineBlockPool:
    """``num_blocks`` blocks, the null block included, shared by all groups.

    ``spoil`` overwrites blocks whose content nobody may read any more.
    """

    def __init__(self, num_blocks: int, spoil: Callable[[Sequence[int]], None]) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self.names: list[list[BlockName]] = [[] for _ in range(num_blocks)]
        """By block: the hashes under which it is found. A whole block, and beginnings of it."""
        self.fresh: set[BlockName] = set()
        """Names given in this step: what they stand for is yet to be computed."""
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._cached: dict[BlockName, OrderedDict[int, None]] = {}
        self._spoil = spoil

    def __repr__(self) -> str:
        return f"<EngineBlockPool [{self.num_free} of {self.num_blocks} free]>"

    @property
    def num_free(self) -> int:
        """How many blocks could be given out now."""
        return len(self._free)

    def cached(self) -> Iterator[tuple[int, BlockName]]:
        """Yield every block that can be found by a hash, with each of its names."""
        for block_id, names in enumerate(self.names):
            for name in names:
                yield block_id, name

    def find(self, group_id: int, block_hash: bytes) -> int | None:
        """Return a block that holds what the hash names; None if there is none."""
        ids = self._cached.get((group_id, block_hash))
        return next(iter(ids)) if ids else None

    def allocate(self, num_blocks: int) -> list[int]:
        """Give blocks out; what they held is forgotten.

        Raises:
            ValueError: there are not that many; the caller should have asked.
        """
        if num_blocks > len(self._free):
            raise ValueError(f"{num_blocks} blocks wanted, {len(self._free)} free")
        ids = [self._free.popitem(last=False)[0] for _ in range(num_blocks)]
        for block_id in ids:
            self._forget(block_id)
            self.ref_counts[block_id] = 1
        return ids

    def num_free_among(self, block_ids: Iterable[int]) -> int:
        """Return how many of ``block_ids`` would leave the free queue if touched."""
        return sum(not self.ref_counts[block_id] for block_id in block_ids)

    def touch(self, block_ids: Iterable[int]) -> None:
        """Take one more reference to each block."""
        for block_id in block_ids:
            assert block_id != NULL_BLOCK_ID, "the null block cannot be held"
            if not self.ref_counts[block_id]:
                del self._free[block_id]
            self.ref_counts[block_id] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Give references back; the first block is the first to be given out again."""
        for block_id in block_ids:
            assert self.ref_counts[block_id] > 0, f"block {block_id} was freed twice"
            self.ref_counts[block_id] -= 1
            if not self.ref_counts[block_id]:
                self._free[block_id] = None
                if not self.names[block_id]:
                    self._spoil((block_id,))

    def cache(self, group_id: int, block_id: int, block_hash: bytes) -> None:
        """Let a block be found by a hash."""
        name = (group_id, block_hash)
        assert block_id != NULL_BLOCK_ID, "the null block holds nothing"
        assert name not in self.names[block_id], f"block {block_id} has this name already"
        self.names[block_id].append(name)
        self._cached.setdefault(name, OrderedDict())[block_id] = None
        self.fresh.add(name)

    def move_names(self, source: int, target: int) -> None:
        """Let ``target``, a copy, be found instead of ``source``."""
        names = list(self.names[source])
        self.unname(source)
        for group_id, block_hash in names:
            self.cache(group_id, target, block_hash)

    def reset(self) -> bool:
        """Forget every hash; False, and nothing happens, while any block is held."""
        if self.num_free != self.num_blocks - 1:
            return False
        self.drop_cached()
        return True

    def drop_cached(self) -> None:
        """Forget what free blocks hold: as if other requests had used all of them."""
        for block_id in self._free:
            self._forget(block_id)

    def _forget(self, block_id: int) -> None:
        self.unname(block_id)
        self._spoil((block_id,))

    def unname(self, block_id: int) -> None:
        """Let a block be found no more."""
        names, self.names[block_id] = self.names[block_id], []
        for name in names:
            ids = self._cached[name]
            del ids[block_id]
            if not ids:
                del self._cached[name]
