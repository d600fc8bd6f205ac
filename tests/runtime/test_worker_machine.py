"""Random histories of one rank: jobs, faults, deadlines, evictions, reuse of blocks.

Two claims hold over all of them: bytes loaded equal bytes stored, and every job ends once with
everything it held given back.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtide.core.jobs import LoadJob, StepPlan, StoreJob
from kvtide.core.topology import ParallelSizes, RankRole, Split, Topology
from kvtide.errors import StoreLostError
from kvtide.stores.base import Status
from tests.runtime_harness import Rank

NAMES = st.sampled_from("ab")
CHUNKS = st.integers(1, 6)
GROUPS = ((4, 100), (8, 4100))
FAULTS = (
    "lost",
    "bug",
    "short",
    "failed",
    "no_space",
    "hang past the deadline",
    "spoil",
    "evict",
)


_ONE, _STAGES = ParallelSizes(), ParallelSizes(pp_size=2)
ROLES = {
    "alone": RankRole.alone(2),
    "two shards of one group": Topology(_ONE, (Split(2), Split(1))).role(0),
    "shards of both groups": Topology(_ONE, (Split(3), Split(2))).role(0),
    "nothing of one group": Topology(_STAGES, (Split(1), Split(1, stages=(1,)))).role(0),
    "half of the chunks": Topology(ParallelSizes(tp_size=2), (Split(1), Split(2))).role(1),
}
"""What the rank holds and stores; the first is the simplest."""


def content_of(name: str, group_id: int, chunk: int, num_bytes: int) -> bytes:
    """What the engine computes for a chunk: the same whenever it computes it."""
    seed = hashlib.sha256(f"{name}{group_id}{chunk}".encode()).digest()
    return (seed * (num_bytes // len(seed) + 1))[:num_bytes]


class RankMachine(RuleBasedStateMachine):
    """One rank and an engine that reuses blocks as soon as it is told that it may."""

    @initialize(role=st.sampled_from(list(ROLES.values())))
    def start(self, role: RankRole) -> None:
        """Whatever the rank holds."""
        self.rank = Rank(
            groups=GROUPS,
            role=role,
            staging_bytes=20 * 4096,
            load_staging_bytes=7 * 4096,
            max_queued_puts=3,
            max_queued_loads=4,
            max_batch_keys=6,
            num_blocks=300,
        )
        self.block_bytes = [blocks.shape[1] for blocks in self.rank.blocks.data]
        self.free = [list(range(1, 300)) for _ in GROUPS]
        self.storing: dict[int, list[tuple[int, int]]] = {}
        self.loading: dict[str, tuple[str, list[tuple[int, int, int]]]] = {}
        self.foreign: dict[tuple[int, int], bytes] = {}
        self.store_jobs: list[StoreJob] = []
        self.num_loads = 0
        self.copy_is_slow = False
        self.num_finished: Counter[str] = Counter()
        for method in ("exists", "put", "get", "remove"):
            self.rank.scripted.hooks[method] = self._hook(method)
        self.faults: list[tuple[str, str]] = []
        for method in ("read", "write"):
            setattr(self.rank.blocks, method, self._slow(getattr(self.rank.blocks, method)))

    # --------------------------------------------------------------------------- the engine

    def _allocate(self, group_id: int, count: int) -> list[int]:
        blocks = [self.free[group_id].pop() for _ in range(count)]
        for block in blocks:
            self.foreign.pop((group_id, block), None)
        return blocks

    def _reuse(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Give blocks to someone who fills them with something else at once."""
        for group_id, block in blocks:
            theirs = f"foreign {group_id} {block} {len(self.foreign)}".encode()
            theirs = (theirs * 1000)[: self.block_bytes[group_id]]
            self.rank.blocks.data[group_id][block] = memoryview(theirs)
            self.foreign[group_id, block] = theirs
            self.free[group_id].insert(0, block)

    def _collect(self) -> None:
        rank = self.rank
        rank.collect()
        for job_id in list(self.storing):
            if rank.report.staged[job_id] or rank.report.ended.get(job_id):
                self._reuse(self.storing.pop(job_id))
        for request_id in [*rank.finished]:
            self.num_finished[request_id] += 1
            name, targets = self.loading.pop(request_id)
            if request_id not in rank.failed:
                for group_id, chunk, block in targets:
                    loaded = rank.blocks.content(group_id, block)
                    num_bytes = self.block_bytes[group_id]
                    assert loaded == content_of(name, group_id, chunk, num_bytes)
            else:
                assert request_id in rank.report.failed_loads
            self._reuse([(group_id, block) for group_id, _, block in targets])
        rank.finished.clear()

    def _hook(self, method: str) -> Any:
        def hook(keys: Sequence[str]) -> Any:
            index = next((i for i, (m, _) in enumerate(self.faults) if m == method), None)
            if index is None:
                return None
            _, fault = self.faults.pop(index)
            return self._fail(method, fault, keys)

        return hook

    def _slow(self, copy: Any) -> Any:
        def slow_copy(*args: Any) -> None:
            if self.copy_is_slow:
                # The engine polls during the copy: it must not be told that the blocks are free.
                self.copy_is_slow = False
                self.rank.clock.now_s += 31.0
                self._collect()
            copy(*args)

        return slow_copy

    def _fail(self, method: str, fault: str, keys: Sequence[str]) -> Any:
        values = self.rank.scripted.values
        if fault == "lost":
            raise StoreLostError("gone")
        if fault == "bug":
            raise RuntimeError("bug")
        if fault == "short":
            return ([True] if method == "exists" else [Status.OK]) * (len(keys) - 1)
        if fault == "failed" and method != "exists":
            return [Status.FAILED, *[Status.OK] * (len(keys) - 1)]
        if fault == "no_space" and method == "put":
            return [*[Status.OK] * (len(keys) - 1), Status.NO_SPACE]
        if fault == "hang past the deadline":
            # The engine polls while the call hangs, and uses what it is given back.
            self.rank.clock.now_s += 31.0
            self._collect()
        for key in keys[len(keys) // 2 :]:
            if fault == "spoil" and key in values:
                values[key] = values[key][:7] + bytes([values[key][7] ^ 1]) + values[key][8:]
            if fault == "evict":
                values.pop(key, None)
        return None

    # ----------------------------------------------------------------------------- the rules

    @precondition(lambda self: len(self.storing) < 12)
    @rule(name=NAMES, first=st.integers(0, 3), count=st.integers(1, 3), null=st.booleans())
    def save(self, name: str, first: int, count: int, null: bool) -> None:
        """Compute chunks and store them; with sparse groups, one of them has no block."""
        start, end = 8 * first, 8 * (first + count)
        blocks = []
        held = []
        for group_id, (size, _) in enumerate(GROUPS):
            ids = self._allocate(group_id, (end - start) // size)
            for i, block in enumerate(ids):
                num_bytes = self.block_bytes[group_id]
                data = content_of(name, group_id, start // size + i, num_bytes)
                self.rank.blocks.data[group_id][block] = memoryview(data)
            held += [(group_id, block) for block in ids]
            blocks.append([0, *ids[1:]] if null and group_id else ids)
        job = self.rank.store_job(name, start, end, *blocks)
        self.storing[job.job_id] = held
        self.store_jobs.append(job)
        self.rank.worker.take_over(StepPlan(stores=(job,)))

    @precondition(lambda self: len(self.loading) < 12)
    @rule(name=NAMES, end=st.integers(1, 6), window=st.integers(0, 5))
    def load(self, name: str, end: int, window: int) -> None:
        """Load a prefix: all of the first group, the end of the second."""
        end_token = 8 * end
        firsts = [0, min(window, end - 1)]
        targets = []
        blocks = []
        for group_id, (size, _) in enumerate(GROUPS):
            ids = self._allocate(group_id, end_token // size - firsts[group_id])
            targets += [(group_id, firsts[group_id] + i, block) for i, block in enumerate(ids)]
            blocks.append(ids)
        self.num_loads += 1
        request_id = f"load{self.num_loads}"
        job: LoadJob = self.rank.load_job(
            name, 0, end_token, *blocks, first_chunks=firsts, request_id=request_id
        )
        self.loading[request_id] = (name, targets)
        self.rank.worker.take_over(StepPlan(loads=(job,)))

    @rule()
    def fence(self) -> None:
        """The forward pass is issued."""
        self.rank.worker.fence()

    @rule()
    def settle(self) -> None:
        """Everything gets to run, as in a step that takes long."""
        self.rank.worker.fence()
        self.rank.worker.run_pending()
        self._collect()

    @rule(
        name=NAMES,
        end=st.integers(1, 4),
        method=st.sampled_from(["exists", "put", "get", "get", "remove"]),
        fault=st.sampled_from(("", *FAULTS)),
    )
    def save_and_load(self, name: str, end: int, method: str, fault: str) -> None:
        """What was just saved is loaded, perhaps with a fault on the way."""
        if self.storing or self.loading:
            self.settle()
        if fault:
            self.faults.append((method, fault))
        self.save(name=name, first=0, count=end, null=False)
        self.settle()
        self.load(name=name, end=end, window=0)
        self.settle()

    @rule(service=st.sampled_from(["staging", "sender", "receiver"]))
    def work(self, service: str) -> None:
        """One of the threads gets to run."""
        getattr(self.rank.worker, service).run_pending()

    @rule()
    def step(self) -> None:
        """The engine polls and takes the report."""
        self._collect()

    @rule(seconds=st.sampled_from([1.0, 12.0, 31.0]))
    def time_passes(self, seconds: float) -> None:
        """Some of what waits is past its deadline at the next poll."""
        self.rank.clock.now_s += seconds

    @rule(method=st.sampled_from(["exists", "put", "get", "remove"]), fault=st.sampled_from(FAULTS))
    def something_will_fail(self, method: str, fault: str) -> None:
        """The next call of a method goes wrong."""
        if len(self.faults) < 4:
            self.faults.append((method, fault))

    @rule()
    def the_next_copy_will_be_slow(self) -> None:
        """Deadlines pass while blocks are read or written."""
        self.copy_is_slow = True

    # -------------------------------------------------------------------------- the claims

    @invariant()
    def no_job_ends_twice(self) -> None:
        """At most one end and one staged report per job, at most one finish per load."""
        report = self.rank.report
        assert all(sum(ends.values()) == 1 for ends in report.ended.values())
        assert all(count == 1 for count in report.staged.values())
        assert all(count == 1 for count in self.num_finished.values())

    @invariant()
    def blocks_given_back_are_left_alone(self) -> None:
        """Nothing is written to a block after the engine was told that it is free."""
        for (group_id, block), theirs in self.foreign.items():
            assert self.rank.blocks.content(group_id, block) == theirs

    def teardown(self) -> None:
        """Let everything run to its end."""
        self.faults.clear()
        self.copy_is_slow = False
        self.rank.worker.fence()
        self.rank.worker.run_pending()
        self._collect()
        self.rank.worker.check_idle()
        worker = self.rank.worker
        for service in (worker.staging, worker.sender, worker.receiver):
            # Faults of stores are expected; one that only the last resort caught is ours.
            assert f"{service.name} met a fault" not in service.faults.seen
        self.no_job_ends_twice()
        self.blocks_given_back_are_left_alone()
        assert all(self.rank.ends(job) for job in self.store_jobs)
        assert sum(self.num_finished.values()) == self.num_loads
        for load in self.rank.failed:
            assert load in self.rank.report.failed_loads
        event(f"bytes were loaded: {self.rank.report.counters['loaded_bytes'] > 0}")
        event(f"bad values were met: {self.rank.report.counters['bad_values'] > 0}")
        event(f"something expired: {self.rank.report.counters['expired_jobs'] > 0}")
        self.rank.worker.close()


RankMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestRankMachine = RankMachine.TestCase
