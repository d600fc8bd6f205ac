"""Chunks: one group's blocks as units of the store, and the keys they are stored under."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtide.core.keys import HexSource, KeyMetadata, KeyStyle, PoolKey


class Chunk(NamedTuple):
    """The tokens ``[start_token, end_token)`` of one group, named by the hash of the last block."""

    start_token: int
    end_token: int
    chunk_hash: bytes


def ceil_div(numerator: int, denominator: int) -> int:
    """Return the quotient rounded up."""
    return -(-numerator // denominator)


@dataclass(frozen=True, slots=True)
class ChunkedTokenDatabase:
    """Cuts one group's tokens into chunks and names them.

    ``block_size`` is the group's block in tokens, a multiple of ``hash_block_size``, the unit in
    which the engine chains its hashes. Since a chained hash covers every token before it, the
    last hash inside a chunk is enough to name it.

    Raises:
        ValueError: the block is not a multiple of the hash block.
    """

    prefix: str
    block_size: int
    hash_block_size: int

    def __post_init__(self) -> None:
        if self.hash_block_size <= 0 or self.block_size % self.hash_block_size:
            raise ValueError(
                f"block_size {self.block_size} must be a multiple of "
                f"hash_block_size {self.hash_block_size}"
            )

    @classmethod
    def for_group(
        cls,
        metadata: KeyMetadata,
        *,
        block_size: int,
        hash_block_size: int,
        keys: KeyStyle = PoolKey,
    ) -> ChunkedTokenDatabase:
        """Return the database of the group and part that ``metadata`` names."""
        return cls(keys.build_prefix(metadata), block_size, hash_block_size)

    @property
    def hashes_per_chunk(self) -> int:
        """How many hash blocks make up a chunk."""
        return self.block_size // self.hash_block_size

    def last_hash_index(self, chunk_id: int, num_hashes: int) -> int:
        """Return the index of the hash that names a chunk, the last one it has.

        ``num_hashes`` caps it: the last chunk of a request may be cut short.
        """
        return min((chunk_id + 1) * self.hashes_per_chunk, num_hashes) - 1

    def process_tokens(
        self,
        token_len: int,
        block_hashes: Sequence[bytes],
        mask_num: int = 0,
        *,
        chunk_mask: Sequence[bool] | None = None,
        put_step: int = 1,
        put_step_rank: int = 0,
    ) -> Iterator[Chunk]:
        """Yield the chunks of ``token_len`` tokens, from ``ceil(mask_num / block_size)`` on.

        Never past the hashes. ``mask_num`` (tokens) is what to skip; ``chunk_mask`` is relative
        to the first chunk considered; masked chunks, and chunks whose absolute index is not
        ``put_step_rank`` modulo ``put_step``, are skipped before their hash is touched. The last
        chunk ends at ``token_len``. This is the reference enumerator; :meth:`keys` serves ranges.
        """
        num_hashes = len(block_hashes)
        first_chunk = ceil_div(mask_num, self.block_size)
        end_chunk = min(
            ceil_div(token_len, self.block_size), ceil_div(num_hashes, self.hashes_per_chunk)
        )
        for chunk_id in range(first_chunk, end_chunk):
            relative = chunk_id - first_chunk
            if chunk_mask is not None and not (relative < len(chunk_mask) and chunk_mask[relative]):
                continue
            if chunk_id % put_step != put_step_rank:
                continue
            start_token = chunk_id * self.block_size
            end_token = min(start_token + self.block_size, token_len)
            chunk_hash = block_hashes[self.last_hash_index(chunk_id, num_hashes)]
            yield Chunk(start_token, end_token, chunk_hash)

    def key_for(self, chunk_hash: bytes) -> str:
        """Return the pool key of the chunk with this hash."""
        return PoolKey.build_key_string(self.prefix, chunk_hash.hex())

    def keys(
        self, block_hashes: HexSource, chunks: range, tail_token: int | None = None
    ) -> list[str]:
        """Return the keys of ``chunks``, one hex conversion for all of them.

        Each is named by its last hash; the last of them by the hash at ``tail_token``, which lies
        inside it, where that is given.
        """
        ratio = self.hashes_per_chunk
        names = range((chunks.start + 1) * ratio - 1, chunks.stop * ratio, ratio)
        if tail_token is None or not chunks or tail_token == chunks.stop * self.block_size:
            return self.keys_at(block_hashes, names)
        tail = tail_token // self.hash_block_size - 1
        return self.keys_at(block_hashes, names[:-1]) + self.keys_at(block_hashes, (tail,))

    def keys_at(self, block_hashes: HexSource, hash_indexes: Sequence[int]) -> list[str]:
        """Return the keys of the chunks that the hashes at ``hash_indexes`` name."""
        return self.keys_named(block_hashes.hexes(hash_indexes))

    def keys_named(self, hexes: Sequence[str]) -> list[str]:
        """Return the keys of the chunks whose hashes in hex are ``hexes``."""
        head = PoolKey.build_key_string(self.prefix, "")
        return [head + text for text in hexes]
