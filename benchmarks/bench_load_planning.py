"""What planning a load costs per chunk, beside the receiving thread of vLLM's store connector.

    python benchmarks/bench_load_planning.py [--rounds 15]

kvtide plans a load in the scheduler (``plan_load``) and part by part on its receiving thread, which
here loads from a store that gives every value at once, into blocks that copy nothing. The peer is
``KVCacheStoreRecvingThread._handle_request`` of the in-tree connector with its coordinator, key
database and layout, on the same hashes and blocks and as fast a store. Values are bare on both
sides: what a tag costs is the matter of ``bench_tags.py``. CPU time of one thread, in turns.
"""

from __future__ import annotations

import argparse
import gc
import threading
import warnings
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from statistics import median
from typing import Any

from bench_lookup_keys import NAMESPACE, vllm_spec
from measuring import Row, context_name, cpu_s, figure, left_out, report, times_less

from kvtide.core.batch import Batch
from kvtide.core.coordinator import Coordinator
from kvtide.core.groups import FullAttention, SlidingWindow
from kvtide.core.jobs import LoadJob, StepPlan
from kvtide.core.transfer import plan_load
from kvtide.runtime.limits import WorkerLimits
from kvtide.runtime.prefixes import PrefixDatabases
from kvtide.runtime.values import BARE
from kvtide.runtime.worker import PoolWorker
from kvtide.stores import Status
from kvtide.stores.memory import MemoryStore
from kvtide.stores.memory_buffer import ByteArray
from kvtide.stores.wrappers import WrapperStore
from kvtide.testing.blocks import FakeBlocks, byte_layout
from kvtide.testing.requests import RecordingRequest, fake_hashes

BENCH = "load_planning"
BLOCK = 16
CONTEXTS = (2 << 10, 8 << 10, 32 << 10, 128 << 10)
MODELS = {
    "full": Coordinator((FullAttention(BLOCK),), BLOCK),
    "full + window 4,096": Coordinator((FullAttention(BLOCK), SlidingWindow(BLOCK, 4096)), BLOCK),
}
VALUE_BYTES = 4096
LAYERS = 32


class GivingStore(WrapperStore):
    """Gives every value at once: nothing is written."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.keys: list[str] = []

    def get(self, batch: Batch) -> list[Status]:
        """Answer OK."""
        self.keys += batch.keys
        return [Status.OK] * len(batch)

    def batch_get_into_multi_buffers(
        self, keys: Sequence[str], _addresses: Any, _sizes: Any
    ) -> list[int]:
        """Answer as Mooncake's client does."""
        self.keys += keys
        return [VALUE_BYTES] * len(keys)


class UntouchedBlocks(FakeBlocks):
    """Blocks to which nothing is copied."""

    def write(self, group_id: int, block_ids: Sequence[int], data: ByteArray) -> None:
        """Leave the blocks as they are."""


class Load:
    """A request of which everything is in the store and nothing in the engine."""

    def __init__(self, coordinator: Coordinator, num_tokens: int) -> None:
        self.hit_token = num_tokens
        self.hashes = fake_hashes(num_tokens // BLOCK)
        self.table = list(range(1, len(self.hashes) + 1))
        self.view = RecordingRequest(
            num_tokens=num_tokens + 1,
            hashes=self.hashes,
            tables=[self.table] * len(coordinator.groups),
        )
        self.num_chunks = sum(map(len, coordinator.load_mask(num_tokens, 0)))


class KVTideSide:
    """A scheduler's plan of a load, and a worker that carries it out in the caller's thread."""

    def __init__(self, coordinator: Coordinator) -> None:
        groups = coordinator.groups
        self._coordinator = coordinator
        self.store = GivingStore()
        self._worker = PoolWorker(
            UntouchedBlocks(byte_layout(*((g.block_size, VALUE_BYTES) for g in groups)), 1),
            self.store,
            PrefixDatabases([group.block_size for group in groups], coordinator.hash_block_size),
            limits=WorkerLimits(staging_bytes=1),
            values=BARE,
            threaded=False,
        )
        self._worker.take_over(StepPlan({0: NAMESPACE}))

    def plan(self, load: Load) -> LoadJob:
        """Do what the scheduler does once the engine has allocated blocks."""
        return plan_load(
            load.view,
            self._coordinator,
            job_id=1,
            prefix_id=0,
            num_computed_tokens=0,
            hit_token=load.hit_token,
        )

    def load(self, job: LoadJob) -> None:
        """Do what the worker does: in parts, each named, asked for, judged and written."""
        self._worker.take_over(StepPlan(loads=(job,)))
        self._worker.run_pending()
        results = self._worker.poll()
        assert results.finished_loads == {job.request_id}
        assert not results.failed_loads

    def close(self) -> None:
        """End the worker."""
        self._worker.close()


class InTreeSide:
    """The receiving thread of vLLM's connector, run in the caller's thread."""

    def __init__(self, coordinator: Coordinator) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import data, worker
            from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator import (
                MooncakeStoreCoordinator,
            )
            from vllm.v1.kv_cache_interface import KVCacheGroupSpec
        self._data = data
        self._num_groups = len(coordinator.groups)
        groups = [KVCacheGroupSpec(["layer"], vllm_spec(group)) for group in coordinator.groups]
        databases = []
        for group_id, group in enumerate(coordinator.groups):
            metadata = data.KeyMetadata("model", 0, 0, 0, 0, group_id=group_id)
            database = data.ChunkedTokenDatabase(metadata, group.block_size)
            num_layers = LAYERS // self._num_groups
            database.set_kv_caches_base_addr([layer << 32 for layer in range(num_layers)])
            database.set_block_len([VALUE_BYTES // num_layers])
            databases.append(database)
        self.store = GivingStore()
        self._thread = worker.KVCacheStoreRecvingThread(
            self.store,
            MooncakeStoreCoordinator(
                groups, coordinator.lcm_block_size, coordinator.hash_block_size
            ),
            databases,
            coordinator.lcm_block_size,
            0,
            threading.Event(),
            is_hma_required=self._num_groups > 1,
        )

    def load(self, load: Load) -> None:
        """Do what the thread does for a request."""
        spec = self._data.LoadSpec(0, load.hit_token, can_load=True, token_len=load.hit_token)
        request = self._data.ReqMeta(
            "r", load.hit_token, (load.table,) * self._num_groups, load.hashes, load_spec=spec
        )
        self._thread.add_request(request)
        self._thread._handle_request(self._thread.request_queue.get())  # noqa: SLF001
        assert self._thread.get_and_clear_finished_requests() == {"r"}
        assert not self._thread.get_and_clear_block_ids_with_load_errors()


def rows(name: str, num_tokens: int, rounds: int, *, with_vllm: bool) -> Iterator[Row]:
    """Plan the same load on both sides in turns, and yield the CPU time per chunk."""
    coordinator = MODELS[name]
    load = Load(coordinator, num_tokens)
    ours = KVTideSide(coordinator)
    peer = InTreeSide(coordinator) if with_vllm else None
    planned_s: list[float] = []
    loaded_s: list[float] = []
    peer_s: list[float] = []
    job = ours.plan(load)
    for _ in range(rounds):
        planned_s.append(cpu_s(lambda: ours.plan(load)))
        loaded_s.append(cpu_s(lambda: ours.load(job)))
        if peer is not None:
            peer_s.append(cpu_s(lambda: peer.load(load)))
    assert len(ours.store.keys) == rounds * load.num_chunks
    if peer is not None:
        names = [sorted(key[-64:] for key in side.store.keys) for side in (ours, peer)]
        assert names[0] == names[1], "both sides load the same chunks"
    ours.close()
    each_us = 1e6 / load.num_chunks
    case = f"{name} at {context_name(num_tokens)}"
    yield figure(BENCH, f"{case}: scheduler", "us/chunk", median(planned_s) * each_us)
    total_us = [(a + b) * each_us for a, b in zip(planned_s, loaded_s, strict=True)]
    if peer is None:
        yield figure(BENCH, f"{case}: both", "us/chunk", median(total_us))
        return
    peer_us = [seconds * each_us for seconds in peer_s]
    worker_us = [seconds * each_us for seconds in loaded_s]
    yield times_less(BENCH, f"{case}: worker", "us/chunk", worker_us, peer_us)
    yield times_less(BENCH, f"{case}: both", "us/chunk", total_us, peer_us)


def main() -> None:
    """Run every case and write build/bench/load_planning.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    with_vllm = find_spec("vllm") is not None
    found = [] if with_vllm else [left_out(BENCH, "the peer: vLLM is not installed")]
    gc.disable()  # its passes would meet whoever is running
    for name in MODELS:
        for num_tokens in CONTEXTS:
            found += rows(name, num_tokens, options.rounds, with_vllm=with_vllm)
    print(f"written: {report(BENCH, found)}")


if __name__ == "__main__":
    main()
