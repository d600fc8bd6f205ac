"""The coordinator: what is stored, what is loaded, and that the two meet."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvtide.core.coordinator import Coordinator
from kvtide.core.groups import ChunkedLocal, FullAttention, Group, Mamba, SlidingWindow
from kvtide.core.search import SearchRange
from kvtide.testing.requests import fake_hashes
from tests.core.models import Contents, coordinators, longest_hit

MIXED = Coordinator((FullAttention(16), Mamba(32)), 16)
UNITS = st.integers(0, 12)
PROMPTS = st.one_of(st.none(), st.integers(1, 600))


def kept_boundaries(
    coordinator: Coordinator, group: Group, last_token: int, num_prompt_tokens: int | None
) -> list[int]:
    """Return the boundaries up to ``last_token`` that are kept for a group, by the definition."""
    interval = coordinator.retention_interval
    unit = coordinator.lcm_block_size
    if group.ignores_retention:
        interval = None
    step = unit if interval is None else interval
    kept = set(range(step, last_token + 1, step)) if step else set()
    if interval is not None and num_prompt_tokens is not None:
        has_proof = coordinator.max_proof_tokens > 0
        for end in (num_prompt_tokens - 1, num_prompt_tokens if has_proof else 0):
            kept.add(max(0, end // unit - has_proof) * unit)
    return sorted(n for n in kept if 0 < n <= last_token)


def stored_chunks(
    coordinator: Coordinator, end_token: int, num_prompt_tokens: int | None
) -> list[set[int]]:
    """Return per group the chunks stored of a whole request, states by the engine's hand-offs.

    The proof of its end is among them, where it is owed.
    """
    kept = coordinator.kept_boundaries(num_prompt_tokens)
    runs = coordinator.stored_runs(0, end_token, kept)
    stored = [set(itertools.chain(*each)) for each in runs]
    if end_token and coordinator.owes_proof(end_token, kept):
        puts = coordinator.boundary_chunks(end_token, kept)
        for group, chunks, each in zip(coordinator.groups, stored, puts, strict=True):
            chunks.update(chunk for chunk, end in each if end % group.block_size == 0)
    for group, chunks in zip(coordinator.groups, stored, strict=True):
        if group.is_state:
            for boundary in kept_boundaries(coordinator, group, end_token, num_prompt_tokens):
                chunks.update(group.required(boundary))
    return stored


def num_lowered_again(coordinator: Coordinator) -> int:
    """Return how often a proof inside a chunk may lower a boundary that another had lowered.

    Full attention is not asked for hashes past the best boundary so far and its proof, as in the
    engine's own search: a chunk that ends past a lowered boundary does not count for the next
    group, whose proof then takes from the chunk before.
    """
    proven = [group for group in coordinator.groups if group.is_downward_closed]
    proven = [group for group in proven if group.proof_tokens]
    is_cut = any(group.proof_tokens % group.block_size for group in proven)
    return len(proven) - 1 if is_cut else 0


# ------------------------------------------------------------------ I4: stored and asked for


@given(coordinators(), UNITS, PROMPTS)
def test_every_stored_chunk_can_be_asked_for(
    coordinator: Coordinator, units: int, num_prompt_tokens: int | None
) -> None:
    """Some boundary that is kept matches it, and no chunk that one matches is left out."""
    end_token = units * coordinator.lcm_block_size
    runs = coordinator.stored_runs(0, end_token, coordinator.kept_boundaries(num_prompt_tokens))
    far = end_token + 40 * coordinator.lcm_block_size
    for group, each in zip(coordinator.groups, runs, strict=True):
        if group.is_state:
            assert each == []
            continue
        matched = {
            chunk
            for boundary in kept_boundaries(coordinator, group, far, num_prompt_tokens)
            for chunk in group.matched(boundary)
        }
        end = end_token // group.block_size
        assert set(itertools.chain(*each)) == {chunk for chunk in matched if chunk < end}


@given(coordinators(), UNITS, PROMPTS)
def test_the_best_lookups_load_is_fully_stored(
    coordinator: Coordinator, units: int, num_prompt_tokens: int | None
) -> None:
    """A longer prompt finds at least the last boundary kept for all groups, and can load it."""
    end_token = units * coordinator.lcm_block_size
    stored = stored_chunks(coordinator, end_token, num_prompt_tokens)
    unit = coordinator.hash_block_size
    present = {
        (group_id, (chunk + 1) * group.block_size // unit - 1)
        for group_id, group in enumerate(coordinator.groups)
        for chunk in stored[group_id]
    }
    num_hashes = (end_token + coordinator.max_proof_tokens) // unit
    where = SearchRange(0, end_token, num_hashes)
    hit = longest_hit(Contents(coordinator.boundaries, where, frozenset(present)))
    for group, chunks, load in zip(
        coordinator.groups, stored, coordinator.load_mask(hit, 0), strict=True
    ):
        assert set(load) <= chunks, group
    unit = coordinator.lcm_block_size
    last_token = end_token
    for group in coordinator.groups:
        finer = group.proof_tokens % group.block_size  # cut chunks have names of their own
        has_states = any(one.is_state for one in coordinator.groups)
        last_token = min(last_token, end_token - (group.proof_tokens if has_states else finer))
    last_token -= unit * num_lowered_again(coordinator)
    kept = set(range(0, end_token + 1, unit))
    for group in coordinator.groups:
        kept &= {0, *kept_boundaries(coordinator, group, last_token, num_prompt_tokens)}
    assert hit >= max(kept)


# ------------------------------------------------------------------ masks in parts


@given(coordinators(), st.lists(st.integers(1, 12), min_size=1, max_size=5), PROMPTS)
def test_consecutive_saves_store_what_one_would(
    coordinator: Coordinator, ends: list[int], num_prompt_tokens: int | None
) -> None:
    """However a request is cut into jobs, each chunk is stored once or never."""
    cuts = sorted({0, *(end * coordinator.lcm_block_size for end in ends)})
    parts: list[list[int]] = [[] for _ in coordinator.groups]
    for start, end in itertools.pairwise(cuts):
        for chunks, runs in zip(
            parts,
            coordinator.stored_runs(start, end, coordinator.kept_boundaries(num_prompt_tokens)),
            strict=True,
        ):
            chunks.extend(itertools.chain(*runs))
    whole = coordinator.stored_runs(0, cuts[-1], coordinator.kept_boundaries(num_prompt_tokens))
    assert parts == [list(itertools.chain(*runs)) for runs in whole]


@given(coordinators(), UNITS, UNITS, PROMPTS)
def test_the_mask_of_a_suffix_is_the_tail_of_the_whole(
    coordinator: Coordinator, first: int, more: int, num_prompt_tokens: int | None
) -> None:
    """A job that starts at the saved offset stores what one from 0 would store there."""
    unit = coordinator.lcm_block_size
    start, end = first * unit, (first + more) * unit
    whole = masks(coordinator, 0, end, num_prompt_tokens)
    suffix = masks(coordinator, start, end, num_prompt_tokens)
    for group, all_of_it, tail in zip(coordinator.groups, whole, suffix, strict=True):
        assert all_of_it[start // group.block_size :] == tail


@given(coordinators(), UNITS, UNITS, PROMPTS)
def test_a_mask_only_grows_at_its_end(
    coordinator: Coordinator, first: int, more: int, num_prompt_tokens: int | None
) -> None:
    """A chunk that was not worth storing does not become so when the request grows."""
    unit = coordinator.lcm_block_size
    for short, grown in zip(
        masks(coordinator, 0, first * unit, num_prompt_tokens),
        masks(coordinator, 0, (first + more) * unit, num_prompt_tokens),
        strict=True,
    ):
        assert grown[: len(short)] == short


@given(coordinators(), UNITS, PROMPTS)
def test_masks_and_runs_say_the_same(
    coordinator: Coordinator, units: int, num_prompt_tokens: int | None
) -> None:
    """But for states, which have no runs."""
    end_token = units * coordinator.lcm_block_size
    runs = coordinator.stored_runs(0, end_token, coordinator.kept_boundaries(num_prompt_tokens))
    for group, mask, each in zip(
        coordinator.groups, masks(coordinator, 0, end_token, num_prompt_tokens), runs, strict=True
    ):
        if not group.is_state:
            wanted = [chunk for chunk, is_wanted in enumerate(mask) if is_wanted]
            assert wanted == list(itertools.chain(*each))


def masks(
    coordinator: Coordinator, start_token: int, end_token: int, num_prompt_tokens: int | None
) -> list[list[bool]]:
    """Return the store masks in full."""
    return [
        [True] * ((end_token - start_token) // group.block_size) if mask is None else mask
        for group, mask in zip(
            coordinator.groups,
            coordinator.store_mask(end_token, start_token, num_prompt_tokens),
            strict=True,
        )
    ]


def test_a_mask_of_all_is_none() -> None:
    """As full attention always has it, and an empty range."""
    window = Coordinator((FullAttention(16), SlidingWindow(16, 33)), 16, retention_interval=64)
    assert window.store_mask(128) == [None, [False, False, True, True] * 2]
    assert window.store_mask(128, 32) == [None, [True, True, False, False, True, True]]
    assert window.store_mask(64, 64) == [None, None]
    assert Coordinator((FullAttention(16), SlidingWindow(16, 100)), 16).store_mask(64) == [None] * 2


def test_local_attention_is_dense_whatever_retention_keeps() -> None:
    """Only the last block of an attention chunk is never required: a new chunk begins behind it."""
    local = Coordinator((FullAttention(16), ChunkedLocal(16, 64)), 16, retention_interval=0)
    assert local.store_mask(128, 0, 128) == [None, [True, True, True, False] * 2]


# ------------------------------------------------------------------ proofs


def test_the_end_of_a_saved_range_owes_the_proof_behind_it() -> None:
    """A block of the draft model's group; not where retention keeps no boundary there."""
    groups = (FullAttention(32), SlidingWindow(16, 17, proof_tokens=16))
    draft = Coordinator(groups, 16)
    assert draft.owes_proof(64, ())
    assert draft.boundary_chunks(64) == [[], [(4, 80)]]
    assert draft.boundary_chunks(64, saved_token=96) == [[], []]
    sparse = Coordinator(groups, 16, retention_interval=0)
    assert not sparse.owes_proof(64, ())
    assert sparse.owes_proof(64, (64,))
    assert not Coordinator((FullAttention(32),), 16).owes_proof(64, ())
    dense = Coordinator((FullAttention(16, proof_tokens=16),), 16, retention_interval=0)
    assert dense.owes_proof(64, ())


def test_with_states_their_hand_offs_bring_the_proofs() -> None:
    """Any other boundary has no state, so nobody resumes there."""
    fine = Coordinator((FullAttention(64, proof_tokens=16), Mamba(64)), 16, partial_hits=True)
    assert not fine.owes_proof(64, ())
    assert fine.boundary_chunks(64) == [[(1, 80)], []]


# ------------------------------------------------------------------ boundaries that engines name


@given(coordinators(), st.integers(0, 100), PROMPTS)
def test_a_boundary_put_and_the_units_before_it_are_all_that_resuming_needs(
    coordinator: Coordinator, hashes: int, num_prompt_tokens: int | None
) -> None:
    """No chunk of :meth:`matched` is missing, none is named twice, and names end at the proof."""
    unit = coordinator.alignment
    boundary = hashes * coordinator.hash_block_size // unit * unit
    assume(boundary)
    saved = coordinator.aligned(boundary)
    stored: list[set[int]] = [set() for _ in coordinator.groups]
    if saved:
        runs = coordinator.stored_runs(0, saved, coordinator.kept_boundaries(num_prompt_tokens))
        stored = [set(itertools.chain(*each)) for each in runs]
    needed = coordinator.boundary_chunks(boundary, coordinator.kept_boundaries(num_prompt_tokens))
    for group, have, puts in zip(coordinator.groups, stored, needed, strict=True):
        if group.is_state:
            assert puts == []
            continue
        end_token = boundary + group.proof_tokens
        chunks = [chunk for chunk, _ in puts]
        assert have.isdisjoint(chunks)
        assert have.union(chunks) >= set(group.matched(boundary))
        assert puts == [(c, min((c + 1) * group.block_size, end_token)) for c in chunks]


@given(coordinators(), UNITS)
def test_no_unit_stores_more_chunks_than_is_said(coordinator: Coordinator, units: int) -> None:
    """The bound that a job is cut by."""
    unit = coordinator.lcm_block_size
    runs = coordinator.stored_runs(
        units * unit, (units + 1) * unit, coordinator.kept_boundaries((units + 1) * unit + 1)
    )
    num_chunks = sum(len(run) for each in runs for run in each)
    assert num_chunks <= coordinator.max_stored_per_unit


# ------------------------------------------------------------------ loads, sizes, lookups


@given(coordinators(), UNITS, UNITS)
def test_a_load_is_what_the_hit_requires_and_the_engine_lacks(
    coordinator: Coordinator, hit_units: int, computed_units: int
) -> None:
    """Nothing below what the engine holds, nothing past the hit, no proof."""
    unit = coordinator.alignment
    hit, computed = hit_units * unit, computed_units * unit
    for group, chunks in zip(coordinator.groups, coordinator.load_mask(hit, computed), strict=True):
        first = computed // group.block_size
        assert set(chunks) == {chunk for chunk in group.required(hit) if chunk >= first}


def test_boundaries_are_multiples_of_all_block_sizes_or_of_hashes() -> None:
    """Groups of 16 and 32 tokens meet every 32; with partial hits, every hash block."""
    assert MIXED.lcm_block_size == MIXED.alignment == 32
    assert MIXED.last_boundary(95) == MIXED.aligned(95) == 64
    partial = Coordinator(MIXED.groups, 16, partial_hits=True)
    assert (partial.alignment, partial.lcm_block_size) == (16, 32)
    assert partial.last_boundary(95) == 80
    assert partial.aligned(95) == 64


def test_only_full_attention_lets_a_hit_be_shortened() -> None:
    """And only where the chunk at the end keeps its name."""
    full = (FullAttention(16), FullAttention(32))
    assert Coordinator(full, 16).may_shorten
    assert not Coordinator(full, 16, partial_hits=True).may_shorten
    assert not MIXED.may_shorten


def test_sentinels_are_chunks_of_a_group_that_stores_them_all() -> None:
    """The first of them, or none."""
    assert MIXED.sentinel_block_size == 16
    assert Coordinator((Mamba(16), FullAttention(64)), 16).sentinel_block_size == 64
    assert Coordinator((Mamba(16),), 16).sentinel_block_size is None


@pytest.mark.parametrize(
    "num_tokens, end_token, num_hashes",
    [(0, 0, 0), (16, 0, 1), (33, 32, 2), (64, 48, 4), (65, 64, 4), (80, 64, 5)],
)
def test_a_query_leaves_a_token_to_compute_and_carries_the_proofs_hashes(
    num_tokens: int, end_token: int, num_hashes: int
) -> None:
    """Never past the hashes that exist."""
    draft = Coordinator((FullAttention(16, proof_tokens=16),), 16)
    query = draft.query(num_tokens, fake_hashes(num_tokens // 16))
    assert (query.start_token, query.end_token, len(query.hashes)) == (0, end_token, num_hashes)


@pytest.mark.parametrize(
    "groups, message",
    [
        ((), "at least one"),
        ((FullAttention(24),), "must be multiples of hash_block_size 16"),
        ((FullAttention(32, proof_tokens=8),), "must be multiples of hash_block_size 16"),
        ((SlidingWindow(16, 64, proof_tokens=32),), "a proof is at most a block"),
        ((FullAttention(16), Mamba(16, proof_tokens=16)), "a state has none"),
    ],
)
def test_impossible_groups_are_refused(groups: tuple[Group, ...], message: str) -> None:
    """Keys could not be named, or a draft model would have a state."""
    with pytest.raises(ValueError, match=message):
        Coordinator(groups, 16)


def test_an_interval_that_boundaries_miss_is_refused() -> None:
    """Retention counts in whole units of saving."""
    with pytest.raises(ValueError, match="must be a multiple of 32"):
        Coordinator(MIXED.groups, 16, retention_interval=48)


def test_dense_stores_keep_of_local_attention_what_no_boundary_requires() -> None:
    """The last block of each attention chunk too; windows and states stay as retention has them."""
    groups = (ChunkedLocal(16, 64), FullAttention(16), SlidingWindow(16, 17))
    sparse = Coordinator(groups, 16, retention_interval=64)
    dense = replace(sparse, stores_dense=True)
    assert sparse.store_mask(128) == [
        [True, True, True, False] * 2,
        None,
        [False] * 3 + [True, False, False, False, True],
    ]
    assert dense.store_mask(128) == [None, *sparse.store_mask(128)[1:]]


def test_dense_stores_count_all_chunks_of_local_attention() -> None:
    """For how many chunks a job may have."""
    groups = (ChunkedLocal(16, 16), FullAttention(64))
    sparse = Coordinator(groups, 16)
    assert sparse.max_stored_per_unit == 1 + 1
    assert replace(sparse, stores_dense=True).max_stored_per_unit == 4 + 1


def test_dense_stores_keep_all_of_local_attention_up_to_a_boundary() -> None:
    """A boundary inside a unit, right behind an attention chunk, needs none of it."""
    groups = (ChunkedLocal(16, 16), FullAttention(16), Mamba(64))
    sparse = Coordinator(groups, 16, partial_hits=True)
    assert sparse.boundary_chunks(96) == [[], [(4, 80), (5, 96)], []]
    dense = replace(sparse, stores_dense=True)
    assert dense.boundary_chunks(96) == [[(4, 80), (5, 96)], [(4, 80), (5, 96)], []]
