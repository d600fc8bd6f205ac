"""The benchmarks measure what they say, on stand-ins; their times are not judged here."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return a function that imports a benchmark, which writes below ``tmp_path``."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def load_module(name: str) -> ModuleType:
        module = __import__(name)
        monkeypatch.setattr(sys.modules["measuring"], "OUTPUT", tmp_path)
        return module

    return load_module


def test_the_metadata_of_a_step_does_not_grow_with_the_context(load: Any) -> None:
    """At 128k tokens a step's plan pickles to at most 1.1 times what it does at 2k."""
    bench = load("bench_scheduler")
    cases = {context: bench.Case(bench.StandIn(context), context) for context in bench.CONTEXTS}
    rows = list(bench.metadata_rows(cases))
    assert [row.met for row in rows] == [None, None, True]
    jobs = {row.case: row.kvtide for row in bench.job_rows(cases, 1)}
    assert len(jobs) == 3 * len(bench.CONTEXTS)
    for context in map(bench.context_name, bench.CONTEXTS):
        halves = jobs[f"emit + pin at {context}"] + jobs[f"report + free at {context}"]
        assert jobs[f"job at {context}"] == pytest.approx(halves)
    for case in cases.values():
        assert case.scheduler.num_open_jobs == case.scheduler.num_pinned_blocks == 0


def test_a_lookup_asks_for_64_keys_on_a_cold_miss_and_once_for_each_on_a_hit(load: Any) -> None:
    """The figures of the lookup are counts of keys, calls, and times."""
    bench = load("bench_scheduler")
    figures = {row.case: row.kvtide for row in bench.lookup_rows(2)}
    assert figures["lookup at 128k, cold miss: keys asked"] == 64
    assert figures["lookup at 128k, cold miss: store calls"] == 1
    assert figures["lookup at 128k, full hit: keys asked"] == 8191


def test_a_lookup_asks_only_for_what_can_change_the_answer(load: Any) -> None:
    """The keys asked for a prompt of 131,072 tokens, by kind of model and what the store has."""
    bench = load("bench_lookup_keys")
    found = [row for model in bench.MODELS for row in bench.rows(model, 1, with_vllm=False)]
    keys = {row.case: row.kvtide for row in found if row.unit == "keys"}
    assert keys["full + window 4,096, full hit"] == 8192 + 256
    assert keys["full + window 4,096, cold miss"] == 64
    assert keys["like DeepSeek-V4, full hit"] == 512 + 2 + 8 + 4 + 8
    assert keys["window 4,096 alone, full hit"] == 32 + 255
    assert keys["window 4,096 alone, cold miss"] == 32
    assert keys["full + states, full hit"] == 256 + 1
    assert keys["states alone, full hit"] == 64
    assert keys["states alone, cold miss"] == 256
    assert keys["full, TP 8, full hit"] == 8 * keys["full, full hit"] == 8 * 8192
    assert keys["full, TP 8, cold miss"] == keys["full, cold miss"] == 64
    assert all(row.met for row in found if row.unit == "keys" and row.goal is not None)


def test_a_lookup_costs_what_can_change_its_answer(load: Any) -> None:
    """Keys and calls of the real executor and scheduler, by what store and engine hold."""
    bench = load("bench_lookup_cost")
    figures = {row.case: row for row in bench.lookup_rows(1, with_vllm=False)}
    keys = {case: row.kvtide for case, row in figures.items() if row.unit == "keys"}
    assert keys["full, cold miss: keys"] == 64
    assert keys["full, full hit: keys"] == 8192
    assert keys["full, 95 % held locally: keys"] == 410 + 2  # and the sentinels
    assert keys["full + window 4,096, full hit: keys"] == 8192 + 256
    assert keys["full, TP 8, cold miss: keys"] == 64
    assert keys["full, TP 8, 95 % held locally: keys"] == 8 * (410 + 2)
    assert keys["full + states, TP 8, 95 % held locally: keys"] == 8 * (13 + 1 + 2)
    assert figures["full, cold miss: calls"].kvtide == 1
    assert figures["full, full hit: calls"].kvtide == 12
    assert all(row.met for row in figures.values() if row.goal is not None)


def test_bursts_of_lookups_are_cut_at_every_call_and_at_every_chance_for_others(
    load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With many lookups at once, by a clock that ticks when it is read; no call is in a burst."""
    bench = load("bench_lookup_cost")
    now_ms = 0
    answer = bench.CountingStore.exists

    def read_clock() -> float:
        nonlocal now_ms
        now_ms += 1
        return now_ms / 1e3

    def exists(store: Any, keys: Sequence[str]) -> list[bool]:
        nonlocal now_ms
        now_ms += 1000
        return answer(store, keys)

    monkeypatch.setattr(bench, "time", SimpleNamespace(thread_time=read_clock))
    monkeypatch.setattr(bench.CountingStore, "exists", exists)
    rows = list(bench.burst_rows(1))
    assert len(rows) == len(bench.models())
    assert [row.kvtide for row in rows] == pytest.approx([1.0] * len(rows))


def test_planning_a_load_ends_in_the_chunks_that_the_hit_requires(load: Any) -> None:
    """The real worker asks for each of them once; the bench itself checks how many."""
    bench = load("bench_load_planning")
    for name in bench.MODELS:
        rows = list(bench.rows(name, 8 << 10, 2, with_vllm=False))
        assert [row.unit for row in rows] == ["us/chunk"] * 2
        assert rows[0].kvtide < rows[1].kvtide  # the scheduler's part, and all of it


def test_tags_are_measured_on_values_that_are_saved_and_loaded(load: Any, tmp_path: Path) -> None:
    """Both formats through the real worker, which saves and loads every value of each turn."""
    bench = load("bench_tags")
    shares = list(bench.share_rows(512 << 10, 3))
    assert [row.goal for row in shares] == ["<= 15", None, "<= 15", None]
    rows = list(bench.worker_rows(tmp_path / "pool", 2048 << 10, 1))
    assert [row.unit for row in rows] == ["MiB/s", "ms"] * 2
    assert all(row.ratio == pytest.approx(row.kvtide / row.peer) for row in rows)


def test_values_are_compared_in_layers_and_whole_on_a_real_mooncake_pool(
    load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways of kvtide beside the client with all segments; the bytes are checked there."""
    bench = load("bench_mooncake_transfer")
    monkeypatch.setattr(bench, "CASES", ((64 << 10, 3, True),))
    rows = list(bench.all_rows(2))
    compared = {row.case: row.goal for row in rows if row.goal}
    assert compared == {
        "put 64 KiB x 3, gathered": ">= 10",
        "put 64 KiB x 3, single": ">= 10",
        "get 64 KiB x 3, gathered": ">= 8",
        "get 64 KiB x 3, single": ">= 8",
    }
    assert len(rows) > len(compared)


def test_markers_are_compared_with_all_parts_on_both_stores(
    load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight times the keys on a full hit and as many on a miss; each lookup's hit is checked there.

    In a full store a lookup of every rank's part promises nothing that is not there.
    """
    bench = load("bench_rank_markers")
    monkeypatch.setattr(bench, "POOL_BYTES", 256 << 20)
    monkeypatch.setattr(bench, "FILLED_BYTES", 64 << 20)
    monkeypatch.setattr(bench, "FULL_POOL_BYTES", 64 << 20)
    effort = bench.Effort(2, 9, 1, (1024, 2048))
    found = [*bench.local_rows(effort), *bench.mooncake_rows(effort)]
    rows = {row.case: row for row in found}
    assert len(rows) == len(found)
    for name in ("local", "Mooncake"):
        hit, miss = (
            rows[f"{name}, TP 8, {case}: keys"] for case in ("hit of 2,048 tokens", "cold miss")
        )
        assert (hit.kvtide, hit.peer, hit.ratio) == (8 * 128, 128, 8)
        assert (miss.kvtide, miss.peer) == (64, 64)
        assert rows[f"{name}, TP 8, save"].kvtide > 0
        assert rows[f"{name}, full store, markers: chunks of prompts loaded"].kvtide > 0
    assert rows["local, full store, markers: hits whose load failed"].kvtide == 0
    assert rows["local, TP 2, room"].peer >= 4096  # a page
    assert rows["Mooncake, TP 2, room"].peer == bench.TAG_BYTES


def test_a_decode_step_is_timed_where_the_model_ran_and_all_requests_decode(load: Any) -> None:
    """Not the prompts in front, nor steps after a request's end, nor three times the median."""
    bench = load("bench_end_to_end")
    prompts = [bench.Step(9.0, 0.1, 0.9, has_run=True, num_ended=0)] * 5
    empty = [bench.Step(7.0, 0.1, 0.7, has_run=False, num_ended=0)] * 5
    decodes = [bench.Step(1.0, 0.1, 0.2, has_run=True, num_ended=0)] * 33
    saving = [bench.Step(2.0, 0.1, 0.4, has_run=True, num_ended=0)]
    slow = [bench.Step(5.0, 0.1, 0.5, has_run=True, num_ended=0)]
    late = [bench.Step(0.1, 0.1, 0.1, has_run=True, num_ended=1)] * 9
    steps = [*prompts, *empty, *slow, *decodes, *saving, *late]
    answers = bench.Answers([[1]], [1.0], steps, [0], 0, 0)
    step = bench.mean_decode_step(answers)
    assert step == pytest.approx((35 / 34, (33 * 0.2 + 0.4) / 34))


def test_rounds_that_did_not_save_or_load_what_they_are_timed_for_are_refused(load: Any) -> None:
    """A full pool and a back-off cost nothing, and a lookup that finds nothing neither."""
    bench = load("bench_end_to_end")
    answers = bench.Answers([[1]], [1.0], [], [0], 0, 7)
    bench.check_saves("kvtide", answers, 7)
    bench.check_loads("kvtide", [2048, 2048], is_connected=True)
    bench.check_loads("kvtide", [0, 0], is_connected=False)
    for num_blocks in (0, 8):
        with pytest.raises(RuntimeError, match="saved 7 chunks"):
            bench.check_saves("kvtide", answers, num_blocks)
    for is_connected in (True, False):
        with pytest.raises(RuntimeError, match="late prompts"):
            bench.check_loads("kvtide", [2048, 0], is_connected=is_connected)
    one_block = [[0] * (bench.BLOCK - bench.DECODE_TOKENS % bench.BLOCK + 1)]
    assert bench.num_full_blocks(one_block) == bench.DECODE_TOKENS // bench.BLOCK + 1
    assert bench.p99([*range(1, 102)]) == 100


def test_ranks_that_hold_the_same_bytes_write_one_copy_in_equal_shares(load: Any) -> None:
    """The goals are counts, so they are judged here too."""
    bench = load("bench_rank_shares")
    found = [row for model in bench.MODELS for row in bench.rows(model, 16 << 10)]
    assert len(found) == 2 * len(bench.MODELS)
    assert all(row.met for row in found)


def test_all_rows_are_joined_in_one_summary(
    load: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of every benchmark are in the list, and goals that were missed are told."""
    measuring = load("measuring")
    row = {"case": "c", "unit": "us", "peer": None, "ratio": None}
    measuring.report("b", [measuring.Row(bench="b", kvtide=2, goal="<= 1", met=False, **row)])
    measuring.report("a", [measuring.Row(bench="a", kvtide=1, goal="<= 1", met=True, **row)])
    for _ in range(2):  # the summary of an earlier run is no benchmark's
        rows = json.loads(measuring.merge().read_text())
        assert [one["bench"] for one in rows] == ["a", "b"]
        assert set(rows[0]) == {*row, "bench", "kvtide", "goal", "met", "spread"}
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("NOT MET")]
    assert set(told) == {"NOT MET: b, c: 2 (goal <= 1)"}


def test_the_ratio_is_the_median_over_rounds_that_both_sides_shared(load: Any) -> None:
    """A burst of noise in one round is in the spread, and leaves the ratio alone."""
    measuring = load("measuring")
    row = measuring.compared("b", "c", "MiB/s", [20, 30, 2, 40, 50], [2, 3, 2, 2, 4], at_least=10)
    assert (row.ratio, row.kvtide, row.peer) == (10, 30, 2)
    assert row.spread == (10, 12.5)
    assert (row.goal, row.met) == (">= 10", True)
    assert measuring.compared("b", "c", "", [9.9], [1], at_least=10).met is False


def test_costs_at_three_contexts_become_a_line_and_all_rows_a_table(load: Any) -> None:
    """The line is in the order of contexts; what has no peer, or too few points, is not plotted."""
    plot_costs = load("plot_costs")
    common = {"unit": "us", "ratio": None, "spread": [1, 2], "goal": "<= 9", "met": True}
    rows = [
        {"case": "job at 8k", "kvtide": 2, "peer": 8.0, **common},
        {"case": "job at 2k", "kvtide": 1, "peer": 2000.0, **common},
        {"case": "job at 128k", "kvtide": 3, "peer": 128.0, **common},
        {"case": "other at 2k", "kvtide": 1, "peer": 1.0, **common},
        {"case": "alone at 2k", "kvtide": 1, "peer": None, **common},
    ]
    points = [(2 << 10, 1, 2000.0), (8 << 10, 2, 8.0), (128 << 10, 3, 128.0)]
    assert plot_costs.series(rows) == {"us": {"job": points}}
    of_a_part = [{**row, "case": row["case"] + ": part"} for row in rows]
    assert plot_costs.series(of_a_part) == {"us": {"job: part": points}}
    lines = plot_costs.table(rows).splitlines()
    assert lines[3] == "| job at 2k | us | 1 | 2,000 |  | 1 to 2 | <= 9 | yes |"
    assert len(lines) == 2 + len(rows)


def test_a_ratio_is_written_with_three_digits_that_matter(load: Any) -> None:
    """Small ones as 1/x, the spread from the smaller x."""
    measuring = load("measuring")
    assert measuring.written_ratio(1 / 56.72, (1 / 58.7, 1 / 46.68)) == (
        "1/56.7",
        "1/46.7 to 1/58.7",
    )
    assert measuring.written_ratio(0.6667, (0.5, 1.2345)) == ("0.667", "0.5 to 1.23")
    assert measuring.written_ratio(2.0512, None) == ("2.05", "")
    assert measuring.written_ratio(None, (15.04, 16.06)) == ("", "15 to 16.1")
    assert measuring.written(12345.6) == "12,346"
    assert measuring.written(None) == ""


def test_a_page_gets_the_tables_of_the_benches_that_ran(load: Any) -> None:
    """Measures of a case share a line; a table of another bench, and the text, stay as they are."""
    measuring, plot_costs = load("measuring"), load("plot_costs")
    measuring.report(
        "b",
        [
            measuring.at_most("b", "miss: keys", "keys", 64, 64, peer=8192),
            measuring.times_less("b", "miss: CPU", "us", [2], [80], at_least=50),
            measuring.figure("b", "hit: keys", "keys", 8192),
            measuring.times_less("b", "hit: CPU", "us", [30], [240]),
            measuring.at_most("b", "alone: longest", "ms", 0.5, 1),
        ],
    )
    page = "Text.\n\n<!-- table: b:keys -->\n\n| old |\n|---|\n| 1 |\n\nMore.\n"
    other = "\n<!-- table: c -->\n\n| of another run |\n|---|\n"
    assert plot_costs.filled(page + other) == (
        "Text.\n\n<!-- table: b:keys -->\n\n"
        "| case | keys | CPU, us | ratio of CPU | spread | goals |\n|---|---|---|---|---|---|\n"
        "| miss | 64 : 8,192 | 2 : 80 | 1/40 | 1/40 to 1/40 | keys <= 64, CPU <= 1/50 (missed) |\n"
        "| hit | 8,192 | 30 : 240 | 1/8 | 1/8 to 1/8 |  |\n"
        "\nMore.\n" + other
    )
    longest = "| case | longest, ms | goals |\n|---|---|---|\n| alone | 0.5 | longest <= 1 |\n"
    place = "<!-- table: b:longest -->\n"
    once = plot_costs.filled(place)
    assert once == plot_costs.filled(once) == f"{place}\n{longest}"


def test_of_costs_the_ratio_is_bounded_from_above(load: Any) -> None:
    """A goal of 50 times less is a ratio of at most 1/50."""
    measuring = load("measuring")
    row = measuring.times_less("b", "c", "us", [1, 2, 9], [100, 100, 100], at_least=50)
    assert (row.ratio, row.goal, row.met) == (0.02, "<= 1/50", True)
    assert measuring.times_less("b", "c", "us", [3], [100], at_least=50).met is False
    assert measuring.times_less("b", "c", "us", [3], [100]).goal is None


def test_a_bench_that_cannot_run_says_why(
    load: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its row has no result, and the summary repeats the reason."""
    measuring = load("measuring")
    measuring.report("b", [measuring.left_out("b", "vLLM is not installed")])
    [row] = json.loads(measuring.merge().read_text())
    assert (row["case"], row["kvtide"]) == ("left out: vLLM is not installed", None)
    assert "b: left out: vLLM is not installed" in capsys.readouterr().out
