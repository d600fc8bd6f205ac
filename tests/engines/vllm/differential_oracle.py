"""vLLM's own answers: its engine's hit search and its store connector's masks, on a set of keys."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from functools import cache
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator import (
    ExternalCachedBlockPool,
    MooncakeStoreCoordinator,
)
from vllm.v1.core import kv_cache_coordinator as engine
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

from kvtide.core.coordinator import Coordinator
from kvtide.core.groups import ChunkedLocal, FullAttention, Group, Mamba, SlidingWindow
from tests.engines.vllm.configs import attention_spec
from tests.engines.vllm.differential_cases import HASHES, Case, GroupCase

MAX_MODEL_LEN = 1 << 20


@cache
def spec_of(group: GroupCase) -> Any:
    """Return vLLM's spec of a group."""
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    match group.kind:
        case "full":
            return attention_spec(block_size=group.block_size)
        case "mla":
            return attention_spec("MLAAttentionSpec", block_size=group.block_size)
        case "window":
            return attention_spec(
                "SlidingWindowSpec", block_size=group.block_size, sliding_window=group.reach
            )
        case "window mla":
            return attention_spec(
                "SlidingWindowMLASpec", block_size=group.block_size, sliding_window=group.reach
            )
        case "local":
            return attention_spec(
                "ChunkedLocalAttentionSpec",
                block_size=group.block_size,
                attention_chunk_size=group.reach,
            )
        case "state":
            return MambaSpec(
                block_size=group.block_size,
                shapes=((4, 4),),
                dtypes=(torch.float32,),
                mamba_cache_mode="align",
            )
    raise ValueError(group.kind)


def group_of(group: GroupCase, proof_tokens: int) -> Group:
    """Return kvtide's group."""
    size, reach = group.block_size, group.reach
    match group.kind:
        case "full" | "mla":
            return FullAttention(size, proof_tokens=proof_tokens)
        case "window" | "window mla":
            return SlidingWindow(size, reach, proof_tokens=proof_tokens)
        case "local":
            return ChunkedLocal(size, reach, proof_tokens=proof_tokens)
    return Mamba(size, proof_tokens=proof_tokens)


class Oracle:
    """vLLM's engine and its store connector, for one case's groups.

    ``uses_partial_hits`` and ``proof_tokens`` are decided by vLLM's own code.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.hashes = HASHES[: case.num_hashes]
        specs = [spec_of(group) for group in case.groups]
        groups = [
            KVCacheGroupSpec([f"layer.{number}"], spec, is_eagle_group=group.is_eagle)
            for number, (group, spec) in enumerate(zip(case.groups, specs, strict=True))
        ]
        self.engine = self._engine(groups)
        self.uses_partial_hits = bool(self.engine.enable_partial_hash_hits)
        self.store = MooncakeStoreCoordinator(
            groups,
            case.lcm_block_size,
            case.hash_block_size,
            use_eagle=case.use_eagle,
            retention_interval=case.retention_interval,
            enable_partial_hash_hits=self.uses_partial_hits,
        )
        margins = self.store.eagle_proof_margin_by_group
        self.proof_tokens = tuple(margins.get(number, 0) for number in range(len(groups)))

    def _engine(self, groups: list[KVCacheGroupSpec]) -> Any:
        case = self.case
        config = KVCacheConfig(
            num_blocks=2,
            kv_cache_tensors=[],
            kv_cache_groups=groups,
            prefix_cache_retention_interval=case.retention_interval,
        )
        return engine.get_kv_cache_coordinator(
            config,
            max_model_len=MAX_MODEL_LEN,
            max_in_flight_tokens=MAX_MODEL_LEN,
            use_eagle=case.use_eagle,
            enable_caching=True,
            enable_kv_cache_events=False,
            dcp_world_size=1,
            pcp_world_size=1,
            scheduler_block_size=case.lcm_block_size,
            hash_block_size=case.hash_block_size,
        )

    def coordinator(self) -> Coordinator:
        """Return kvtide's coordinator for the same groups, with vLLM's rules for proofs."""
        groups = tuple(
            group_of(group, proof)
            for group, proof in zip(self.case.groups, self.proof_tokens, strict=True)
        )
        return Coordinator(
            groups,
            self.case.hash_block_size,
            partial_hits=self.uses_partial_hits,
            retention_interval=self.case.retention_interval,
        )

    def hit(self, present: AbstractSet[tuple[int, int]]) -> int:
        """Return the engine's longest hit of the case's request over the keys ``present``."""
        pool = self._pool(present)
        self.engine.block_pool = pool
        for manager in self.engine.single_type_managers:
            manager.block_pool = pool
        _, hit, *_ = self.engine.find_longest_cache_hit(
            self.hashes, max(0, self.case.num_tokens - 1)
        )
        return int(hit)

    def store_hit(self, present: AbstractSet[tuple[int, int]]) -> int:
        """Return the store connector's longest hit, which mirrors the engine's."""
        longest = self.store.align_lookup_length(max(0, self.case.num_tokens - 1))
        return self.store.find_longest_cache_hit(self.hashes, longest, self._pool(present))[1]

    def window_hit(
        self, number: int, max_length: int, present: AbstractSet[tuple[int, int]]
    ) -> int:
        """Return what the manager of a draft model's window finds in ``max_length`` tokens."""
        manager = self.engine.single_type_managers[number]
        _, hit = type(manager).find_longest_cache_hit(
            self.hashes,
            max_length,
            [number],
            self._pool(present),
            manager.kv_cache_spec,
            drop_eagle_block=True,
            alignment_tokens=manager.cache_hit_alignment_tokens,
        )
        return int(hit)

    def _pool(self, present: AbstractSet[tuple[int, int]]) -> ExternalCachedBlockPool:
        keys = {(number, self.hashes[index]) for number, index in present}
        return ExternalCachedBlockPool(self.case.hash_block_size, keys)

    def load_mask(self, hit: int) -> list[list[int]]:
        """Return per group the chunks that the store connector loads for a hit."""
        masks = self.store.load_mask(self.hashes, hit)
        return [[chunk for chunk, wanted in enumerate(mask) if wanted] for mask in masks]

    def store_mask(
        self, aligned_token_len: int, start_token: int, num_prompt_tokens: int | None
    ) -> list[list[bool] | None]:
        """Return per group what the managers keep of a range; state groups are not left out."""
        return list(
            self.store._reachable_masks(
                aligned_token_len,
                start_token,
                retention_interval=self.store.retention_interval,
                num_prompt_tokens=num_prompt_tokens,
            )
        )
