"""A scripted stand-in for an engine with paged KV memory, to drive the pool without installing one.

:class:`ScriptedEngine` schedules as vLLM does (chunked prefill, preemption, asynchronous loads,
drafted tokens, its own prefix cache) and drives the real scheduler side, lookups and workers of
the pool over any store. What it computes depends on the bytes it reads, so a wrong byte shows.

>>> engine = ScriptedEngine(MemoryStore())
>>> request = engine.add("a", range(100), max_tokens=5)
>>> engine.run()
>>> assert engine.outputs["a"] == engine.model.generate(range(100), 5)

A model of several attention kinds is a setup of several groups:

>>> EngineSetup(groups=(FullAttention(4), SlidingWindow(4, window=6), Mamba(4)))

An engine of several ranks has their numbers, and says how they divide each group's blocks:

>>> EngineSetup(sizes=ParallelSizes(tp_size=4), splits=(Split(num_shards=2),))
"""

from __future__ import annotations

import pickle
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvtide.core.chunks import ChunkedTokenDatabase
from kvtide.core.coordinator import Coordinator
from kvtide.core.save_limits import SaveLimits
from kvtide.core.scheduler import PoolScheduler, StepEvents
from kvtide.core.transfer import Scheduled
from kvtide.runtime.lookup import LookupExecutor
from kvtide.stores.base import Store
from kvtide.testing.engine_batch import BatchScheduler, Decisions
from kvtide.testing.engine_blocks import EngineBlockPool
from kvtide.testing.engine_hits import LocalCache
from kvtide.testing.engine_model import KvModel
from kvtide.testing.engine_ranks import Ranks, SharedStore, StepOutput
from kvtide.testing.engine_requests import EngineRequest, EngineState
from kvtide.testing.engine_setup import EngineSetup, ManualClock, StepRecord
from kvtide.testing.engine_tables import BlockTables


class ScriptedEngine:
    """Runs requests step by step, in the caller's thread.

    The engine does not own ``store`` and leaves it open; several engines may share one. Keys begin
    with ``namespace``. ``outputs`` has what finished requests generated, ``records`` what each step
    cost, ``pinned`` the references that jobs hold. Time is ``clock``'s.
    """

    def __init__(
        self,
        store: Store,
        setup: EngineSetup | None = None,
        *,
        clock: Callable[[], float] | None = None,
        namespace: str = "weights-0",
    ) -> None:
        self.setup = setup = setup if setup is not None else EngineSetup()
        self.clock = clock if clock is not None else ManualClock()
        self.namespace = namespace
        self.namespaces: dict[int, list[str]] = {0: [namespace]}
        """All names used so far, by the weights that they stand for."""
        parts = setup.topology.all_parts()
        self.model = KvModel(setup.groups, parts, setup.hash_block_size, setup.partial_hits)
        self.requests: dict[str, EngineRequest] = {}
        self.outputs: dict[str, list[int]] = {}
        self.records: list[StepRecord] = []
        self.pinned: Counter[int] = Counter()
        self.coordinator = Coordinator(
            setup.groups, setup.hash_block_size, setup.partial_hits, setup.retention_interval
        )
        self.lookup_store = SharedStore(store, per_key=True)
        self.lookups = LookupExecutor(
            self.lookup_store,
            self.coordinator.boundaries,
            self.databases,
            timeout_s=setup.lookup_timeout_s,
            max_bad_keys=setup.worker.max_bad_keys,
            clock=self.clock,
            threaded=setup.threaded,
        )
        self.scheduler = self._make_scheduler()
        self.ranks = Ranks(setup, self.model, store, self.clock)
        self.pool = EngineBlockPool(setup.num_blocks, self.ranks.spoil)
        self.cache = LocalCache(setup, self.pool)
        self.tables = BlockTables(setup, self.pool, self.cache, self.ranks.copy)
        self.batch = BatchScheduler(
            setup, self.pool, self.tables, self._match, self.scheduler.on_allocated
        )
        self._late: deque[StepOutput] = deque()
        self.is_in_step = False
        """Whether a step is under way: then nothing else may be done to the engine."""

    def _make_scheduler(self) -> PoolScheduler:
        setup = self.setup
        return PoolScheduler(
            self.coordinator,
            self.lookups,
            limits=SaveLimits(
                max_pinned_blocks=setup.pin_budget,
                max_job_tokens=setup.job_tokens,
                decode_job_tokens=setup.decode_job_tokens,
                delays=setup.delays,
            ),
            admission=replace(setup.admission, delays=setup.delays),
            saves=setup.saves,
            num_ranks=setup.topology.num_ranks,
        )

    def databases(self, namespace: str | None = None) -> list[list[ChunkedTokenDatabase]]:
        """Return what names the chunks under a namespace (default: the present), by group and part.

        The parts are those of ``model.parts``.
        """
        namespace = namespace if namespace is not None else self.namespace
        return self.coordinator.databases(namespace, self.model.parts)

    # ------------------------------------------------------------------ requests

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        max_tokens: int = 1,
        may_load: bool = True,
        accepts: Sequence[int] = (0,),
    ) -> EngineRequest:
        """Accept a request; an id may be used again once its last request holds nothing.

        Raises:
            ValueError: the id is in use, or the request can never fit into the cache.
        """
        setup = self.setup
        if request_id in self.requests:
            raise ValueError(f"the request id {request_id!r} is in use")
        if not self.batch.can_ever_fit(len(prompt) + max_tokens + setup.num_drafts):
            raise ValueError(f"{request_id} can never fit into {setup.num_blocks} blocks")
        request = EngineRequest(
            request_id,
            prompt,
            self.pool,
            self.model,
            self.cache.guess,
            max_tokens=max_tokens,
            may_load=may_load,
            accepts=accepts,
        )
        self.requests[request_id] = request
        self.batch.waiting.append(request)
        self.scheduler.on_new_request(request, self.namespace, self.clock(), may_load=may_load)
        return request

    def abort(self, request_id: str) -> None:
        """End a request now; blocks that a load writes to are held until it has reported."""
        self._finish(self.requests[request_id])

    def _finish(self, request: EngineRequest) -> None:
        is_held = request.state is EngineState.LOADING and not request.is_loaded
        offers = self.tables.last_offers(request)
        self._pin(self.scheduler.on_finishing(request, offers, request.num_computed, self.clock()))
        self.batch.remove(request)
        request.state = EngineState.FINISHED
        self.scheduler.on_finished(request.request_id)
        if not is_held:
            self._release(request)

    def _release(self, request: EngineRequest) -> None:
        self.tables.drop(request)
        del self.requests[request.request_id]

    def _pin(self, block_ids: Sequence[int]) -> None:
        self.pool.touch(block_ids)
        self.pinned.update(block_ids)

    def _match(self, request: EngineRequest, num_computed: int) -> int | None:
        return self.scheduler.match(request, num_computed, self.clock())

    # ------------------------------------------------------------------ steps

    @property
    def has_work(self) -> bool:
        """Whether the engine keeps stepping: for its requests, or for blocks that jobs hold."""
        return self.batch.has_requests or self.scheduler.has_pins

    @property
    def num_polls(self) -> int:
        """Steps in which nothing was computed."""
        return sum(record.is_poll for record in self.records)

    def run(self, max_steps: int = 1000) -> None:
        """Step until there is nothing to do.

        Raises:
            AssertionError: ``max_steps`` were not enough.
        """
        for _ in range(max_steps):
            if not self.has_work:
                return
            self.step()
        raise AssertionError(f"not idle after {max_steps} steps: {self!r}")

    def step(self, *, run_pool: bool = True) -> StepRecord:
        """Schedule, compute and report once; with ``run_pool`` the pool does all it can in it."""
        assert not self.is_in_step, "steps do not nest"
        self.is_in_step = True
        try:
            return self._step(run_pool=run_pool)
        finally:
            self.is_in_step = False

    def _step(self, *, run_pool: bool) -> StepRecord:
        if run_pool:
            self.run_lookups()
        marks = {name: request.num_reads for name, request in self.requests.items()}
        decisions = self.batch.schedule()
        num_list_reads = self._num_list_reads()
        outcome = self.scheduler.step(self._events(decisions), self.clock())
        num_list_reads = self._num_list_reads() - num_list_reads
        self._pin(outcome.pin_block_ids)
        self.pool.free(decisions.offers.blocks)
        packed = pickle.dumps(outcome.plan)
        record = StepRecord(
            decisions.num_tokens,
            {request.request_id: request.num_computed for request, _ in decisions.scheduled},
            len(packed),
            len(outcome.plan.stores),
            len(outcome.plan.loads),
            {n: r.hash_reads[marks.get(n, (0, 0))[0] :] for n, r in self.requests.items()},
            {n: r.block_reads[marks.get(n, (0, 0))[1] :] for n, r in self.requests.items()},
            num_list_reads,
        )
        self.records.append(record)
        # Every rank unpickles its own copy, as in a process of its own.
        self.ranks.take_over([pickle.loads(packed) for _ in self.ranks.ranks])  # noqa: S301
        sampled = {
            request.request_id: self.ranks.forward(request, n) for request, n in decisions.scheduled
        }
        if not self.setup.threaded:
            self.ranks.complete()
        if run_pool:
            self.run_pool()
        self._late.append(self.ranks.collect(is_empty=not decisions.scheduled))
        self.ranks.complete()
        self._update(decisions, sampled)
        return record

    def _num_list_reads(self) -> int:
        return sum(len(request.list_reads) for request in self.requests.values())

    def _events(self, decisions: Decisions) -> StepEvents:
        preempted = decisions.preempted if self.setup.tell_preemptions else ()
        hand_offs = decisions.offers.hand_offs
        scheduled = [
            Scheduled(
                request, request.num_computed, count, request.request_id in decisions.admitted
            )
            for request, count in decisions.scheduled
            # As the connector does: what cannot have anything to save is left out.
            if request.request_id in decisions.admitted
            or request.request_id in hand_offs
            or self.scheduler.is_due(request.request_id, request.num_computed + count)
        ]
        return StepEvents(preempted, scheduled, hand_offs)

    def _update(self, decisions: Decisions, sampled: dict[str, list[int]]) -> None:
        """Take in a step's tokens and what the ranks report: failures, tokens, ends, reports."""
        for request, num_tokens in decisions.scheduled:
            request.num_computed += num_tokens
        output = self._due_output()
        for request_id in output.failed_loads:
            request = self.requests[request_id]
            if request.state is EngineState.LOADING:
                request.num_computed = 0
                request.has_failed_load = True
        for request, _ in decisions.scheduled:
            self._take_tokens(request, sampled[request.request_id])
        unpinned = self.scheduler.on_report(output.report, self.clock())
        self.lookups.bad_keys.discard(output.report.mended_keys)
        self.lookups.bad_keys.add(output.report.bad_keys)
        self.pool.free(unpinned)
        self.pinned.subtract(unpinned)
        for request_id in output.finished_loads:
            self.scheduler.on_load_finished(request_id)
        for request_id in output.finished_loads:
            request = self.requests[request_id]
            if request.state is EngineState.LOADING:
                request.is_loaded = True
                if not request.has_failed_load:
                    request.num_loaded_tokens += request.num_external
            else:
                assert request.state is EngineState.FINISHED, f"{request!r} did not load"
                self._release(request)

    def _due_output(self) -> StepOutput:
        """Return what the ranks said up to ``report_delay`` steps ago."""
        due = StepOutput()
        if len(self._late) > self.setup.report_delay:
            while self._late:
                due = due.merge(self._late.popleft())
        return due

    def _take_tokens(self, request: EngineRequest, tokens: list[int]) -> None:
        """Append what was sampled; what was computed for rejected drafts counts as not computed."""
        if not tokens:
            return
        room = request.max_tokens - len(request.output)
        request.append(tokens[:room])
        request.num_computed = len(request.tokens) - 1
        if request.is_done:
            self.outputs[request.request_id] = request.output
            self._finish(request)
        else:
            request.draft(self.setup.num_drafts)

    # ------------------------------------------------------------------ the pool's threads

    def run_lookups(self) -> None:
        """Answer the lookups that wait (without threads)."""
        if not self.setup.threaded:
            self.lookups.run_pending()

    def run_pool(self) -> None:
        """Do everything that the pool's threads would do by now (without threads)."""
        if self.setup.threaded:
            return
        self.run_lookups()
        for rank in self.ranks.ranks:
            rank.worker.run_pending()

    def reset_prefix_cache(self, *, reset_running: bool = False) -> bool:
        """Forget every cached block; False while blocks are held.

        With ``reset_running`` the running requests are preempted first.

        Raises:
            RuntimeError: not even that freed every block, because of a load or of a job.
        """
        if reset_running:
            for request in reversed(self.batch.running[:]):
                self.batch.preempt(request)
        is_reset = self.pool.reset()
        if reset_running and not is_reset:
            raise RuntimeError("blocks are still held by loads or by jobs")
        return is_reset

    def reset_pool(self, namespace: str) -> None:
        """Move the pool to another namespace, as a connector does at ``reset_cache``."""
        self.namespace = namespace
        self.namespaces.setdefault(self.model.weights, []).append(namespace)
        self.scheduler.reset(lambda _: namespace)

    def change_weights(self, weights: int, namespace: str | None = None) -> None:
        """Compute with other weights from now on; reset both caches around it.

        Raises:
            RuntimeError: blocks are held, see :meth:`reset_prefix_cache`.
        """
        self.reset_prefix_cache(reset_running=True)
        self.model.weights = weights
        for request in self.requests.values():
            request.change_weights()
        self.reset_pool(namespace if namespace is not None else f"weights-{weights}")

    def close(self) -> None:
        """End the pool's threads; the store stays open."""
        self.lookups.close()
        for rank in self.ranks.ranks:
            rank.worker.close()

    def __repr__(self) -> str:
        return (
            f"<ScriptedEngine [{len(self.batch.running)} running, {len(self.batch.waiting)} "
            f"waiting | {self.pool!r} | {self.scheduler!r}]>"
        )
