"""From a prefix id to the databases that name this rank's chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtide.core.chunks import ChunkedTokenDatabase
from kvtide.core.keys import KeyMetadata, KeyStyle, PoolKey


class PrefixDatabases:
    """One :class:`ChunkedTokenDatabase` per prefix id and group, for one rank."""

    def __init__(
        self,
        group_block_sizes: Sequence[int],
        hash_block_size: int,
        rank: int,
        keys: KeyStyle = PoolKey,
    ) -> None:
        self.block_sizes = tuple(group_block_sizes)
        self._hash_block_size = hash_block_size
        self._rank = rank
        self._keys = keys
        self._databases: dict[int, tuple[ChunkedTokenDatabase, ...]] = {}

    def learn(self, prefixes: Mapping[int, str]) -> None:
        """Take note of the namespaces that new prefix ids stand for."""
        for prefix_id, namespace in prefixes.items():
            self._databases[prefix_id] = tuple(
                ChunkedTokenDatabase.for_group(
                    KeyMetadata(namespace, self._rank, group_id),
                    block_size=block_size,
                    hash_block_size=self._hash_block_size,
                    keys=self._keys,
                )
                for group_id, block_size in enumerate(self.block_sizes)
            )

    def __getitem__(self, prefix_id: int) -> tuple[ChunkedTokenDatabase, ...]:
        """Return the databases of a prefix id, by group.

        Raises:
            KeyError: no plan announced this id.
        """
        return self._databases[prefix_id]
