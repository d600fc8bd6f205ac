"""vLLM's own scheduler and cache manager, with both halves of kvtide, and a model that is a hash.

What a token's KV cache holds is a digest of all tokens up to it; a state is a digest of all tokens
before it. So whatever vLLM makes the runner read can be compared with what must be there, for group
kinds that no kernel of this machine can compute as well.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from tests.engines.vllm.configs import engine_config

PAGE_BYTES = 1024
GARBAGE = 0xEE


def digests(tokens: Sequence[int]) -> list[bytes]:
    """Return one digest per token, of all tokens up to it."""
    chain: list[bytes] = []
    last = b""
    for token in tokens:
        last = blake2b(last + token.to_bytes(4, "little"), digest_size=32).digest()
        chain.append(last)
    return chain


def attention(kind: str, block_size: int, **fields: Any) -> Any:
    """Return an attention spec whose block takes a page."""
    import torch
    from vllm.v1 import kv_cache_interface as interface

    return getattr(interface, kind)(
        block_size=block_size,
        num_kv_heads=1,
        head_size=PAGE_BYTES // block_size // 2,
        dtype=torch.int8,
        **fields,
    )


def state(block_size: int, mamba_type: str = "MAMBA1", **fields: Any) -> Any:
    """Return the spec of a state group in mode ``align`` whose state takes most of a page."""
    import torch
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.kv_cache_interface import MambaSpec

    return MambaSpec(
        block_size=block_size,
        shapes=((3, 64), (8, 64)),
        dtypes=(torch.int8, torch.int8),
        page_size_padded=PAGE_BYTES,
        mamba_type=MambaAttentionBackendEnum[mamba_type],
        mamba_cache_mode="align",
        **fields,
    )


def is_state(spec: Any) -> bool:
    """Tell whether a spec is that of states."""
    return type(spec).__name__ == "MambaSpec"


@dataclass
class Setup:
    """What an engine is made of: one spec per group, and vLLM's settings."""

    specs: Sequence[Any]
    num_blocks: int = 400
    hash_unit: int | None = None
    retention_interval: int | None = None
    draft_groups: frozenset[int] = frozenset()
    """Groups of an EAGLE draft model: a token's KV cache there knows the next token."""
    max_num_batched_tokens: int = 128
    options: dict[str, Any] = field(default_factory=dict)


class ModelledEngine:
    """One engine; use :func:`modelled_engine` to open it."""

    def __init__(self, folder: Path, store: str, setup: Setup) -> None:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import (
            get_request_block_hasher,
            init_none_hash,
            resolve_kv_cache_block_sizes,
        )
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        self.setup = setup
        self.config = self._vllm_config(folder, store)
        self.kv_cache_config = self._kv_cache_config()
        block_size, hash_size = resolve_kv_cache_block_sizes(self.kv_cache_config, self.config)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(hash_size, sha256)
        self.scheduler = Scheduler(
            self.config,
            self.kv_cache_config,
            StructuredOutputManager(self.config),
            block_size,
            hash_block_size=hash_size,
            log_stats=False,
        )
        self._resolve(block_size, hash_size)
        self.memory = np.full((setup.num_blocks, PAGE_BYTES), GARBAGE, dtype=np.uint8)
        self.worker = KVConnectorFactory.create_connector(
            self.config, KVConnectorRole.WORKER, self.kv_cache_config
        )
        self.worker.register_kv_caches(self._tensors())
        self.connector.set_xfer_handshake_metadata_pp_aware(
            {(0, 0): self.worker.get_handshake_metadata()}
        )
        self.outputs: dict[str, list[int]] = {}
        self.plans: list[Any] = []
        """The plans of all steps, as the workers got them."""
        self.num_checked = 0
        """How many tokens' bytes, and states, were compared."""
        self.num_preemptions = 0
        self.worked = False

    # ------------------------------------------------------------------ what vLLM is given

    def _vllm_config(self, folder: Path, store: str) -> Any:
        draft: dict[str, Any] = {}
        if self.setup.draft_groups:
            method = {"method": "eagle", "model": str(folder), "num_speculative_tokens": 1}
            draft["speculative_config"] = method
        config = engine_config(
            folder,
            **draft,
            block_size=max(spec.block_size for spec in self.setup.specs),
            max_num_batched_tokens=self.setup.max_num_batched_tokens,
            max_num_seqs=8,
            enable_prefix_caching=True,
            async_scheduling=False,
            kv_transfer_config={
                "kv_connector": "KVTideConnector",
                "kv_connector_module_path": "kvtide.engines.vllm",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "store": store,
                    "weights_version": "modelled",
                    "lookup_wait_ms": 10000,
                    "lookup_timeout_ms": 10000,
                    "staging_size": "16MiB",
                    **self.setup.options,
                },
            },
        )
        config.cache_config.num_gpu_blocks = self.setup.num_blocks
        config.cache_config.mamba_cache_mode = "align"
        config.cache_config.prefix_match_unit = self.setup.hash_unit
        return config

    def _kv_cache_config(self) -> Any:
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

        groups, tensors = [], []
        for number, spec in enumerate(self.setup.specs):
            name = f"model.layers.{number}.attn"
            is_draft = number in self.setup.draft_groups
            groups.append(KVCacheGroupSpec([name], spec, is_eagle_group=is_draft))
            tensors.append(
                KVCacheTensor(
                    size=PAGE_BYTES * self.setup.num_blocks,
                    layers=[name],
                    layer_stride=PAGE_BYTES * self.setup.num_blocks,
                    block_stride=PAGE_BYTES,
                )
            )
        return KVCacheConfig(
            num_blocks=self.setup.num_blocks,
            kv_cache_tensors=tensors,
            kv_cache_groups=groups,
            prefix_cache_retention_interval=self.setup.retention_interval,
            **self._resolved_sizes(groups),
        )

    def _resolved_sizes(self, groups: Sequence[Any]) -> dict[str, int]:
        """Return what vLLM's engine core resolves before it makes a scheduler."""
        from math import gcd, lcm

        from vllm.v1.core.kv_cache_utils import partial_hash_hits_enabled
        from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

        sizes = [spec.block_size for spec in self.setup.specs]
        unit = self.setup.hash_unit or (gcd(*sizes) if len(sizes) > 1 else sizes[0])
        managers = [KVCacheSpecRegistry.get_manager_class(spec) for spec in self.setup.specs]
        is_partial = len(groups) > 1 and partial_hash_hits_enabled(groups, unit, 1, managers)
        return {
            "hash_block_size": unit,
            "cache_hit_alignment_tokens": unit if is_partial else lcm(*sizes),
        }

    def _resolve(self, block_size: int, hash_size: int) -> None:
        """Check that the scheduler sees the sizes that the configuration tells."""
        assert self.kv_cache_config.hash_block_size == hash_size
        coordinator = self.scheduler.kv_cache_manager.coordinator
        is_partial = coordinator.enable_partial_hash_hits
        alignment = hash_size if is_partial else block_size
        assert self.kv_cache_config.cache_hit_alignment_tokens == alignment

    def _tensors(self) -> dict[str, Any]:
        """Return one tensor per group; all lie in the same pages, as vLLM's do."""
        import torch

        whole = torch.from_numpy(self.memory).view(torch.int8)
        tensors = {}
        for number, spec in enumerate(self.setup.specs):
            if is_state(spec):
                size = spec.state_content_size_bytes
                tensor = whole.as_strided((len(whole), 1, 1, size), (PAGE_BYTES, size, size, 1))
            else:
                width = PAGE_BYTES // spec.block_size
                shape = (len(whole), 1, spec.block_size, width)
                tensor = whole.as_strided(shape, (PAGE_BYTES, PAGE_BYTES, width, 1))
            tensors[f"model.layers.{number}.attn"] = tensor
        return tensors

    # ------------------------------------------------------------------ requests

    @property
    def connector(self) -> Any:
        """The scheduler's connector."""
        return self.scheduler.connector

    @property
    def pool(self) -> Any:
        """The core's scheduler."""
        return self.connector._scheduler_side._scheduler

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int = 4) -> None:
        """Give the scheduler a request."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        params.update_from_generation_config({}, 2)
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=params,
            pooling_params=None,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)

    def abort(self, request_id: str) -> None:
        """End a request now."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def run(self, timeout_s: float = 60.0) -> None:
        """Step until every request has ended and no job holds a block."""
        give_up_s = time.monotonic() + timeout_s
        while self.scheduler.has_requests() or self.connector.has_pending_push_work():
            self.step()
            assert time.monotonic() < give_up_s, f"not idle: {self.pool!r}"
            if not self.worked:
                time.sleep(0.001)

    def settle(self, timeout_s: float = 20.0) -> None:
        """Step until every job has ended."""
        give_up_s = time.monotonic() + timeout_s
        while self.pool.num_open_jobs:
            self.step()
            time.sleep(0.001)
            assert time.monotonic() < give_up_s, f"jobs stay open: {self.pool!r}"

    def step(self) -> None:
        """Schedule, run the hashing model, and report."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        output = self.scheduler.schedule()
        self.num_preemptions += len(output.preempted_req_ids or ())
        self.worked = bool(output.num_scheduled_tokens)
        self.worker.bind_connector_metadata(output.kv_connector_metadata)
        self.plans.append(output.kv_connector_metadata.plan)
        self._poison()
        for block_id in output.new_block_ids_to_zero or ():
            self.memory[block_id] = 0
        for copy in output.kv_cache_block_copies or ():
            self.memory[copy.dst_block_id] = self.memory[copy.src_block_id]
        sampled = self._forward(list(_work(output)))
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        results = self.worker.get_transfer_results(output.finished_req_ids)
        connector_output = KVConnectorOutput(
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )
        self.worker.clear_connector_metadata()
        request_ids = list(sampled)
        runner_output = ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(request_ids)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=connector_output,
        )
        requests = dict(self.scheduler.requests)
        self.scheduler.update_from_output(output, runner_output)
        for request_id, request in requests.items():
            if request.is_finished():
                self.outputs[request_id] = list(request.output_token_ids)

    def _poison(self) -> None:
        """Overwrite every block that nobody holds and no prefix names."""
        for block in self.scheduler.kv_cache_manager.block_pool.blocks:
            if block.ref_cnt == 0 and block.block_hash is None and not block.is_null:
                self.memory[block.block_id] = GARBAGE

    # ------------------------------------------------------------------ the model

    def _forward(self, work: Sequence[tuple[str, int, int]]) -> dict[str, list[int]]:
        """Compute a step's tokens and return what is sampled.

        As in a layer's forward pass all tokens are written before any is read: vLLM lets a request
        share a block that another one fills in the same step. States are never shared so.
        """
        sampled: dict[str, list[int]] = {}
        chains = {name: self._chain(name) for name, _, _ in work}
        for name, start, count in work:
            for number, spec, table in self._tables(name):
                if not is_state(spec):
                    self._write_tokens(number, spec, table, chains[name], start, start + count)
        for name, start, _ in work:
            for number, spec, table in self._tables(name):
                self._check(number, spec, table, chains[name], start)
        for name, start, count in work:
            chain = chains[name]
            for number, spec, table in self._tables(name):
                if is_state(spec):
                    self._write_state(number, spec, table, chain, start + count)
            # The chain knows one token more than there is: the one that is sampled now.
            sampled[name] = [_next_token(chain[-2])] if start + count == len(chain) - 1 else []
        return sampled

    def _chain(self, request_id: str) -> list[bytes]:
        """Return the digests of a request's tokens and of the one that follows."""
        tokens = list(self.scheduler.requests[request_id].all_token_ids)
        chain = digests(tokens)
        return digests([*tokens, _next_token(chain[-1])])

    def _content(self, number: int, chain: Sequence[bytes], token: int, size: int) -> bytes:
        """Return what a group of attention holds for a token."""
        known = token + (number in self.setup.draft_groups)
        return _bytes(chain[known], number, size)

    def _tables(self, request_id: str) -> list[tuple[int, Any, Sequence[int]]]:
        """Return the number, the spec and a request's block table of each group."""
        tables = self.scheduler.kv_cache_manager.get_block_ids(request_id)
        return [(i, *pair) for i, pair in enumerate(zip(self.setup.specs, tables, strict=True))]

    def _write_tokens(
        self,
        number: int,
        spec: Any,
        table: Sequence[int],
        chain: Sequence[bytes],
        start: int,
        end: int,
    ) -> None:
        for token in range(start, end):
            slot = self._slot(spec, table, token)
            slot[:] = np.frombuffer(self._content(number, chain, token, len(slot)), np.uint8)

    def _check(
        self, number: int, spec: Any, table: Sequence[int], chain: Sequence[bytes], start: int
    ) -> None:
        """Compare everything that computing from ``start`` reads with what must be there."""
        if not start:
            return
        if is_state(spec):
            block_id = table[(start - 1) // spec.block_size]
            size = spec.state_content_size_bytes
            found = self.memory[block_id, :size].tobytes()
            assert found == _bytes(chain[start - 1], number, size), (
                f"group {number}: block {block_id} does not hold the state after {start} tokens"
            )
            self.num_checked += 1
            return
        width = PAGE_BYTES // spec.block_size
        for token in range(_first_read(spec, start), start):
            assert table[token // spec.block_size], f"group {number} has no block for token {token}"
            found = self._slot(spec, table, token).tobytes()
            assert found == self._content(number, chain, token, width), (
                f"group {number}: token {token} of {start} reads wrong bytes"
            )
            self.num_checked += 1

    def _slot(self, spec: Any, table: Sequence[int], token: int) -> Any:
        width = PAGE_BYTES // spec.block_size
        low = token % spec.block_size * width
        return self.memory[table[token // spec.block_size], low : low + width]

    def _write_state(
        self, number: int, spec: Any, table: Sequence[int], chain: Sequence[bytes], end: int
    ) -> None:
        size = spec.state_content_size_bytes
        block_id = table[(end - 1) // spec.block_size]
        assert block_id, "a running state has no block"
        self.memory[block_id, :size] = np.frombuffer(
            _bytes(chain[end - 1], number, size), dtype=np.uint8
        )

    def close(self) -> None:
        """Stop both halves."""
        self.scheduler.shutdown()
        self.worker.shutdown()


def _bytes(digest: bytes, number: int, size: int) -> bytes:
    """Return what a group stores for a digest."""
    whole = blake2b(digest + bytes([number]), digest_size=32).digest()
    return (whole * (size // 32 + 1))[:size]


def _next_token(digest: bytes) -> int:
    return digest[0] + 3


def _first_read(spec: Any, start: int) -> int:
    """Return the first token that the next one attends to."""
    window = getattr(spec, "sliding_window", None)
    chunk = getattr(spec, "attention_chunk_size", None)
    if window is not None:
        return max(0, start - (window - 1))
    return start // chunk * chunk if chunk is not None else 0


def _work(output: Any) -> Iterator[tuple[str, int, int]]:
    """Yield ``(request, computed before, scheduled)`` of a step."""
    counts = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens, counts[new.req_id]
    cached = output.scheduled_cached_reqs
    for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield request_id, computed, counts[request_id]


@contextmanager
def modelled_engine(folder: Path, store: str, setup: Setup) -> Iterator[ModelledEngine]:
    """Open an engine for a block, and wait at its end for what it saves."""
    from vllm.config import set_current_vllm_config

    engine = ModelledEngine(folder, store, setup)
    with set_current_vllm_config(engine.config):
        try:
            yield engine
            engine.settle()
        finally:
            engine.close()
