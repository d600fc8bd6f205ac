"""The lookup: how far a request's KV cache can be loaded, asking as few keys as possible.

A generator, so that it does no I/O: it yields keys to check, is sent one boolean per key, and
returns a :class:`LookupHit`. The runtime drives it against a store off the scheduling thread;
tests and :func:`~kvtide.core.coordinator.find_longest_cache_hit` drive it with a function.

*Which* chunks are asked for is decided in ``search``; here they get their keys, one per part.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvtide.core.chunks import ChunkedTokenDatabase
from kvtide.core.keys import HashWindow
from kvtide.core.probes import MAX_PROBE_KEYS, leading
from kvtide.core.search import Ask, Boundaries, Found, SearchRange, search

Questions: TypeAlias = "Generator[list[str], Sequence[bool], LookupHit]"


@dataclass(frozen=True, slots=True)
class LookupQuery:
    """What to look up: the boundaries in ``(start_token, end_token]`` of one request.

    ``hashes`` carries the hash blocks from the one at ``start_token`` on (and, for the
    sentinels, nothing below it), past ``end_token`` as far as proofs reach. ``end_token`` already
    leaves the one token that must be computed. ``sentinel_hashes`` are hashes of chunks below
    ``start_token`` (chunk 0 and the last one the engine holds) of the first downward-closed group;
    their absence means that the store lacks part of what the engine has.
    """

    start_token: int
    end_token: int
    hashes: HashWindow
    sentinel_hashes: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class LookupHit:
    """The answer: the store holds what resuming at ``hit_token`` needs beyond ``start_token``.

    ``hit_token`` equals ``start_token`` on a miss. ``tail_tokens`` says per group which hash names
    the chunk that ends at the hit (empty: the one at the hit, for all). ``shared_token`` is how far
    the prefix is stored, if only some groups have what resuming there needs; 0 where that is not
    known. ``sentinels_present`` is False where a chunk that the engine holds is missing.
    """

    start_token: int
    hit_token: int
    tail_tokens: tuple[int, ...] = ()
    shared_token: int = 0
    sentinels_present: bool = True


def lookup(
    query: LookupQuery,
    boundaries: Boundaries,
    databases: Sequence[Sequence[ChunkedTokenDatabase]],
) -> Questions:
    """Yield lists of keys to check and return the longest hit.

    ``databases[g]`` has one database for each part of group ``g``'s chunks: a chunk counts only
    where all of them are present.
    """
    steps = search(boundaries, SearchRange(query.start_token, query.end_token, len(query.hashes)))
    sentinel_keys = _sentinel_keys(query, boundaries, databases)
    sentinels_present = True
    answers: Sequence[bool] | None = None
    while True:
        try:
            ask = next(steps) if answers is None else steps.send(answers)
        except StopIteration as stop:
            found: Found = stop.value
            break
        answers, present = yield from _ask_parts(query, ask, databases, sentinel_keys)
        sentinels_present = sentinels_present and present
        sentinel_keys = []
    if sentinel_keys:
        sentinels_present = all((yield sentinel_keys))
    return LookupHit(query.start_token, *found, sentinels_present)


def _sentinel_keys(
    query: LookupQuery,
    boundaries: Boundaries,
    databases: Sequence[Sequence[ChunkedTokenDatabase]],
) -> list[str]:
    for group, parts in zip(boundaries.groups, databases, strict=True):
        if group.is_downward_closed:
            return [part.key_for(value) for part in parts for value in query.sentinel_hashes]
    return []


def _ask_parts(
    query: LookupQuery,
    ask: Ask,
    databases: Sequence[Sequence[ChunkedTokenDatabase]],
    sentinel_keys: list[str],
) -> Generator[list[str], Sequence[bool], tuple[list[bool], bool]]:
    """Return which chunks have all their parts, and whether the sentinels are there.

    The first part decides which chunks the others are asked for, all of them in one list. The
    sentinels ride on the first batch: they cost no call of their own.
    """
    first, *others = databases[ask.group_id]
    num_sentinels = len(sentinel_keys)
    answers = yield sentinel_keys + first.keys_at(query.hashes, ask.hash_indexes)
    sentinels_present = all(answers[:num_sentinels])
    present = list(answers[num_sentinels:])
    if not others:
        return present, sentinels_present
    step = max(1, MAX_PROBE_KEYS // len(others))
    places = _worth_asking(present, ask)
    while places:
        asked, places = places[:step], places[step:]
        hexes = query.hashes.hexes([ask.hash_indexes[place] for place in asked])
        answers = yield [key for part in others for key in part.keys_named(hexes)]
        by_part = (
            answers[first : first + len(asked)] for first in range(0, len(answers), len(asked))
        )
        are_whole = list(map(all, zip(*by_part, strict=True)))
        for place, is_whole in zip(asked, are_whole, strict=True):
            present[place] = is_whole
        if ask.up_to_gap and not all(are_whole):
            break
    return present, sentinels_present


def _worth_asking(present: Sequence[bool], ask: Ask) -> Sequence[int]:
    """Return the places of an answer at which other parts may still change something."""
    if ask.up_to_gap:
        return range(leading(present))
    return [place for place, is_present in enumerate(present) if is_present]


def drive(questions: Questions, exists: Callable[[list[str]], Sequence[bool]]) -> LookupHit:
    """Run a lookup to its end with a presence function."""
    try:
        keys = next(questions)
        while True:
            keys = questions.send(exists(keys))
    except StopIteration as stop:
        hit = stop.value
        assert isinstance(hit, LookupHit)
        return hit
