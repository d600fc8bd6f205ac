"""The kinds of attention, each reduced to one pure function.

``required(n)`` is the range of chunks that must be present for a request to resume after ``n``
tokens. Hit length, load mask and store mask are all derived from it in ``coordinator``; nothing
else knows attention kinds, so supporting another kind means adding a class here. The formulas are
those of vLLM's ``single_type_kv_cache_manager`` (what it keeps of a request after ``n`` tokens).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from kvtide.core.chunks import ceil_div


@dataclass(frozen=True, slots=True)
class Group(ABC):
    """A KV cache group: layers that share one block table and one attention kind.

    ``block_size`` is the resolved span of one block-table entry, in tokens. A group of a draft
    model (EAGLE, MTP) may resume at a boundary only if the ``proof_tokens`` after it were matched
    too: the drafter writes a token's KV cache with knowledge of the next token.
    """

    block_size: int
    proof_tokens: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        if self.block_size <= 0:
            raise ValueError(f"block_size must be positive, not {self.block_size}")
        if self.proof_tokens < 0:
            raise ValueError(f"proof_tokens must not be negative: {self.proof_tokens}")

    @abstractmethod
    def required(self, num_tokens: int) -> range:
        """Return the chunks that must be present to resume after ``num_tokens`` tokens.

        Both ends never fall as ``num_tokens`` grows.
        """

    @abstractmethod
    def last_requiring(self, chunk: int) -> int | None:
        """Return the largest token count that requires ``chunk``; ``None``: there is none.

        No count below it, down to the end of the chunk, has ``required`` begin behind the chunk.
        """

    @property
    def is_downward_closed(self) -> bool:
        """Whether ``required(n)`` contains ``required(m)`` for every m below n.

        Such a group is probed forward and stops at its first gap; it is never stored sparsely.
        """
        return False

    @property
    def is_state(self) -> bool:
        """Whether a block holds the state after exactly the tokens of its key, no token's own.

        Such a block is no use for a shorter prefix, and its place in the engine's block table says
        nothing about what it holds: only the engine's hand-offs do.
        """
        return False

    @property
    def ignores_retention(self) -> bool:
        """Whether every boundary is kept for it, however few retention keeps.

        The engine's retention makes windows and states sparse, nothing else.
        """
        return self.is_downward_closed

    @property
    def slack_tokens(self) -> float:
        """For how many tokens after its end a chunk is still required, at least.

        So long an engine keeps its block, and saving it may wait.
        """
        return 0

    def matched(self, boundary: int) -> range:
        """Return the chunks that must be found to resume at ``boundary``: required, and proof."""
        end_token = boundary + self.proof_tokens
        return range(self.required(boundary).start, self.required(end_token).stop)


@dataclass(frozen=True, slots=True)
class FullAttention(Group):
    """Every token attends to every earlier one: all chunks up to ``num_tokens`` (also MLA)."""

    def required(self, num_tokens: int) -> range:
        """Return ``[0, ceil(num_tokens / block_size))``."""
        return range(ceil_div(num_tokens, self.block_size))

    def last_requiring(self, chunk: int) -> None:  # noqa: ARG002
        """Return ``None``: a longer prefix needs all that a shorter one needs."""
        return

    @property
    def is_downward_closed(self) -> bool:
        """True."""
        return True

    @property
    def slack_tokens(self) -> float:
        """Without end."""
        return math.inf


@dataclass(frozen=True, slots=True)
class SlidingWindow(Group):
    """A token attends to itself and the ``window - 1`` tokens before it."""

    window: int

    def __post_init__(self) -> None:
        Group.__post_init__(self)
        if self.window <= 0:
            raise ValueError(f"window must be positive, not {self.window}")

    def required(self, num_tokens: int) -> range:
        """Return the chunks of the ``window - 1`` tokens before ``num_tokens``."""
        first_token = max(0, num_tokens - (self.window - 1))
        return range(first_token // self.block_size, ceil_div(num_tokens, self.block_size))

    def last_requiring(self, chunk: int) -> int:
        """Return where the chunk's last token leaves the window."""
        return (chunk + 1) * self.block_size + self.window - 2

    @property
    def slack_tokens(self) -> float:
        """Until the chunk's last token leaves the window."""
        return max(0, self.window - 2)


@dataclass(frozen=True, slots=True)
class ChunkedLocal(Group):
    """A token attends to the earlier tokens of its own ``chunk_size`` tokens, to no others."""

    chunk_size: int

    def __post_init__(self) -> None:
        Group.__post_init__(self)
        if self.chunk_size <= 0:
            raise ValueError(f"chunk_size must be positive, not {self.chunk_size}")

    def required(self, num_tokens: int) -> range:
        """Return the chunks since the last multiple of ``chunk_size``; none right behind one."""
        first_token = num_tokens // self.chunk_size * self.chunk_size
        return range(first_token // self.block_size, ceil_div(num_tokens, self.block_size))

    def last_requiring(self, chunk: int) -> int:
        """Return the last token count inside the attention chunk of the chunk's last token."""
        end_token = (chunk + 1) * self.block_size
        return ceil_div(end_token, self.chunk_size) * self.chunk_size - 1

    @property
    def ignores_retention(self) -> bool:
        """True, as for full attention."""
        return True


@dataclass(frozen=True, slots=True)
class Mamba(Group):
    """One state stands for all tokens before it (Mamba, linear attention, short convolutions)."""

    def required(self, num_tokens: int) -> range:
        """Return the one chunk that ends at, or contains, ``num_tokens``."""
        end = ceil_div(num_tokens, self.block_size)
        return range(max(0, end - 1), end)

    def last_requiring(self, chunk: int) -> int:
        """Return the end of the chunk: a state serves the boundary at its end."""
        return (chunk + 1) * self.block_size

    @property
    def is_state(self) -> bool:
        """True."""
        return True
