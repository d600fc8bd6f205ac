"""What to store, what to load and how far a hit reaches, derived from each group's ``required``.

Theory of operation. A *boundary* is a token count at which a later request may resume: a multiple
of ``alignment``. Resuming at boundary ``n`` needs ``required(n)`` of every group, so

* a **hit** is the largest boundary at most ``num_tokens - 1`` where every group holds
  ``required(boundary)`` (one token must remain to compute, and that bounds the *search*: a hit
  shortened afterwards would ask for chunks that were never stored);
* the **load mask** is ``required(hit)`` at or above what the engine has already;
* the **store mask** is the union of ``required`` over all boundaries a later request may use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtide.core.chunks import ChunkedTokenDatabase, ceil_div
from kvtide.core.groups import Group
from kvtide.core.keys import HashWindow, KeyMetadata
from kvtide.core.lookup import LookupQuery, drive, lookup


@dataclass(frozen=True, slots=True)
class Coordinator:
    """Joint decisions over all KV cache groups of a model.

    ``hash_block_size`` (tokens) divides every group's block size.

    Raises:
        ValueError: there is no group, or a block size is not a multiple of ``hash_block_size``.
    """

    groups: tuple[Group, ...]
    hash_block_size: int
    lcm_block_size: int = field(init=False)
    """The least common multiple of the groups' block sizes, in tokens."""

    def __post_init__(self) -> None:
        if not self.groups:
            raise ValueError("a model needs at least one KV cache group")
        for group in self.groups:
            if group.block_size % self.hash_block_size:
                raise ValueError(
                    f"block_size {group.block_size} must be a multiple of "
                    f"hash_block_size {self.hash_block_size}"
                )
        lcm = math.lcm(*(group.block_size for group in self.groups))
        object.__setattr__(self, "lcm_block_size", lcm)

    @property
    def alignment(self) -> int:
        """The distance in tokens between boundaries."""
        return self.lcm_block_size

    def aligned(self, num_tokens: int) -> int:
        """Return ``num_tokens`` rounded down to whole ``lcm_block_size``: the units of saving."""
        return num_tokens // self.lcm_block_size * self.lcm_block_size

    def last_boundary(self, num_tokens: int) -> int:
        """Return the largest boundary at most ``num_tokens``."""
        return num_tokens // self.alignment * self.alignment

    def store_mask(
        self, aligned_token_len: int, start_token: int = 0, num_prompt_tokens: int | None = None
    ) -> list[list[bool] | None]:
        """Return per group which chunks of ``[start_token, aligned_token_len)`` to store.

        ``None`` means all of them. Both ends are multiples of ``lcm_block_size``.
        ``num_prompt_tokens`` is where the prompt ends, for kinds that keep less after it.
        """
        del num_prompt_tokens  # every boundary is kept for the kinds that exist so far
        return self._reachable_masks(start_token, aligned_token_len)

    def _reachable_masks(self, start_token: int, end_token: int) -> list[list[bool] | None]:
        """Return per group the chunks of the range that some boundary in it asks for."""
        boundaries = range(start_token + self.alignment, end_token + 1, self.alignment)
        masks: list[list[bool] | None] = []
        for group in self.groups:
            if group.is_downward_closed:
                masks.append(None)
                continue
            chunks = range(start_token // group.block_size, end_token // group.block_size)
            wanted = {chunk for boundary in boundaries for chunk in group.required(boundary)}
            masks.append([chunk in wanted for chunk in chunks])
        return masks

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

    def databases(self, namespace: str, ranks: range) -> list[list[ChunkedTokenDatabase]]:
        """Return per group one database per rank, under one namespace."""
        return [
            [
                ChunkedTokenDatabase.for_group(
                    KeyMetadata(namespace, rank, group_id),
                    block_size=group.block_size,
                    hash_block_size=self.hash_block_size,
                )
                for rank in ranks
            ]
            for group_id, group in enumerate(self.groups)
        ]

    def num_chunks(self, start_token: int, end_token: int) -> int:
        """Return how many chunks of all groups together make up a token range."""
        return sum(
            ceil_div(end_token, group.block_size) - start_token // group.block_size
            for group in self.groups
        )

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
        end_token = min(num_tokens - 1, len(block_hashes) * self.hash_block_size)
        query = LookupQuery(0, max(0, end_token), HashWindow(block_hashes))
        return drive(lookup(query, self.groups, databases, self.alignment), exists).hit_token
