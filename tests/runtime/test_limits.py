"""Limits are checked where they are made."""

from __future__ import annotations

import pytest

from kvtide.errors import ConfigError
from kvtide.runtime.limits import WorkerLimits


def test_all_faults_are_told_at_once() -> None:
    """Every bound that is not positive is named in one error."""
    with pytest.raises(ConfigError) as caught:
        WorkerLimits(staging_bytes=0, load_timeout_s=-1)
    assert [fault.split()[0] for fault in caught.value.faults] == [
        "staging_bytes",
        "load_timeout_s",
    ]


def test_not_waiting_for_room_is_allowed() -> None:
    """A wait of zero is a policy, not a mistake."""
    assert WorkerLimits(stage_wait_s=0).stage_wait_s == 0
