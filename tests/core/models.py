"""Random models, stores and prompts, and the slow definition of what a search must find."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hypothesis import strategies as st

from kvtide.core.coordinator import Coordinator
from kvtide.core.groups import ChunkedLocal, FullAttention, Group, Mamba, SlidingWindow
from kvtide.core.search import Boundaries, SearchRange


@st.composite
def coordinators(draw: st.DrawFn, *, partial_hits: bool | None = None) -> Coordinator:
    """Draw a model of one to four groups of any kind, with or without a draft model."""
    unit = draw(st.sampled_from([1, 4]))
    is_partial = draw(st.booleans()) if partial_hits is None else partial_hits
    has_draft = draw(st.booleans())
    groups = draw(
        st.lists(_groups(unit, is_partial=is_partial, has_draft=has_draft), min_size=1, max_size=4)
    )
    lcm = Coordinator(tuple(groups), unit).lcm_block_size
    interval = draw(st.one_of(st.none(), st.integers(0, 4).map(lambda times: times * lcm)))
    return Coordinator(tuple(groups), unit, partial_hits=is_partial, retention_interval=interval)


@st.composite
def _groups(draw: st.DrawFn, unit: int, *, is_partial: bool, has_draft: bool) -> Group:
    size = unit * draw(st.integers(1, 4))
    proofs = [0]
    if has_draft:
        proofs.append(size)
        if is_partial:
            proofs.append(unit)
    proof = draw(st.sampled_from(proofs))
    kind = draw(st.sampled_from([FullAttention, SlidingWindow, ChunkedLocal, Mamba]))
    if kind is SlidingWindow:
        return SlidingWindow(size, draw(st.integers(1, 5 * size + 1)), proof_tokens=proof)
    if kind is ChunkedLocal:
        return ChunkedLocal(size, size * draw(st.integers(1, 4)))
    if kind is Mamba:
        return Mamba(size)
    return FullAttention(size, proof_tokens=proof)


@dataclass(frozen=True)
class Contents:
    """Which hash blocks of a prompt name a chunk that a store holds: ``(group, hash index)``."""

    boundaries: Boundaries
    where: SearchRange
    present: frozenset[tuple[int, int]]


@st.composite
def contents(draw: st.DrawFn) -> Contents:
    """Draw a model, a range to search, and a store with a part of the prompt."""
    coordinator = draw(coordinators())
    boundaries = coordinator.boundaries
    unit = boundaries.hash_block_size
    num_hashes = draw(st.integers(0, 60))
    end_token = boundaries.last(draw(st.integers(0, num_hashes)) * unit)
    start_token = draw(st.integers(0, end_token // unit)) * unit
    where = SearchRange(start_token, end_token, num_hashes)
    random = draw(st.randoms(use_true_random=False))
    present: set[tuple[int, int]] = set()
    for group_id in range(len(boundaries.groups)):
        share = draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))
        present |= {(group_id, index) for index in range(num_hashes) if random.random() < share}
        if present and draw(st.booleans()):
            present.discard((group_id, draw(st.integers(0, max(0, num_hashes - 1)))))
    return Contents(boundaries, where, frozenset(present))


def longest_hit(contents: Contents) -> int:
    """Return the hit by its definition: try every boundary, from the last one down.

    Full attention comes first, group by group, and is not asked for hashes past the best boundary
    so far and its proof.
    """
    boundaries, where = contents.boundaries, contents.where
    candidate = boundaries.last(where.end_token)
    followers = []
    for group_id, group in enumerate(boundaries.groups):
        if not group.is_downward_closed:
            followers.append(group_id)
            continue
        limit_token = min(candidate + group.proof_tokens, _known_tokens(contents))
        candidate = next(
            (
                n
                for n in _descending(contents, candidate)
                if _holds(contents, group_id, n, limit_token)
            ),
            where.start_token,
        )
    last = _known_tokens(contents)
    return next(
        (
            n
            for n in _descending(contents, candidate)
            if all(_holds(contents, group_id, n, last) for group_id in followers)
        ),
        where.start_token,
    )


def names_of(
    contents: Contents, group_id: int, chunk: int, end_token: int, limit_token: int
) -> range:
    """Return the hash blocks of which any names a chunk that is needed up to ``end_token``."""
    group, unit = contents.boundaries.groups[group_id], contents.boundaries.hash_block_size
    end = (chunk + 1) * group.block_size
    first = min(end, end_token) // unit - 1
    last = first if group.is_state else min(end, limit_token) // unit - 1
    return range(first, last + 1)


def _holds(contents: Contents, group_id: int, boundary: int, limit_token: int) -> bool:
    group, where = contents.boundaries.groups[group_id], contents.where
    end_token = boundary + group.proof_tokens
    if end_token > _known_tokens(contents):
        return False
    return all(
        any(
            (group_id, name) in contents.present
            for name in names_of(contents, group_id, chunk, end_token, limit_token)
        )
        for chunk in group.matched(boundary)
        if chunk >= where.start_token // group.block_size
    )


def _known_tokens(contents: Contents) -> int:
    return contents.where.num_hashes * contents.boundaries.hash_block_size


def _descending(contents: Contents, last: int) -> Iterator[int]:
    alignment = contents.boundaries.alignment
    first = contents.where.start_token // alignment * alignment
    return iter(range(last, first, -alignment))
