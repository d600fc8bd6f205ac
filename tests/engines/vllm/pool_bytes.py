"""The bytes of a request's chunks: in the blocks of an engine, and in a pool."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np

from kvtide.runtime import tags
from kvtide.runtime.tags import TAG_BYTES
from kvtide.stores import Status, open_store
from kvtide.testing import Arena
from tests.engines.vllm.engines import InProcessEngine

Digests = dict[str, str]
"""A digest of each chunk's bytes, by group and chunk: ``"2/14"``."""


class Requests:
    """The requests that an engine has served, with what their own blocks held in the end."""

    def __init__(self, one: InProcessEngine) -> None:
        self._one = one
        self.served: list[tuple[Any, Digests]] = []
        finished = one.connector.request_finished_all_groups

        def note(request: Any, block_ids: tuple[list[int], ...]) -> Any:
            self.served.append((request, _in_own_blocks(one, request, block_ids)))
            return finished(request, block_ids)

        one.connector.request_finished_all_groups = note

    def in_blocks(self, number: int = -1) -> tuple[Any, Digests]:
        """Return a request, and the chunks that the engine's own prefix cache still has after it.

        Where the engine has no such cache, as for MLA, those that the request's own blocks held.
        """
        request, own = self.served[number]
        has_cache = self._one.core.scheduler.kv_cache_manager.enable_caching
        return request, _in_cache(self._one, request) if has_cache else own


def _chunks(one: InProcessEngine, request: Any) -> Iterator[tuple[int, int, bytes]]:
    """Yield group, chunk and hash of all whole chunks; a block is one hash here."""
    plan = one.connector._scheduler_side._plan
    for index, group in enumerate(plan.groups):
        assert group.block_size == plan.hash_block_size
        for chunk, block_hash in enumerate(request.block_hashes):
            yield index, chunk, block_hash


def _in_cache(one: InProcessEngine, request: Any) -> Digests:
    """Read the chunks of ``request`` that the engine's own prefix cache has."""
    pool = one.core.scheduler.kv_cache_manager.block_pool
    group_ids = one.connector._scheduler_side._plan.group_ids
    found = {}
    for index, chunk, block_hash in _chunks(one, request):
        cached = pool.get_cached_block(block_hash, [group_ids[index]])
        if cached:
            found[f"{index}/{chunk}"] = _digest(one, index, cached[0].block_id)
    return found


def _in_own_blocks(one: InProcessEngine, request: Any, block_ids: tuple[list[int], ...]) -> Digests:
    """Read the chunks of ``request`` in the blocks that it has, as far as it has them."""
    group_ids = one.connector._scheduler_side._plan.group_ids
    found = {}
    for index, chunk, _ in _chunks(one, request):
        table = block_ids[group_ids[index]]
        if chunk < len(table):
            found[f"{index}/{chunk}"] = _digest(one, index, table[chunk])
    return found


def _digest(one: InProcessEngine, index: int, block_id: int) -> str:
    """Read a block."""
    memory = one.worker._memory
    out = np.zeros((1, memory.layout.groups[index].payload_bytes), dtype=np.uint8)
    memory.read(index, [block_id], out)
    return hashlib.sha256(out.tobytes()).hexdigest()


def in_pool(one: InProcessEngine, url: str, request: Any) -> Digests:
    """Read the chunks of ``request`` that the pool has, without their tags, which must be right."""
    side = one.connector._scheduler_side
    databases = side._plan.coordinator().databases(side._namespace_of(request))
    layout = one.worker._memory.layout
    found = {}
    with closing(open_store(url)) as store:
        arena = Arena(store)
        for index, chunk, block_hash in _chunks(one, request):
            key = databases[index][0].key_for(block_hash)
            payload = layout.groups[index].payload_bytes
            [(status, value)] = arena.get([(key, payload + TAG_BYTES)])
            assert status is not Status.FAILED
            if status is Status.OK:
                assert tags.verify(memoryview(value), key, payload)
                found[f"{index}/{chunk}"] = hashlib.sha256(value[:payload]).hexdigest()
    return found
