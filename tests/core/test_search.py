"""The search: the longest hit by its definition, asking for little and for nothing twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given

from kvtide.core.groups import ChunkedLocal, FullAttention, Group, Mamba, SlidingWindow
from kvtide.core.probes import FIRST_PROBE_KEYS, MAX_PROBE_KEYS
from kvtide.core.search import Boundaries, Found, Search, SearchRange, search
from tests.core.models import Contents, contents, longest_hit

Has = Callable[[int, int], bool]


class Run:
    """A search driven to its end, and what it asked: per batch the group and the hash blocks."""

    def __init__(self, steps: Search, has: Has) -> None:
        self.batches: list[tuple[int, list[int]]] = []
        answers: list[bool] | None = None
        while True:
            try:
                ask = next(steps) if answers is None else steps.send(answers)
            except StopIteration as stop:
                self.found: Found = stop.value
                return
            assert 0 < len(ask.hash_indexes) <= MAX_PROBE_KEYS
            self.batches.append((ask.group_id, list(ask.hash_indexes)))
            answers = [has(ask.group_id, index) for index in ask.hash_indexes]

    @property
    def asked(self) -> list[tuple[int, int]]:
        """All that was asked, as ``(group, hash index)``."""
        return [(group_id, index) for group_id, batch in self.batches for index in batch]


def run(groups: Sequence[Group], num_chunks: int, has: Has, *, block: int = 16) -> Run:
    """Search a prompt of so many blocks of 16 tokens."""
    boundaries = Boundaries(tuple(groups), block, block)
    where = SearchRange(0, num_chunks * block, num_chunks)
    return Run(search(boundaries, where), has)


def run_contents(case: Contents) -> Run:
    """Search what Hypothesis drew."""
    return Run(
        search(case.boundaries, case.where), lambda group, index: (group, index) in case.present
    )


@given(contents())
def test_the_hit_is_the_longest_by_definition(case: Contents) -> None:
    """Any mix of groups, partial hits, draft models, from any local hit on."""
    assert run_contents(case).found.hit_token == longest_hit(case)


@given(contents())
def test_nothing_is_asked_twice_or_outside_the_hashes(case: Contents) -> None:
    """The hashes below the engine's own hit need not be read."""
    done = run_contents(case)
    assert len(set(done.asked)) == len(done.asked)
    first = case.where.start_token // case.boundaries.hash_block_size
    assert all(first <= index < case.where.num_hashes for _, index in done.asked)


@given(contents())
def test_the_chunk_at_the_hit_is_present_under_the_name_that_travels(case: Contents) -> None:
    """Its last token lies at or after the hit and inside the chunk, for a state at the hit."""
    done = run_contents(case)
    hit, tails, _ = done.found
    boundaries, where = case.boundaries, case.where
    if hit == where.start_token:
        assert tails == ()
        return
    for group_id, group in enumerate(boundaries.groups):
        tail = tails[group_id] if tails else hit
        assert (
            hit
            <= tail
            <= (hit if group.is_state else -(-hit // group.block_size) * group.block_size)
        )
        chunk = (hit - 1) // group.block_size
        if chunk in group.required(hit):
            assert (group_id, tail // boundaries.hash_block_size - 1) in case.present


@given(contents())
def test_where_full_attention_is_known_it_is_not_asked(case: Contents) -> None:
    """The engine's own cache tells how far it reaches; the others are asked as ever."""
    groups = case.boundaries.groups
    everything = {(g, i) for g in range(len(groups)) for i in range(case.where.num_hashes)}
    full = {(g, i) for g, i in everything if groups[g].is_downward_closed}
    for covered in (0, case.where.num_hashes // 2 * case.boundaries.hash_block_size):
        steps = search(case.boundaries, case.where, covered_token=covered)
        done = Run(steps, lambda group, index: (group, index) in case.present)
        assert not full.intersection(done.asked)
        if full:
            limit = max(case.where.start_token, case.boundaries.last(covered))
            assert done.found.hit_token <= limit


# ------------------------------------------------------------------------------ what it costs


def test_a_window_behind_full_attention_is_asked_for_at_once() -> None:
    """A full hit: all chunks of full attention, and the one window that is needed."""
    done = run((FullAttention(16), SlidingWindow(16, 4096)), 8192, lambda *_: True)
    assert done.found == Found(131_072, ())
    assert len(done.asked) == 8192 + 256
    assert done.batches[-1] == (1, list(range(8192 - 256, 8192)))


def test_a_cold_miss_costs_one_small_batch() -> None:
    """Windows and states are not asked for what full attention lacks."""
    done = run((Mamba(16), SlidingWindow(16, 4096), FullAttention(16)), 8192, lambda *_: False)
    assert done.found.hit_token == 0
    assert [len(batch) for _, batch in done.batches] == [FIRST_PROBE_KEYS]


def test_after_a_gap_only_the_first_chunks_of_windows_are_asked() -> None:
    """A window that was evicted to one half: the ladder finds the other half in one batch."""

    def has(group_id: int, index: int) -> bool:
        return group_id == 0 or index < 4000

    done = run((FullAttention(16), SlidingWindow(16, 4096)), 8192, has)
    assert done.found.hit_token == 4000 * 16
    window = [batch for group_id, batch in done.batches if group_id == 1]
    assert [len(batch) for batch in window[:2]] == [256, 31]
    assert sum(map(len, window)) < 256 + 31 + 2 * 256


def test_without_full_attention_a_cold_miss_costs_a_key_per_window() -> None:
    """One first chunk per window rules out everything, whatever the number of boundaries."""
    done = run((SlidingWindow(16, 4096),), 8192, lambda *_: False)
    assert [len(batch) for _, batch in done.batches] == [32]


def test_many_small_windows_are_asked_in_bounded_batches() -> None:
    """A ladder has at most 64 rungs, then 128."""
    done = run((SlidingWindow(16, 17),), 1000, lambda *_: False)
    assert [len(batch) for _, batch in done.batches][:3] == [64, 128, 128]
    assert len(done.asked) == 1000


def test_one_state_is_asked_for_behind_full_attention_then_more() -> None:
    """Where it is missing, the boundaries before it are asked in growing batches."""
    groups = (FullAttention(16), Mamba(16))
    done = run(groups, 1000, lambda group_id, index: group_id == 0 or index == 700)
    assert done.found.hit_token == 701 * 16
    states = [batch for group_id, batch in done.batches if group_id == 1]
    assert [len(batch) for batch in states] == [1, 64, 128, 256]


def test_states_alone_are_asked_in_growing_batches() -> None:
    """No state says anything of another, so that a cold miss asks for all."""
    done = run((Mamba(16),), 8192, lambda *_: False)
    sizes = [len(batch) for _, batch in done.batches]
    assert sizes == [64, 128, 256, 512, *[1024] * 7, 64]
    assert run((Mamba(16),), 8192, lambda *_: True).batches == [(0, list(range(8128, 8192)))]


def test_states_of_two_groups_meet_at_a_common_boundary() -> None:
    """One group's states at multiples of 3, the other's at multiples of 5: they meet at 990."""
    states = (range(2, 1000, 3), range(4, 1000, 5))
    done = run((Mamba(16), Mamba(16)), 1000, lambda group_id, index: index in states[group_id])
    assert done.found.hit_token == 990 * 16


def test_states_that_the_other_group_rules_out_are_not_asked() -> None:
    """One group has a state at 100 alone: of the other, nothing between it and the end is asked."""
    states = ({99, 998}, {99})
    done = run((Mamba(16), Mamba(16)), 1000, lambda group_id, index: index in states[group_id])
    assert done.found.hit_token == 100 * 16
    assert done.batches[0] == (0, list(range(936, 1000)))
    assert done.batches[-1] == (0, list(range(100)))


def test_behind_a_whole_attention_chunk_local_attention_needs_nothing() -> None:
    """A boundary between attention chunks is a hit without a key of that group."""
    done = run((FullAttention(16), ChunkedLocal(16, 128)), 64, lambda group_id, _: group_id == 0)
    assert done.found.hit_token == 1024
    assert {group_id for group_id, _ in done.batches} == {0}
    done = run((ChunkedLocal(16, 128),), 63, lambda *_: False)
    assert done.found.hit_token == 56 * 16


@pytest.mark.parametrize("end_chunks", [0, 3])
def test_what_the_engine_holds_already_is_no_question(end_chunks: int) -> None:
    """A local hit up to the last boundary: nothing is asked."""
    boundaries = Boundaries((FullAttention(16), SlidingWindow(16, 64), Mamba(16)), 16, 16)
    where = SearchRange(end_chunks * 16, end_chunks * 16, 8)
    done = Run(search(boundaries, where), lambda *_: True)
    assert done.found == Found(end_chunks * 16, ())
    assert done.batches == []


def test_a_cut_chunk_of_full_attention_may_have_a_later_name() -> None:
    """Tokens are only appended: what was stored up to 48 serves a state at 32."""
    boundaries = Boundaries((FullAttention(64), Mamba(64)), 16, 16)
    present = {(0, 2), (1, 1)}
    done = Run(search(boundaries, SearchRange(0, 64, 4)), lambda *key: key in present)
    assert done.found == Found(32, (48, 32), 48)


def test_the_proof_is_matched_and_the_hit_ends_before_it() -> None:
    """Four blocks, of which the last proves the third."""
    groups = (FullAttention(16, proof_tokens=16), SlidingWindow(16, 33, proof_tokens=16))
    done = run(groups, 4, lambda *_: True)
    assert done.found.hit_token == 48
    assert (0, 3) in done.asked
    assert (1, 3) in done.asked
    assert run(groups, 4, lambda group_id, index: (group_id, index) != (1, 3)).found.hit_token == 32
