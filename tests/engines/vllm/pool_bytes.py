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
    """The requests that an engine has served, with the blocks they had in the end."""

    def __init__(self, one: InProcessEngine) -> None:
        self.served: list[tuple[Any, tuple[list[int], ...]]] = []
        finished = one.connector.request_finished_all_groups

        def note(request: Any, block_ids: tuple[list[int], ...]) -> Any:
            self.served.append((request, block_ids))
            return finished(request, block_ids)

        one.connector.request_finished_all_groups = note

    @property
    def last(self) -> tuple[Any, tuple[list[int], ...]]:
        """The last of them."""
        return self.served[-1]


def _chunks(one: InProcessEngine, request: Any) -> Iterator[tuple[int, int, bytes]]:
    """Yield group, chunk and hash of all whole chunks; a block is one hash here."""
    plan = one.connector._scheduler_side._plan
    for index, group in enumerate(plan.groups):
        assert group.block_size == plan.hash_block_size
        for chunk, block_hash in enumerate(request.block_hashes):
            yield index, chunk, block_hash


def in_blocks(one: InProcessEngine, request: Any, block_ids: tuple[list[int], ...]) -> Digests:
    """Read the chunks that the engine's own prefix cache still has after ``request``.

    Where the engine has none, as for MLA, what lies where the request's own blocks were: nobody
    has been given them since.
    """
    manager = one.core.scheduler.kv_cache_manager
    group_ids = one.connector._scheduler_side._plan.group_ids
    memory = one.worker._memory
    found = {}
    for index, chunk, block_hash in _chunks(one, request):
        if manager.enable_caching:
            cached = manager.block_pool.get_cached_block(block_hash, [group_ids[index]])
            block_id = cached[0].block_id if cached else None
        else:
            block_id = block_ids[group_ids[index]][chunk]
        if block_id is not None:
            out = np.zeros((1, memory.layout.groups[index].payload_bytes), dtype=np.uint8)
            memory.read(index, [block_id], out)
            found[f"{index}/{chunk}"] = hashlib.sha256(out.tobytes()).hexdigest()
    return found


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
