"""A job's whole way through a rank, without threads."""

from __future__ import annotations

import pytest
from runtime_harness import Rank

from kvtide.core.jobs import StepPlan


def test_bytes_loaded_equal_bytes_stored() -> None:
    """What was stored comes back into other blocks, byte for byte."""
    rank = Rank()
    contents = rank.fill("a", [5, 9, 7])
    job = rank.store_job("a", 0, 12, [5, 9, 7])
    rank.step(job)
    assert rank.ends(job) == ["stored"]
    assert rank.report.staged == {job.job_id: 1}
    assert rank.report.counters["saved_bytes"] > 0
    rank.step(rank.load_job("a", 0, 12, [20, 22, 21]))
    assert rank.finished == ["a"]
    assert rank.failed == []
    assert [rank.blocks.content(0, block) for block in (20, 22, 21)] == contents
    rank.worker.check_idle()
