"""Small jobs of one step become one job, which has what they had."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from kvtide.core.back_off import BackOff, Delays
from kvtide.core.coordinator import Coordinator
from kvtide.core.groups import FullAttention, SlidingWindow
from kvtide.core.jobs import NULL_BLOCK_ID, JoinedJob, StoreJob, pack_ints, unpack_ints
from kvtide.core.joining import MAX_SMALL_UNITS, Joining, join_stores
from kvtide.core.keys import BlockHashes
from kvtide.core.open_jobs import OpenJobs
from kvtide.core.requests import SaveProgress
from kvtide.core.transfer import PlannedStore
from kvtide.testing.requests import fake_hashes

UNIT = 16
COORDINATOR = Coordinator([FullAttention(UNIT)], UNIT)


def job(job_id: int, first_unit: int, num_units: int, *, prefix_id: int = 0) -> StoreJob:
    """A store job of whole units whose block of unit ``i`` is ``100 * job_id + i + 1``."""
    units = range(first_unit, first_unit + num_units)
    return StoreJob(
        job_id,
        prefix_id,
        first_unit * UNIT,
        (first_unit + num_units) * UNIT,
        BlockHashes.pack(fake_hashes(units.stop)[first_unit:], first=first_unit),
        (first_unit,),
        (pack_ints(100 * job_id + unit + 1 for unit in units),),
    )


class Bench:
    """Open jobs and what joins them."""

    def __init__(self, max_units: int = 1000) -> None:
        self.open_jobs = OpenJobs(1)
        self.ids = count(1000)
        self.joining = Joining(
            COORDINATOR,
            self.open_jobs,
            max_job_tokens=max_units * UNIT,
            take_job_id=lambda: next(self.ids),
        )

    def joined(self, *jobs: StoreJob, failed: Sequence[int] = ()) -> list[list[int]]:
        """Open the jobs and join them; return the blocks of each job that is left."""
        planned = []
        for one in jobs:
            start = one.start_token
            progress = SaveProgress(start, start, BackOff(Delays(1.0, 4.0)), first_token=0)
            if one.job_id in failed:
                progress.back_off.fail(0.0)
            planned.append(PlannedStore(one, list(unpack_ints(one.block_ids[0])), 0))
            self.open_jobs.open(planned[-1], progress)
        left = list(self.joining.joined(planned))
        assert len(self.open_jobs) == len(left)
        self.open_jobs.check_integrity(())
        return [list(unpack_ints(one.block_ids[0])) for one in left]


def test_jobs_of_a_few_units_are_joined_and_long_ones_left_alone() -> None:
    """In the order in which they were planned."""
    long = job(3, 0, MAX_SMALL_UNITS + 1)
    left = Bench().joined(job(1, 4, 1), job(2, 7, 2), long)
    assert left == [list(range(301, 302 + MAX_SMALL_UNITS)), [105, 208, 209]]


def test_a_joined_job_is_no_longer_than_a_worker_takes() -> None:
    """Three units at most: a part ends before the job that would exceed them."""
    jobs = [job(1, 0, 2), job(2, 0, 2), job(3, 0, 1), job(4, 0, 3)]
    assert Bench(3).joined(*jobs) == [[101, 102], [201, 202, 301], [401, 402, 403]]


def test_what_failed_before_is_not_joined() -> None:
    """Nor are the others kept from it."""
    jobs = [job(1, 0, 1), job(2, 0, 1), job(3, 0, 1)]
    assert Bench().joined(*jobs, failed=[2]) == [[201], [101, 301]]


def test_key_prefixes_stay_apart() -> None:
    """A job has one."""
    jobs = [job(1, 0, 1), job(2, 0, 1, prefix_id=1), job(3, 0, 1)]
    assert Bench().joined(*jobs) == [[101, 301], [201]]


def test_a_joined_job_names_every_chunk_and_leaves_nulls_out() -> None:
    """Of each group, by the hash at the chunk's end."""
    coordinator = Coordinator([FullAttention(32), SlidingWindow(16, 64)], 16)
    hashes = BlockHashes.pack(fake_hashes(4))
    stores = [
        StoreJob(1, 0, 0, 64, hashes, (0, 0), (pack_ints([1, 2]), pack_ints([3, 4, 5, 6]))),
        StoreJob(2, 0, 0, 32, hashes, (0, 1), (pack_ints([7]), pack_ints([NULL_BLOCK_ID]))),
    ]
    joined = join_stores(stores, coordinator, job_id=9)
    names = fake_hashes(4)
    assert isinstance(joined, JoinedJob)
    assert [list(unpack_ints(chunks)) for chunks in joined.chunks] == [[0, 1, 0], [0, 1, 2, 3]]
    assert [list(unpack_ints(ids)) for ids in joined.block_ids] == [[1, 2, 7], [3, 4, 5, 6]]
    assert list(joined.hashes) == [names[1], names[3], names[1], *names]
