"""A worker's half of the connector: vLLM's hooks drive :class:`kvtide.runtime.worker.PoolWorker`.

vLLM calls the hooks in an order that differs by release and runner (``docs/walkthrough.md``), so
no hook relies on another having been called before: jobs are taken over when the step's metadata
is bound and fenced at ``wait_for_save``; what is unfenced at the next bind is fenced then.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from kvtide.config import PoolConfig
from kvtide.engines.vllm import features
from kvtide.engines.vllm.formats import PoolFormat
from kvtide.engines.vllm.metadata import KVTideHandshake, KVTideMetadata, KVTideWorkerMetadata
from kvtide.engines.vllm.ranks import RankPlan
from kvtide.engines.vllm.tensors import TensorBlocks
from kvtide.engines.vllm.translate import GroupPlan
from kvtide.errors import ConfigError
from kvtide.runtime.limits import WorkerLimits
from kvtide.runtime.prefixes import PrefixDatabases
from kvtide.runtime.worker import PoolWorker, WorkerResults
from kvtide.stores import Store
from kvtide.units import format_size

REST_S = 0.0005
"""A step that only waits for the pool rests so long, where the engine's loop does not rest by
itself (:func:`kvtide.engines.vllm.features.has_own_loop`): it would keep the interpreter from the
very threads that it waits for, and a load takes 40 times as long."""


class WorkerSide:
    """Owns one rank's threads and staging memory; idle until the KV cache is registered."""

    def __init__(
        self,
        config: PoolConfig,
        plan: GroupPlan,
        pool_format: PoolFormat,
        vllm_config: Any,
        kv_cache_config: Any,
        store: Store,
        *,
        ranks: RankPlan,
        rank: int,
    ) -> None:
        self._vllm_config = vllm_config
        self._config = config
        self._plan = plan
        self._format = pool_format
        self._kv_cache_config = kv_cache_config
        self._store = store
        self._ranks = ranks
        self._role = ranks.topology.role(rank)
        self._blocks: TensorBlocks | None = None
        self._worker: PoolWorker | None = None
        self._must_rest = False

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Take the engine's KV tensors, one per layer, and start."""
        config = self._config
        traits = features.attention_traits(self._vllm_config, kv_caches)
        role = self._role
        self._blocks = TensorBlocks(
            kv_caches,
            self._kv_cache_config,
            self._plan.group_ids,
            traits,
            num_parts=[len(parts) for parts in role.parts],
            find=self._format.find_blocks,
        )
        self._role = role = role.without(
            group_id
            for group_id, group in enumerate(self._blocks.layout.groups)
            if not group.values_per_block
        )
        try:
            self._worker = PoolWorker(
                self._blocks,
                self._store,
                PrefixDatabases(
                    [group.block_size for group in self._plan.groups],
                    self._plan.hash_block_size,
                    role.parts,
                    self._format.keys(self._ranks.topology.sizes),
                ),
                limits=WorkerLimits(
                    staging_bytes=config.staging_size,
                    load_staging_bytes=config.staging_size,
                    save_timeout_s=config.save_timeout_s,
                    load_timeout_s=config.load_timeout_s,
                    max_bad_keys=config.max_bad_keys,
                    flush_timeout_s=config.flush_timeout_s,
                ),
                role=role,
                values=self._format.values,
            )
        except (OSError, MemoryError, OverflowError) as error:
            raise ConfigError(
                f"staging_size is {format_size(config.staging_size)}, and twice that, for saving "
                f"and for loading, cannot be had from this machine ({error}): set it lower"
            ) from error

    def handshake(self) -> KVTideHandshake | None:
        """Return this rank's layout, once there is one."""
        if self._blocks is None:
            return None
        return KVTideHandshake(
            self._blocks.layout,
            self._role.rank,
            self._role.parts,
            self._ranks.sharing,
            features.token_interleave(self._vllm_config),
        )

    def take_over(self, metadata: KVTideMetadata) -> None:
        """Take the step's jobs over."""
        self._must_rest = metadata.must_rest
        if self._worker is not None:
            self._worker.take_over(metadata.plan)

    def start_loads(self) -> None:
        """Start the step's loads, ordered after everything the engine has issued so far."""
        if self._worker is not None:
            self._worker.start_loads()

    def fence(self) -> None:
        """Mark the point after which the step's blocks may be read."""
        if self._worker is not None:
            self._worker.fence()

    def poll(self) -> WorkerResults:
        """Return the loads that ended, and end what is past its deadline."""
        if self._must_rest:
            time.sleep(REST_S)
        return self._worker.poll() if self._worker is not None else WorkerResults(set(), set())

    def take_report(self) -> KVTideWorkerMetadata | None:
        """Return what is to be reported, if anything."""
        report = self._worker.take_report() if self._worker is not None else None
        return None if report is None else KVTideWorkerMetadata(report)

    def close(self) -> None:
        """Store what is staged, within the flush time, and stop; may be called twice."""
        if self._worker is not None:
            self._worker.close()
        else:
            self._store.close()
        if self._blocks is not None:
            self._blocks.close()
