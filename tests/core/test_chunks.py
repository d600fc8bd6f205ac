"""Chunks: the reference enumerator, and the fast form that must agree with it."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.core.chunks import Chunk, ChunkedTokenDatabase, ceil_div
from kvtide.core.keys import BlockHashes, KeyMetadata
from kvtide.core.topology import Part
from kvtide.testing.requests import fake_hashes


class RecordingHashes(Sequence[bytes]):
    """Hashes that remember which of them were read."""

    def __init__(self, hashes: list[bytes]) -> None:
        self._hashes = hashes
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self._hashes)

    def __getitem__(self, index: Any) -> Any:
        self.read.append(index)
        return self._hashes[index]


def database(block_size: int = 16, hash_block_size: int = 16) -> ChunkedTokenDatabase:
    """A database under a short prefix."""
    return ChunkedTokenDatabase("p", block_size, hash_block_size)


def test_chunks_run_from_the_first_unskipped_to_the_last_begun() -> None:
    """40 tokens in blocks of 16 are three chunks; the last one ends at 40."""
    hashes = fake_hashes(3)
    assert list(database().process_tokens(40, hashes)) == [
        Chunk(0, 16, hashes[0]),
        Chunk(16, 32, hashes[1]),
        Chunk(32, 40, hashes[2]),
    ]


def test_masked_and_foreign_chunks_are_skipped_before_their_hash_is_touched() -> None:
    """Only hashes of chunks that are yielded are read."""
    hashes = RecordingHashes(fake_hashes(10))
    mask = [True, False, True, True, False, True]
    chunks = list(
        database().process_tokens(160, hashes, 17, chunk_mask=mask, put_step=2, put_step_rank=1)
    )
    assert [chunk.start_token for chunk in chunks] == [5 * 16, 7 * 16]
    assert hashes.read == [5, 7]


def test_the_last_hash_of_a_chunk_names_it() -> None:
    """A chunk of four hash blocks is named by the fourth; a cut one by the last it has."""
    hashes = fake_hashes(6)
    chunks = list(database(64, 16).process_tokens(96, hashes))
    assert [chunk.chunk_hash for chunk in chunks] == [hashes[3], hashes[5]]


def test_a_mask_shorter_than_the_range_masks_the_rest() -> None:
    """What a mask does not speak of is not stored."""
    chunks = list(database().process_tokens(64, fake_hashes(4), chunk_mask=[True]))
    assert [chunk.start_token for chunk in chunks] == [0]


def test_chunks_never_run_past_the_hashes() -> None:
    """Tokens without a hash (drafts, for instance) have no name and no chunk."""
    assert len(list(database().process_tokens(100, fake_hashes(2)))) == 2


@given(
    ratio=st.integers(1, 4), first=st.integers(0, 10), length=st.integers(0, 10), own=st.booleans()
)
def test_the_fast_keys_equal_the_reference(
    ratio: int, first: int, length: int, *, own: bool
) -> None:
    """One hex conversion for a range gives the keys that the enumerator gives one by one."""
    db = database(16 * ratio, 16)
    hashes = fake_hashes((first + length) * ratio)
    carried = BlockHashes.pack(hashes[first * ratio :], first=first * ratio) if own else None
    source: Sequence[bytes] = hashes if carried is None else carried
    start, end = first * 16 * ratio, (first + length) * 16 * ratio
    slow = [db.key_for(chunk.chunk_hash) for chunk in db.process_tokens(end, source, start)]
    fast = db.keys(
        carried or BlockHashes.pack(hashes) if hashes else BlockHashes.pack([]),
        range(first, first + length),
    )
    assert slow == fast


def test_the_last_key_of_a_range_may_be_that_of_a_cut_chunk() -> None:
    """Where the last chunk is stored in part, the hash at its last token names it."""
    db = database(64, 16)
    hashes = fake_hashes(12)
    packed = BlockHashes.pack(hashes)
    whole = [db.key_for(hashes[index]) for index in (3, 7, 11)]
    assert db.keys(packed, range(3), 192) == db.keys(packed, range(3)) == whole
    assert db.keys(packed, range(3), 160) == [*whole[:2], db.key_for(hashes[9])]
    assert db.keys(packed, range(2, 3), 144) == [db.key_for(hashes[8])]
    assert db.keys(packed, range(3, 3), 144) == []


def test_a_block_must_be_whole_hash_blocks() -> None:
    """A group whose block is no multiple of the hash block cannot be named by hashes."""
    with pytest.raises(ValueError, match="multiple"):
        database(24, 16)
    with pytest.raises(ValueError, match="multiple"):
        database(16, 0)


def test_a_group_gets_its_own_prefix() -> None:
    """Part and group are in every key."""
    db = ChunkedTokenDatabase.for_group(
        KeyMetadata("ns", Part(1, 2, 3), group_id=5), block_size=16, hash_block_size=16
    )
    assert db.key_for(b"\x01") == "ns@pp:1@shard:2@dcp:3@group:5@01"


def test_ceil_div_rounds_up() -> None:
    """The quotient of whole and begun blocks."""
    assert [ceil_div(n, 16) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
