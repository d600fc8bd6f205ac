"""The lookup: the longest prefix that all ranks hold, asking as few keys as possible."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.core.chunks import ChunkedTokenDatabase
from kvtide.core.coordinator import Coordinator
from kvtide.core.groups import FullAttention, Mamba, SlidingWindow
from kvtide.core.keys import HashWindow, KeyMetadata
from kvtide.core.lookup import LookupHit, LookupQuery, drive, lookup
from kvtide.core.probes import FIRST_PROBE_KEYS
from kvtide.core.search import Boundaries
from kvtide.core.topology import Part
from kvtide.testing.requests import fake_hashes
from tests.core.models import Contents, contents, longest_hit

BLOCK = 16


class Presence:
    """A presence function over a set of keys that counts what it is asked."""

    def __init__(self, keys: set[str]) -> None:
        self.keys = keys
        self.asked: list[list[str]] = []

    def __call__(self, keys: Sequence[str]) -> list[bool]:
        self.asked.append(list(keys))
        return [key in self.keys for key in keys]

    @property
    def num_asked(self) -> int:
        return sum(map(len, self.asked))


def databases(num_ranks: int = 1) -> list[ChunkedTokenDatabase]:
    """One database per rank of one group."""
    return [
        ChunkedTokenDatabase.for_group(
            KeyMetadata("ns", Part(shard_id=rank), 0), block_size=BLOCK, hash_block_size=BLOCK
        )
        for rank in range(num_ranks)
    ]


def run(
    presence: Presence,
    hashes: list[bytes],
    *,
    start_chunk: int = 0,
    num_ranks: int = 1,
    sentinels: tuple[bytes, ...] = (),
) -> LookupHit:
    """Look up everything from ``start_chunk`` on."""
    query = LookupQuery(
        start_chunk * BLOCK,
        len(hashes) * BLOCK,
        HashWindow(hashes[start_chunk:], first=start_chunk),
        sentinels,
    )
    boundaries = Boundaries((FullAttention(BLOCK),), BLOCK, BLOCK)
    probe = lookup(query, boundaries, [databases(num_ranks)])
    return drive(probe, presence)


def keys_of(hashes: list[bytes], *, rank: int = 0) -> list[str]:
    """The keys of all chunks on one rank."""
    database = databases(rank + 1)[rank]
    return [database.key_for(value) for value in hashes]


@given(
    present=st.lists(st.booleans(), max_size=400),
    start=st.integers(0, 20),
)
def test_the_hit_ends_at_the_first_gap(present: list[bool], start: int) -> None:
    """Whatever lies behind a gap is of no use to full attention."""
    hashes = fake_hashes(len(present))
    start = min(start, len(present))
    keys = keys_of(hashes)
    presence = Presence({key for key, there in zip(keys, present, strict=True) if there})
    expected = start
    while expected < len(present) and present[expected]:
        expected += 1
    assert run(presence, hashes, start_chunk=start).hit_token == expected * BLOCK


def test_a_cold_miss_of_a_long_prompt_costs_one_small_batch() -> None:
    """131,072 tokens that nobody stored: 64 keys, one call."""
    presence = Presence(set())
    assert run(presence, fake_hashes(8192)).hit_token == 0
    assert [len(keys) for keys in presence.asked] == [FIRST_PROBE_KEYS]


def test_a_full_hit_asks_each_key_once_in_growing_batches() -> None:
    """8,192 chunks in batches that double from 64 to 1,024; nothing is asked twice."""
    hashes = fake_hashes(8192)
    presence = Presence(set(keys_of(hashes)))
    assert run(presence, hashes).hit_token == 8192 * BLOCK
    asked = [key for keys in presence.asked for key in keys]
    assert len(asked) == len(set(asked)) == 8192
    assert [len(keys) for keys in presence.asked[:6]] == [64, 128, 256, 512, 1024, 1024]


def test_what_the_engine_holds_is_not_asked() -> None:
    """A lookup starts at the local hit."""
    hashes = fake_hashes(100)
    presence = Presence(set(keys_of(hashes)))
    assert run(presence, hashes, start_chunk=95).hit_token == 100 * BLOCK
    assert presence.asked == [keys_of(hashes)[95:]]


def test_sentinels_ride_on_the_first_batch_and_do_not_change_the_hit() -> None:
    """The ends of what the engine holds are asked in the same call."""
    hashes = fake_hashes(10)
    keys = keys_of(hashes)
    presence = Presence(set(keys[4:8]))
    hit = run(presence, hashes, start_chunk=4, sentinels=(hashes[0], hashes[3]))
    assert hit == LookupHit(4 * BLOCK, 8 * BLOCK, sentinels_present=False)
    assert presence.asked == [[keys[0], keys[3], *keys[4:]]]
    presence = Presence(set(keys))
    assert run(presence, hashes, start_chunk=4, sentinels=(hashes[0],)).sentinels_present


def test_sentinels_are_asked_even_when_nothing_else_is() -> None:
    """A prompt that the engine holds whole may still be missing in the store."""
    hashes = fake_hashes(4)
    presence = Presence(set())
    hit = run(presence, hashes, start_chunk=4, sentinels=(hashes[0],))
    assert hit == LookupHit(4 * BLOCK, 4 * BLOCK, sentinels_present=False)
    assert presence.num_asked == 1


@given(st.data(), st.integers(1, 4), st.integers(1, 80))
def test_a_chunk_counts_only_if_every_rank_has_it(
    data: st.DataObject, num_ranks: int, num_chunks: int
) -> None:
    """Each rank's every key may be gone: the hit is the longest prefix that all ranks hold."""
    hashes = fake_hashes(num_chunks)
    holes = data.draw(
        st.lists(
            st.tuples(st.integers(0, num_ranks - 1), st.integers(0, num_chunks - 1)), max_size=3
        )
    )
    present = {key for rank in range(num_ranks) for key in keys_of(hashes, rank=rank)}
    for rank, chunk in holes:
        present.discard(keys_of(hashes, rank=rank)[chunk])
    first_hole = min([chunk for _, chunk in holes], default=num_chunks)
    presence = Presence(present)
    assert run(presence, hashes, num_ranks=num_ranks).hit_token == first_hole * BLOCK


def test_the_first_rank_decides_how_far_the_others_are_asked() -> None:
    """A cold miss costs one batch whatever the number of ranks."""
    presence = Presence(set())
    run(presence, fake_hashes(500), num_ranks=8)
    assert presence.num_asked == FIRST_PROBE_KEYS


@given(contents(), st.integers(1, 3), st.randoms(use_true_random=False))
def test_every_kind_of_group_needs_all_of_its_ranks(
    case: Contents, num_ranks: int, random: Random
) -> None:
    """The hit is that of a store which has only what every rank has; no key is asked twice."""
    groups, unit = case.boundaries.groups, case.boundaries.hash_block_size
    ranks = [
        [
            ChunkedTokenDatabase(f"{number}/{rank}", group.block_size, unit)
            for rank in range(num_ranks)
        ]
        for number, group in enumerate(groups)
    ]
    hashes = fake_hashes(case.where.num_hashes)
    gone = {
        (number, rank, index)
        for number, index in case.present
        for rank in range(num_ranks)
        if random.random() < 0.05
    }
    everywhere = {
        (number, index)
        for number, index in case.present
        if not any((number, rank, index) in gone for rank in range(num_ranks))
    }
    presence = Presence(
        {
            ranks[number][rank].key_for(hashes[index])
            for number, index in case.present
            for rank in range(num_ranks)
            if (number, rank, index) not in gone
        }
    )
    start_token, end_token = case.where.start_token, case.where.end_token
    first = start_token // unit
    window = HashWindow(hashes[first:], first=first)
    query = LookupQuery(start_token, end_token, window)
    hit = drive(lookup(query, case.boundaries, ranks), presence)
    assert hit.hit_token == longest_hit(replace(case, present=frozenset(everywhere)))
    asked = [key for keys in presence.asked for key in keys]
    assert len(set(asked)) == len(asked)


def test_sentinels_are_chunks_of_full_attention() -> None:
    """Windows and states below a local hit are no use to anybody: they may be gone."""
    hashes = fake_hashes(8)
    ranks = [[ChunkedTokenDatabase(f"{number}", BLOCK, BLOCK)] for number in range(2)]
    presence = Presence({ranks[1][0].key_for(hashes[0])})
    for groups, sentinels in (
        ((SlidingWindow(BLOCK, 64), FullAttention(BLOCK)), [[ranks[1][0].key_for(hashes[0])]]),
        ((SlidingWindow(BLOCK, 64), Mamba(BLOCK)), []),
    ):
        presence.asked.clear()
        query = LookupQuery(4 * BLOCK, 4 * BLOCK, HashWindow((), first=4), (hashes[0],))
        hit = drive(lookup(query, Boundaries(groups, BLOCK, BLOCK), ranks), presence)
        assert hit == LookupHit(4 * BLOCK, 4 * BLOCK)
        assert presence.asked == sentinels


def test_the_names_of_cut_chunks_travel_with_the_hit() -> None:
    """The worker cannot know under which of its hashes a part of a chunk was stored."""
    hashes = fake_hashes(4)
    ranks = [[ChunkedTokenDatabase(f"{number}", 4 * BLOCK, BLOCK)] for number in range(2)]
    boundaries = Boundaries((FullAttention(4 * BLOCK), Mamba(4 * BLOCK)), BLOCK, BLOCK)
    presence = Presence({ranks[0][0].key_for(hashes[2]), ranks[1][0].key_for(hashes[1])})
    query = LookupQuery(0, 4 * BLOCK, HashWindow(hashes))
    hit = drive(lookup(query, boundaries, ranks), presence)
    assert hit == LookupHit(0, 2 * BLOCK, (3 * BLOCK, 2 * BLOCK), 3 * BLOCK)


def test_a_hit_of_two_groups_ends_where_the_shorter_one_does() -> None:
    """Groups of different block sizes meet at a common boundary."""
    hashes = fake_hashes(32)
    coordinator = Coordinator((FullAttention(16), FullAttention(64)), 16)
    small = databases()[0]
    large = ChunkedTokenDatabase("large", 64, BLOCK)
    have = {small.key_for(value) for value in hashes[:30]}
    have |= {large.key_for(hashes[i]) for i in (3, 7, 11)}
    tokens = coordinator.find_longest_cache_hit(
        32 * 16 + 1, hashes, [[small], [large]], Presence(have)
    )
    assert tokens == 3 * 64


@pytest.mark.parametrize("num_tokens, expected", [(32, 16), (33, 32), (1, 0), (0, 0)])
def test_one_token_always_remains_to_compute(num_tokens: int, expected: int) -> None:
    """A prompt of exactly two blocks resumes after one: the bound is part of the search."""
    hashes = fake_hashes(num_tokens // BLOCK)
    presence = Presence(set(keys_of(hashes)))
    coordinator = Coordinator((FullAttention(BLOCK),), BLOCK)
    found = coordinator.find_longest_cache_hit(num_tokens, hashes, [databases()], presence)
    assert found == expected
