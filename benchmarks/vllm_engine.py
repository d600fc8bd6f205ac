"""vLLM's own objects around a step: requests, their hashes, the cache manager, scheduler outputs.

A :class:`HeldEngine` holds requests of one length with all their blocks, and tells of steps that
lead there, as vLLM's scheduler does. Beside them other requests take blocks and left cached ones
behind, so that the pool is filled alike whatever the length.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import CachedRequestData, KVConnectorBlockState, SchedulerOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.request import Request

BLOCK = 16
STEP_TOKENS = 2048
LAYERS = 32
LAYER_BYTES = 1 << 10
"""Of one block in one layer: 16 tokens of one head of 16 elements of 2 bytes, keys and values."""
VALUE_BYTES = LAYERS * LAYER_BYTES


def kv_caches(num_blocks: int) -> dict[str, torch.Tensor]:
    """Return a KV cache as vLLM lays it out on CPUs: (blocks, heads, tokens, keys and values)."""
    width = LAYER_BYTES // 2 // BLOCK
    memory = torch.ones((LAYERS, num_blocks, 1, BLOCK, width), dtype=torch.bfloat16)
    return {f"layer.{layer}": cache for layer, cache in enumerate(memory)}


def kv_cache_config(num_blocks: int) -> KVCacheConfig:
    """Return vLLM's plan of a cache of one group of full attention, layer by layer."""
    width = LAYER_BYTES // 4 // BLOCK
    spec = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=width, dtype=torch.bfloat16
    )
    assert spec.page_size_bytes == LAYER_BYTES
    names = [f"layer.{layer}" for layer in range(LAYERS)]
    tensor = KVCacheTensor(
        size=VALUE_BYTES * num_blocks,
        layers=names,
        layer_stride=LAYER_BYTES * num_blocks,
        block_stride=LAYER_BYTES,
    )
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[tensor],
        kv_cache_groups=[KVCacheGroupSpec(names, spec)],
    )


class HeldRequest(Request):
    """A request of which a step may know the first ``num_known`` tokens only."""

    num_known: int | None = None

    @property
    def num_tokens(self) -> int:
        """How many tokens are known."""
        return len(self._all_token_ids) if self.num_known is None else self.num_known


class HeldEngine:
    """Holds ``num_requests`` requests of ``num_tokens`` tokens; ``num_blocks`` is the whole pool.

    Of the pool all but an eighth is taken or was: other requests take what these leave of half of
    it, and three eighths are free blocks that still hold cached prefixes.
    """

    def __init__(self, num_tokens: int, num_blocks: int, num_requests: int = 1) -> None:
        init_none_hash(sha256)
        self.config = kv_cache_config(num_blocks)
        self.num_tokens = num_tokens
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self.manager = KVCacheManager(
            self.config,
            max_model_len=num_blocks * BLOCK,
            scheduler_block_size=BLOCK,
            hash_block_size=BLOCK,
        )
        self.manager.free(self._admit("gone", num_blocks * 3 // 8 * BLOCK))
        left = num_blocks // 2 * BLOCK - num_tokens * num_requests
        assert left >= 0, "the requests take more than half of the pool"
        if left:
            self._admit("other", left)
        self.requests = [self._admit(f"r{n}", num_tokens) for n in range(num_requests)]

    def _admit(self, request_id: str, num_tokens: int) -> HeldRequest:
        generator = random.Random(request_id)  # noqa: S311 - no secrets
        request = HeldRequest(
            request_id=request_id,
            prompt_token_ids=[generator.randrange(32_000) for _ in range(num_tokens)],
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        for start in range(0, num_tokens, STEP_TOKENS):
            chunk = min(STEP_TOKENS, num_tokens - start)
            assert self.manager.allocate_slots(request, chunk) is not None
            request.num_computed_tokens += chunk
        return request

    @contextmanager
    def known(self, num_tokens: int) -> Iterator[None]:
        """Let the requests have so many tokens: what comes after them they will have decoded."""
        for request in self.requests:
            request.num_known = num_tokens
        yield
        for request in self.requests:
            request.num_known = None

    def admission(self, computed: int) -> SchedulerOutput:
        """Return the step that admits the requests at ``computed`` tokens, and computes nothing."""
        for request in self.requests:
            request.num_computed_tokens = computed
        ids = [request.request_id for request in self.requests]
        tables: list[tuple[list[int], ...] | None] = []
        for request_id in ids:
            [table] = self.manager.get_block_ids(request_id)
            tables.append((table[: -(-computed // BLOCK)],))
        return self._output(computed, 0, tables, resumed=set(ids))

    def step(self, computed: int, num_scheduled: int) -> SchedulerOutput:
        """Return the step that computes so many tokens of each request, on from ``computed``."""
        new = slice(-(-computed // BLOCK), -(-(computed + num_scheduled) // BLOCK))
        tables: list[tuple[list[int], ...] | None] = []
        for request in self.requests:
            [table] = self.manager.get_block_ids(request.request_id)
            tables.append((table[new],) if table[new] else None)
        return self._output(computed, num_scheduled, tables, resumed=set())

    def _output(
        self,
        computed: int,
        num_scheduled: int,
        tables: Sequence[tuple[list[int], ...] | None],
        resumed: set[str],
    ) -> SchedulerOutput:
        output = SchedulerOutput.make_empty()
        ids = [request.request_id for request in self.requests]
        output.scheduled_cached_reqs = CachedRequestData(
            req_ids=ids,
            resumed_req_ids=resumed,
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=list(tables),
            num_computed_tokens=[computed] * len(ids),
            num_output_tokens=[0] * len(ids),
        )
        output.num_scheduled_tokens = dict.fromkeys(ids, num_scheduled)
        output.total_num_scheduled_tokens = num_scheduled * len(ids)
        output.kv_connector_block_state = KVConnectorBlockState(
            req_ids=set(ids),
            resolve_block_ids=self.manager.get_block_ids,
            boundary_state_offloads={},
        )
        return output
