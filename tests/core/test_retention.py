"""Retention: which boundaries are kept along a request, and which for the sake of its prompt."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.core.retention import Retention, replay_boundaries


@pytest.mark.parametrize(
    "num_prompt_tokens, expected",
    [(1, ()), (16, ()), (17, (16,)), (64, (48,)), (65, (64,)), (80, (64,))],
)
def test_the_same_prompt_again_resumes_below_its_last_token(
    num_prompt_tokens: int, expected: tuple[int, ...]
) -> None:
    """One token must remain to compute."""
    assert replay_boundaries(num_prompt_tokens, 16, has_proof=False) == expected


@pytest.mark.parametrize(
    "num_prompt_tokens, expected",
    [(16, ()), (32, (16,)), (48, (16, 32)), (49, (32,)), (64, (32, 48)), (65, (48,))],
)
def test_with_a_draft_model_both_ends_lie_a_unit_lower(
    num_prompt_tokens: int, expected: tuple[int, ...]
) -> None:
    """A longer prompt resumes where the whole unit above is matched, the same one a unit lower."""
    assert replay_boundaries(num_prompt_tokens, 16, has_proof=True) == expected


@given(st.integers(1, 500), st.booleans())
def test_what_is_replayed_can_be_resumed_at(num_prompt_tokens: int, has_proof: bool) -> None:
    """Multiples of the unit inside the prompt, with their proof."""
    for boundary in replay_boundaries(num_prompt_tokens, 16, has_proof=has_proof):
        assert boundary > 0
        assert boundary % 16 == 0
        assert boundary + (16 if has_proof else 1) <= num_prompt_tokens


def test_an_interval_spaces_the_boundaries() -> None:
    """``None`` keeps all, 0 keeps none along the request."""
    assert Retention(16).step == 16
    assert Retention(16, 0).step == 0
    assert Retention(16, 64).step == 64


def test_the_prompt_is_replayed_where_not_all_is_kept() -> None:
    """Nothing is added where every boundary is kept, or where no prompt is known."""
    assert Retention(16).replayed(100, has_proof=False) == ()
    assert Retention(16, 64).replayed(None, has_proof=False) == ()
    assert Retention(16, 64).replayed(100, has_proof=False) == (96,)
    assert Retention(16, 0).replayed(100, has_proof=True) == (80,)


@pytest.mark.parametrize("interval", [-16, 8, 24])
def test_an_interval_between_the_boundaries_is_refused(interval: int) -> None:
    """Nothing could be resumed there."""
    with pytest.raises(ValueError, match="must be a multiple of 16 tokens"):
        Retention(16, interval)
