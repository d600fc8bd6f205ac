"""Keys in vLLM's format are those of its own Mooncake connector, byte for byte."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import data
from vllm.v1.kv_cache_interface import KVCacheGroupSpec

from kvtide.config import PoolConfig
from kvtide.core.chunks import ChunkedTokenDatabase
from kvtide.core.keys import (
    BlockHashes,
    KeyMetadata,
    VllmPoolKey,
    vllm_namespace,
)
from kvtide.core.topology import WHOLE, ParallelSizes, Part, StoreShare
from kvtide.engines.vllm.ranks import plan_ranks
from tests.engines.vllm.configs import attention_spec, engine_of, state_spec
from tests.engines.vllm.in_tree import store_worker

NAMES = st.text(st.characters(codec="ascii", exclude_characters="/"), min_size=1, max_size=20)
RANKS = st.integers(0, 300)
PARTS = st.builds(Part, RANKS, RANKS, RANKS)


@given(
    NAMES,
    st.just("") | NAMES,
    PARTS,
    st.integers(1, 8),
    st.integers(0, 20),
    st.binary(min_size=1, max_size=32),
)
def test_a_key_is_the_in_tree_connectors(
    model: str, cache_prefix: str, part: Part, dcp_size: int, group_id: int, block_hash: bytes
) -> None:
    """For any model, prefix of the operator's, rank, group and hash."""
    theirs = data.KeyMetadata(
        model,
        tp_rank=part.shard_id,
        pcp_rank=0,
        dcp_rank=part.shard_id % dcp_size,
        pp_rank=part.pp_rank,
        group_id=group_id,
        cache_prefix=cache_prefix,
    )
    database = ChunkedTokenDatabase.for_group(
        KeyMetadata(vllm_namespace(cache_prefix, f"/models/{model}"), part, group_id),
        block_size=32,
        hash_block_size=32,
        keys=VllmPoolKey(dcp_size),
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
        KeyMetadata("model", WHOLE, 0),
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


SPECS = {
    "attention": lambda tp_size: attention_spec(num_kv_heads=max(1, 2 // tp_size)),
    "latent": lambda _: attention_spec("MLAAttentionSpec"),
    "state": lambda _: state_spec(),
}


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize(
    "tp_size,pp_size,dcp_size",
    [(1, 1, 1), (2, 1, 1), (8, 1, 1), (1, 2, 1), (4, 2, 1), (8, 1, 2), (4, 2, 4)],
)
def test_ranks_store_and_look_up_under_the_in_tree_connectors_keys(
    kind: str, tp_size: int, pp_size: int, dcp_size: int
) -> None:
    """Of two heads, a latent cache and a state: the same keys, stored by the same ranks."""
    sizes = ParallelSizes(tp_size, pp_size, 1, dcp_size)
    groups = [KVCacheGroupSpec([f"layer.{n}"], SPECS[kind](tp_size)) for n in range(2)]
    config = SimpleNamespace(kv_cache_groups=groups)
    ranks = plan_ranks(
        PoolConfig(key_format="vllm"), (0, 1), config, engine_of(sizes, total_kv_heads=2)
    )
    keys = VllmPoolKey(dcp_size)
    lookup_prefixes: list[set[str]] = []
    for rank in range(sizes.num_ranks):
        place = sizes.place(rank)
        theirs = store_worker(
            groups,
            32,
            metadata=data.KeyMetadata(
                "model", place.tp_rank, place.pcp_rank, place.dcp_rank, place.pp_rank
            ),
            sizes=sizes,
            num_kv_heads=2,
        )
        role = ranks.topology.role(rank)
        for group_id, database in enumerate(theirs.token_dbs):
            [part] = role.parts[group_id]
            prefix = keys.build_prefix(KeyMetadata("model", part, group_id))
            assert prefix == data.PoolKey.build_prefix(database.metadata)
            put_step = theirs.group_tp_replication_factors[group_id]
            assert role.shares[group_id] == StoreShare(
                put_step, (place.tp_rank + group_id) % put_step
            )
        lookup_prefixes = [set(prefixes) for prefixes in theirs._lookup_key_prefixes]
    for group_id, prefixes in enumerate(lookup_prefixes):
        parts = ranks.topology.parts(group_id)
        assert prefixes == {
            keys.build_prefix(KeyMetadata("model", part, group_id)) for part in parts
        }
