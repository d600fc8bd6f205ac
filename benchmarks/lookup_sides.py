"""A lookup by kvtide and by vLLM's in-tree store connector, on the same request and store.

:class:`KVTideSide` is kvtide's ``PoolScheduler`` and ``LookupExecutor``. :class:`InTreeSide` is
``MooncakeStoreWorker.lookup`` with its coordinator and key prefixes; :class:`InTreeScheduler` is
all that vLLM's scheduling thread meets: ``MooncakeStoreScheduler`` and its client and server.
"""

from __future__ import annotations

import os
import random
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from bench_lookup_keys import NAMESPACE, Model, vllm_spec

from kvtide.core.admission import AdmissionLimits
from kvtide.core.coordinator import Coordinator
from kvtide.core.save_limits import SaveLimits
from kvtide.core.scheduler import PoolScheduler
from kvtide.core.topology import ParallelSizes, Topology
from kvtide.core.transfer import RequestView
from kvtide.runtime.lookup import LookupExecutor
from kvtide.stores.memory import MemoryStore
from kvtide.stores.wrappers import WrapperStore

FOREVER_S = 1e9
HEX_CHARS = 64
"""A key of either side ends in the hash of its chunk, in so many characters."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One lookup: CPU seconds of the thread that called, without the store's, and the answer.

    ``scheduling_s`` is the part of it that the engine's scheduling thread spends.
    """

    cpu_s: float
    scheduling_s: float
    hit_token: int


class CountingStore(WrapperStore):
    """Answers ``exists`` at once, to both sides; what is ``present`` is told by hash."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.present: frozenset[str] = frozenset()
        self.clear()

    def clear(self) -> None:
        """Count from 0."""
        self.num_calls = self.num_keys = 0
        self.cpu_s = 0.0

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Tell which keys' hashes are present."""
        start = time.thread_time()
        present = self.present
        answers = [key[-HEX_CHARS:] in present for key in keys]
        self.num_calls += 1
        self.num_keys += len(keys)
        self.cpu_s += time.thread_time() - start
        return answers

    batch_is_exist = exists
    """Mooncake's client answers 1 and 0."""


class KVTideSide:
    """A scheduler and its lookups; without ``threaded`` they run in the caller's thread."""

    def __init__(self, model: Model, store: CountingStore, *, threaded: bool = False) -> None:
        coordinator = model.coordinator
        topology = Topology.undivided(len(coordinator.groups), ParallelSizes(model.tp_size))
        databases = coordinator.databases(NAMESPACE, topology.all_parts())
        self._store = store
        self._executor = LookupExecutor(
            store,
            coordinator.boundaries,
            lambda _namespace: databases,
            FOREVER_S,
            max_bad_keys=1024,
            threaded=threaded,
        )
        self._scheduler = PoolScheduler(
            coordinator,
            self._executor,
            limits=SaveLimits(max_pinned_blocks=1, max_job_tokens=coordinator.lcm_block_size),
            admission=AdmissionLimits(lookup_wait_s=FOREVER_S),
        )

    def lookup(self, view: RequestView, num_computed_tokens: int = 0) -> Timed:
        """Submit a lookup as a request arrives, carry it out, and collect it for the engine."""
        self._store.clear()
        begun = time.thread_time()
        self.submit(view)
        submitted = time.thread_time()
        self.run()
        answered = time.thread_time()
        num_tokens = self.collect(view, num_computed_tokens)
        ended = time.thread_time()
        assert num_tokens is not None
        self.end(view)
        scheduling_s = submitted - begun + ended - answered
        return Timed(
            ended - begun - self._store.cpu_s, scheduling_s, num_computed_tokens + num_tokens
        )

    def submit(self, view: RequestView) -> None:
        """Do what the scheduling thread does when a request arrives."""
        self._scheduler.on_new_request(view, NAMESPACE, time.monotonic())

    def collect(self, view: RequestView, num_computed_tokens: int) -> int | None:
        """Do what it does when the engine asks how much can be loaded."""
        return self._scheduler.match(view, num_computed_tokens, time.monotonic())

    def run(self) -> None:
        """Carry all lookups to their end, where no thread does."""
        self._executor.run_pending()

    def end(self, view: RequestView) -> None:
        """Forget a request."""
        self._scheduler.on_finished(view.request_id)

    def close(self) -> None:
        """End the lookups' thread."""
        self._executor.close()


class InTreeSide:
    """The lookup of vLLM's connector on its rank 0."""

    def __init__(self, model: Model, store: CountingStore) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import (
                coordinator,
                data,
                worker,
            )
            from vllm.v1.kv_cache_interface import KVCacheGroupSpec
        ours = model.coordinator
        groups = [KVCacheGroupSpec(["layer"], vllm_spec(group)) for group in ours.groups]
        self._data = data
        self._store = store
        self.worker = made = object.__new__(worker.MooncakeStoreWorker)
        made._kv_cache_groups = groups
        made._capacity_only = False
        made.hash_block_size = ours.hash_block_size
        made.tp_rank, made.tp_size, made.num_kv_head = 0, model.tp_size, model.tp_size
        made.pcp_size = made.dcp_size = made.pp_size = 1
        made._group_tp_replication_factors = made._compute_group_tp_replication_factors()
        metadata = data.KeyMetadata("model", tp_rank=0, pcp_rank=0, dcp_rank=0, pp_rank=0)
        made.token_dbs = made._build_token_databases(metadata, None)
        made._init_lookup_key_prefixes()
        made.coord = coordinator.MooncakeStoreCoordinator(
            groups,
            ours.lcm_block_size,
            ours.hash_block_size,
            enable_partial_hash_hits=ours.partial_hits,
        )
        made.store = store
        made._record_kv_connector_operation = lambda *_args, **_kwargs: None

    def lookup(self, num_tokens: int, hashes: Sequence[bytes]) -> Timed:
        """Join the hashes as the client sends them, and answer as the server does."""
        self._store.clear()
        begun = time.thread_time()
        blob = memoryview(b"".join(hashes))
        result = self.worker.lookup(num_tokens, self._data.BlobBlockHashes(blob, len(hashes[0])))
        cpu_s = time.thread_time() - begun - self._store.cpu_s
        return Timed(cpu_s, cpu_s, int(result.hit_length))


class InTreeScheduler:
    """What vLLM's scheduling thread meets: ``MooncakeStoreScheduler``, its client and its server.

    The server is a thread of this process, as with one rank; with more it is in another one.
    """

    def __init__(self, model: Model, side: InTreeSide) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import (
            data,
            scheduler,
            worker,
        )

        self._no_hit = data.MooncakeLookupResult(0)
        config: Any = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(
                kv_connector_extra_config={"lookup_rpc_port": f"kvtide_bench_{os.getpid()}"}
            ),
            parallel_config=SimpleNamespace(data_parallel_index=0),
        )
        self._server = worker.LookupKeyServer(side.worker, config)
        self._scheduler = made = object.__new__(scheduler.MooncakeStoreScheduler)
        made.client = worker.LookupKeyClient(config)
        made.enable_lookup, made.lookup_async, made.load_async = True, False, True
        made.enable_partial_hash_hits = model.coordinator.partial_hits
        made._block_size = model.coordinator.lcm_block_size
        made.load_specs = {}

    def match(self, request: Any, num_computed_tokens: int) -> int:
        """Answer the engine; the thread that asks waits."""
        num_tokens, _ = self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)
        return int(num_tokens)

    def close(self) -> None:
        """End the server's thread within one more request, and close the sockets."""
        self._server.store_worker = SimpleNamespace(lookup=self._end)
        self._scheduler.client.lookup("last", 0, [])
        self._server.thread.join()
        for end in (self._scheduler.client, self._server):
            end.close()
            end.ctx.term()

    def _end(self, *_: object) -> Any:
        self._server.running = False
        return self._no_hit


class EngineCache:
    """vLLM's own requests, cache manager and block pool, for one group of full attention."""

    def __init__(self, coordinator: Coordinator, num_tokens: int, num_blocks: int) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

        from kvtide.engines.vllm.view import EngineTables

        [group] = coordinator.groups
        block_size = group.block_size
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(block_size, sha256)
        config = KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], vllm_spec(group))],
        )
        self._manager = KVCacheManager(
            config,
            max_model_len=num_tokens,
            scheduler_block_size=block_size,
            hash_block_size=block_size,
        )
        self._tables = EngineTables(self._manager, (0,), coordinator)

    def request(self, name: str, num_tokens: int, held_token: int = 0) -> Any:
        """Return a request that waits, of whose prompt the cache holds a part."""
        if held_token:
            computed = self._make(name, held_token)
            assert self._manager.allocate_slots(computed, held_token) is not None
            self._manager.free(computed)
        return self._make(name, num_tokens)

    def view(self, request: Any) -> RequestView:
        """Return kvtide's view of a request."""
        from kvtide.engines.vllm.view import VllmRequestView

        return VllmRequestView(request, self._tables)

    def _make(self, name: str, num_tokens: int) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        generator = random.Random(name)  # noqa: S311 - no secrets
        return Request(
            request_id=name,
            prompt_token_ids=[generator.randrange(32_000) for _ in range(num_tokens)],
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=self._hasher,
        )
