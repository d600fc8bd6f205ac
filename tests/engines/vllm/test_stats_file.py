"""The statistics file: whole or not at all, not too often, never in the engine's way."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from kvtide.engines.vllm.stats_file import MIN_INTERVAL_S, StatsFile


def test_it_holds_the_latest_counters_and_is_not_due_too_often(tmp_path: Path) -> None:
    """At most five times a second; the last word is always written."""
    path = tmp_path / "stats.json"
    stats = StatsFile(str(path))
    assert stats.is_due(0.0)
    stats.write({"saved_bytes": 1}, 0.0)
    assert not stats.is_due(MIN_INTERVAL_S / 2)
    assert stats.is_due(MIN_INTERVAL_S)
    stats.close({"saved_bytes": 2})
    assert json.loads(path.read_text()) == {"saved_bytes": 2}
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Counting is no reason to stop an engine."""
    stats = StatsFile(str(tmp_path / "nowhere" / "stats.json"))
    with caplog.at_level(logging.WARNING):
        stats.write({"saved_bytes": 1}, 0.0)
        stats.close({"saved_bytes": 2})
    assert len(caplog.records) == 1
