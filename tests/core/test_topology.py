"""Topology: every byte of a block is held, stored once, and asked for by its name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.core.topology import (
    WHOLE,
    ParallelSizes,
    Part,
    RankPlace,
    RankRole,
    Split,
    StoreShare,
    Topology,
)


def divisors(number: int) -> list[int]:
    """All of them."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


@st.composite
def parallel_sizes(draw: st.DrawFn) -> ParallelSizes:
    """Draw an engine of up to 8 x 3 x 2 ranks."""
    tp_size = draw(st.sampled_from([1, 2, 4, 6, 8]))
    pcp_size = draw(st.integers(1, 3))
    dcp_size = draw(st.sampled_from(divisors(tp_size * pcp_size)))
    return ParallelSizes(tp_size, draw(st.integers(1, 2)), pcp_size, dcp_size)


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Draw an engine's ranks and one to four groups that can be divided among them."""
    sizes = draw(parallel_sizes())
    fitting = [*divisors(sizes.tp_size), 2 * sizes.tp_size, 3 * sizes.tp_size]
    splits = []
    for _ in range(draw(st.integers(1, 4))):
        num_shards = draw(st.sampled_from(fitting))
        has_ranks = max(1, sizes.tp_size // num_shards) * sizes.pcp_size >= sizes.dcp_size
        stages = draw(st.sets(st.integers(0, sizes.pp_size - 1)))
        splits.append(Split(num_shards, has_ranks and draw(st.booleans()), tuple(stages)))
    return Topology(sizes, tuple(splits))


def holders(topology: Topology) -> Iterator[tuple[int, list[RankRole]]]:
    """Yield for every part of every group the group and the ranks that hold the part."""
    roles = [topology.role(rank) for rank in range(topology.num_ranks)]
    for group_id, parts in enumerate(topology.all_parts()):
        for part in parts:
            yield group_id, [role for role in roles if part in role.parts[group_id]]


def stores(role: RankRole, group_id: int, chunk: int) -> bool:
    """Tell whether a rank stores what it holds of a chunk."""
    share = role.shares[group_id]
    return chunk % share.put_step == share.put_step_rank


@given(topologies())
def test_a_chunk_has_every_shard_of_every_stage_and_of_all_tokens(topology: Topology) -> None:
    """And no other part; each is held by somebody."""
    sizes = topology.sizes
    for group_id, split in enumerate(topology.splits):
        wanted = {
            Part(pp_rank, shard_id, dcp_rank)
            for pp_rank in split.stages or range(sizes.pp_size)
            for shard_id in range(split.num_shards)
            for dcp_rank in range(sizes.dcp_size if split.is_token_sharded else 1)
        }
        parts = topology.all_parts()[group_id]
        assert len(parts) == len(set(parts))
        assert set(parts) == wanted
    assert all(ranks for _, ranks in holders(topology))


@given(topologies())
def test_a_rank_holds_neighbouring_shards_of_its_stage_and_its_tokens(topology: Topology) -> None:
    """In the order of the heads; tensor parallel ranks in a row hold the same where they share."""
    for group_id, split in enumerate(topology.splits):
        for rank in range(topology.num_ranks):
            place = topology.sizes.place(rank)
            held = topology.parts_held(group_id, rank)
            if split.stages and place.pp_rank not in split.stages:
                assert held == ()
                continue
            first = place.tp_rank * split.num_shards // topology.sizes.tp_size
            num_held = max(1, split.num_shards // topology.sizes.tp_size)
            assert [part.shard_id for part in held] == list(range(first, first + num_held))
            assert {part.pp_rank for part in held} == {place.pp_rank}
            dcp_rank = place.dcp_rank if split.is_token_sharded else 0
            assert {part.dcp_rank for part in held} == {dcp_rank}


@given(topologies(), st.integers(0, 10_000))
def test_exactly_one_rank_stores_a_part_of_a_chunk(topology: Topology, chunk: int) -> None:
    """Of all that hold it, whatever the chunk."""
    for group_id, ranks in holders(topology):
        assert sum(stores(role, group_id, chunk) for role in ranks) == 1


@given(topologies(), st.integers(0, 1000), st.integers(0, 200))
def test_ranks_with_copies_store_equally_many_chunks(
    topology: Topology, first: int, num_chunks: int
) -> None:
    """Over any run of chunks the shares differ by one at most."""
    chunks = range(first, first + num_chunks)
    for group_id, ranks in holders(topology):
        counts = [sum(stores(role, group_id, chunk) for chunk in chunks) for role in ranks]
        assert max(counts) - min(counts) <= 1


@given(topologies(), st.integers(0, 1000))
def test_groups_divided_alike_begin_with_different_ranks(topology: Topology, chunk: int) -> None:
    """The phase turns with the group: so not one rank stores the first chunk of each."""
    twice = Topology(topology.sizes, (topology.splits[0],) * 2)
    for rank in range(twice.num_ranks):
        role = twice.role(rank)
        assert stores(role, 0, chunk) == stores(role, 1, chunk + 1)
        step = role.shares[0].put_step
        assert (role.shares[0] == role.shares[1]) == (step == 1)


@given(topologies())
def test_roles_say_what_the_topology_says(topology: Topology) -> None:
    """A rank needs to know no more than its role."""
    for rank in range(topology.num_ranks):
        role = topology.role(rank)
        assert (role.rank, role.num_ranks) == (rank, topology.num_ranks)
        for group_id in range(len(topology.splits)):
            assert role.parts[group_id] == topology.parts_held(group_id, rank)
            assert role.shares[group_id] == topology.share(group_id, rank)


@given(parallel_sizes())
def test_places_are_those_of_vllm(sizes: ParallelSizes) -> None:
    """Its groups: ranks as an array of axes, one axis last, cut into rows."""
    ranks = np.arange(sizes.num_ranks).reshape(sizes.pp_size, sizes.pcp_size, sizes.tp_size)
    places = [sizes.place(rank) for rank in range(sizes.num_ranks)]
    rows = {
        "tp_rank": ranks.reshape(-1, sizes.tp_size),
        "pcp_rank": ranks.transpose(0, 2, 1).reshape(-1, sizes.pcp_size),
        "pp_rank": ranks.transpose(2, 1, 0).reshape(-1, sizes.pp_size),
        "dcp_rank": ranks.swapaxes(-1, -2).reshape(-1, sizes.dcp_size),
    }
    for axis, groups in rows.items():
        for group in groups:
            assert [getattr(places[rank], axis) for rank in group] == list(range(len(group)))
    assert len(set(places)) == sizes.num_ranks
    assert Counter(place.dcp_rank for place in places) == Counter(
        dict.fromkeys(range(sizes.dcp_size), sizes.num_ranks // sizes.dcp_size)
    )


def test_places_of_an_engine_of_all_kinds_of_parallelism() -> None:
    """Decode contexts run over prefill contexts first."""
    sizes = ParallelSizes(tp_size=2, pp_size=2, pcp_size=2, dcp_size=4)
    assert [sizes.place(rank) for rank in (0, 1, 2, 3, 6)] == [
        RankPlace(0, 0, 0, 0),
        RankPlace(0, 0, 1, 2),
        RankPlace(0, 1, 0, 1),
        RankPlace(0, 1, 1, 3),
        RankPlace(1, 1, 0, 1),
    ]


def test_two_key_value_heads_on_eight_ranks_that_divide_tokens_by_four() -> None:
    """Every rank has bytes of its own: four ranks hold each head, and a quarter of its tokens."""
    topology = Topology(ParallelSizes(tp_size=8, dcp_size=4), (Split(2, is_token_sharded=True),))
    assert [topology.parts_held(0, rank) for rank in (0, 3, 4, 7)] == [
        (Part(0, 0, 0),),
        (Part(0, 0, 3),),
        (Part(0, 1, 0),),
        (Part(0, 1, 3),),
    ]
    assert {topology.share(0, rank) for rank in range(8)} == {StoreShare()}


def test_ranks_of_different_numbers_hold_the_same_parts() -> None:
    """Cut to four shards, engines of one, two and four ranks read each other's values."""
    splits = (Split(4),)
    engines = [Topology(ParallelSizes(tp_size=size), splits) for size in (1, 2, 4)]
    assert len({engine.parts(0) for engine in engines}) == 1
    assert [len(engine.parts_held(0, 0)) for engine in engines] == [4, 2, 1]


def test_without_more_said_each_tensor_parallel_rank_has_bytes_of_its_own() -> None:
    """And a rank that is alone has everything."""
    assert RankRole.alone(2) == RankRole(0, 1, ((WHOLE,),) * 2, (StoreShare(),) * 2)
    topology = Topology.undivided(1, ParallelSizes(tp_size=2, pp_size=2))
    assert topology.parts(0) == (Part(0, 0), Part(0, 1), Part(1, 0), Part(1, 1))


@pytest.mark.parametrize(
    "sizes, match",
    [
        ({"tp_size": 0}, "positive"),
        ({"pp_size": -1}, "positive"),
        ({"pcp_size": 0}, "positive"),
        ({"dcp_size": 0}, "positive"),
        ({"tp_size": 4, "dcp_size": 3}, "divide"),
        ({"dcp_size": 2}, "divide"),
    ],
)
def test_sizes_that_make_no_engine_are_refused(sizes: dict[str, int], match: str) -> None:
    """Decode contexts are formed of the ranks there are."""
    with pytest.raises(ValueError, match=match):
        ParallelSizes(**sizes)


@pytest.mark.parametrize(
    "split, match",
    [
        (Split(0), "0 shards"),
        (Split(3), "3 shards do not fit 4"),
        (Split(6), "6 shards do not fit 4"),
        (Split(2, is_token_sharded=True), "on 2 ranks of a stage, .* among 4"),
        (Split(8, is_token_sharded=True), "on 1 ranks of a stage, .* among 4"),
        (Split(4, stages=(0, 2)), "2 pipeline stages"),
        (Split(4, stages=(-1,)), "2 pipeline stages"),
    ],
)
def test_a_group_that_cannot_be_divided_so_is_refused(split: Split, match: str) -> None:
    """Else some of its bytes would be held, stored or asked for by nobody."""
    sizes = ParallelSizes(tp_size=4, pp_size=2, dcp_size=4)
    with pytest.raises(ValueError, match=f"group 1: .*{match}"):
        Topology(sizes, (Split(1), split))


def test_a_rank_without_a_group_s_layers_holds_nothing_of_it() -> None:
    """Its share, were there something to store, stays what it was."""
    role = Topology(ParallelSizes(tp_size=2, pp_size=2), (Split(2), Split(1))).role(3)
    without = role.without([1])
    assert without.parts == (role.parts[0], ())
    assert (without.rank, without.shares) == (3, role.shares)
    assert role.without([]) == role
