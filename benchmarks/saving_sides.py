"""An engine that computes new prompts, and the two real sending threads that save what it computes.

Both sides save the same KV cache of 32 layers into the same kind of pool. :class:`KVTideSide` is
kvtide's scheduler and worker, with the default limits; :class:`InTreeSide` is the sending thread of
vLLM's ``MooncakeStoreConnector``, with its coordinator, key database and layout, and Mooncake's
client set up by vLLM. What the connector does around it, it does here: each step of a prefill is a
job, a decode saves nothing, and an ended request is forgotten when its jobs have drained.

An engine computes a prompt after the other, and generates 64 tokens after each meanwhile. It
waits with a step while ``MAX_OPEN_JOBS`` have not ended, so that no side loses anything by being
slow.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from native_client import WatchedClient, native_client

from kvtide.config import PoolConfig
from kvtide.core.back_off import Delays
from kvtide.core.batch import Batch
from kvtide.core.coordinator import Coordinator
from kvtide.core.groups import FullAttention
from kvtide.core.keys import CacheIdentity, namespace_for
from kvtide.core.save_limits import SaveLimits
from kvtide.core.scheduler import PoolScheduler, StepEvents
from kvtide.core.transfer import Scheduled
from kvtide.engines.vllm.tensors import TensorBlocks
from kvtide.runtime.limits import WorkerLimits
from kvtide.runtime.prefixes import PrefixDatabases
from kvtide.runtime.worker import PoolWorker
from kvtide.stores import Status, Store
from kvtide.stores.wrappers import WrapperStore
from kvtide.testing.lookups import ManualLookups
from kvtide.testing.requests import RecordingRequest

LAYERS = 32
BLOCK = 16
LAYER_BYTES = 2 << 10
VALUE_BYTES = LAYERS * LAYER_BYTES
NUM_BLOCKS = 4096
STEP_TOKENS = 512
PROMPT_TOKENS = 2048
OUTPUT_TOKENS = 64
STEP_BYTES = STEP_TOKENS // BLOCK * VALUE_BYTES
MAX_OPEN_JOBS = 8
NO_SPACE = -200
DRAIN_S = 20.0


def kv_caches() -> dict[str, torch.Tensor]:
    """Return a KV cache as vLLM lays it out on CPUs: (blocks, heads, tokens, keys and values)."""
    width = LAYER_BYTES // 2 // BLOCK
    memory = torch.ones((LAYERS, NUM_BLOCKS, 1, BLOCK, width), dtype=torch.bfloat16)
    return {f"layer.{layer}": cache for layer, cache in enumerate(memory)}


def kv_cache_config() -> Any:
    """Return vLLM's description of that cache: one group of full attention."""
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
    )

    width = LAYER_BYTES // 4 // BLOCK
    spec = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=width, dtype=torch.bfloat16
    )
    assert spec.page_size_bytes == LAYER_BYTES
    names = [f"layer.{layer}" for layer in range(LAYERS)]
    tensor = KVCacheTensor(
        size=LAYERS * LAYER_BYTES * NUM_BLOCKS,
        layers=names,
        layer_stride=LAYER_BYTES * NUM_BLOCKS,
        block_stride=LAYER_BYTES,
    )
    return KVCacheConfig(
        num_blocks=NUM_BLOCKS,
        kv_cache_tensors=[tensor],
        kv_cache_groups=[KVCacheGroupSpec(names, spec)],
    )


class Stored:
    """What the store's answers to puts say that it holds: each key counts once."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.num_tried = 0
        self.num_refused = 0
        self.num_failed = 0
        self.keys: set[str] = set()

    def note(self, key: str, num_bytes: int, *, is_stored: bool, is_refused: bool) -> None:
        """Count what became of a key that was put."""
        self.num_tried += 1
        self.num_refused += is_refused
        self.num_failed += not (is_stored or is_refused)
        if is_stored and key not in self.keys:
            self.keys.add(key)
            self.num_bytes += num_bytes


@dataclass(slots=True)
class Prompt:
    """A request: the hashes of its prompt's blocks, and where they are computed."""

    request_id: str
    hashes: list[bytes]
    block_ids: list[int]
    num_computed: int = 0


class Engine:
    """Makes prompts that nobody computed before, but for a part at their beginning.

    A step computes ``STEP_TOKENS`` tokens of a prompt, a token of each request that decodes, and
    takes ``step_s``. Of each prompt the share ``shared`` is that of one of the last 64 prompts.
    """

    def __init__(self, step_s: float, shared: float = 0.0) -> None:
        self.step_s = step_s
        self._shared = shared
        self._known: deque[list[bytes]] = deque(maxlen=64)
        self._random = random.Random(11)  # noqa: S311 - the same choices each time
        self._prompt = self._next_prompt()
        self._decoding: deque[Prompt] = deque()

    def step(self, side: Side) -> None:
        """Compute a step, and let ``side`` save what it added."""
        prompt = self._prompt
        side.save(prompt, self._decoding)
        prompt.num_computed += STEP_TOKENS
        for other in self._decoding:
            other.num_computed += 1
        while self._decoding and is_over(self._decoding[0]):
            side.end(self._decoding.popleft())
        if prompt.num_computed == PROMPT_TOKENS:
            self._decoding.append(prompt)
            self._prompt = self._next_prompt()

    def end(self, side: Side) -> None:
        """End every request."""
        for prompt in (*self._decoding, self._prompt):
            side.end(prompt)

    def _next_prompt(self) -> Prompt:
        num_blocks = PROMPT_TOKENS // BLOCK
        number = next(_numbers)
        hashes = [os.urandom(32) for _ in range(num_blocks)]
        if self._shared and self._known:
            num_shared = round(self._shared * num_blocks)
            hashes[:num_shared] = self._random.choice(self._known)[:num_shared]
        self._known.append(hashes)
        places = range(number * num_blocks, (number + 1) * num_blocks)
        return Prompt(f"request-{number}", hashes, [1 + i % (NUM_BLOCKS - 1) for i in places])


_numbers = itertools.count()


def is_over(prompt: Prompt) -> bool:
    """Tell whether a request has all its tokens."""
    return prompt.num_computed >= PROMPT_TOKENS + OUTPUT_TOKENS


class Side(Protocol):
    """One way of saving."""

    stored: Stored

    @property
    def num_back_offs(self) -> int:
        """How often it did not save for lack of space."""

    @property
    def num_open_jobs(self) -> int:
        """Jobs that have not ended."""

    def save(self, prompt: Prompt, decoding: Sequence[Prompt]) -> None:
        """Save what a step of ``STEP_TOKENS`` tokens of a prompt adds, and what others lack."""

    def end(self, prompt: Prompt) -> None:
        """Note that a request is over."""

    def settle(self) -> None:
        """Take in what has ended since."""

    def close(self) -> None:
        """End it."""


def drive(side: Side, engine: Engine, seconds: float) -> float:
    """Compute prompts for a time; return the bytes per second that were stored in it.

    What is under way at the end is waited for, so that the next side has the pool for itself.
    """
    begun_s, stored_before = time.monotonic(), side.stored.num_bytes
    due_s = begun_s
    while (now_s := time.monotonic()) < begun_s + seconds:
        side.settle()
        if now_s < due_s or side.num_open_jobs >= MAX_OPEN_JOBS:
            time.sleep(0.001)
            continue
        due_s = now_s + engine.step_s
        engine.step(side)
    speed = (side.stored.num_bytes - stored_before) / (time.monotonic() - begun_s)
    engine.end(side)
    end_s = time.monotonic() + DRAIN_S
    while side.num_open_jobs:
        assert time.monotonic() < end_s, "jobs never end"
        side.settle()
        time.sleep(0.01)
    return speed


# ------------------------------------------------------------------------------ kvtide


class CountedStore(WrapperStore):
    """Counts what was stored; ``checks`` says whether the sender is to ask ``exists`` first."""

    def __init__(self, inner: Store, *, checks: bool) -> None:
        super().__init__(inner)
        self.stored = Stored()
        self._checks = checks

    @property
    def checks_before_put(self) -> bool:
        """Whether to ask first."""
        return self._checks

    def put(self, batch: Batch) -> list[Status]:
        """Put, and count."""
        statuses = self.inner.put(batch)
        for index, status in enumerate(statuses):
            self.stored.note(
                batch.keys[index],
                batch.value_bytes(index),
                is_stored=status is Status.OK,
                is_refused=status is Status.NO_SPACE,
            )
        return statuses


class KVTideSide:
    """kvtide's scheduler and worker with the default options; takes the store over."""

    def __init__(self, store: Store, *, checks: bool = False, delays: Delays | None = None) -> None:
        config = PoolConfig()
        counted = CountedStore(store, checks=checks)
        self.stored = counted.stored
        self._blocks = TensorBlocks(kv_caches(), kv_cache_config(), [0])
        self._worker = PoolWorker(
            self._blocks,
            counted,
            PrefixDatabases([BLOCK], BLOCK),
            limits=WorkerLimits(staging_bytes=config.staging_size, load_staging_bytes=1 << 20),
        )
        coordinator = Coordinator((FullAttention(BLOCK),), BLOCK)
        self._scheduler = PoolScheduler(
            coordinator,
            ManualLookups(coordinator, lambda keys: [False] * len(keys)),
            limits=SaveLimits(
                max_pinned_blocks=int(config.pin_fraction * NUM_BLOCKS),
                max_job_tokens=STEP_TOKENS,
                max_open_tokens=config.staging_size // VALUE_BYTES * BLOCK,
                delays=delays or Delays(config.backoff_s, config.max_backoff_s),
            ),
        )
        self._namespace = namespace_for("", CacheIdentity({}, None))
        self._views: dict[str, RecordingRequest] = {}

    @property
    def num_back_offs(self) -> int:
        """How often all saving paused."""
        return self._scheduler.counters["pool_back_offs"]

    @property
    def num_open_jobs(self) -> int:
        """Jobs that have not ended."""
        return self._scheduler.num_open_jobs

    def save(self, prompt: Prompt, decoding: Sequence[Prompt]) -> None:
        """See :class:`Side`."""
        now_s = time.monotonic()
        is_admission = not prompt.num_computed
        if is_admission:
            view = RecordingRequest(
                prompt.request_id,
                num_tokens=PROMPT_TOKENS,
                hashes=prompt.hashes,
                tables=[prompt.block_ids],
            )
            self._views[prompt.request_id] = view
            self._scheduler.on_new_request(view, self._namespace, now_s, may_load=False)
        view = self._views[prompt.request_id]
        scheduled = [Scheduled(view, prompt.num_computed, STEP_TOKENS, is_admission)]
        for other in decoding:
            if self._scheduler.is_due(other.request_id, other.num_computed + 1):
                view = self._views[other.request_id]
                scheduled.append(Scheduled(view, other.num_computed, 1, is_admission=False))
        self._worker.take_over(self._scheduler.step(StepEvents((), scheduled), now_s).plan)
        self._worker.fence()

    def end(self, prompt: Prompt) -> None:
        """See :class:`Side`."""
        self._scheduler.on_finished(prompt.request_id)
        self._views.pop(prompt.request_id, None)

    def settle(self) -> None:
        """See :class:`Side`."""
        self._worker.poll()
        report = self._worker.take_report()
        if report is not None:
            self._scheduler.on_report(report, time.monotonic())

    def close(self) -> None:
        """End the worker, which closes the store."""
        self._worker.close()
        self._blocks.close()


# ------------------------------------------------------------------------------ vLLM's own


class InTreeSide:
    """The sending thread of vLLM's MooncakeStoreConnector on the pool at ``master``."""

    def __init__(self, master: str) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import data, worker
        from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator import (
            MooncakeStoreCoordinator,
        )

        self._data = data
        self._caches = kv_caches()
        self._native, how = native_client(master, self._caches)
        self.stored = Stored()
        client = WatchedClient(self._native, self._note)
        metadata = data.KeyMetadata("model", tp_rank=0, pcp_rank=0, dcp_rank=0, pp_rank=0)
        database = data.ChunkedTokenDatabase(metadata, BLOCK)
        database.store_layout.register_kv_caches(list(self._caches.values()), NUM_BLOCKS)
        ready = threading.Event()
        self._thread = worker.KVCacheStoreSendingThread(
            client,
            MooncakeStoreCoordinator(kv_cache_config().kv_cache_groups, BLOCK, BLOCK),
            [database],
            BLOCK,
            0,
            [1],
            "kv_both",
            ready,
            replicate_config=how,
        )
        self.num_back_offs = 0
        should_skip = self._thread._should_skip_request  # noqa: SLF001 - nothing else tells it

        def note_skip(request_id: str) -> bool:
            skips: bool = should_skip(request_id)
            self.num_back_offs += skips
            return skips

        self._thread._should_skip_request = note_skip  # noqa: SLF001
        self._thread.start()
        assert ready.wait(10)
        self._next_job_id = 0
        self._open: set[int] = set()
        self._ended: set[str] = set()

    def _note(self, key: str, num_bytes: int, code: int) -> None:
        self.stored.note(key, num_bytes, is_stored=code == 0, is_refused=code == NO_SPACE)

    @property
    def num_open_jobs(self) -> int:
        """Jobs that have not ended."""
        return len(self._open)

    def save(self, prompt: Prompt, decoding: Sequence[Prompt]) -> None:  # noqa: ARG002 - default
        """See :class:`Side`."""
        computed = prompt.num_computed + STEP_TOKENS
        num_blocks = computed // BLOCK
        self._next_job_id += 1
        self._open.add(self._next_job_id)
        self._thread.add_request(
            self._data.ReqMeta(
                req_id=prompt.request_id,
                token_len_chunk=computed,
                block_ids=(prompt.block_ids[:num_blocks],),
                block_hashes=prompt.hashes[:num_blocks],
                can_save=True,
                prefill_end_tokens=PROMPT_TOKENS,
                store_job_id=self._next_job_id,
                completed_token_len=computed,
            )
        )

    def end(self, prompt: Prompt) -> None:
        """See :class:`Side`."""
        self._ended.add(prompt.request_id)

    def settle(self) -> None:
        """Release ended jobs, and forget requests whose jobs have drained."""
        self._open.difference_update(self._thread.take_completed_saves())
        for request_id in list(self._ended):
            if not self._thread.stored_requests.get(request_id):
                self._thread.delete_finished_stored_request(request_id)
                self._ended.discard(request_id)

    def close(self) -> None:
        """End the connection; the thread, which has no end, waits for ever."""
        assert not self._open, "a native call after the close would crash the process"
        self._native.close()
