"""The scheduler halves of both connectors, driven by the same scheduler outputs.

:class:`KVTideHalf` is kvtide's :class:`~kvtide.engines.vllm.scheduler_side.SchedulerSide`,
:class:`InTreeHalf` the ``MooncakeStoreScheduler`` of vLLM's ``MooncakeStoreConnector``; only its
lookup client, a socket to a worker, is left out. Both save what is decoded, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Protocol
from unittest.mock import patch

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm_engine import BLOCK, LAYER_BYTES, LAYERS, HeldEngine

from kvtide.config import PoolConfig
from kvtide.core.batch import Batch
from kvtide.core.groups import FullAttention
from kvtide.core.jobs import JobEnd, JobReport
from kvtide.core.layout import GroupLayout, Region, StoreLayout
from kvtide.engines.vllm.formats import FORMATS
from kvtide.engines.vllm.metadata import KVTideHandshake, KVTideMetadata, KVTideWorkerMetadata
from kvtide.engines.vllm.names import IdentityNames
from kvtide.engines.vllm.scheduler_side import SchedulerSide
from kvtide.engines.vllm.translate import GroupPlan
from kvtide.stores import Status, Store

LAYOUT = StoreLayout((GroupLayout(BLOCK, (LAYER_BYTES,) * LAYERS, "bytes"),))
PLAN = GroupPlan(
    groups=(FullAttention(BLOCK),),
    group_ids=(0,),
    hash_block_size=BLOCK,
    specs=({},),
    num_layers=(LAYERS,),
)


class CountingStore(Store):
    """Answers at once that nothing is there and that everything was stored; counts its calls."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.num_keys = 0
        """Keys that were put."""

    def register(self, region: Region) -> None:
        """Take note of nothing."""

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Answer that nothing is there."""
        self.num_calls += 1
        return [False] * len(keys)

    def put(self, batch: Batch) -> list[Status]:
        """Count."""
        self.num_calls += 1
        self.num_keys += len(batch.keys)
        return [Status.OK] * len(batch.keys)

    def get(self, batch: Batch) -> list[Status]:
        """Find nothing."""
        return [Status.MISSING] * len(batch.keys)

    def remove(self, keys: Sequence[str]) -> list[Status]:
        """Find nothing."""
        return [Status.MISSING] * len(keys)

    def close(self) -> None:
        """Hold nothing."""


class Half(Protocol):
    """A connector's half in the scheduler's process."""

    decode_job_tokens: int
    """How many more tokens of a decode, whose last completes a block, make it save."""

    def admit(self, request: Any) -> None:
        """Take a request that arrived and found nothing in the store."""

    def emit(self, output: Any) -> Any:
        """Return the metadata of a step, its blocks pinned."""

    def report_on(self, metadata: Any) -> Any:
        """Return what one rank reports when the jobs of ``metadata`` have ended well."""

    def take(self, report: Any) -> None:
        """Take the report in: the blocks are released."""

    def num_jobs(self, metadata: Any) -> int:
        """Return how many save jobs ``metadata`` holds."""

    def forget(self, request: Any) -> None:
        """Forget a request that ended."""

    @property
    def has_pins(self) -> bool:
        """Whether jobs hold blocks."""

    @property
    def num_pinned_blocks(self) -> int:
        """How many blocks jobs hold."""


def make_halves(engine: HeldEngine) -> dict[str, Half]:
    """Return both halves, to which the engine's requests have arrived."""
    halves: dict[str, Half] = {"kvtide": KVTideHalf(engine), "peer": InTreeHalf(engine)}
    for half in halves.values():
        for request in engine.requests:
            half.admit(request)
    return halves


class KVTideHalf:
    """kvtide's, with the default budgets."""

    decode_job_tokens = 1

    def __init__(self, engine: HeldEngine) -> None:
        config = PoolConfig.from_mapping({"save_decode_cache": True})
        names = IdentityNames("", {"weights": "w"}, "")
        self.side = SchedulerSide(config, PLAN, FORMATS["kvtide"], names, CountingStore())
        self.side.bind(engine.manager)
        self.side.agree_on_layouts([KVTideHandshake(LAYOUT)])

    def admit(self, request: Any) -> None:
        """See :class:`Half`."""
        self.side.on_new_request(request)

    def emit(self, output: Any) -> KVTideMetadata:
        """See :class:`Half`."""
        return self.side.build_metadata(output)

    def report_on(self, metadata: KVTideMetadata) -> Any:
        """See :class:`Half`."""
        report = JobReport()
        for job in metadata.plan.stores:
            report.staged[job.job_id] += 1
            report.end(job.job_id, JobEnd.STORED)
        return KVConnectorOutput(kv_connector_worker_meta=KVTideWorkerMetadata(report))

    def take(self, report: Any) -> None:
        """See :class:`Half`."""
        self.side.on_output(report)

    def num_jobs(self, metadata: KVTideMetadata) -> int:
        """See :class:`Half`."""
        return len(metadata.plan.stores)

    def forget(self, request: Any) -> None:
        """See :class:`Half`."""
        self.side.on_finished(request)

    @property
    def has_pins(self) -> bool:
        """See :class:`Half`."""
        return self.side.has_pins

    @property
    def num_pinned_blocks(self) -> int:
        """See :class:`Half`."""
        scheduler = self.side._scheduler  # noqa: SLF001 - what a user reads from the gauges
        assert scheduler is not None
        return scheduler.num_pinned_blocks


class NoLookups:
    """Stands for the client of vLLM's lookup server."""

    def __init__(self, vllm_config: object) -> None:
        """Connect to nothing."""

    def discard(self, request_id: str) -> None:
        """Hold nothing."""


class InTreeHalf:
    """vLLM's own."""

    decode_job_tokens = 1

    def __init__(self, engine: HeldEngine) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import data, scheduler

        self._worker_metadata = data.MooncakeStoreWorkerMetadata
        options = {"save_decode_cache": True}
        vllm_config: Any = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(
                kv_role="kv_both", kv_connector_extra_config=options
            ),
            kv_events_config=None,
            cache_config=SimpleNamespace(block_size=BLOCK, prefix_match_unit=None),
            parallel_config=SimpleNamespace(world_size=1, decode_context_parallel_size=1),
            speculative_config=None,
        )
        with patch.object(scheduler, "LookupKeyClient", NoLookups):
            self.side = scheduler.MooncakeStoreScheduler(vllm_config, engine.config)
        self.side.bind_gpu_block_pool(engine.manager.block_pool)

    def admit(self, request: Any) -> None:
        """See :class:`Half`."""
        self.side.update_state_after_alloc(request, KVCacheBlocks(([],)), 0)

    def emit(self, output: Any) -> Any:
        """See :class:`Half`."""
        return self.side.build_connector_meta(output)

    def report_on(self, metadata: Any) -> Any:
        """See :class:`Half`."""
        ended = {request.store_job_id: 1 for request in metadata.requests if request.can_save}
        return KVConnectorOutput(kv_connector_worker_meta=self._worker_metadata(ended))

    def take(self, report: Any) -> None:
        """See :class:`Half`."""
        self.side.update_connector_output(report)

    def num_jobs(self, metadata: Any) -> int:
        """See :class:`Half`."""
        return sum(bool(request.can_save) for request in metadata.requests)

    def forget(self, request: Any) -> None:
        """See :class:`Half`."""
        output = SchedulerOutput.make_empty()
        output.finished_req_ids = {request.request_id}
        self.emit(output)

    @property
    def has_pins(self) -> bool:
        """See :class:`Half`."""
        return self.side.has_pending_push_work()

    @property
    def num_pinned_blocks(self) -> int:
        """See :class:`Half`."""
        return sum(len(blocks) for blocks, _ in self.side._pinned_saves.values())  # noqa: SLF001
