"""The lookup: the longest prefix of which all parts are there, asking as few keys as possible."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.core.chunks import ChunkedTokenDatabase
from kvtide.core.coordinator import Coordinator
from kvtide.core.groups import FullAttention, Group, Mamba, SlidingWindow
from kvtide.core.keys import HashWindow, KeyMetadata
from kvtide.core.lookup import LookupHit, LookupQuery, drive, lookup
from kvtide.core.probes import FIRST_PROBE_KEYS
from kvtide.core.search import Boundaries
from kvtide.core.topology import WHOLE, Part
from kvtide.testing.requests import fake_hashes
from tests.core.models import Contents, contents, longest_hit

BLOCK = 16
MANY_HASHES = fake_hashes(1000)


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


def databases(num_parts: int = 1) -> list[ChunkedTokenDatabase]:
    """One database per part of one group."""
    return [
        ChunkedTokenDatabase.for_group(
            KeyMetadata("ns", Part(shard_id=shard_id), 0), block_size=BLOCK, hash_block_size=BLOCK
        )
        for shard_id in range(num_parts)
    ]


def run(
    presence: Presence,
    hashes: list[bytes],
    *,
    start_chunk: int = 0,
    num_parts: int = 1,
    sentinels: tuple[bytes, ...] = (),
) -> LookupHit:
    """Look up everything from ``start_chunk`` on."""
    query = LookupQuery(
        start_chunk * BLOCK,
        len(hashes) * BLOCK,
        HashWindow(hashes, first=start_chunk),
        sentinels,
    )
    boundaries = Boundaries((FullAttention(BLOCK),), BLOCK, BLOCK)
    probe = lookup(query, boundaries, [databases(num_parts)])
    return drive(probe, presence)


def keys_of(hashes: list[bytes], *, part: int = 0) -> list[str]:
    """The keys of one part of all chunks."""
    database = databases(part + 1)[part]
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


def test_sentinels_are_asked_of_every_part() -> None:
    """What one rank lacks has to be repaired, whichever it is."""
    hashes = fake_hashes(4)
    present = {key for part in range(3) for key in keys_of(hashes, part=part)}
    for missing in (None, 0, 2):
        gone = set() if missing is None else {keys_of(hashes, part=missing)[0]}
        presence = Presence(present - gone)
        hit = run(presence, hashes, start_chunk=3, num_parts=3, sentinels=(hashes[0], hashes[2]))
        assert hit == LookupHit(3 * BLOCK, 4 * BLOCK, sentinels_present=missing is None)
        assert [len(keys) for keys in presence.asked] == [3 * 2 + 1, 2]


def test_sentinels_are_asked_even_when_nothing_else_is() -> None:
    """A prompt that the engine holds whole may still be missing in the store."""
    hashes = fake_hashes(4)
    presence = Presence(set())
    hit = run(presence, hashes, start_chunk=4, sentinels=(hashes[0],))
    assert hit == LookupHit(4 * BLOCK, 4 * BLOCK, sentinels_present=False)
    assert presence.num_asked == 1


@given(st.data(), st.integers(1, 4), st.integers(1, 80))
def test_a_chunk_counts_only_if_all_its_parts_are_there(
    data: st.DataObject, num_parts: int, num_chunks: int
) -> None:
    """Any key of any part may be gone: the hit is the longest prefix that has all of them."""
    hashes = fake_hashes(num_chunks)
    holes = data.draw(
        st.lists(
            st.tuples(st.integers(0, num_parts - 1), st.integers(0, num_chunks - 1)), max_size=3
        )
    )
    present = {key for part in range(num_parts) for key in keys_of(hashes, part=part)}
    for part, chunk in holes:
        present.discard(keys_of(hashes, part=part)[chunk])
    first_hole = min([chunk for _, chunk in holes], default=num_chunks)
    presence = Presence(present)
    assert run(presence, hashes, num_parts=num_parts).hit_token == first_hole * BLOCK


TP8 = 8
"""The parts of a chunk where each of eight ranks has its own heads."""


def test_a_cold_miss_costs_one_batch_whatever_the_number_of_parts() -> None:
    """The first part decides how far the others are asked."""
    presence = Presence(set())
    assert run(presence, fake_hashes(8192), num_parts=TP8).hit_token == 0
    assert [len(keys) for keys in presence.asked] == [64]


def test_a_full_hit_of_many_parts_asks_each_key_once_in_lists_of_all_parts() -> None:
    """8 x 8,192 keys; a list has 1,024 at most, and the other seven parts share theirs."""
    hashes = fake_hashes(8192)
    presence = Presence({key for part in range(TP8) for key in keys_of(hashes, part=part)})
    assert run(presence, hashes, num_parts=TP8).hit_token == 8192 * BLOCK
    asked = [key for keys in presence.asked for key in keys]
    assert len(asked) == len(set(asked)) == 8 * 8192
    assert max(len(keys) for keys in presence.asked) <= 1024
    assert len(presence.asked) == 12 + 65


@pytest.mark.parametrize("part", [1, 4, 7])
def test_past_the_gap_of_any_part_hardly_a_key_is_asked(part: int) -> None:
    """The list in which the gap is found is the last."""
    hashes = fake_hashes(8192)
    present = {key for part in range(TP8) for key in keys_of(hashes, part=part)}
    present.discard(keys_of(hashes, part=part)[200])
    presence = Presence(present)
    assert run(presence, hashes, num_parts=TP8).hit_token == 200 * BLOCK
    # The first part is asked in batches of 64, 128 and 256, the others in lists of 146 chunks.
    assert presence.num_asked == 448 + 7 * (64 + 128 + 146)


@given(contents(), st.integers(1, 3), st.randoms(use_true_random=False))
def test_every_kind_of_group_needs_all_of_its_parts(
    case: Contents, num_parts: int, random: Random
) -> None:
    """The hit is that of a store which has only whole chunks; no key is asked twice."""
    groups, unit = case.boundaries.groups, case.boundaries.hash_block_size
    parts = [
        [
            ChunkedTokenDatabase(f"{number}/{part}", group.block_size, unit)
            for part in range(num_parts)
        ]
        for number, group in enumerate(groups)
    ]
    hashes = fake_hashes(case.where.num_hashes)
    gone = {
        (number, part, index)
        for number, index in case.present
        for part in range(num_parts)
        if random.random() < 0.05
    }
    everywhere = {
        (number, index)
        for number, index in case.present
        if not any((number, part, index) in gone for part in range(num_parts))
    }
    presence = Presence(
        {
            parts[number][part].key_for(hashes[index])
            for number, index in case.present
            for part in range(num_parts)
            if (number, part, index) not in gone
        }
    )
    start_token, end_token = case.where.start_token, case.where.end_token
    first = start_token // unit
    window = HashWindow(hashes, first=first)
    query = LookupQuery(start_token, end_token, window)
    hit = drive(lookup(query, case.boundaries, parts), presence)
    assert hit.hit_token == longest_hit(replace(case, present=frozenset(everywhere)))
    asked = [key for keys in presence.asked for key in keys]
    assert len(set(asked)) == len(asked)


def test_sentinels_are_chunks_of_full_attention() -> None:
    """Windows and states below a local hit are no use to anybody: they may be gone."""
    hashes = fake_hashes(8)
    parts = [[ChunkedTokenDatabase(f"{number}", BLOCK, BLOCK)] for number in range(2)]
    presence = Presence({parts[1][0].key_for(hashes[0])})
    for groups, sentinels in (
        ((SlidingWindow(BLOCK, 64), FullAttention(BLOCK)), [[parts[1][0].key_for(hashes[0])]]),
        ((SlidingWindow(BLOCK, 64), Mamba(BLOCK)), []),
    ):
        presence.asked.clear()
        query = LookupQuery(4 * BLOCK, 4 * BLOCK, HashWindow(hashes, first=4, end=4), (hashes[0],))
        hit = drive(lookup(query, Boundaries(groups, BLOCK, BLOCK), parts), presence)
        assert hit == LookupHit(4 * BLOCK, 4 * BLOCK)
        assert presence.asked == sentinels


def test_the_names_of_cut_chunks_travel_with_the_hit() -> None:
    """The worker cannot know under which of its hashes a part of a chunk was stored."""
    hashes = fake_hashes(4)
    parts = [[ChunkedTokenDatabase(f"{number}", 4 * BLOCK, BLOCK)] for number in range(2)]
    boundaries = Boundaries((FullAttention(4 * BLOCK), Mamba(4 * BLOCK)), BLOCK, BLOCK)
    presence = Presence({parts[0][0].key_for(hashes[2]), parts[1][0].key_for(hashes[1])})
    query = LookupQuery(0, 4 * BLOCK, HashWindow(hashes))
    hit = drive(lookup(query, boundaries, parts), presence)
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


SHARES = st.sampled_from([0.0, 0.01, 0.1, 0.5, 0.97])


@given(
    st.sampled_from([SlidingWindow(4, 40), SlidingWindow(4, 1200), Mamba(4)]),
    st.sampled_from([2, 9, 40]),
    st.tuples(SHARES, SHARES),
    st.integers(0, 1 << 32),
)
def test_a_hit_of_many_parts_ends_where_the_last_has_all_that_it_needs(
    needs: Group, num_parts: int, lacking_shares: tuple[float, float], seed: int
) -> None:
    """Whatever the first and the last of a group's parts lack, and wherever asking stops early."""
    coordinator = Coordinator((FullAttention(4), needs), 4)
    parts = [(WHOLE,), tuple(Part(shard_id=part) for part in range(num_parts))]
    databases_of = coordinator.databases("ns", parts)
    window, random = HashWindow(MANY_HASHES), Random(seed)
    gone: set[int] = set()
    absent: set[str] = set()
    for part, share in zip((0, num_parts - 1), lacking_shares, strict=True):
        lacking = [chunk for chunk in range(999) if random.random() < share]
        gone.update(lacking)
        absent.update(databases_of[1][part].keys_at(window, lacking))
    end = coordinator.last_boundary(3999)
    hit = drive(
        lookup(LookupQuery(0, end, window), coordinator.boundaries, databases_of),
        lambda keys: [key not in absent for key in keys],
    )
    assert hit.hit_token == max(
        token for token in range(0, end + 1, 4) if gone.isdisjoint(needs.required(token))
    )
