"""What a rank stores of a job, whatever form the job has."""

from __future__ import annotations

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from kvtide.core.coordinator import Coordinator
from kvtide.core.groups import FullAttention
from kvtide.core.jobs import BoundaryJob, BoundaryPut, SaveJob, StoreJob, pack_ints
from kvtide.core.joining import join_stores
from kvtide.core.topology import WHOLE, RankRole, StoreShare
from kvtide.runtime.selection import select
from tests.runtime_harness import hashes_of

COORDINATOR = Coordinator((FullAttention(4), FullAttention(8)), 2)
RATIOS = (2, 4)
"""Hash blocks in a chunk of each group."""
UNIT = 8


@st.composite
def roles(draw: st.DrawFn) -> RankRole:
    """Some rank: it may lack a group, and share each with others that hold the same."""
    steps = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    shares = tuple(StoreShare(step, draw(st.integers(0, step - 1))) for step in steps)
    parts = tuple(draw(st.sampled_from(((WHOLE,), ()))) for _ in steps)
    return RankRole(0, 1, parts, shares)


def unit_job(name: str, unit: int, job_id: int, nulls: set[int]) -> StoreJob:
    """A job for one unit: two chunks of the first group, one of the second."""
    hashes = hashes_of(name, (unit + 1) * UNIT // 2, unit * UNIT // 2)
    tables = [[10 * job_id + 1, 10 * job_id + 2], [10 * job_id + 3]]
    packed = tuple(pack_ints(0 if i % 10 in nulls else i for i in ids) for ids in tables)
    return StoreJob(job_id, 0, unit * UNIT, (unit + 1) * UNIT, hashes, (2 * unit, unit), packed)


def stored(job: SaveJob, role: RankRole) -> set[tuple[int, int, int, str]]:
    """What is stored: group, chunk, block, and the hash that names it."""
    return {
        (one.group_id, chunk, block_id, name)
        for one in select(job, role, RATIOS)
        for chunk, block_id, name in zip(
            one.chunks, one.block_ids, one.hashes.hexes(one.names), strict=True
        )
    }


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sets(st.integers(1, 3))), min_size=1, max_size=4),
    roles(),
)
def test_a_joined_job_stores_what_its_jobs_would(
    units: list[tuple[int, set[int]]], role: RankRole
) -> None:
    """The same blocks under the same names, on any rank, nulls left out."""
    ids = count(1)
    jobs = [unit_job(f"r{n}", unit, next(ids), nulls) for n, (unit, nulls) in enumerate(units)]
    joined = join_stores(jobs, COORDINATOR, job_id=99)
    assert stored(joined, role) == set().union(*(stored(job, role) for job in jobs))


@given(st.integers(0, 5), st.sets(st.integers(1, 3)), roles())
def test_puts_by_themselves_store_what_a_range_would(
    unit: int, nulls: set[int], role: RankRole
) -> None:
    """Each chunk named by the hash at its end."""
    job = unit_job("r", unit, 1, nulls)
    everything = stored(job, RankRole.alone(2))
    puts = [
        (
            BoundaryPut(group_id, chunk, (chunk + 1) * (4, 8)[group_id], block_id),
            bytes.fromhex(name),
        )
        for group_id, chunk, block_id, name in sorted(everything)
    ]
    alone = BoundaryJob(2, 0, tuple(put for put, _ in puts), tuple(name for _, name in puts))
    assert stored(alone, role) == stored(job, role)


def test_a_rank_without_anything_to_store_selects_nothing() -> None:
    """No group of a job has an empty selection."""
    role = RankRole(0, 1, ((WHOLE,), ()), (StoreShare(4, 3), StoreShare()))
    assert select(unit_job("r", 0, 1, set()), role, RATIOS) == []
