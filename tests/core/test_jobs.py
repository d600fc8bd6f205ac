"""Jobs and reports: small on the wire, and merged in any order."""

import pickle
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvtide.core.jobs import (
    JobEnd,
    JobReport,
    StepPlan,
    StoreJob,
    pack_ints,
    unpack_ints,
)
from kvtide.core.keys import BlockHashes
from kvtide.testing.requests import fake_hashes

counters = st.dictionaries(st.sampled_from("ab"), st.integers(1, 5)).map(Counter)
reports = st.builds(
    JobReport,
    staged=st.dictionaries(st.integers(0, 3), st.integers(1, 2)).map(Counter),
    ended=st.dictionaries(
        st.integers(0, 3),
        st.dictionaries(st.sampled_from(list(JobEnd)), st.integers(1, 2), min_size=1).map(Counter),
    ),
    failed_loads=st.dictionaries(st.sampled_from("xy"), st.integers(0, 9)),
    lost_loads=st.sets(st.sampled_from("xy")),
    bad_keys=st.sets(st.sampled_from("pq")),
    mended_keys=st.sets(st.sampled_from("pq")),
    counters=counters,
)


@given(reports, reports, reports)
def test_reports_of_ranks_merge_in_any_order(a: JobReport, b: JobReport, c: JobReport) -> None:
    """VLLM aggregates as reports come: order and grouping must not matter."""
    assert a.merge(b) == b.merge(a)
    assert a.merge(b).merge(c) == a.merge(b.merge(c))


@given(reports)
def test_merging_an_empty_report_changes_nothing(report: JobReport) -> None:
    """And an empty one says so, to spare the engine a message."""
    assert report.merge(JobReport()) == report
    assert bool(report) == (report != JobReport())


@given(reports, reports)
def test_merging_leaves_both_reports_as_they_were(a: JobReport, b: JobReport) -> None:
    """The engine may merge one report into several."""
    before = pickle.dumps((a, b))
    a.merge(b)
    assert pickle.dumps((a, b)) == before


def test_the_first_token_not_loaded_counts() -> None:
    """Ranks may fail at different chunks: nothing at or past the first one is proven."""
    report = JobReport()
    report.fail_load("r", 64)
    report.fail_load("r", 32, lost=True)
    report.fail_load("r", 96)
    report.end(1, JobEnd.FAILED)
    assert report.failed_loads == {"r": 32}
    assert report.lost_loads == {"r"}
    assert report.ended == {1: Counter({JobEnd.FAILED: 1})}
    assert not JobEnd.FAILED.is_success
    assert JobEnd.STORED.is_success


def job(first_chunk: int, num_chunks: int) -> StoreJob:
    """A job of blocks of 16 tokens."""
    hashes = fake_hashes(num_chunks)
    return StoreJob(
        job_id=12345,
        prefix_id=0,
        start_token=first_chunk * 16,
        end_token=(first_chunk + num_chunks) * 16,
        hashes=BlockHashes.pack(hashes, first=first_chunk),
        first_chunks=(first_chunk,),
        block_ids=(pack_ints(range(70000, 70000 + num_chunks)),),
    )


def test_a_job_costs_the_same_bytes_at_any_context() -> None:
    """2,048 tokens at 128k take at most a few bytes more than at 2k."""
    near = len(pickle.dumps(StepPlan(stores=(job(0, 128),))))
    far = len(pickle.dumps(StepPlan(stores=(job(8064, 128),))))
    assert far <= 1.01 * near
    assert near < 6000


def test_block_ids_survive_the_journey() -> None:
    """Packed as 32-bit integers, four bytes each."""
    ids = [0, 1, 70000, 2**31 - 1]
    packed = pack_ints(ids)
    assert len(packed) == 16
    assert list(unpack_ints(packed)) == ids
    assert not StepPlan()
