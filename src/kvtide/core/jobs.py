"""Jobs: self-contained transfers from the scheduler to the workers, and the reports back.

Workers know jobs, not requests: a job carries the blocks that it is about, the hashes that name
them, and the id of its key prefix. Nothing in it grows with the length of a request.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, TypeAlias

from kvtide.core.keys import BlockHashes

NULL_BLOCK_ID = 0
"""The engine's placeholder in a block table; its memory is nobody's and never a source."""

_INT = "i"  # array type code: 32 bits


def pack_ints(values: Iterable[int]) -> bytes:
    """Pack block ids or chunk indexes as 32-bit integers, which pickle as one string."""
    return array(_INT, values).tobytes()


def unpack_ints(packed: bytes) -> Sequence[int]:
    """Return what :func:`pack_ints` packed."""
    values = array(_INT)
    values.frombytes(packed)
    return values


class StoreJob(NamedTuple):
    """Write the KV cache of the tokens ``[start_token, end_token)`` of one request.

    Both ends are multiples of ``lcm_block_size``. ``block_ids[g]`` holds, packed, the block of
    each chunk of group ``g`` from ``first_chunks[g]`` (absolute) on; what is not worth storing, and
    what the engine has freed, is null and is skipped, not failed. ``hashes`` carries the hash
    blocks of the range under their absolute indexes.
    """

    job_id: int
    prefix_id: int
    start_token: int
    end_token: int
    hashes: BlockHashes
    first_chunks: tuple[int, ...]
    block_ids: tuple[bytes, ...]


class BoundaryPut(NamedTuple):
    """One block to write, under the hash at the end of the tokens that it stands for.

    ``end_token`` lies in chunk ``chunk_id`` (absolute) of the group, or at its end.
    """

    group_id: int
    chunk_id: int
    end_token: int
    block_id: int


class BoundaryJob(NamedTuple):
    """Write what makes one boundary of a request fit to resume at, beside what store jobs write.

    That is the states the engine handed off, and the chunks of the other groups that no store job
    covers, such as a chunk that the boundary cuts. ``hashes[i]`` names ``puts[i]``.
    """

    job_id: int
    prefix_id: int
    puts: tuple[BoundaryPut, ...]
    hashes: tuple[bytes, ...]


class JoinedJob(NamedTuple):
    """Write chunks of several requests, none of which has many: what a step of decodes completes.

    ``chunks[g]`` and ``block_ids[g]`` have, packed, the absolute index and the block of each chunk
    of group ``g``. ``hashes`` names them one after the other, group by group, from index 0 on.
    """

    job_id: int
    prefix_id: int
    hashes: BlockHashes
    chunks: tuple[bytes, ...]
    block_ids: tuple[bytes, ...]


SaveJob: TypeAlias = StoreJob | BoundaryJob | JoinedJob
"""What a rank copies out of the engine's blocks and writes to the store."""


class LoadJob(NamedTuple):
    """Fill the blocks of one request from the store, so that it resumes at ``end_token``.

    ``first_chunks[g]`` is the absolute index of the first chunk of group ``g`` to load and
    ``block_ids[g]`` the target block of each chunk from there on, packed. The hash at
    ``tail_tokens[g]`` names the last of them. ``request_id`` is only handed back to the engine.
    """

    job_id: int
    request_id: str
    prefix_id: int
    start_token: int
    end_token: int
    hashes: BlockHashes
    first_chunks: tuple[int, ...]
    tail_tokens: tuple[int, ...]
    block_ids: tuple[bytes, ...]


class StepPlan(NamedTuple):
    """What one step asks of every worker; empty in most steps.

    ``prefixes`` announces the namespaces of the prefix ids that are used here for the first time.
    ``cancelled_loads`` are jobs whose request was aborted: the engine holds its blocks until the
    load has ended. ``mended_keys`` are whole again: what one rank reads another may have put.
    """

    prefixes: Mapping[int, str] = {}
    stores: tuple[SaveJob, ...] = ()
    loads: tuple[LoadJob, ...] = ()
    cancelled_loads: tuple[int, ...] = ()
    mended_keys: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        has_jobs = self.prefixes or self.stores or self.loads or self.cancelled_loads
        return bool(has_jobs or self.mended_keys)


class JobEnd(Enum):
    """How a store job ended on one rank."""

    STORED = "stored"
    """Every chunk is in the store now (those that were there before included)."""
    REFUSED = "refused"
    """Staging or the put queue was full: nothing is wrong with the store."""
    NO_SPACE = "no_space"
    """The store had no room for some chunk."""
    FAILED = "failed"
    """Some chunk could not be written, or the deadline passed."""
    LOST = "lost"
    """The store as a whole was gone."""

    @property
    def is_success(self) -> bool:
        """Whether the range may count as saved."""
        return self is JobEnd.STORED


@dataclass(slots=True)
class JobReport:
    """What ranks report of their jobs since the last report; reports of ranks are merged.

    ``staged`` counts per job the ranks that no longer read the engine's blocks; ``ended`` counts
    per job the ranks by how the job ended there. ``failed_loads`` maps a request to the first
    token that is not proven loaded; ``lost_loads`` are those that failed because the store
    answered too late or not at all. ``bad_keys`` did not verify and could not be removed yet;
    ``mended_keys`` are whole again. ``counters`` are sums over ranks (bytes, chunks, faults).
    """

    staged: Counter[int] = field(default_factory=Counter)
    ended: dict[int, Counter[JobEnd]] = field(default_factory=dict)
    failed_loads: dict[str, int] = field(default_factory=dict)
    lost_loads: set[str] = field(default_factory=set)
    bad_keys: set[str] = field(default_factory=set)
    mended_keys: set[str] = field(default_factory=set)
    counters: Counter[str] = field(default_factory=Counter)

    def __bool__(self) -> bool:
        return bool(
            self.staged
            or self.ended
            or self.failed_loads
            or self.lost_loads
            or self.bad_keys
            or self.mended_keys
            or self.counters
        )

    def end(self, job_id: int, end: JobEnd) -> None:
        """Record that a job ended on this rank."""
        self.ended.setdefault(job_id, Counter())[end] += 1

    def fail_load(self, request_id: str, token: int, *, lost: bool = False) -> None:
        """Record the first token of a load that is not proven loaded."""
        known = self.failed_loads.get(request_id)
        self.failed_loads[request_id] = token if known is None else min(known, token)
        if lost:
            self.lost_loads.add(request_id)

    def absorb(self, other: JobReport) -> None:
        """Take another report in; the order in which reports are taken in does not matter."""
        self.staged.update(other.staged)
        for job_id, ends in other.ended.items():
            self.ended.setdefault(job_id, Counter()).update(ends)
        for request_id, token in other.failed_loads.items():
            self.fail_load(request_id, token)
        self.lost_loads |= other.lost_loads
        self.bad_keys |= other.bad_keys
        self.mended_keys |= other.mended_keys
        self.counters.update(other.counters)

    def merge(self, other: JobReport) -> JobReport:
        """Return both reports as one, and leave them as they are."""
        merged = JobReport()
        merged.absorb(self)
        merged.absorb(other)
        return merged
