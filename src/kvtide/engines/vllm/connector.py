"""``KVTideConnector``: vLLM's KV connector interface, handed on to the two halves.

vLLM makes one object per role. This class only checks the configuration, builds its half and
translates hooks; it defines newer hooks unconditionally, since older releases never call them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvtide import __version__
from kvtide.config import PoolConfig
from kvtide.engines.vllm import features
from kvtide.engines.vllm.formats import FORMATS, PoolFormat
from kvtide.engines.vllm.logs import log_as_vllm_does
from kvtide.engines.vllm.metadata import KVTideHandshake, KVTideMetadata
from kvtide.engines.vllm.ranks import RankPlan, plan_ranks, this_rank
from kvtide.engines.vllm.scheduler_side import SchedulerSide
from kvtide.engines.vllm.stats_file import path_of
from kvtide.engines.vllm.telemetry import KVTidePromMetrics, KVTideStats
from kvtide.engines.vllm.translate import GroupPlan, check_engine, translate_groups
from kvtide.engines.vllm.worker_side import WorkerSide
from kvtide.errors import ConfigError
from kvtide.stores import Store, open_store, url_for_lookups

logger = logging.getLogger(__name__)


class KVTideConnector(KVConnectorBase_V1, SupportsHMA):
    """Saves KV cache to a pool and loads it back, whichever engine computed it.

    Raises:
        ConfigError: an option, the engine's settings or the model stands against it; the message
            lists everything that has to change.
        StoreOpenError: the store cannot be opened.
    """

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any | None = None
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        features.check_release()
        log_as_vllm_does()
        config, plan, pool_format, ranks = _checked(vllm_config, kv_cache_config)
        self._scheduler_side: SchedulerSide | None = None
        self._worker_side: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            features.require_recompute(vllm_config)
            engine_index = features.data_parallel_index(vllm_config)
            config = replace(config, stats_path=path_of(config.stats_path, engine_index))
            names = pool_format.names(config, vllm_config, plan)
            with _opened(url_for_lookups(config.store), "the scheduler") as store:
                self._scheduler_side = SchedulerSide(
                    config, plan, pool_format, names, store, sizes=ranks.topology.sizes
                )
        else:
            sizes = ranks.topology.sizes
            rank = this_rank(sizes)
            with _opened(config.store, f"rank {rank} of {sizes.num_ranks}") as store:
                self._worker_side = WorkerSide(
                    config,
                    plan,
                    pool_format,
                    vllm_config,
                    kv_cache_config,
                    store,
                    ranks=ranks,
                    rank=rank,
                )

    # ------------------------------------------------------------------ both

    @property
    def _scheduler(self) -> SchedulerSide:
        assert self._scheduler_side is not None, "vLLM called a scheduler hook on a worker"
        return self._scheduler_side

    @property
    def _worker(self) -> WorkerSide:
        assert self._worker_side is not None, "vLLM called a worker hook on the scheduler"
        return self._worker_side

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a cache that loses something costs a recompute."""
        return False

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """False: hits are joint over all groups."""
        return False

    @classmethod
    def supports_sleep_mode(cls) -> bool:
        """False: the threads hold addresses of the KV cache."""
        return False

    def shutdown(self) -> None:
        """Store what is staged, within the flush time, and stop; may be called twice."""
        if self._scheduler_side is not None:
            self._scheduler_side.close()
        if self._worker_side is not None:
            self._worker_side.close()

    # ------------------------------------------------------------------ scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Take the cache manager; the base class also binds its block pool."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler.bind(kv_cache_manager)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Take every rank's memory layout: only now can keys be named."""
        self._scheduler.agree_on_layouts(
            handshake for handshake in metadata.values() if isinstance(handshake, KVTideHandshake)
        )

    def set_xfer_handshake_metadata(
        self, metadata: Mapping[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Take every rank's memory layout, where vLLM knows no pipeline ranks."""
        self.set_xfer_handshake_metadata_pp_aware(
            {(0, rank): handshake for rank, handshake in metadata.items()}
        )

    def on_new_request(self, request: Any) -> None:
        """Start looking the request up."""
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded beyond what vLLM holds; ``None``: not known yet."""
        return self._scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(
        self,
        request: Any,
        blocks: Any,  # noqa: ARG002 - the table is read from the cache manager, in ranges
        num_external_tokens: int,
    ) -> None:
        """Plan the load of what vLLM granted."""
        self._scheduler.on_allocated(request, num_external_tokens)

    def get_external_cache_hit_sources(
        self,
        request: Any,  # noqa: ARG002
        num_external_tokens: int,
    ) -> dict[Any, int]:
        """Tell vLLM's statistics where the loaded tokens come from."""
        return features.external_hit_sources(num_external_tokens, "host")

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return the step's jobs."""
        return self._scheduler.build_metadata(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take in what the ranks report."""
        self._scheduler.on_output(connector_output)

    def register_finished_partial_tail(
        self,
        request: Any,
        block_ids: tuple[list[int], ...],  # noqa: ARG002 - the table is read in ranges
        partial_tail_offloads: list[tuple[int, int, int]],
    ) -> bool:
        """Pin the states that vLLM hands off with a request's end; its blocks need not wait."""
        self._scheduler.on_finishing(request, partial_tail_offloads)
        return False

    def request_finished(
        self,
        request: Any,
        block_ids: list[int],  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request; open jobs hold their own references to its blocks."""
        self._scheduler.on_finished(request)
        return False, None

    def request_finished_all_groups(
        self,
        request: Any,
        block_ids: tuple[list[int], ...],  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request; open jobs hold their own references to its blocks."""
        return self.request_finished(request, [])

    def has_pending_push_work(self) -> bool:
        """Keep vLLM stepping while jobs hold blocks: the release reaches it with a step."""
        return self._scheduler.has_pins

    def has_pending_block_frees(self) -> bool:
        """False: nothing is freed outside the reports."""
        return False

    def reset_cache(self) -> bool | None:
        """Leave everything stored so far behind; the pool itself is not touched."""
        return None if self._scheduler_side is None else self._scheduler_side.reset()

    # ------------------------------------------------------------------ worker

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Take the KV tensors and start."""
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return this rank's memory layout."""
        return self._worker.handshake() if self._worker_side is not None else None

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take the step's jobs over."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, KVTideMetadata)
        self._worker.take_over(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Start the step's loads."""
        self._worker.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads end before a request is scheduled."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: blocks are saved whole, after the step."""

    def wait_for_save(self) -> None:
        """Mark the point after which the step's blocks may be read; waits for nothing."""
        self._worker.fence()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:  # noqa: ARG002
        """Return the loads that ended; those that failed are in both sets."""
        results = self._worker.poll()
        return features.transfer_results(
            finished_recving=results.finished_loads, failed_recving=results.failed_loads
        )

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return this rank's report, never older than the results of the same step."""
        return self._worker.take_report()

    # ------------------------------------------------------------------ telemetry

    def get_kv_connector_stats(self) -> Any:
        """Return what was counted since the last call; workers count through their reports."""
        if self._scheduler_side is None:
            return None
        counters = self._scheduler_side.take_counters()
        return KVTideStats.of(counters) if counters else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """Return statistics made of ``data``."""
        return KVTideStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Any:
        """Return the Prometheus side of the statistics."""
        return KVTidePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


@contextlib.contextmanager
def _opened(url: str, who: str) -> Iterator[Store]:
    """Open a store for the block to hand on; where the block raises, close it again."""
    store = open_store(url)
    logger.info("kvtide %s in %s uses the store %s", __version__, who, url)
    try:
        yield store
    except BaseException:
        store.close()
        raise


def _checked(
    vllm_config: Any, kv_cache_config: Any
) -> tuple[PoolConfig, GroupPlan, PoolFormat, RankPlan]:
    """Check options, settings and model, and tell all faults at once."""
    faults: list[str] = []
    transfer = vllm_config.kv_transfer_config
    config = plan = ranks = None
    try:
        config = PoolConfig.from_mapping(transfer.kv_connector_extra_config, transfer.kv_role)
    except ConfigError as error:
        faults.extend(error.faults)
    faults.extend(check_engine(vllm_config))
    try:
        plan = translate_groups(kv_cache_config, vllm_config)
    except ConfigError as error:
        faults.extend(error.faults)
    if config is not None and plan is not None:
        try:
            ranks = plan_ranks(config, plan.group_ids, kv_cache_config, vllm_config)
        except ConfigError as error:
            faults.extend(error.faults)
    if faults or config is None or plan is None or ranks is None:
        raise ConfigError(faults)
    pool_format = FORMATS[config.key_format]
    return config, replace(plan, stores_dense=pool_format.stores_dense), pool_format, ranks
