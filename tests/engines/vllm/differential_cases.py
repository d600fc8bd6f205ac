"""Seeded random cases: groups that vLLM accepts, a prompt, and what of it a store may hold."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

KINDS = ("full", "mla", "window", "window mla", "local", "state")
ATTENTION = KINDS[:4]
MAX_HASHES = 400
"""Prompts are no longer than this many hash blocks."""


def hash_chain(num_hashes: int) -> list[bytes]:
    """Return as many hashes as asked for, the same ones each time."""
    return [hashlib.sha256(index.to_bytes(4, "big")).digest() for index in range(num_hashes)]


HASHES = hash_chain(MAX_HASHES)


@dataclass(frozen=True, slots=True)
class GroupCase:
    """A group: ``reach`` is its window or its attention chunk, in tokens."""

    kind: str
    block_size: int
    reach: int = 0
    is_eagle: bool = False

    @property
    def is_sparse(self) -> bool:
        """Whether a retention interval changes what is kept of it."""
        return self.kind in ("window", "window mla", "state")


@dataclass(frozen=True, slots=True)
class Case:
    """A model's groups and a request of ``num_tokens`` tokens.

    The store mask is asked for ``[start_token, aligned_token_len)``, of a prompt of
    ``num_prompt_tokens`` (``None``: not said).
    """

    groups: tuple[GroupCase, ...]
    hash_block_size: int
    num_tokens: int
    retention_interval: int | None = None
    use_eagle: bool = False
    start_token: int = 0
    num_prompt_tokens: int | None = None

    @property
    def lcm_block_size(self) -> int:
        """The least common multiple of the block sizes."""
        return math.lcm(*(group.block_size for group in self.groups))

    @property
    def aligned_token_len(self) -> int:
        """The request's tokens in whole ``lcm_block_size``."""
        return self.num_tokens // self.lcm_block_size * self.lcm_block_size

    @property
    def num_hashes(self) -> int:
        """How many whole hash blocks the request has."""
        return self.num_tokens // self.hash_block_size


def random_case(rng: random.Random, *, use_eagle: bool) -> Case:
    """Return a random case that vLLM accepts."""
    unit = rng.choice((1, 4, 16))
    groups = _random_groups(rng, unit, use_eagle=use_eagle)
    case = Case(groups, unit, 0, use_eagle=use_eagle)
    if len(groups) == 1:  # vLLM then hashes whole blocks
        case = replace(case, hash_block_size=groups[0].block_size)
    lcm = case.lcm_block_size
    case = replace(
        case,
        num_tokens=_random_length(rng, case),
        retention_interval=_random_retention(rng, case),
    )
    num_units = case.num_tokens // lcm
    return replace(
        case,
        start_token=rng.randint(0, num_units) * lcm if rng.random() < 0.5 else 0,
        num_prompt_tokens=_random_prompt(rng, case),
    )


def _random_groups(rng: random.Random, unit: int, *, use_eagle: bool) -> tuple[GroupCase, ...]:
    num_groups = rng.choice((1, 1, 2, 2, 2, 3, 3, 4, 5))
    style = rng.random()
    if style < 0.15 and not use_eagle:
        size = unit * rng.choice((1, 2, 4))
        kinds = ["local", *(rng.choice(KINDS) for _ in range(num_groups - 1))]
        groups = [_random_group(rng, kind, size) for kind in kinds]
    elif style < 0.4:  # states coarser than the hashes, so that hits may lie inside blocks
        groups = [_random_group(rng, "state", unit * rng.choice((2, 3, 4, 6)))]
        for _ in range(num_groups):
            kind = rng.choice(("full", "full", "mla", "window", "state"))
            ratio = 1 if kind == "window" else rng.choice((1, 2, 3, 4))
            groups.append(_random_group(rng, kind, unit * ratio))
        if style < 0.18 and not use_eagle:
            groups.append(_random_group(rng, "local", unit))
    else:
        kinds = rng.choices((*ATTENTION, "state"), (3, 1, 3, 1, 2), k=num_groups)
        sizes = rng.choice(((1,), (1, 2), (1, 2, 4), (1, 2, 3, 4), (2, 4), (1, 2, 4, 8)))
        groups = [_random_group(rng, kind, unit * rng.choice(sizes)) for kind in kinds]
    if use_eagle:
        groups = _flagged(rng, groups)
    elif rng.random() < 0.15:  # groups of one spec are looked up together
        groups.append(rng.choice(groups))
    rng.shuffle(groups)
    # Groups of one spec lie side by side, as vLLM makes them.
    specs = [replace(group, is_eagle=False) for group in groups]
    return tuple(
        group
        for _, group in sorted(
            zip(map(specs.index, specs), groups, strict=True), key=lambda pair: pair[0]
        )
    )


def _random_group(rng: random.Random, kind: str, block_size: int) -> GroupCase:
    if kind in ("window", "window mla"):
        whole = block_size * rng.randint(1, 6)
        window = rng.choice((whole, whole + 1, whole + 2, rng.randint(2, 6 * block_size + 1)))
        return GroupCase(kind, block_size, max(2, window))
    if kind == "local":
        return GroupCase(kind, block_size, block_size * rng.randint(1, 6))
    return GroupCase(kind, block_size)


def _flagged(rng: random.Random, groups: list[GroupCase]) -> list[GroupCase]:
    """Return the groups with those of the draft model flagged, which are never states."""
    if all(group.kind == "state" for group in groups):
        groups = [*groups, _random_group(rng, rng.choice(ATTENTION), groups[0].block_size)]
    if rng.random() < 0.3:
        return groups  # none flagged: vLLM takes them all
    flags = [rng.random() < 0.5 and group.kind != "state" for group in groups]
    return [replace(group, is_eagle=flag) for group, flag in zip(groups, flags, strict=True)]


def _random_length(rng: random.Random, case: Case) -> int:
    longest = MAX_HASHES * case.hash_block_size
    num_tokens = rng.randint(0, min(longest, case.lcm_block_size * rng.randint(1, 24)))
    edge = rng.choice((case.lcm_block_size, *(group.block_size for group in case.groups), 1))
    num_tokens = num_tokens // edge * edge
    return max(0, min(longest, num_tokens + rng.choice((0, 0, 0, 1, -1))))


def _random_retention(rng: random.Random, case: Case) -> int | None:
    choice = rng.random()
    if choice < 0.5:
        return None
    if choice < 0.7 or not any(group.is_sparse for group in case.groups):
        return 0
    return case.lcm_block_size * rng.randint(1, 5)


def _random_prompt(rng: random.Random, case: Case) -> int | None:
    choice = rng.random()
    if choice < 0.1:
        return None
    if choice < 0.6:
        return max(1, case.num_tokens)
    return max(1, case.num_tokens + rng.randint(-2, 2) * rng.choice((1, case.lcm_block_size)))


# ------------------------------------------------------------------------------- what is present


class Presence:
    """Which hash blocks of the case name a chunk that a store holds, per group."""

    def __init__(self, case: Case, rng: random.Random, *, uses_partial_hits: bool) -> None:
        self.case = case
        self.rng = rng
        self.uses_partial_hits = uses_partial_hits

    def random(self) -> set[tuple[int, int]]:
        """Return what a store may hold, as ``(group, index of the hash)``.

        What names a part of a chunk is there in all groups of one spec or in none: vLLM looks them
        up as one (see ``test_groups_of_one_spec_may_name_a_cut_chunk_differently``).
        """
        present = self._random()
        groups = self.case.groups
        specs = [replace(group, is_eagle=False) for group in groups]
        firsts = [specs.index(spec) for spec in specs]
        whole = {(number, index) for number in range(len(groups)) for index in self._names(number)}
        return {
            (number, index)
            for number in range(len(groups))
            for index in range(self.case.num_hashes)
            if (number if (number, index) in whole else firsts[number], index) in present
        }

    def _random(self) -> set[tuple[int, int]]:
        style = self.rng.random()
        if style < 0.25:
            return set(self._scattered())
        if style < 0.65:
            return set(self._prefix_with_holes())
        present = set(self._stored_by_earlier_prompts())
        if style < 0.85:
            for _ in range(self.rng.randint(1, 4)):
                if present:
                    present.discard(self.rng.choice(sorted(present)))
        return present

    def _names(self, number: int) -> range:
        """Return the hash blocks that may name a chunk of a group."""
        case, group = self.case, self.case.groups[number]
        ratio = group.block_size // case.hash_block_size
        return range(ratio - 1, case.num_hashes, ratio)

    def _inner_names(self, number: int) -> list[int]:
        """Return some hash blocks inside chunks, where a hit may end there."""
        if not self.uses_partial_hits:
            return []
        num_hashes = self.case.num_hashes
        return [index for index in range(num_hashes) if self.rng.random() < self.rng.random() / 2]

    def _scattered(self) -> Iterator[tuple[int, int]]:
        for number in range(len(self.case.groups)):
            share = self.rng.choice((0.2, 0.5, 0.8, 0.95, 1.0))
            for index in [*self._names(number), *self._inner_names(number)]:
                if self.rng.random() < share:
                    yield number, index

    def _prefix_with_holes(self) -> Iterator[tuple[int, int]]:
        end = self.rng.randint(0, self.case.num_hashes)
        for number in range(len(self.case.groups)):
            own_end = end if self.rng.random() < 0.6 else self.rng.randint(0, self.case.num_hashes)
            names = [index for index in self._names(number) if index < own_end]
            holes = set(self.rng.choices(names or [0], k=self.rng.choice((0, 0, 1, 2))))
            inner = self._inner_names(number)
            yield from ((number, index) for index in {*names, *inner} - holes)

    def _stored_by_earlier_prompts(self) -> Iterator[tuple[int, int]]:
        """What vLLM's policy keeps of prompts that begin as this one does, computed anew here."""
        case = self.case
        for _ in range(self.rng.randint(1, 3)):
            shared = self.rng.randint(0, case.num_tokens)
            length = shared + self.rng.randint(0, 2 * case.lcm_block_size)
            kept = self._kept_boundaries(length)
            for number, group in enumerate(case.groups):
                for index in self._names(number):
                    end = (index + 1) * case.hash_block_size
                    if end <= shared and _is_kept(group, end, kept):
                        yield number, index
            if self.uses_partial_hits:
                tail = min(shared, length - 1) // case.hash_block_size - 1
                if tail >= 0 and self.rng.random() < 0.7:
                    yield from ((number, tail) for number in range(len(case.groups)))

    def _kept_boundaries(self, length: int) -> list[int]:
        lcm = self.case.lcm_block_size
        interval = self.case.retention_interval
        step = lcm if interval is None else interval
        kept = list(range(step, length + 1, step)) if step else []
        margin = lcm if self.case.use_eagle else 0
        ends = (max(0, length - 1) // lcm * lcm - margin, length // lcm * lcm - margin)
        return sorted({*kept, *(end for end in ends if end > 0)})


def _is_kept(group: GroupCase, end: int, boundaries: list[int]) -> bool:
    if not group.is_sparse:
        return True
    size = group.block_size
    if group.kind == "state":
        return end in boundaries
    need = -(-(group.reach - 1) // size) * size
    margin = size  # with a draft model's proof, and harmless without
    return any(boundary - need < end <= boundary + margin for boundary in boundaries)
