"""What to store, what to load and how far a hit reaches, derived from each group's ``required``.

Theory of operation. A *boundary* is a token count at which a later request may resume: a multiple
of ``alignment``. Resuming at boundary ``n`` needs ``required(n)`` of every group, and of a draft
model's group ``required(n + proof)`` as well, so

* a **hit** is the largest boundary at most ``num_tokens - 1`` where every group holds that (one
  token must remain to compute, and that bounds the *search*: a hit shortened afterwards would ask
  for chunks that were never stored);
* the **load mask** is ``required(hit)`` at or above what the engine has already (the proof was
  matched, it is not loaded);
* the **store mask** is the union of both over the boundaries that retention keeps.

Saving goes in units of ``lcm_block_size``. What a boundary needs beside whole units is put by
itself: the proof behind the last unit, and chunks that a boundary cuts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvtide.core.chunks import ChunkedTokenDatabase, ceil_div
from kvtide.core.groups import Group
from kvtide.core.keys import HashWindow, KeyMetadata, KeyStyle, PoolKey
from kvtide.core.lookup import LookupQuery, drive, lookup
from kvtide.core.retention import Retention
from kvtide.core.search import Boundaries
from kvtide.core.topology import WHOLE, Part


@dataclass(frozen=True, slots=True)
class Coordinator:
    """Joint decisions over all KV cache groups of a model.

    ``hash_block_size`` (tokens) divides every group's block size and proof. With ``partial_hits``
    boundaries lie on hash blocks, inside chunks too. ``retention_interval`` is in tokens, as in
    :class:`~kvtide.core.retention.Retention`. With ``stores_dense`` every chunk is stored of groups
    that ignore retention, also those that no boundary requires, as vLLM's in-tree store connector
    does: its lookup takes for granted that each group holds the chunk that ends at a hit.

    Raises:
        ValueError: there is no group, or sizes do not divide each other as they must.
    """

    groups: tuple[Group, ...]
    hash_block_size: int
    partial_hits: bool = False
    retention_interval: int | None = None
    stores_dense: bool = False
    lcm_block_size: int = field(init=False)
    """The least common multiple of the groups' block sizes, in tokens."""
    alignment: int = field(init=False, repr=False)
    """The distance in tokens between boundaries."""
    max_proof_tokens: int = field(init=False, repr=False)
    """How many tokens beyond a boundary have to be matched, 0 without a draft model."""
    sentinel_block_size: int | None = field(init=False, repr=False)
    """The block size of the group whose chunks are all stored, ``None`` where there is none."""
    _retention: Retention = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.groups:
            raise ValueError("a model needs at least one KV cache group")
        for group in self.groups:
            if group.block_size % self.hash_block_size or group.proof_tokens % self.hash_block_size:
                raise ValueError(
                    f"block_size {group.block_size} and proof_tokens {group.proof_tokens} must be "
                    f"multiples of hash_block_size {self.hash_block_size}"
                )
            if group.proof_tokens > (0 if group.is_state else group.block_size):
                raise ValueError(f"a proof is at most a block, and a state has none: {group}")
        lcm = math.lcm(*(group.block_size for group in self.groups))
        derived = {
            "lcm_block_size": lcm,
            "alignment": self.hash_block_size if self.partial_hits else lcm,
            "max_proof_tokens": max(group.proof_tokens for group in self.groups),
            "sentinel_block_size": next(
                (group.block_size for group in self.groups if group.is_downward_closed), None
            ),
        }
        for name, value in derived.items():  # each request asks for them, so once for all
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_retention", Retention(lcm, self.retention_interval))

    @property
    def boundaries(self) -> Boundaries:
        """What a search must know: the groups and where boundaries lie."""
        return Boundaries(self.groups, self.hash_block_size, self.alignment)

    @property
    def may_shorten(self) -> bool:
        """Whether every boundary below a hit is a hit as well, under the names at the boundary."""
        return not self.partial_hits and all(group.is_downward_closed for group in self.groups)

    def aligned(self, num_tokens: int) -> int:
        """Return ``num_tokens`` rounded down to whole ``lcm_block_size``: the units of saving."""
        return num_tokens // self.lcm_block_size * self.lcm_block_size

    def last_boundary(self, num_tokens: int) -> int:
        """Return the largest boundary at most ``num_tokens``."""
        return num_tokens // self.alignment * self.alignment

    # ------------------------------------------------------------------ what to store

    def store_mask(
        self, aligned_token_len: int, start_token: int = 0, num_prompt_tokens: int | None = None
    ) -> list[list[bool] | None]:
        """Return per group which chunks of ``[start_token, aligned_token_len)`` to store.

        ``None`` means all of them. Both ends are multiples of ``lcm_block_size``.
        ``num_prompt_tokens`` is where the prompt ends, for retention that keeps more there.
        """
        kept = self.kept_boundaries(num_prompt_tokens)
        masks: list[list[bool] | None] = []
        for group in self.groups:
            chunks = range(start_token // group.block_size, aligned_token_len // group.block_size)
            runs = self._reachable_runs(group, chunks, kept)
            if runs == [chunks] or not chunks:
                masks.append(None)
                continue
            mask = [False] * len(chunks)
            for run in runs:
                mask[run.start - chunks.start : run.stop - chunks.start] = [True] * len(run)
            masks.append(mask)
        return masks

    def kept_boundaries(
        self, num_prompt_tokens: int | None, shared_tokens: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """Return the boundaries kept beside the regular ones: the prompt's, and shared prefixes'.

        ``shared_tokens`` are where requests were seen to part that begin alike: ``()`` or more.
        """
        if self.retention_interval is None:
            return ()
        has_proof = self.max_proof_tokens > 0
        replayed = self._retention.replayed(num_prompt_tokens, has_proof=has_proof)
        shared = (self.aligned(token) for token in shared_tokens)
        return (*replayed, *(boundary for boundary in shared if boundary))

    def stored_runs(
        self, start_token: int, end_token: int, kept: Sequence[int] = ()
    ) -> list[list[range]]:
        """Return per group the runs of chunks to store when saving ``[start_token, end_token)``.

        Both ends are multiples of ``lcm_block_size``. ``kept`` are :meth:`kept_boundaries`. State
        groups have none: their blocks are named by the engine alone.
        """
        runs: list[list[range]] = []
        for group in self.groups:
            if group.is_state:
                runs.append([])
                continue
            chunks = range(start_token // group.block_size, end_token // group.block_size)
            runs.append(self._reachable_runs(group, chunks, kept))
        return runs

    def owes_proof(self, boundary: int, kept: Sequence[int]) -> bool:
        """Tell whether the end of a saved range needs a proof from behind it to be of use.

        Where there are states, only their hand-offs make boundaries, and bring the proofs along.
        """
        if not self.max_proof_tokens or self.num_state_groups:
            return False
        is_dense = all(group.ignores_retention for group in self.groups)
        step = self.lcm_block_size if is_dense else self._retention.step
        return bool(step and boundary % step == 0) or boundary in kept

    @property
    def num_state_groups(self) -> int:
        """How many groups hold states: so many blocks does a boundary hand off."""
        return sum(group.is_state for group in self.groups)

    @property
    def slack_tokens(self) -> float:
        """For how many tokens an engine keeps what is to be saved, at least."""
        return min(group.slack_tokens for group in self.groups)

    @property
    def max_stored_per_unit(self) -> int:
        """How many chunks of a unit are stored at most, over all groups."""
        unit = self.lcm_block_size
        num_chunks = 0
        for group in self.groups:
            if group.is_state:
                continue
            whole = unit // group.block_size
            last = group.last_requiring(0)
            if last is not None and not self._is_stored_whole(group):
                whole = min(whole, (last + group.proof_tokens) // group.block_size + 1)
            num_chunks += whole
        return num_chunks

    def boundary_chunks(
        self, boundary: int, kept: Sequence[int] = (), *, saved_token: int = 0
    ) -> list[list[tuple[int, int]]]:
        """Return per group what resuming at ``boundary`` needs beside saved units.

        Whole units are saved up to the boundary, or to ``saved_token`` beyond it. So that is, as
        ``(chunk, end_token)``: chunks past them, also of a proof; one that the boundary (or its
        proof) cuts; and chunks of a boundary that retention does not keep. The hash at
        ``end_token`` names the chunk. State groups have none: the engine hands their blocks off.
        """
        saved_token = max(saved_token, self.aligned(boundary))
        needed: list[list[tuple[int, int]]] = []
        for group in self.groups:
            if group.is_state:
                needed.append([])
                continue
            size, end_token = group.block_size, boundary + group.proof_tokens
            matched = group.matched(boundary)
            if self._is_stored_whole(group):
                matched = range(matched.stop)
            saved_stop = min(saved_token, end_token) // size
            saved = range(matched.start, max(matched.start, min(matched.stop, saved_stop)))
            stored = self._reachable_runs(group, saved, kept)
            missing = _without(matched, stored)
            needed.append([(chunk, min((chunk + 1) * size, end_token)) for chunk in missing])
        return needed

    def _reachable_runs(self, group: Group, chunks: range, kept: Sequence[int]) -> list[range]:
        """Return the chunks that some boundary asks for, as ascending runs.

        Whether a chunk is among them does not depend on where ``chunks`` begin or end: a chunk is
        looked at once, so boundaries that lie beyond it count as well.
        """
        if self._is_stored_whole(group):
            return [chunks] if chunks else []
        step = self.lcm_block_size if group.ignores_retention else self._retention.step
        wanted = list(_runs_of_multiples(group, chunks, step))
        for boundary in kept:
            matched = group.matched(boundary)
            first, stop = max(matched.start, chunks.start), min(matched.stop, chunks.stop)
            if first < stop:
                wanted.append(range(first, stop))
        return _merged(wanted)

    def _is_stored_whole(self, group: Group) -> bool:
        return group.is_downward_closed or (self.stores_dense and group.ignores_retention)

    # ------------------------------------------------------------------ what to load

    def load_mask(self, hit_token: int, num_computed_tokens: int) -> list[range]:
        """Return per group the chunks to load so that a request resumes at ``hit_token``.

        That is ``required(hit_token)`` at or above what the engine already holds.
        """
        ranges = []
        for group in self.groups:
            required = group.required(hit_token)
            first = num_computed_tokens // group.block_size
            ranges.append(range(max(required.start, first), max(required.stop, first)))
        return ranges

    def blocks_to_compute(self, num_tokens: int, max_step_tokens: int) -> int:
        """Return how many blocks an engine wants for a request of ``num_tokens``, at most.

        A window keeps what it reaches and what a step adds; a state the last two and two copies.
        """
        num_blocks = 0
        for group in self.groups:
            wanted = ceil_div(num_tokens, group.block_size) + 1
            last = group.last_requiring(0)
            if group.is_state:
                wanted = 4
            elif last is not None:
                wanted = min(wanted, ceil_div(last + 1 + max_step_tokens, group.block_size) + 1)
            num_blocks += wanted
        return num_blocks

    def databases(
        self,
        namespace: str,
        parts: Sequence[Sequence[Part]] | None = None,
        keys: KeyStyle = PoolKey,
    ) -> list[list[ChunkedTokenDatabase]]:
        """Return per group one database per part of its chunks, under one namespace.

        ``parts`` has those of each group; by default one rank has everything.
        """
        parts = parts if parts is not None else ((WHOLE,),) * len(self.groups)
        return [
            [
                ChunkedTokenDatabase.for_group(
                    KeyMetadata(namespace, part, group_id),
                    block_size=group.block_size,
                    hash_block_size=self.hash_block_size,
                    keys=keys,
                )
                for part in parts[group_id]
            ]
            for group_id, group in enumerate(self.groups)
        ]

    def find_longest_cache_hit(
        self,
        num_tokens: int,
        block_hashes: Sequence[bytes],
        databases: Sequence[Sequence[ChunkedTokenDatabase]],
        exists: Callable[[list[str]], Sequence[bool]],
    ) -> int:
        """Return the longest hit of a request of ``num_tokens`` tokens, at most that minus one.

        This *is* the lookup, driven by a presence function: one algorithm serves both.
        """
        query = self.query(num_tokens, block_hashes)
        return drive(lookup(query, self.boundaries, databases), exists).hit_token

    def query(self, num_tokens: int, block_hashes: Sequence[bytes]) -> LookupQuery:
        """Return what to ask for a request of ``num_tokens`` tokens, from its first one on."""
        known_tokens = min(num_tokens - 1, len(block_hashes) * self.hash_block_size)
        end_token = self.last_boundary(max(0, known_tokens))
        end = (end_token + self.max_proof_tokens) // self.hash_block_size
        return LookupQuery(0, end_token, HashWindow(block_hashes, end=min(end, len(block_hashes))))


def _runs_of_multiples(group: Group, chunks: range, step: int) -> Iterator[range]:
    """Yield the runs of ``chunks`` that multiples of ``step`` tokens match; none where it is 0.

    Not boundary by boundary, but each time by the last one that still matches the next chunk.
    """
    size, proof = group.block_size, group.proof_tokens
    chunk = chunks.start
    while step and chunk < chunks.stop:
        boundary = (max(0, chunk * size - proof) // step + 1) * step  # the first one behind
        first = group.matched(boundary).start
        if first > chunk:
            chunk = first
            continue
        last = group.last_requiring(chunk)
        assert last is not None
        boundary = max(boundary, last // step * step)
        stop = min(group.matched(boundary).stop, chunks.stop)
        yield range(chunk, stop)
        chunk = stop


def _without(chunks: range, runs: Sequence[range]) -> list[int]:
    """Return the chunks that lie in none of the ascending ``runs``."""
    left: list[int] = []
    first = chunks.start
    for run in runs:
        left.extend(range(first, run.start))
        first = run.stop
    left.extend(range(first, chunks.stop))
    return left


def _merged(runs: list[range]) -> list[range]:
    """Return runs in ascending order, those that touch as one."""
    merged: list[range] = []
    for run in sorted(runs, key=lambda run: run.start):
        if merged and run.start <= merged[-1].stop:
            merged[-1] = range(merged[-1].start, max(merged[-1].stop, run.stop))
        else:
            merged.append(run)
    return merged
