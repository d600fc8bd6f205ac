"""What must hold of a scripted engine at any time, and of a store that it has written to."""

from __future__ import annotations

from collections import Counter

from kvtide.core.groups import Group
from kvtide.core.jobs import NULL_BLOCK_ID
from kvtide.core.keys import KeyMetadata, PoolKey
from kvtide.runtime.tags import TAG_BYTES, verify
from kvtide.stores.base import Status, Store
from kvtide.testing.engine import ScriptedEngine
from kvtide.testing.engine_attention import TOKEN_BYTES, block_bytes, first_needed_token, is_draft
from kvtide.testing.engine_model import GroupPart
from kvtide.testing.engine_ranks import EngineRank
from kvtide.testing.engine_requests import EngineRequest, EngineState
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
    for block_id, (group_id, block_hash) in engine.pool.cached():
        for rank in engine.ranks.ranks:
            for name, value in zip(
                rank.held[group_id], rank.blocks.values[group_id][block_id], strict=True
            ):
                wanted = model.truth[model.weights, name, block_hash]
                assert value[: len(wanted)].tobytes() == wanted, (
                    f"rank {rank.rank}: block {block_id} holds wrong KV of {name}"
                )


def _check_running_requests(engine: ScriptedEngine) -> None:
    model = engine.model
    for request in engine.requests.values():
        if request.state is not EngineState.RUNNING:
            continue
        for rank in engine.ranks.ranks:
            for group_id, names in enumerate(rank.held):
                for number, name in enumerate(names):
                    _check_attended(request, rank, name, number, model.groups[group_id])


def _check_attended(
    request: EngineRequest, rank: EngineRank, name: GroupPart, number: int, group: Group
) -> None:
    num_tokens = request.num_computed
    kv = rank.attended(name.group_id, number, request.tables[name.group_id], num_tokens)
    first = first_needed_token(group, num_tokens)
    wanted = request.true.span(name, first, num_tokens)
    is_right = kv == wanted
    if is_draft(group):
        is_right = _without_ends(kv, group, first) == _without_ends(wanted, group, first)
    assert is_right, f"{request!r} computed on wrong KV of {name} on rank {rank.rank}"


def _without_ends(kv: bytes, group: Group, first_token: int) -> list[bytes]:
    """Return the KV of the tokens that do not end a block.

    An end that was loaded or found is of whoever computed it, with another token after it.
    """
    values = [kv[i : i + TOKEN_BYTES] for i in range(0, len(kv), TOKEN_BYTES)]
    return [
        value for token, value in enumerate(values, first_token) if (token + 1) % group.block_size
    ]


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
    assert not engine.scheduler.num_wanted_blocks, f"{engine.scheduler!r}"
    assert not len(engine.lookups), f"{engine.lookups!r}"
    assert engine.pool.num_free == engine.pool.num_blocks - 1, f"{engine.pool!r}"
    for rank in engine.ranks.ranks:
        rank.worker.check_idle()
        for group_id, block_ids in rank.blocks.reads + rank.blocks.writes:
            assert NULL_BLOCK_ID not in block_ids, f"group {group_id}: the null block was copied"


def finish(engine: ScriptedEngine, max_steps: int = 1000) -> None:
    """Run to the end, checking every step, and some steps on until the pool is at rest.

    Raises:
        AssertionError: a check failed, or something is left after ``max_steps``.
    """
    for _ in range(max_steps):
        if not engine.has_work:
            break
        engine.step()
        check_engine(engine)
    for _ in range(4):
        engine.step()
    check_idle(engine)


def check_store(engine: ScriptedEngine, store: Store) -> int:
    """Check every value under the engine's names against its tokens; return how many there are.

    ``store`` answers truthfully and without faults: the one below any wrapper that fails.

    Raises:
        AssertionError: a value is not what its key says.
    """
    sizes = [block_bytes(group) for group in engine.setup.groups]
    entries = [
        (_key(namespace, name, block_hash), content, sizes[name.group_id])
        for (weights, name, block_hash), content in engine.model.truth.items()
        for namespace in engine.namespaces[weights]
    ]
    present = [
        entry
        for entry, there in zip(entries, store.exists([key for key, _, _ in entries]), strict=True)
        if there
    ]
    arena = Arena(store, max(1, len(present)) * (max(sizes) + TAG_BYTES))
    answers = arena.get([(key, size + TAG_BYTES) for key, _, size in present])
    for (key, content, size), (status, value) in zip(present, answers, strict=True):
        assert status is Status.OK, f"{key}: {status}"
        assert value[: len(content)] == content, f"{key} names other bytes"
        assert verify(memoryview(value), key, size), f"{key} has a wrong tag"
    return len(present)


def _key(namespace: str, name: GroupPart, block_hash: bytes) -> str:
    prefix = PoolKey.build_prefix(KeyMetadata(namespace, name.part, name.group_id))
    return PoolKey.build_key_string(prefix, block_hash.hex())
