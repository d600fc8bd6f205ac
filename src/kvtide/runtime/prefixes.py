"""From a prefix id to the databases that name what this rank holds of chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtide.core.chunks import ChunkedTokenDatabase
from kvtide.core.keys import KeyMetadata, KeyStyle, PoolKey
from kvtide.core.topology import WHOLE, Part


class PrefixDatabases:
    """One :class:`ChunkedTokenDatabase` per prefix id, group and part that the rank holds.

    ``parts`` has those of each group; by default the rank has everything.
    """

    def __init__(
        self,
        group_block_sizes: Sequence[int],
        hash_block_size: int,
        parts: Sequence[Sequence[Part]] | None = None,
        keys: KeyStyle = PoolKey,
    ) -> None:
        self.block_sizes = tuple(group_block_sizes)
        self.hashes_per_chunk = tuple(size // hash_block_size for size in self.block_sizes)
        self._hash_block_size = hash_block_size
        self.parts = parts if parts is not None else ((WHOLE,),) * len(self.block_sizes)
        self._keys = keys
        self._databases: dict[int, tuple[tuple[ChunkedTokenDatabase, ...], ...]] = {}

    def learn(self, prefixes: Mapping[int, str]) -> None:
        """Take note of the namespaces that new prefix ids stand for."""
        for prefix_id, namespace in prefixes.items():
            self._databases[prefix_id] = tuple(
                tuple(
                    ChunkedTokenDatabase.for_group(
                        KeyMetadata(namespace, part, group_id),
                        block_size=block_size,
                        hash_block_size=self._hash_block_size,
                        keys=self._keys,
                    )
                    for part in self.parts[group_id]
                )
                for group_id, block_size in enumerate(self.block_sizes)
            )

    def __getitem__(self, prefix_id: int) -> tuple[tuple[ChunkedTokenDatabase, ...], ...]:
        """Return the databases of a prefix id, by group and part.

        Raises:
            KeyError: no plan announced this id.
        """
        return self._databases[prefix_id]


def interleaved(keys_of_parts: Sequence[list[str]]) -> list[str]:
    """Return keys chunk by chunk, each with all its parts, as rows of a slab lie."""
    if len(keys_of_parts) == 1:
        return keys_of_parts[0]
    return [key for keys in zip(*keys_of_parts, strict=True) for key in keys]
