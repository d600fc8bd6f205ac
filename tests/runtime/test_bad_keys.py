"""Keys whose value did not verify are remembered, but not without bound."""

from __future__ import annotations

import pytest

from kvtide.runtime.bad_keys import DISTRUST_S, BadKeys


def test_remembers_until_discarded() -> None:
    """A key is bad from ``add`` to ``discard``, which tells whether it was."""
    keys = BadKeys(10)
    keys.add(["a", "b"])
    assert "a" in keys
    assert keys.among(["x", "b", "a"]) == {"a", "b"}
    assert keys.discard(["a", "x"]) == {"a"}
    assert "a" not in keys
    assert len(keys) == 1


def test_forgets_the_key_that_was_used_longest_ago() -> None:
    """At the bound, being asked for keeps a key; the others go first."""
    keys = BadKeys(2)
    keys.add(["old", "new"])
    assert "old" in keys
    keys.add(["newest"])
    assert "new" not in keys
    assert keys.among(["old", "newest"]) == {"old", "newest"}


def test_a_key_is_tried_again_after_a_while() -> None:
    """Somebody else may have made it whole, and who only loads is never told."""
    now_s = [100.0]
    keys = BadKeys(10, lambda: now_s[0])
    keys.add(["a"])
    now_s[0] += DISTRUST_S / 2
    keys.add(["b"])
    now_s[0] += DISTRUST_S / 2
    assert keys.among(["a", "b"]) == {"b"}
    assert len(keys) == 1
    keys.add(["a"])
    assert "a" in keys


def test_bound_must_be_positive() -> None:
    """A set that can hold nothing would promise bad values for ever."""
    with pytest.raises(ValueError, match="positive"):
        BadKeys(0)
