"""vLLM's own Mooncake connector, as far as it runs without a store and without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator import (
    MooncakeStoreCoordinator,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import (
    KeyMetadata,
    MooncakeLookupResult,
    RankLocalStoreLayout,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import MooncakeStoreWorker
from vllm.v1.kv_cache_interface import group_kernel_blocks

from kvtide.core.topology import ParallelSizes

METADATA = KeyMetadata("model", tp_rank=0, pcp_rank=0, dcp_rank=0, pp_rank=0)


def store_worker(
    groups: Sequence[Any],
    hash_block_size: int,
    *,
    metadata: KeyMetadata = METADATA,
    sizes: ParallelSizes | None = None,
    num_kv_heads: int = 1,
) -> MooncakeStoreWorker:
    """Return a worker that can name keys; it has neither a store nor threads."""
    worker = object.__new__(MooncakeStoreWorker)
    worker._kv_cache_groups = list(groups)
    worker._capacity_only = False
    worker.hash_block_size = hash_block_size
    sizes = sizes or ParallelSizes()
    worker.tp_rank, worker.tp_size = metadata.tp_rank, sizes.tp_size
    worker.pcp_size = sizes.pcp_size
    worker.dcp_size, worker.pp_size = sizes.dcp_size, sizes.pp_size
    worker.num_kv_head = num_kv_heads
    worker._group_tp_replication_factors = worker._compute_group_tp_replication_factors()
    worker.token_dbs = worker._build_token_databases(metadata, None)
    worker._init_lookup_key_prefixes()
    return worker


def rank_local_layout(kv_caches: dict[str, Any], num_blocks: int) -> RankLocalStoreLayout:
    """Return the connector's layout of a rank's blocks, for all layers of ``kv_caches``."""
    layout = RankLocalStoreLayout(METADATA, 32, 32)
    firsts = [cache[0] if isinstance(cache, list) else cache for cache in kv_caches.values()]
    blocks = [group_kernel_blocks(cache, num_blocks) for cache in firsts]
    layout.register_kv_caches(blocks, num_blocks)
    return layout


class InTreeLookup:
    """The connector's own lookup over a set of keys, and which of them it then loads."""

    def __init__(self, coordinator: MooncakeStoreCoordinator, keys: AbstractSet[str]) -> None:
        self._worker = store_worker(coordinator.kv_cache_groups, coordinator.hash_block_size)
        self._worker.coord = coordinator
        self._worker.store = self
        self._worker._record_kv_connector_operation = lambda *_, **__: None
        self._keys = keys

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """Answer as Mooncake's client does."""
        return [int(key in self._keys) for key in keys]

    def lookup(self, num_tokens: int, hashes: Sequence[bytes]) -> MooncakeLookupResult:
        """Return what is found of a request of ``num_tokens`` tokens."""
        return self._worker.lookup(num_tokens, hashes)

    def keys_to_load(self, result: MooncakeLookupResult, hashes: Sequence[bytes]) -> list[str]:
        """Return the keys that its receiving thread asks for, by that thread's own steps."""
        hit = result.hit_length
        tails = {tail.group_id: tail.num_tokens for tail in result.tail_key_boundaries}
        masks = self._worker.coord.load_mask(hashes, hit)
        keys = []
        for group_id, database in enumerate(self._worker.token_dbs):
            mask = masks[group_id]
            for start, end, block_hash in database.process_tokens(hit, hashes):
                chunk = start // database.block_size
                if chunk < len(mask) and mask[chunk]:
                    if end == hit and group_id in tails:
                        name = tails[group_id] // database.hash_block_size - 1
                        block_hash = hashes[name]  # noqa: PLW2901
                    keys.append(database.key_for(block_hash))
        return keys
