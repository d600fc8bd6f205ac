"""Each kind of attention is one pure function: what must be present to resume after n tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.core.groups import ChunkedLocal, FullAttention, Group, Mamba, SlidingWindow

KINDS = st.sampled_from(
    [
        FullAttention(16),
        SlidingWindow(16, 2),
        SlidingWindow(16, 33),
        SlidingWindow(4, 100),
        ChunkedLocal(16, 16),
        ChunkedLocal(16, 64),
        ChunkedLocal(16, 24),
        Mamba(16),
        Mamba(48),
    ]
)


def attended(group: Group, num_tokens: int) -> set[int]:
    """Return the tokens below ``num_tokens`` that the token at ``num_tokens`` attends to."""
    match group:
        case SlidingWindow(window=window):
            return set(range(max(0, num_tokens - window + 1), num_tokens))
        case ChunkedLocal(chunk_size=size):
            return set(range(num_tokens // size * size, num_tokens))
        case Mamba():  # its one state stands for all of them and lies at the last
            return {num_tokens - 1} if num_tokens else set()
    return set(range(num_tokens))


@given(KINDS, st.integers(0, 400))
def test_the_chunks_required_are_those_of_the_tokens_attended_to(
    group: Group, num_tokens: int
) -> None:
    """No chunk less, and no chunk more."""
    chunks = {token // group.block_size for token in attended(group, num_tokens)}
    assert set(group.required(num_tokens)) == chunks


@given(KINDS, st.integers(0, 400), st.integers(0, 400))
def test_both_ends_never_fall(group: Group, one: int, other: int) -> None:
    """What the search relies on where it steps down."""
    low, high = group.required(min(one, other)), group.required(max(one, other))
    assert low.start <= high.start
    assert low.stop <= high.stop


@given(KINDS, st.integers(0, 20))
def test_the_last_count_that_requires_a_chunk(group: Group, chunk: int) -> None:
    """None for full attention; for the others, the next count begins behind the chunk."""
    last = group.last_requiring(chunk)
    assert (last is None) == group.is_downward_closed
    if last is not None:
        assert group.required(last).start <= chunk < group.required(last + 1).start


def test_full_attention_alone_is_downward_closed() -> None:
    """A prefix of what it holds serves a shorter prompt."""
    closed = FullAttention(16)
    assert closed.is_downward_closed
    assert closed.ignores_retention
    assert not closed.is_state
    for group in (SlidingWindow(16, 64), ChunkedLocal(16, 64), Mamba(16)):
        assert not group.is_downward_closed


def test_retention_makes_windows_and_states_sparse_and_nothing_else() -> None:
    """As in vLLM, where local attention is kept for every boundary."""
    groups = (FullAttention(16), ChunkedLocal(16, 64), SlidingWindow(16, 64), Mamba(16))
    assert [group.ignores_retention for group in groups] == [True, True, False, False]
    assert [group.is_state for group in groups] == [False, False, False, True]


def test_a_proof_is_matched_and_not_required() -> None:
    """The chunk behind the boundary must be found; it is not loaded."""
    group = SlidingWindow(16, 33, proof_tokens=16)
    assert group.required(64) == range(2, 4)
    assert group.matched(64) == range(2, 5)
    assert FullAttention(64, proof_tokens=16).matched(64) == range(2)
    assert Mamba(16).matched(64) == range(3, 4)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: FullAttention(0), "block_size must be positive"),
        (lambda: FullAttention(16, proof_tokens=-1), "proof_tokens must not be negative"),
        (lambda: SlidingWindow(0, 16), "block_size must be positive"),
        (lambda: SlidingWindow(16, 0), "window must be positive"),
        (lambda: ChunkedLocal(16, -64), "chunk_size must be positive"),
    ],
)
def test_sizes_that_mean_nothing_are_refused(make: Callable[[], Group], message: str) -> None:
    """A group of no tokens would require nothing, and promise everything."""
    with pytest.raises(ValueError, match=message):
        make()


@given(KINDS, st.integers(0, 40), st.integers(0, 200))
def test_a_chunk_is_required_for_its_slack_after_its_end(
    group: Group, chunk: int, after: int
) -> None:
    """So long an engine keeps its block, and saving it may wait."""
    num_tokens = (chunk + 1) * group.block_size + after
    if not group.is_state and 0 < after <= group.slack_tokens:
        assert group.required(num_tokens).start <= chunk
