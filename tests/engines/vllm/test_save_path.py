"""The benchmark of the save path drives both connectors' own code and counts what they do."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(180)]

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The benchmark, which leaves this process's garbage collector alone."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(gc, "freeze", lambda: None)
    import bench_save_path

    yield bench_save_path
    sys.modules.pop("bench_save_path")


def test_a_job_costs_the_same_bytes_at_any_context_and_the_peers_grow(bench: Any) -> None:
    """Each side emits and releases one job in every round; times are not judged here."""
    cases = bench.hold((2 << 10, 8 << 10))
    rows = {row.case: row for row in bench.metadata_rows(cases, 1)}
    for kind in ("prefill job", "decode job"):
        short, long = (rows[f"b. metadata, {kind} at {context}"] for context in ("2k", "8k"))
        assert abs(long.kvtide - short.kvtide) < 10
        assert long.peer > 3 * short.peer
    assert rows["b. metadata, decode job at 8k"].kvtide < 400
    times = list(bench.scheduler_rows(cases, 1))
    assert all(row.kvtide > 0 for row in times)


def test_requests_that_decode_share_two_calls_and_the_peer_makes_two_for_each(bench: Any) -> None:
    """Every key is put by every worker: the rows are of complete work."""
    rows = {row.case: row for row in bench.worker_rows(8 << 10, (4,), 1)}
    calls = rows["d. 4 requests complete a block: calls"]
    assert (calls.kvtide, calls.peer, calls.met) == (2, 8, True)
    assert all(row.kvtide > 0 and row.peer > 0 for row in rows.values())


def test_a_job_pins_what_it_reads_and_the_peers_all_blocks_of_its_request(bench: Any) -> None:
    """And what is held for a request does not grow with it."""
    rows = {row.case: row for row in bench.memory_rows(8 << 10)}
    pinned = rows["h. blocks pinned by a job at 8k"]
    assert (pinned.kvtide, pinned.peer) == (128, 512)
    live = rows["h. a live request in the scheduler at 8k"]
    assert 0 < live.kvtide < 2000 < live.peer
