"""What a search knows of one group's chunks, and what it asks next: a class per way of asking.

Each ``settle`` lowers a boundary to the last one that its group can resume at, in as few questions
as it takes. Why they ask as they do is told in ``search``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from kvtide.core.groups import Group

FIRST_PROBE_KEYS = 64
"""A cold miss costs one batch of this many keys; while chunks are found, batches double."""
MAX_PROBE_KEYS = 1024
"""Keeps the key building of one batch well under a millisecond."""
_MAX_RUNGS = 128
"""Likewise for a ladder, whose rungs are found one by one."""


class Ask(NamedTuple):
    """A question: which of these hash blocks name a chunk of the group that is present.

    With ``up_to_gap`` nothing past the first that is absent matters.
    """

    group_id: int
    hash_indexes: Sequence[int]
    up_to_gap: bool = False


Step: TypeAlias = "Generator[Ask, Sequence[bool], int]"


@dataclass(frozen=True, slots=True)
class Boundaries:
    """The groups, and where a request may resume: at the multiples of ``alignment`` tokens."""

    groups: tuple[Group, ...]
    hash_block_size: int
    alignment: int

    def last(self, num_tokens: int) -> int:
        """Return the largest boundary at most ``num_tokens``."""
        return num_tokens // self.alignment * self.alignment


@dataclass(frozen=True, slots=True)
class SearchRange:
    """Where to search: the boundaries in ``(start_token, end_token]``.

    The engine holds what is below ``start_token``. ``num_hashes`` hash blocks of the request are
    known; nothing is asked past them.
    """

    start_token: int
    end_token: int
    num_hashes: int


class Probe(ABC):
    """What is known of one group's chunks."""

    def __init__(
        self, boundaries: Boundaries, where: SearchRange, group_id: int, group: Group
    ) -> None:
        self.group_id = group_id
        self.group = group
        self.hashes_per_chunk = group.block_size // boundaries.hash_block_size
        self._boundaries = boundaries
        self._where = where
        self._unit = boundaries.hash_block_size

    @abstractmethod
    def settle(self, boundary: int) -> Step:
        """Return the last boundary at most ``boundary`` that the group can resume at."""

    @abstractmethod
    def tail_token(self, hit: int) -> int:
        """Return the token whose hash names the chunk that ends at ``hit``."""


class ForwardProbe(Probe):
    """A group that is found up to its first gap, ``covered_token``."""

    covered_token = 0
    _whole_token = 0
    """Up to here, chunks are present under their own hashes."""

    def cover(self, covered_token: int) -> int:
        """Take over how far the group reaches, and return the last boundary it allows."""
        self.covered_token = covered_token
        self._whole_token = covered_token // self.group.block_size * self.group.block_size
        return self._boundaries.last(max(0, covered_token - self.group.proof_tokens))

    def settle(self, boundary: int) -> Step:
        """Return the last boundary at most ``boundary`` that the group can resume at."""
        limit_token = min(boundary + self.group.proof_tokens, self._where.num_hashes * self._unit)
        chunk = yield from self._first_gap(limit_token)
        covered = chunk * self.group.block_size
        tail = yield from self._tail(chunk, limit_token)
        allowed = self.cover(max(covered, tail))
        self._whole_token = covered
        return min(boundary, allowed)

    def _first_gap(self, limit_token: int) -> Step:
        """Return the first chunk that is absent, or the first that ends past ``limit_token``."""
        ratio = self.hashes_per_chunk
        chunk = self._where.start_token // self.group.block_size
        end = limit_token // self.group.block_size
        num_keys = FIRST_PROBE_KEYS
        while chunk < end:
            stop = min(end, chunk + num_keys)
            names = range((chunk + 1) * ratio - 1, stop * ratio, ratio)
            answers = yield Ask(self.group_id, names, up_to_gap=True)
            found = leading(answers)
            chunk += found
            if found < len(answers):
                break
            num_keys = min(2 * num_keys, MAX_PROBE_KEYS)
        return chunk

    def _tail(self, chunk: int, limit_token: int) -> Step:
        """Return how far a cut part of ``chunk`` reaches, 0 where there is none."""
        if self._boundaries.alignment >= self.group.block_size:
            return 0
        ratio = self.hashes_per_chunk
        first = max(chunk * ratio, self._where.start_token // self._unit)
        inside = range(first, min((chunk + 1) * ratio - 1, limit_token // self._unit))
        if not inside:
            return 0
        answers = yield Ask(self.group_id, inside)
        present = [index for index, answer in zip(inside, answers, strict=True) if answer]
        return (present[-1] + 1) * self._unit if present else 0

    def tail_token(self, hit: int) -> int:
        """Return the token whose hash names the chunk that ends at ``hit``."""
        end = -(-hit // self.group.block_size) * self.group.block_size
        return end if end <= self._whole_token else max(hit, self.covered_token)


class StateProbe(Probe):
    """A group that needs exactly the state at a boundary."""

    is_likely = False
    """Whether to ask for the next boundary alone."""
    _present: Sequence[int] = ()
    """The boundaries at or above the floor that have a state, the last one first."""
    _floor: int | None = None
    """The lowest boundary that was asked for."""
    _num_keys = FIRST_PROBE_KEYS

    def settle(self, boundary: int) -> Step:
        """Return the last boundary at most ``boundary`` that has a state."""
        for found in self._present:
            if found <= boundary:
                return found
        step = self._boundaries.alignment
        if self._floor is not None:
            boundary = min(boundary, self._floor - step)
        while boundary > self._where.start_token:
            asked = range(boundary, self._where.start_token, -step)[: self._take_num_keys()][::-1]
            names = range(asked[0] // self._unit - 1, asked[-1] // self._unit, step // self._unit)
            answers = yield Ask(self.group_id, names)
            self._floor = asked[0]
            found_here = [b for b, there in zip(asked, answers, strict=True) if there]
            self._present = found_here[::-1]
            if found_here:
                return found_here[-1]
            boundary = asked[0] - step
        return boundary

    def _take_num_keys(self) -> int:
        """Return how many boundaries to ask for now, and let the next batch be larger."""
        if self.is_likely:
            self.is_likely = False
            return 1
        num_keys = self._num_keys
        self._num_keys = min(2 * num_keys, MAX_PROBE_KEYS)
        return num_keys

    def tail_token(self, hit: int) -> int:
        """Return the hit: a state has no other name."""
        return hit


class WindowProbe(Probe):
    """A group that needs only what lies before a boundary, and may lack anything else."""

    def __init__(
        self, boundaries: Boundaries, where: SearchRange, group_id: int, group: Group
    ) -> None:
        super().__init__(boundaries, where, group_id, group)
        self.is_likely = False
        """Whether all that the next boundary matches is worth asking for at once."""
        self._answers: dict[int, bool] = {}
        """What was asked, by hash block."""
        self._num_rungs = FIRST_PROBE_KEYS

    def settle(self, boundary: int) -> Step:
        """Return the last boundary at most ``boundary`` that the group can resume at."""
        while boundary > self._where.start_token:
            absent_end = self._first_absent(boundary)
            if absent_end is not None:
                boundary = self._below(absent_end)
                continue
            asked = self._unknown(boundary)
            if not asked:
                return boundary
            if not self.is_likely and not self._begins_well(boundary):
                asked = self._ladder(boundary)
            asked = asked[:MAX_PROBE_KEYS]
            answers = yield Ask(self.group_id, asked)
            self._answers.update(zip(asked, answers, strict=True))
            self.is_likely = False
        return boundary

    def _names(self, boundary: int) -> tuple[range, range]:
        """Return the hash blocks that name what ``boundary`` matches and the engine does not hold.

        First the names of whole chunks, one each; then those of the chunk that it cuts, any of
        which will do.
        """
        end_token = boundary + self.group.proof_tokens
        matched = self.group.matched(boundary)
        first = max(matched.start, self._where.start_token // self.group.block_size)
        ratio = self.hashes_per_chunk
        last = end_token // self._unit - 1
        whole_stop = max(first, end_token // self.group.block_size)
        whole = range((first + 1) * ratio - 1, whole_stop * ratio, ratio)
        if end_token % self.group.block_size == 0 or matched.stop <= first:
            return whole, range(0)
        return whole, range(last, min(matched.stop * ratio, self._where.num_hashes))

    def _first_absent(self, boundary: int) -> int | None:
        """Return where the first chunk ends that ``boundary`` matches and that is absent."""
        end_token = boundary + self.group.proof_tokens
        if end_token > self._where.num_hashes * self._unit:
            return end_token
        whole, cut = self._names(boundary)
        get = self._answers.get
        for name in whole:
            if not get(name, True):
                return (name + 1) * self._unit
        return end_token if cut and not any(get(name, True) for name in cut) else None

    def _unknown(self, boundary: int) -> list[int]:
        """Return the hash blocks to ask for before ``boundary``, not known absent, is proven."""
        whole, cut = self._names(boundary)
        unknown = [name for name in whole if name not in self._answers]
        if not self._has_any(cut):
            unknown += [name for name in cut if name not in self._answers]
        return unknown

    def _begins_well(self, boundary: int) -> bool:
        """Tell whether the first chunk that ``boundary`` matches is present."""
        whole, cut = self._names(boundary)
        return self._has_any(whole[:1] or cut)

    def _has_any(self, names: range) -> bool:
        """Tell whether a chunk is known to be present under one of these names."""
        return any(self._answers.get(name) for name in names)

    def _ladder(self, boundary: int) -> list[int]:
        """Return the names of the first chunks of descending boundaries, each below the other's."""
        names: dict[int, None] = {}  # in order, and a name once that is the first of two
        while boundary > self._where.start_token and len(names) < self._num_rungs:
            whole, cut = self._names(boundary)
            first = whole[:1] or cut
            if not first:  # a chunk boundary of local attention needs nothing
                break
            names.update((n, None) for n in first if n not in self._answers)
            boundary = self._below((first[0] + 1) * self._unit)
        self._num_rungs = _MAX_RUNGS
        return list(names)

    def _below(self, end_token: int) -> int:
        """Return the last boundary that needs no chunk ending at ``end_token`` or later."""
        return self._boundaries.last(max(0, end_token - self.group.proof_tokens - 1))

    def tail_token(self, hit: int) -> int:
        """Return the token whose hash names the chunk that ends at ``hit``."""
        if hit % self.group.block_size == 0:
            return hit
        first = hit // self._unit - 1
        stop = -(-hit // self.group.block_size) * self.hashes_per_chunk
        found = (name for name in range(first, stop) if self._answers.get(name))
        return (next(found, first) + 1) * self._unit


def leading(answers: Sequence[bool]) -> int:
    """Return how many answers are true before the first false one."""
    try:
        return answers.index(False)
    except ValueError:
        return len(answers)
