"""Keys in vLLM's format are those of its own Mooncake connector, byte for byte."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import data
from vllm.v1.kv_cache_interface import KVCacheGroupSpec

from kvtide.core.chunks import ChunkedTokenDatabase
from kvtide.core.keys import (
    BlockHashes,
    KeyMetadata,
    RankPlace,
    VllmPoolKey,
    vllm_namespace,
    vllm_rank_label,
)
from tests.engines.vllm.configs import attention_spec, state_spec
from tests.engines.vllm.in_tree import store_worker

NAMES = st.text(st.characters(codec="ascii", exclude_characters="/"), min_size=1, max_size=20)
RANKS = st.integers(0, 300)
PLACES = st.builds(RankPlace, RANKS, RANKS, RANKS, RANKS)


@given(NAMES, st.just("") | NAMES, PLACES, st.integers(0, 20), st.binary(min_size=1, max_size=32))
def test_a_key_is_the_in_tree_connectors(
    model: str, cache_prefix: str, place: RankPlace, group_id: int, block_hash: bytes
) -> None:
    """For any model, prefix of the operator's, rank, group and hash."""
    theirs = data.KeyMetadata(model, *place, group_id=group_id, cache_prefix=cache_prefix)
    database = ChunkedTokenDatabase.for_group(
        KeyMetadata(vllm_namespace(cache_prefix, f"/models/{model}"), 0, group_id),
        block_size=32,
        hash_block_size=32,
        keys=VllmPoolKey((place,)),
    )
    assert database.prefix == data.PoolKey.build_prefix(theirs)
    assert database.key_for(block_hash) == data.PoolKey(theirs, block_hash.hex()).to_string()


@given(st.integers(1, 5), st.integers(0, 40), st.integers(0, 40))
def test_a_chunk_is_named_by_the_same_hash(ratio: int, num_chunks: int, first: int) -> None:
    """The last one inside it, where its block is several hashes long."""
    group = KVCacheGroupSpec(["layer"], attention_spec(block_size=16 * ratio))
    hashes = [hashlib.sha256(bytes([i])).digest() for i in range(num_chunks * ratio)]
    [theirs] = store_worker([group], 16).token_dbs
    ours = ChunkedTokenDatabase.for_group(
        KeyMetadata("model", 0, 0),
        block_size=16 * ratio,
        hash_block_size=16,
        keys=VllmPoolKey(),
    )
    chunks = range(min(first, num_chunks), num_chunks)
    expected = [
        theirs.key_for(block_hash)
        for _, _, block_hash in theirs.process_tokens(
            16 * ratio * num_chunks, hashes, mask_num=16 * ratio * chunks.start
        )
    ]
    assert ours.keys(BlockHashes.pack(hashes), chunks) == expected


def test_ranks_that_hold_the_same_bytes_share_the_in_tree_connectors_name() -> None:
    """Eight ranks: two heads are held by four of them each, a latent cache by all, a state by one.

    kvtide runs on one rank for now; the rule is here for when it runs on more.
    """
    specs = [attention_spec(), attention_spec("MLAAttentionSpec"), state_spec()]
    groups = [KVCacheGroupSpec([f"layer.{n}"], spec) for n, spec in enumerate(specs)]
    for tp_rank in range(8):
        metadata = data.KeyMetadata("model", tp_rank, 0, 0, 0)
        worker = store_worker(groups, 32, metadata=metadata, tp_size=8, num_kv_heads=2)
        for database, num_replicas in zip(worker.token_dbs, (4, 8, 1), strict=True):
            label = vllm_rank_label(RankPlace(tp_rank=tp_rank), num_replicas)
            group_id = database.metadata.group_id
            assert f"model{label}@group:{group_id}" == data.PoolKey.build_prefix(database.metadata)
