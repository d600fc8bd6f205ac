"""The lookup: how far a request's KV cache can be loaded, asking as few keys as possible.

A generator, so that it does no I/O: it yields keys to check, is sent one boolean per key, and
returns a :class:`LookupHit`. The runtime drives it against a store off the scheduling thread;
tests and :func:`~kvtide.core.coordinator.find_longest_cache_hit` drive it with a function.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvtide.core.chunks import ChunkedTokenDatabase
from kvtide.core.groups import Group
from kvtide.core.keys import HashWindow

FIRST_PROBE_CHUNKS = 64
"""A cold miss costs one batch of this many keys; while chunks are found, batches double."""
MAX_PROBE_CHUNKS = 1024
"""Keeps the key building of one batch well under a millisecond."""

Probe: TypeAlias = "Generator[list[str], Sequence[bool], LookupHit]"


@dataclass(frozen=True, slots=True)
class LookupQuery:
    """What to look up: the tokens ``[start_token, end_token)`` of one request.

    ``hashes`` carries the hash blocks from the one at ``start_token`` on (and, for the
    sentinels, nothing below it). ``end_token`` already leaves the one token that must be
    computed. ``sentinel_hashes`` are hashes of chunks below ``start_token`` (chunk 0 and the
    last one the engine holds) whose absence means that the store lacks part of what the engine
    has.
    """

    start_token: int
    end_token: int
    hashes: HashWindow
    sentinel_hashes: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class LookupHit:
    """The answer: the store holds what resuming at ``hit_token`` needs beyond ``start_token``.

    ``hit_token`` equals ``start_token`` on a miss. ``sentinels_present`` is False where a chunk
    that the engine holds is missing in the store.
    """

    start_token: int
    hit_token: int
    sentinels_present: bool = True


def lookup(
    query: LookupQuery,
    groups: Sequence[Group],
    databases: Sequence[Sequence[ChunkedTokenDatabase]],
    alignment: int,
) -> Probe:
    """Yield lists of keys to check and return the longest hit at a multiple of ``alignment``.

    ``databases[g]`` has one database per rank whose part of group ``g`` a hit needs: a chunk
    counts only where all of them have it.
    """
    hit = query.end_token // alignment * alignment
    sentinels_present = True
    for index, (group, ranks) in enumerate(zip(groups, databases, strict=True)):
        sentinel_keys: list[str] = []
        if index == 0:
            sentinel_keys = [ranks[0].key_for(value) for value in query.sentinel_hashes]
        end_chunk, present = yield from _probe_forward(query, group, ranks, hit, sentinel_keys)
        sentinels_present = sentinels_present and present
        hit = min(hit, end_chunk * group.block_size) // alignment * alignment
    return LookupHit(query.start_token, max(hit, query.start_token), sentinels_present)


def _probe_forward(
    query: LookupQuery,
    group: Group,
    ranks: Sequence[ChunkedTokenDatabase],
    limit_token: int,
    sentinel_keys: list[str],
) -> Generator[list[str], Sequence[bool], tuple[int, bool]]:
    """Return the first absent chunk from ``start_token`` on, and whether the sentinels are there.

    The sentinels ride on the first batch: they cost no call of their own.
    """
    chunk = query.start_token // group.block_size
    end = group.required(limit_token).stop
    step = FIRST_PROBE_CHUNKS
    present = True
    while chunk < end or sentinel_keys:
        batch = range(chunk, max(chunk, min(end, chunk + step)))
        num_sentinels = len(sentinel_keys)
        keys = sentinel_keys + ranks[0].keys(query.hashes, batch)
        answers = yield keys
        present = present and all(answers[:num_sentinels])
        sentinel_keys = []
        found = _leading(answers[num_sentinels:])
        for database in ranks[1:]:
            if not found:
                break
            answers = yield database.keys(query.hashes, range(chunk, chunk + found))
            found = _leading(answers)
        chunk += found
        if found < len(batch):
            break
        step = min(2 * step, MAX_PROBE_CHUNKS)
    return chunk, present


def _leading(answers: Sequence[bool]) -> int:
    """Return how many answers are true before the first false one."""
    for count, answer in enumerate(answers):
        if not answer:
            return count
    return len(answers)


def drive(probe: Probe, exists: Callable[[list[str]], Sequence[bool]]) -> LookupHit:
    """Run a lookup to its end with a presence function."""
    try:
        keys = next(probe)
        while True:
            keys = probe.send(exists(keys))
    except StopIteration as stop:
        hit = stop.value
        assert isinstance(hit, LookupHit)
        return hit
