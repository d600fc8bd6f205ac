"""One rank without an engine: a worker, fake blocks, a scripted store and the jobs between them."""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from kvtide.core.batch import Batch
from kvtide.core.jobs import (
    BoundaryJob,
    BoundaryPut,
    JobReport,
    LoadJob,
    SaveJob,
    StepPlan,
    StoreJob,
    pack_ints,
)
from kvtide.core.keys import BlockHashes
from kvtide.core.layout import Region
from kvtide.core.topology import RankRole
from kvtide.runtime.limits import WorkerLimits
from kvtide.runtime.prefixes import PrefixDatabases
from kvtide.runtime.values import TAGGED, ValueFormat
from kvtide.runtime.worker import PoolWorker
from kvtide.stores.base import Status, Store
from kvtide.testing.blocks import FakeBlocks, byte_layout

WAIT_S = 20.0
"""Bounds every wait of a test: reached only where something hangs that must not."""
NAMESPACE = "test"


class ScriptedStore(Store):
    """A dictionary, with a hook in front of each method.

    A hook gets the keys; what it returns, unless ``None``, is the answer instead of the real one.
    ``calls`` lists ``(method, keys)``; ``counters`` are what it is to have counted.
    """

    checks_before_put = True

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self.values: dict[str, bytes] = {}
        self.hooks: dict[str, Callable[[Sequence[str]], Any]] = {}
        self.calls: list[tuple[str, tuple[str, ...]]] = []
        self.regions: list[Region] = []
        self.orders: list[Sequence[int] | None] = []
        self.num_closes = 0

    def _hook(self, method: str, keys: Sequence[str]) -> Any:
        self.calls.append((method, tuple(keys)))
        hook = self.hooks.get(method)
        return hook(keys) if hook else None

    def take_counters(self) -> Counter[str]:
        """Hand the counters out once."""
        taken, self.counters = self.counters, Counter()
        return taken

    def register(self, region: Region) -> None:
        """Remember a region."""
        self.regions.append(region)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Look the keys up."""
        answer = self._hook("exists", keys)
        return [key in self.values for key in keys] if answer is None else answer

    def put(self, batch: Batch) -> list[Status]:
        """Store what the hook did not fail."""
        # The bytes are taken when the call is over, as a transfer engine may: rows that are
        # freed too early show.
        answer = self._hook("put", batch.keys)
        self.orders.append(batch.order)
        for key, addresses, sizes in zip(batch.keys, batch.addresses, batch.sizes, strict=True):
            assert all(
                any(r.contains(a, s) for r in self.regions)
                for a, s in zip(addresses, sizes, strict=True)
            )
            value = b"".join(map(ctypes.string_at, addresses, sizes))
            status = (
                Status.OK
                if answer is None
                else (*answer, Status.FAILED)[min(batch.keys.index(key), len(answer))]
            )
            if status is Status.OK:
                self.values.setdefault(key, value)
        return [Status.OK] * len(batch) if answer is None else answer

    def get(self, batch: Batch) -> list[Status]:
        """Copy the values out, after the hook."""
        answer = self._hook("get", batch.keys)
        statuses = []
        for i, key in enumerate(batch.keys):
            value = self.values.get(key)
            if value is None:
                statuses.append(Status.MISSING)
            elif len(value) != batch.value_bytes(i):
                statuses.append(Status.FAILED)
            else:
                ctypes.memmove(batch.addresses[i][0], value, len(value))
                statuses.append(Status.OK)
        return statuses if answer is None else answer

    def remove(self, keys: Sequence[str]) -> list[Status]:
        """Forget the keys."""
        answer = self._hook("remove", keys)
        if answer is not None:
            return answer
        return [Status.MISSING if self.values.pop(key, None) is None else Status.OK for key in keys]

    def close(self) -> None:
        """Count the call."""
        self.num_closes += 1

    def keys_of(self, method: str) -> list[str]:
        """All keys that a method was called with, in order."""
        return [key for name, keys in self.calls if name == method for key in keys]


class Hang:
    """A hook that blocks until released; ``entered`` tells that a call is inside."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.released = threading.Event()

    def __call__(self, _keys: Sequence[str]) -> None:
        """Block."""
        self.entered.set()
        assert self.released.wait(WAIT_S)


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        """The time now, in seconds."""
        return self.now_s


def hashes_of(name: str, end: int, first: int = 0) -> BlockHashes:
    """Hash blocks ``[first, end)`` of a request called ``name``."""
    return BlockHashes.pack(
        [hashlib.sha256(f"{name}/{i}".encode()).digest() for i in range(first, end)], first=first
    )


class Rank:
    """A worker with what surrounds it. One group of 4-token blocks unless ``groups`` says else.

    ``role`` says what it holds and stores (default: everything).
    """

    def __init__(
        self,
        *,
        groups: Sequence[tuple[int, int]] = ((4, 100),),
        hash_block_size: int = 4,
        num_blocks: int = 64,
        threaded: bool = False,
        role: RankRole | None = None,
        store: Store | None = None,
        values: ValueFormat = TAGGED,
        **limits: float,
    ) -> None:
        self.groups = tuple(groups)
        self.clock = Clock()
        self.role = role or RankRole.alone(len(self.groups))
        num_values = [len(parts) for parts in self.role.parts]
        self.blocks = FakeBlocks(byte_layout(*groups, values_per_block=num_values), num_blocks)
        self.scripted = ScriptedStore()
        bounds: dict[str, Any] = {
            "staging_bytes": 64 * 4096,
            "load_staging_bytes": 16 * 4096,
            "stage_wait_s": 0.0,
            "save_timeout_s": 30.0,
            "load_timeout_s": 20.0,
        }
        self.databases = PrefixDatabases(
            [size for size, _ in groups], hash_block_size, self.role.parts
        )
        self.hash_block_size = hash_block_size
        self.worker = PoolWorker(
            self.blocks,
            store or self.scripted,
            self.databases,
            limits=WorkerLimits(**{**bounds, **limits}),
            role=self.role,
            values=values,
            clock=self.clock,
            threaded=threaded,
        )
        self.report = JobReport()
        self.finished: list[str] = []
        self.failed: list[str] = []
        self._num_jobs = 0
        self.worker.take_over(StepPlan(prefixes={0: NAMESPACE}))

    def _job_id(self) -> int:
        self._num_jobs += 1
        return self._num_jobs

    def store_job(
        self, name: str, start: int, end: int, *block_ids: Sequence[int], prefix_id: int = 0
    ) -> StoreJob:
        """A store job over tokens ``[start, end)``; one list of blocks per group."""
        size = self.hash_block_size
        hashes = hashes_of(name, end // size, start // size)
        firsts = tuple(start // size for size, _ in self.groups)
        packed = tuple(pack_ints(ids) for ids in block_ids)
        return StoreJob(
            self._job_id(), prefix_id, start, end, hashes, firsts[: len(packed)], packed
        )

    def boundary_job(self, name: str, *puts: BoundaryPut, prefix_id: int = 0) -> BoundaryJob:
        """A job for single blocks of ``name``, each named by the hash at its end."""
        hashes = hashes_of(name, 1000)
        names = tuple(hashes[put.end_token // self.hash_block_size - 1] for put in puts)
        return BoundaryJob(self._job_id(), prefix_id, puts, names)

    def load_job(
        self,
        name: str,
        start: int,
        end: int,
        *block_ids: Sequence[int],
        first_chunks: Sequence[int] | None = None,
        tail_tokens: Sequence[int] | None = None,
        request_id: str | None = None,
        prefix_id: int = 0,
    ) -> LoadJob:
        """A load job of ``name``'s tokens ``[start, end)``."""
        if first_chunks is None:
            first_chunks = [start // size for size, _ in self.groups]
        return LoadJob(
            self._job_id(),
            request_id or name,
            prefix_id,
            start,
            end,
            hashes_of(name, -(-max(end, *(tail_tokens or (0,))) // self.hash_block_size)),
            tuple(first_chunks),
            tuple(tail_tokens or (end,) * len(first_chunks)),
            tuple(pack_ints(ids) for ids in block_ids),
        )

    def key(self, name: str, chunk: int, group_id: int = 0, number: int = 0) -> str:
        """The key of a chunk, or of value ``number`` of it."""
        database = self.databases[0][group_id][number]
        return database.keys(hashes_of(name, 1000), range(chunk, chunk + 1))[0]

    def fill(self, name: str, block_ids: Sequence[int], group_id: int = 0) -> list[bytes]:
        """Let the engine compute a request's chunks into these blocks."""
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
        return [
            self.blocks.fill(group_id, block_id, seed + 1000 * group_id + i)
            for i, block_id in enumerate(block_ids)
        ]

    def step(self, *jobs: SaveJob | LoadJob, run: bool = True) -> None:
        """One engine step: take over, fence, do the work (without threads), report."""
        self.worker.take_over(
            StepPlan(
                stores=tuple(job for job in jobs if not isinstance(job, LoadJob)),
                loads=tuple(job for job in jobs if isinstance(job, LoadJob)),
            )
        )
        self.worker.fence()
        if run:
            self.worker.run_pending()
        self.collect()

    def collect(self, now_s: float | None = None) -> None:
        """Poll and take the report, in the order in which an engine does."""
        results = self.worker.poll(now_s)
        self.finished += sorted(results.finished_loads)
        self.failed += sorted(results.failed_loads)
        self.report = self.report.merge(self.worker.take_report() or JobReport())

    def collect_until(self, condition: Callable[[], bool]) -> None:
        """Collect until ``condition`` holds (for tests with threads)."""
        turn = threading.Event()
        for _ in range(int(WAIT_S / 0.002)):
            self.collect()
            if condition():
                return
            turn.wait(0.002)
        raise AssertionError(f"never came true; {self.worker!r} {self.report}")

    def ends(self, job: SaveJob) -> list[str]:
        """How a store job ended, once per report."""
        ends = self.report.ended.get(job.job_id, Counter())
        return [end.value for end in ends.elements()]
