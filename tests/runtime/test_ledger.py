"""The ledger: every job ends once, and what is taken is told once."""

from __future__ import annotations

from kvtide.core.jobs import LoadJob
from kvtide.core.keys import BlockHashes
from kvtide.runtime.ledger import Ledger, LoadTask


def load_task(request_id: str = "r") -> LoadTask:
    """An open load."""
    job = LoadJob(1, request_id, 0, 0, 16, BlockHashes.pack(()), (0,), (b"",))
    return LoadTask(job, deadline_s=1.0, unproven_token=0)


def test_a_load_that_ends_after_a_poll_is_told_by_the_next_one_alone() -> None:
    """Also where the poll had nothing to tell: the engine still reads what it was given."""
    ledger, task = Ledger(), load_task()
    ledger.open_load(task)
    finished, failed = ledger.take_loads()
    ledger.end_load(task, 0)
    assert (finished, failed) == (set(), set())
    assert ledger.take_loads() == ({"r"}, {"r"})
    assert ledger.take_loads() == (set(), set())
