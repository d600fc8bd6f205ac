"""What must hold of a scripted engine at any time, and of a store that it has written to."""

from __future__ import annotations

from collections import Counter

from kvtide.core.keys import KeyMetadata, PoolKey
from kvtide.runtime.tags import TAG_BYTES, verify
from kvtide.stores.base import Status, Store
from kvtide.testing.engine import ScriptedEngine
from kvtide.testing.engine_model import TOKEN_BYTES
from kvtide.testing.engine_requests import EngineState
from kvtide.testing.values import Arena


def check_engine(engine: ScriptedEngine) -> None:
    """Check, between two steps, references, budgets and every byte that a request could read.

    Raises:
        AssertionError: something is wrong; the message says what.
    """
    engine.scheduler.check_integrity()
    num_pinned = engine.pinned.total()
    assert num_pinned == engine.scheduler.num_pinned_blocks, "pins were given back twice or never"
    assert num_pinned <= engine.setup.pin_budget, f"{num_pinned} blocks are pinned"
    references = Counter(engine.pinned)
    for request in engine.requests.values():
        references.update(request.held_blocks)
    for block_id, count in enumerate(engine.pool.ref_counts):
        assert references[block_id] == count, f"block {block_id}: {count} references"
    _check_cached_blocks(engine)
    _check_running_requests(engine)


def _check_cached_blocks(engine: ScriptedEngine) -> None:
    model = engine.model
    for block_id, (group_id, block_hash) in engine.pool.cached.items():
        for rank in engine.ranks.ranks:
            wanted = model.truth[model.weights, rank.rank, group_id, block_hash]
            content = rank.blocks.content(group_id, block_id)
            assert content == wanted, f"rank {rank.rank}: block {block_id} holds wrong KV"


def _check_running_requests(engine: ScriptedEngine) -> None:
    model = engine.model
    for request in engine.requests.values():
        if request.state is not EngineState.RUNNING:
            continue
        for rank in engine.ranks.ranks:
            for group_id, table in enumerate(request.tables):
                kv = rank.kv(group_id, table, request.num_computed)
                wanted = request.true.kv[model.seed_index(rank.rank, group_id)]
                assert kv == wanted[: len(kv)], f"{request!r} computed on wrong KV"


def check_idle(engine: ScriptedEngine) -> None:
    """Check that nothing is held, queued or under way once every request has ended.

    Raises:
        AssertionError: something is left; the message says what.
    """
    check_engine(engine)
    assert not engine.requests, f"requests are left: {engine.requests}"
    assert not engine.scheduler.has_pins, f"{engine.scheduler!r}"
    assert not engine.scheduler.num_open_jobs, f"{engine.scheduler!r}"
    assert not engine.scheduler.num_inquiries, f"{engine.scheduler!r}"
    assert not engine.scheduler.num_loads, f"{engine.scheduler!r}"
    assert not len(engine.lookups), f"{engine.lookups!r}"
    assert engine.pool.num_free == engine.pool.num_blocks - 1, f"{engine.pool!r}"
    for rank in engine.ranks.ranks:
        rank.worker.check_idle()


def check_store(engine: ScriptedEngine, store: Store) -> int:
    """Check every value under the engine's names against its tokens; return how many there are.

    ``store`` answers truthfully and without faults: the one below any wrapper that fails.

    Raises:
        AssertionError: a value is not what its key says.
    """
    setup = engine.setup
    entries = [
        (_key(namespace, rank, group_id, block_hash), content)
        for (weights, rank, group_id, block_hash), content in engine.model.truth.items()
        for namespace in engine.namespaces[weights]
    ]
    present = [
        entry
        for entry, there in zip(entries, store.exists([key for key, _ in entries]), strict=True)
        if there
    ]
    value_bytes = max(setup.block_sizes) * TOKEN_BYTES + TAG_BYTES
    arena = Arena(store, max(1, len(present)) * value_bytes)
    answers = arena.get([(key, len(content) + TAG_BYTES) for key, content in present])
    for (key, content), (status, value) in zip(present, answers, strict=True):
        assert status is Status.OK, f"{key}: {status}"
        assert value[: len(content)] == content, f"{key} names other bytes"
        assert verify(memoryview(value), key, len(content)), f"{key} has a wrong tag"
    return len(present)


def _key(namespace: str, rank: int, group_id: int, block_hash: bytes) -> str:
    prefix = PoolKey.build_prefix(KeyMetadata(namespace, rank, group_id))
    return PoolKey.build_key_string(prefix, block_hash.hex())
