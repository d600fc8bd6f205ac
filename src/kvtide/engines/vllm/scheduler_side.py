"""The scheduler's half of the connector: vLLM's events become the core's, and back.

Everything here runs on vLLM's scheduling thread: no store call, no wait. Lookups run in
:class:`kvtide.runtime.lookup.LookupExecutor` on a store handle of their own.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvtide.config import PoolConfig
from kvtide.core.jobs import StepPlan
from kvtide.core.save_limits import SavePolicy
from kvtide.core.scheduler import PoolScheduler, StepEvents
from kvtide.core.topology import ParallelSizes
from kvtide.core.transfer import HandOff, Scheduled
from kvtide.engines.lora import PENDING, Pending
from kvtide.engines.vllm import features
from kvtide.engines.vllm.budgets import Budgets
from kvtide.engines.vllm.formats import PoolFormat
from kvtide.engines.vllm.metadata import KVTideHandshake, KVTideMetadata, KVTideWorkerMetadata
from kvtide.engines.vllm.names import Names
from kvtide.engines.vllm.ranks import Sharing
from kvtide.engines.vllm.stages import Agreement, agree
from kvtide.engines.vllm.stats_file import StatsFile
from kvtide.engines.vllm.translate import GroupPlan
from kvtide.engines.vllm.view import EngineTables, VllmRequestView
from kvtide.runtime.lookup import LookupExecutor
from kvtide.stores import Store

logger = logging.getLogger(__name__)


class SchedulerSide:
    """Owns the core's scheduler; made once per engine.

    Nothing is looked up, saved or loaded before the engine has told which cache manager it uses
    (:meth:`bind`) and the ranks have told their memory layout (:meth:`agree_on_layouts`).
    """

    def __init__(
        self,
        config: PoolConfig,
        plan: GroupPlan,
        pool_format: PoolFormat,
        names: Names,
        store: Store,
        *,
        sizes: ParallelSizes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._plan = plan
        self._format = pool_format
        self._names = names
        self._store = store
        self._sizes = sizes or ParallelSizes()
        self._has_own_loop = features.has_own_loop()
        self._has_states = any(group.is_state for group in plan.groups)
        self._clock = clock
        self._tables: EngineTables | None = None
        self._agreement: Agreement | None = None
        """What the ranks hold, once all have told it."""
        self._views: dict[str, VllmRequestView] = {}
        self._is_stale = False
        """Whether the engine's own cache may hold KV cache of earlier weights."""
        self._held_back: dict[str, float | None] = {}
        """Requests whose adapter is still being read, and until when the engine waits for it."""
        self._lookups: LookupExecutor | None = None
        self._scheduler: PoolScheduler | None = None
        self._stats = StatsFile(config.stats_path) if config.stats_path else None
        self._reported: Counter[str] = Counter()

    # ------------------------------------------------------------------ start

    def bind(self, kv_cache_manager: Any) -> None:
        """Take the engine's cache manager, whose blocks jobs pin."""
        self._tables = EngineTables(
            kv_cache_manager, self._plan.group_ids, self._plan.coordinator()
        )
        self._start()

    def agree_on_layouts(self, handshakes: Iterable[KVTideHandshake]) -> None:
        """Take the ranks' layouts; keys can be named only when the ranks of each stage agree.

        Raises:
            ConfigError: a rank is missing, or ranks lay their bytes out differently.
        """
        self._agreement = agreement = agree(self._sizes, list(handshakes))
        self._names.agree_on(agreement.describe(), agreement.sharing.shards)
        self._tell_who_shares(agreement.sharing)
        self._start()

    def _tell_who_shares(self, sharing: Sharing) -> None:
        """Log what an operator compares where engines do not share."""
        logger.info(
            "keys begin with %s: engines that say the same share their KV cache",
            self._names.namespace_of(None),
        )
        if self._config.store_tp_size:
            level = logging.WARNING if sharing.shards is None else logging.INFO
            line = sharing.describe(self._config.store_tp_size, self._plan.group_ids)
            logger.log(level, "%s", line)

    def _start(self) -> None:
        """Build the scheduler once both the cache manager and the layouts are known."""
        agreement = self._agreement
        if self._tables is None or agreement is None or self._scheduler is not None:
            return
        config = self._config
        coordinator = self._tables.coordinator
        budgets = Budgets(config, self._plan, agreement.layouts, self._format.values)
        keys = self._format.keys(self._sizes)
        self._lookups = LookupExecutor(
            self._store,
            coordinator.boundaries,
            lambda namespace: coordinator.databases(namespace, agreement.parts, keys),
            timeout_s=config.lookup_timeout_ms / 1000,
            max_bad_keys=config.max_bad_keys,
        )
        num_blocks = len(self._tables.manager.block_pool.blocks)
        self._scheduler = PoolScheduler(
            coordinator,
            self._lookups,
            # Where no step follows a request's end, nothing can be put off until then.
            limits=budgets.save_limits(num_blocks, puts_off=self._has_own_loop),
            admission=budgets.admission_limits(num_blocks),
            saves=SavePolicy(
                prefill=config.saves_prefill,
                decode=config.save_decode_cache,
                num_unsettled_tokens=self._plan.num_unsettled_tokens,
            ),
            num_ranks=self._sizes.num_ranks,
        )

    # ------------------------------------------------------------------ requests

    def on_new_request(self, request: Any) -> None:
        """Start looking a request up; an id that is known already begins a new life."""
        if self._scheduler is None or self._tables is None:
            return
        view = VllmRequestView(request, self._tables)
        self._views[view.request_id] = view
        self._scheduler.on_finished(view.request_id)
        self._held_back[view.request_id] = None
        self._introduce(view)

    def match(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Answer vLLM's ``get_num_new_matched_tokens``: tokens to load, and that loads overlap."""
        view = self._views.get(request.request_id)
        if self._scheduler is None or view is None:
            return 0, False
        if not self._introduce(view):
            return (None if self._may_wait(view) else 0), False
        num_tokens = self._scheduler.match(view, num_computed_tokens, self._clock())
        if self._has_states and self._config.saves_prefill:
            features.note_shared_prefix(request, self._scheduler.shared_token(view.request_id))
        return num_tokens, bool(num_tokens)

    def _introduce(self, view: VllmRequestView, *, is_last_call: bool = False) -> bool:
        """Give a request to the core once its adapter is known; tell whether the core has it.

        At the last call it is given away in any case, if need be to go without the cache.
        """
        assert self._scheduler is not None
        if view.request_id not in self._held_back:
            return True
        namespace = self._name_of(view.request)
        if namespace is PENDING and not is_last_call:
            return False
        del self._held_back[view.request_id]
        self._scheduler.on_new_request(
            view,
            _if_known(namespace),
            self._clock(),
            may_load=not view.request.skip_reading_prefix_cache,
        )
        return True

    def _may_wait(self, view: VllmRequestView) -> bool:
        """Tell whether vLLM may ask again for a request held back, which costs it a step."""
        now_s = self._clock()
        until_s = self._held_back[view.request_id]
        if until_s is None:
            until_s = now_s + self._config.lookup_wait_ms / 1000
            self._held_back[view.request_id] = until_s
        return now_s < until_s

    def on_allocated(self, request: Any, num_external_tokens: int) -> None:
        """Plan the load of what vLLM granted; vLLM calls it for whatever it admits."""
        view = self._views.get(request.request_id)
        if self._scheduler is not None and view is not None:
            self._introduce(view, is_last_call=True)
            self._scheduler.on_allocated(view, num_external_tokens)

    def on_finishing(self, request: Any, offers: Sequence[tuple[int, int, int]]) -> None:
        """Save what is left of a request that ends, with the states that vLLM offers; pin it."""
        view = self._views.get(request.request_id)
        if self._scheduler is None or self._tables is None or view is None:
            return
        pins = self._scheduler.on_finishing(
            view, self._tables.hand_offs(offers), request.num_computed_tokens, self._clock()
        )
        if pins:
            self._tables.pin(pins)

    def on_finished(self, request: Any) -> None:
        """Save what is left of a request that ended, however it ended, and forget it."""
        self.on_finishing(request, ())
        self._forget(request.request_id)

    def _forget(self, request_id: str) -> None:
        self._views.pop(request_id, None)
        self._held_back.pop(request_id, None)
        if self._scheduler is not None:
            self._scheduler.on_finished(request_id)

    def _name_of(self, request: Any) -> str | Pending | None:
        """Return the namespace of a request's keys; ``None`` where nothing can name its bytes."""
        name = self._names.namespace_of(request.lora_request)  # begins to read an adapter
        return None if self._is_stale else name

    def _namespace_of(self, request: Any) -> str | None:
        """Return the namespace of a request's keys, ``None`` where it has none or none yet."""
        return _if_known(self._name_of(request))

    # ------------------------------------------------------------------ steps

    def build_metadata(self, scheduler_output: Any) -> KVTideMetadata:
        """Turn a step's decisions into jobs, and pin the blocks that the jobs read."""
        if self._scheduler is None or self._tables is None:
            return KVTideMetadata(StepPlan())
        preempted = [
            self._views[request_id]
            for request_id in scheduler_output.preempted_req_ids or ()
            if request_id in self._views
        ]
        hand_offs = {
            request_id: self._tables.hand_offs(offers)
            for request_id, offers in features.boundary_hand_offs(scheduler_output).items()
        }
        scheduled = self._scheduled(scheduler_output, hand_offs)
        events = StepEvents(preempted, scheduled, hand_offs)
        outcome = self._scheduler.step(events, self._clock())
        if outcome.pin_block_ids:
            self._tables.pin(outcome.pin_block_ids)
        is_empty = not scheduler_output.total_num_scheduled_tokens
        must_rest = is_empty and not self._has_own_loop and self._scheduler.is_awaited
        return KVTideMetadata(outcome.plan, must_rest)

    def _scheduled(
        self, scheduler_output: Any, hand_offs: Mapping[str, Sequence[HandOff]]
    ) -> Iterable[Scheduled]:
        """Yield the requests of a step; those that vLLM calls new or resumed are admissions.

        Left out are those with nothing to save in this step.
        """
        num_scheduled = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            if view := self._views.get(new.req_id):
                yield Scheduled(
                    view, new.num_computed_tokens, num_scheduled[new.req_id], is_admission=True
                )
        cached = scheduler_output.scheduled_cached_reqs
        resumed = cached.resumed_req_ids
        assert self._scheduler is not None
        is_due = self._scheduler.is_due
        for request_id, num_computed in zip(
            cached.req_ids, cached.num_computed_tokens, strict=True
        ):
            num_new = num_scheduled[request_id]
            is_resumed = request_id in resumed
            has_work = is_resumed or request_id in hand_offs
            if not has_work and not is_due(request_id, num_computed + num_new):
                continue
            if view := self._views.get(request_id):
                yield Scheduled(view, num_computed, num_new, is_resumed)

    def on_output(self, connector_output: Any) -> None:
        """Take in what the ranks report, before the loads that ended with the same report."""
        if self._scheduler is None or self._tables is None or self._lookups is None:
            return
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, KVTideWorkerMetadata):
            report = metadata.report
            # In this order: where merged reports say both of a key, distrust is the safe side.
            if report.mended_keys:
                self._lookups.bad_keys.discard(report.mended_keys)
            if report.bad_keys:
                self._lookups.bad_keys.add(report.bad_keys)
            unpinned = self._scheduler.on_report(report, self._clock())
            if unpinned:
                self._tables.unpin(unpinned)
        for request_id in connector_output.finished_recving or ():
            self._scheduler.on_load_finished(request_id)
        now_s = self._clock()
        if self._stats is not None and self._stats.is_due(now_s):
            self._stats.write(self._counters_and_gauges(), now_s)

    @property
    def has_pins(self) -> bool:
        """Whether jobs hold blocks, whose release only reaches vLLM if it keeps stepping."""
        return self._scheduler is not None and self._scheduler.has_pins

    # ------------------------------------------------------------------ counters, reset, end

    def take_counters(self) -> Counter[str]:
        """Return what was counted since the last call."""
        totals = self._totals()
        # Counters only grow: an equal sum means no news, which is what nearly every step has.
        if totals.total() == self._reported.total():
            return Counter()
        new = totals - self._reported
        self._reported = Counter(totals)
        return new

    def _totals(self) -> Counter[str]:
        """Return what was counted so far; the object goes on counting."""
        if self._scheduler is None or self._lookups is None:
            return Counter()
        if taken := self._lookups.take_counters():
            self._scheduler.counters.update(taken)
        return self._scheduler.counters

    def _counters_and_gauges(self) -> dict[str, int]:
        if self._scheduler is None:
            return {}
        return {
            **self._totals(),
            "jobs_open": self._scheduler.num_open_jobs,
            "blocks_pinned": self._scheduler.num_pinned_blocks,
        }

    def reset(self) -> bool:
        """Leave everything stored so far behind, because the weights may have changed.

        False where the engine could not empty its own cache: requests would take KV cache of the
        old weights from it and save it under the new name. So none has a name, and all go without
        the pool, until a reset finds the cache empty.
        """
        has_other_name = self._names.change()
        self._is_stale = self._tables is not None and self._tables.is_in_use
        if self._is_stale and has_other_name:
            logger.warning(
                "the cache was reset while blocks were in use, so vLLM has kept its own: nothing "
                "is saved or loaded until reset_prefix_cache(reset_connector=True) answers True; "
                "where requests keep coming, pause the engine for it (docs/operations.md, "
                "Changing weights)"
            )
        if self._scheduler is not None:
            self._scheduler.reset(
                lambda request_id: self._namespace_of(self._views[request_id].request)
            )
        return not self._is_stale

    def close(self) -> None:
        """Stop looking up and give the store back."""
        if self._stats is not None:
            self._stats.close(self._counters_and_gauges())
        self._names.close()
        if self._lookups is not None:
            self._lookups.close()
        else:
            self._store.close()


def _if_known(namespace: str | Pending | None) -> str | None:
    return namespace if isinstance(namespace, str) else None
