"""The statistics file: whole or not at all, not too often, never in the engine's way."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from kvtide.engines.vllm.stats_file import StatsFile


def test_it_is_written_when_something_changed_and_not_too_often(tmp_path: Path) -> None:
    """At most five times a second, and not for the same numbers."""
    path = tmp_path / "stats.json"
    stats = StatsFile(str(path))
    stats.write({"saved_bytes": 1}, 0.0)
    stats.write({"saved_bytes": 2}, 0.1)
    assert json.loads(path.read_text()) == {"saved_bytes": 1}
    stats.write({"saved_bytes": 2}, 0.2)
    assert json.loads(path.read_text()) == {"saved_bytes": 2}
    path.unlink()
    stats.write({"saved_bytes": 2}, 0.5)
    assert not path.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Counting is no reason to stop an engine."""
    stats = StatsFile(str(tmp_path / "nowhere" / "stats.json"))
    with caplog.at_level(logging.WARNING):
        stats.write({"saved_bytes": 1}, 0.0)
        stats.write({"saved_bytes": 2}, 1.0)
    assert len(caplog.records) == 1
