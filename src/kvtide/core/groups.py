"""The kinds of attention, each reduced to one pure function.

``required(n)`` is the range of chunks that must be present for a request to resume after ``n``
tokens. Hit length, load mask and store mask are all derived from it in ``coordinator``; nothing
else knows attention kinds, so supporting another kind means adding a class here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from kvtide.core.chunks import ceil_div


@dataclass(frozen=True, slots=True)
class Group(ABC):
    """A KV cache group: layers that share one block table and one attention kind.

    ``block_size`` is the resolved span of one block-table entry, in tokens.
    """

    block_size: int

    def __post_init__(self) -> None:
        if self.block_size <= 0:
            raise ValueError(f"block_size must be positive, not {self.block_size}")

    @abstractmethod
    def required(self, num_tokens: int) -> range:
        """Return the chunks that must be present to resume after ``num_tokens`` tokens."""

    @property
    @abstractmethod
    def is_downward_closed(self) -> bool:
        """Whether ``required(n)`` contains ``required(m)`` for every m below n.

        Such a group is probed forward and stops at its first gap.
        """


@dataclass(frozen=True, slots=True)
class FullAttention(Group):
    """Every token attends to every earlier one: all chunks up to ``num_tokens`` (also MLA)."""

    def required(self, num_tokens: int) -> range:
        """Return ``[0, ceil(num_tokens / block_size))``."""
        return range(ceil_div(num_tokens, self.block_size))

    @property
    def is_downward_closed(self) -> bool:
        """True: a longer prefix needs all that a shorter one needs."""
        return True
