"""How a load is cut into parts: as going through its chunks one by one would cut it."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from kvtide.core.jobs import NULL_BLOCK_ID, LoadJob, pack_ints, unpack_ints
from kvtide.core.keys import BlockHashes
from kvtide.runtime.loading import MAX_PART_KEYS, LoadPart, split_load


@dataclass(frozen=True)
class Case:
    """A load and what cuts it."""

    job: LoadJob
    row_bytes: Sequence[int]
    num_parts: Sequence[int]
    block_sizes: Sequence[int]
    capacity_bytes: int


def job_of(first_chunks: Sequence[int], tables: Sequence[Sequence[int]]) -> LoadJob:
    """Return a load of these chunks; nothing here reads its hashes."""
    return LoadJob(
        job_id=1,
        request_id="r",
        prefix_id=0,
        start_token=0,
        end_token=0,
        hashes=BlockHashes.pack(()),
        first_chunks=tuple(first_chunks),
        tail_tokens=(0,) * len(tables),
        block_ids=tuple(pack_ints(table) for table in tables),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw up to three groups of other block sizes, some null targets and a small capacity."""
    num_groups = draw(st.integers(1, 3))

    def each(values: st.SearchStrategy[int]) -> list[int]:
        return [draw(values) for _ in range(num_groups)]

    tables = [
        draw(st.lists(st.integers(1, 9) | st.sampled_from([1, 2, NULL_BLOCK_ID]), max_size=12))
        for _ in range(num_groups)
    ]
    return Case(
        job_of(each(st.integers(0, 5)), tables),
        each(st.integers(1, 5)),
        each(st.sampled_from([0, 1, 2, MAX_PART_KEYS // 3])),
        each(st.sampled_from([16, 32, 48])),
        draw(st.integers(3, 30)),
    )


def one_by_one(case: Case) -> Iterator[tuple[dict[int, list[int]], int | None, bool]]:
    """Yield the chunks of each part by group, where the rest starts, and whether it is blocked."""
    chunks = heapq.merge(
        *(
            [
                (chunk * case.block_sizes[group_id], group_id, chunk, block_id)
                for chunk, block_id in enumerate(
                    unpack_ints(packed), case.job.first_chunks[group_id]
                )
            ]
            for group_id, packed in enumerate(case.job.block_ids)
            if case.num_parts[group_id]
        )
    )
    part: dict[int, list[int]] = {}
    num_bytes = num_keys = 0
    for token, group_id, chunk, block_id in chunks:
        size = case.row_bytes[group_id]
        is_blocked = block_id == NULL_BLOCK_ID or size > case.capacity_bytes
        has_room = num_bytes + size <= case.capacity_bytes and num_keys < MAX_PART_KEYS
        if is_blocked or not has_room:
            yield part, token, is_blocked
            if is_blocked:
                return
            part, num_bytes, num_keys = {}, 0, 0
        part.setdefault(group_id, []).append(chunk)
        num_bytes += size
        num_keys += case.num_parts[group_id]
    yield part, None, False


def split(case: Case) -> list[LoadPart]:
    """Return the parts of a case."""
    return list(
        split_load(case.job, case.row_bytes, case.num_parts, case.block_sizes, case.capacity_bytes)
    )


@given(cases())
def test_a_load_is_cut_as_going_through_its_chunks_would_cut_it(case: Case) -> None:
    """Whole ranges at once give the same parts, whatever the groups, targets and bounds."""
    parts = split(case)
    found = [
        ({run.group_id: list(run.chunks) for run in part.runs}, part.next_token, part.is_blocked)
        for part in parts
    ]
    assert found == list(one_by_one(case))


@given(cases())
def test_the_rows_of_a_part_lie_side_by_side_within_the_capacity(case: Case) -> None:
    """Each run has its targets, and a row for each of them behind the run before."""
    for part in split(case):
        offset = 0
        for run in part.runs:
            table = unpack_ints(case.job.block_ids[run.group_id])
            first = run.chunks.start - case.job.first_chunks[run.group_id]
            assert run.block_ids == list(table[first : first + len(run.chunks)])
            assert run.rows.offset == offset
            assert run.rows.num_rows == len(run.chunks)
            assert run.rows.row_bytes == case.row_bytes[run.group_id]
            offset += run.rows.num_bytes
        assert offset <= case.capacity_bytes


def test_a_part_of_a_long_load_has_so_many_keys_and_no_more() -> None:
    """A load of 1,000 chunks with room for all: bursts of naming and judging stay short."""
    case = Case(job_of([0], [range(1, 1001)]), [1], [1], [16], 1 << 30)
    assert [len(part.runs[0].chunks) for part in split(case)] == [256, 256, 256, 232]
