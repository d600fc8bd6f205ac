"""The worker halves of both connectors, driven by the same metadata, with the CPU they take.

:class:`KVTideWorker` is kvtide's :class:`~kvtide.runtime.worker.PoolWorker` with its threads,
:class:`InTreeWorker` the ``KVCacheStoreSendingThread`` of vLLM's ``MooncakeStoreConnector`` with
its coordinator, key database and layout. Each has a store that answers at once, or a given one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from scheduler_halves import CountingStore
from vllm_engine import BLOCK, kv_cache_config

from kvtide.core.layout import StoreLayout
from kvtide.engines.vllm.tensors import TensorBlocks
from kvtide.runtime.limits import WorkerLimits
from kvtide.runtime.memory import Fence
from kvtide.runtime.prefixes import PrefixDatabases
from kvtide.runtime.values import BARE, TAGGED
from kvtide.runtime.worker import PoolWorker
from kvtide.stores import Store
from kvtide.stores.memory_buffer import ByteArray

_WAIT_S = 20.0
_STAGING_BYTES = 64 << 20


class Worker(Protocol):
    """A connector's half in a worker's process."""

    @property
    def num_calls(self) -> int:
        """Calls of the store so far."""

    @property
    def num_keys(self) -> int:
        """Keys put so far."""

    def take(self, metadata: Any) -> None:
        """Take a step's jobs over, on the engine's thread."""

    def is_idle(self) -> bool:
        """Tell whether every job has ended."""

    def report(self) -> None:
        """Say what has ended, on the engine's thread."""

    def begin(self, request_ids: Sequence[str], num_tokens: int) -> None:
        """Forget these requests, which begin anew and have saved ``num_tokens`` tokens."""

    def threads(self) -> Iterable[threading.Thread]:
        """Return the threads that do the work."""

    def close(self) -> None:
        """End it, as far as that is possible."""


def cpu_of_step(worker: Worker, metadata: Any) -> float:
    """Return the CPU seconds that a step's jobs take: of the engine's thread and of the worker's.

    Nobody waits actively meanwhile.
    """
    before = _clocks(worker)
    start = time.thread_time()
    worker.take(metadata)
    spent = time.thread_time() - start
    give_up_s = time.monotonic() + _WAIT_S
    while not worker.is_idle():
        assert time.monotonic() < give_up_s, "jobs never end"
        time.sleep(0.0005)
    start = time.thread_time()
    worker.report()
    spent += time.thread_time() - start
    return spent + _clocks(worker) - before


def _clocks(worker: Worker) -> float:
    """Return the CPU seconds of a worker's threads so far."""
    return sum(
        time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        for thread in worker.threads()
        if thread.ident is not None
    )


class NoCopy:
    """An engine's memory of which nothing is copied."""

    def __init__(self, blocks: TensorBlocks) -> None:
        self._blocks = blocks

    @property
    def layout(self) -> StoreLayout:
        """The blocks' own."""
        return self._blocks.layout

    def record(self) -> Fence:
        """Return the blocks' own."""
        return self._blocks.record()

    def adopt(self, buffer: ByteArray) -> None:
        """Take note of nothing."""

    def read(self, group_id: int, block_ids: Sequence[int], out: ByteArray) -> None:
        """Leave the rows as they are."""

    def write(self, group_id: int, block_ids: Sequence[int], data: ByteArray) -> None:
        """Leave the blocks as they are."""


class KVTideWorker:
    """kvtide's; ``with_copy`` says whether it copies blocks to staging and writes tags.

    With ``is_held`` its threads never run.
    """

    def __init__(
        self,
        caches: dict[str, torch.Tensor],
        *,
        store: Store | None = None,
        with_copy: bool = True,
        is_held: bool = False,
    ) -> None:
        config = kv_cache_config(len(next(iter(caches.values()))))
        blocks = TensorBlocks(caches, config, [0])
        self._counts = CountingStore()
        """Used where no store is given."""
        self._worker = PoolWorker(
            blocks if with_copy else NoCopy(blocks),
            self._counts if store is None else store,
            PrefixDatabases([BLOCK], BLOCK),
            limits=WorkerLimits(staging_bytes=_STAGING_BYTES, load_staging_bytes=1 << 20),
            values=TAGGED if with_copy else BARE,
            threaded=not is_held,
        )

    @property
    def num_calls(self) -> int:
        """See :class:`Worker`."""
        return self._counts.num_calls

    @property
    def num_keys(self) -> int:
        """See :class:`Worker`."""
        return self._counts.num_keys

    def take(self, metadata: Any) -> None:
        """See :class:`Worker`."""
        self._worker.take_over(metadata.plan)
        self._worker.fence()

    def is_idle(self) -> bool:
        """See :class:`Worker`."""
        return self._worker.flush(0.0)

    def report(self) -> None:
        """See :class:`Worker`."""
        self._worker.poll()
        self._worker.take_report()

    def begin(self, request_ids: Sequence[str], num_tokens: int) -> None:
        """Know nothing of requests."""

    def threads(self) -> Iterable[threading.Thread]:
        """See :class:`Worker`."""
        services = (self._worker.staging, self._worker.sender)
        return [thread for service in services if (thread := service._thread) is not None]  # noqa: SLF001 - whose time is taken

    def close(self) -> None:
        """End its threads."""
        self._worker.close()


class CountingClient:
    """Stands for Mooncake's client: answers at once, and counts."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.num_keys = 0

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """Answer that nothing is there."""
        self.num_calls += 1
        return [0] * len(keys)

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        how: object,  # noqa: ARG002 - the client's own parameters
    ) -> list[int]:
        """Count."""
        assert len(keys) == len(addresses) == len(sizes)
        self.num_calls += 1
        self.num_keys += len(keys)
        return [0] * len(keys)


class InTreeWorker:
    """vLLM's own; its records of operations, which are for metrics, are left out.

    With ``is_held`` its thread never runs. ``client`` and ``how`` are Mooncake's, or stand for it.
    """

    def __init__(
        self,
        caches: dict[str, torch.Tensor],
        *,
        client: Any = None,
        how: object = None,
        is_held: bool = False,
    ) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import data, worker
        from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator import (
            MooncakeStoreCoordinator,
        )

        num_blocks = len(next(iter(caches.values())))
        metadata = data.KeyMetadata("model", tp_rank=0, pcp_rank=0, dcp_rank=0, pp_rank=0)
        database = data.ChunkedTokenDatabase(metadata, BLOCK)
        database.store_layout.register_kv_caches(list(caches.values()), num_blocks)
        self._client = CountingClient()
        ready = threading.Event()
        self._thread = worker.KVCacheStoreSendingThread(
            self._client if client is None else client,
            MooncakeStoreCoordinator(kv_cache_config(num_blocks).kv_cache_groups, BLOCK, BLOCK),
            [database],
            BLOCK,
            0,
            [1],
            "kv_both",
            ready,
            replicate_config=how if how is not None else object(),
        )
        if not is_held:
            self._thread.start()
            assert ready.wait(10)

    @property
    def num_calls(self) -> int:
        """See :class:`Worker`."""
        return self._client.num_calls

    @property
    def num_keys(self) -> int:
        """See :class:`Worker`."""
        return self._client.num_keys

    def take(self, metadata: Any) -> None:
        """Do what the connector's ``wait_for_save`` does, but for the device's event."""
        for request in metadata.requests:
            if request.can_save:
                self._thread.add_request(request)

    def is_idle(self) -> bool:
        """See :class:`Worker`."""
        return self._thread.request_queue.unfinished_tasks == 0

    def report(self) -> None:
        """See :class:`Worker`."""
        self._thread.take_completed_saves()

    def begin(self, request_ids: Sequence[str], num_tokens: int) -> None:
        """Do what the connector does when requests have ended, and tell it what is saved."""
        for request_id in request_ids:
            self._thread.delete_finished_stored_request(request_id)
            self._thread._saved_offset[request_id] = num_tokens  # noqa: SLF001 - no other way

    def threads(self) -> Iterable[threading.Thread]:
        """See :class:`Worker`."""
        return [self._thread]

    def close(self) -> None:
        """Leave its thread alone, which has no end."""
