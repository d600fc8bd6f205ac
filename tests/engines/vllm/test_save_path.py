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
    """The benchmark, which leaves this process's garbage collector alone, and no thread behind."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(gc, "freeze", lambda: None)
    import bench_save_path
    import scheduler_halves

    made: list[Any] = []
    make_halves = scheduler_halves.make_halves

    def noted(engine: Any) -> Any:
        halves = make_halves(engine)
        made.append(halves["kvtide"])
        return halves

    monkeypatch.setattr(scheduler_halves, "make_halves", noted)
    yield bench_save_path
    for half in made:
        half.side.close()
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
    times = {row.case: row for row in bench.scheduler_rows(cases, 1)}
    assert len(times) == 2 * (len(cases) + 1)
    flat = times["a. scheduler, prefill job: 8k beside 2k"]
    assert flat.kvtide == times["a. scheduler, prefill job at 8k"].kvtide


def test_requests_that_decode_share_two_calls_and_the_peer_makes_two_for_each(bench: Any) -> None:
    """Every key is put by every worker: the rows are of complete work."""
    rows = {row.case: row for row in bench.worker_rows(8 << 10, (4,), 1)}
    calls = rows["d. 4 requests decode: calls for a block of each"]
    assert (calls.kvtide, calls.peer, calls.met) == (2, 8, True)
    judged = {
        "c. worker, a key of prefill at 8k": "<= 1/3",
        "c. worker, a key of decode at 8k": "<= 1/5",
        "c. worker, a key of 4 requests that decode": "<= 1/5",
        "d. 4 requests decode: a key": "<= 5",
    }
    for case, goal in judged.items():
        assert rows[case].goal == rows[f"{case}, without copy and tag"].goal == goal


class HalfThatSavesTwoAStep:
    """Stands for a scheduler's half that leaves the rest of a crowd to the next steps."""

    def __init__(self, num_requests: int) -> None:
        self.left = num_requests
        self.num_pinned_blocks = 0
        self.num_taken = 0

    @property
    def has_pins(self) -> bool:
        return self.num_pinned_blocks > 0

    def emit(self, _step: object) -> int:
        self.num_pinned_blocks = min(2, self.left)
        self.left -= self.num_pinned_blocks
        return self.num_pinned_blocks

    def num_jobs(self, metadata: int) -> int:
        return metadata

    def report_on(self, metadata: int) -> int:
        return metadata

    def take(self, _report: int) -> None:
        self.num_pinned_blocks = 0
        self.num_taken += 1


def test_a_crowd_is_timed_over_all_steps_and_must_be_saved_by_then(bench: Any) -> None:
    """Steps in which nothing is due count, too."""
    half = HalfThatSavesTwoAStep(7)
    bench._save_crowd(half, range(16), 7)
    assert half.num_taken == 16
    with pytest.raises(AssertionError, match="not every block"):
        bench._save_crowd(HalfThatSavesTwoAStep(7), range(3), 7)


def test_a_job_pins_what_it_reads_and_the_peers_all_blocks_of_its_request(bench: Any) -> None:
    """And what is held for a request does not grow with it."""
    rows = {row.case: row for row in bench.memory_rows(8 << 10)}
    pinned = rows["h. blocks pinned by a job at 8k"]
    assert (pinned.kvtide, pinned.peer) == (128, 512)
    live = rows["h. a live request in the scheduler at 8k"]
    assert 0 < live.kvtide < 2000 < live.peer
