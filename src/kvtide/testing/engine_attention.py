"""What a token may read, per attention kind, and the arithmetic that takes the place of attention.

Written without the pool's own ``required``: a mistake there makes the engine compute on blocks that
nobody filled, which shows in its tokens.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Sequence

from kvtide.core.groups import ChunkedLocal, Group, SlidingWindow

TOKEN_BYTES = 8
"""The KV of one token in one part of a group; also one state."""


def first_needed_token(group: Group, num_tokens: int) -> int:
    """Return the first token whose KV is read once ``num_tokens`` are computed, or hold a state.

    Everything before it may be freed.
    """
    if isinstance(group, SlidingWindow):
        return max(0, num_tokens - group.window + 1)
    if isinstance(group, ChunkedLocal):
        return num_tokens // group.chunk_size * group.chunk_size
    return max(0, num_tokens - 1) if group.is_state else 0


def is_draft(group: Group) -> bool:
    """Tell whether the group belongs to a draft model, which knows a token's successor."""
    return group.proof_tokens > 0


def block_bytes(group: Group) -> int:
    """Return what one part of a block holds: the KV of its tokens, or one state."""
    return TOKEN_BYTES if group.is_state else group.block_size * TOKEN_BYTES


class TokenChain:
    """Names every prefix of a sequence of tokens; it enters each token's KV, as embeddings do."""

    __slots__ = ("_hash",)

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._hash = hashlib.sha256(array("I", tokens).tobytes())

    def extend(self, token: int) -> bytes:
        """Return the name of the prefix that ends with the next token."""
        self._hash.update(array("I", (token,)).tobytes())
        return self._hash.digest()


class KvChain(ABC):
    """The KV of one part of a group, token after token."""

    is_sampled = True
    """Whether the next token depends on it."""

    @abstractmethod
    def extend(self, name: bytes) -> bytes:
        """Return the KV of the next token, which ends the prefix ``name``, and attend to it."""

    @abstractmethod
    def digest(self) -> bytes:
        """Return what all that the last token attended to comes to."""


def make_chain(group: Group, seed: bytes, num_tokens: int = 0, kv: bytes = b"") -> KvChain:
    """Return a chain that goes on after ``num_tokens``, attending to ``kv``.

    That is the KV from :func:`first_needed_token` on, or the state.
    """
    if is_draft(group):
        return _DraftChain(seed)
    if group.is_state:
        return _StateChain(seed, kv)
    if group.is_downward_closed:
        return _FullChain(seed, kv)
    return _LocalChain(seed, group, num_tokens, kv)


class _FullChain(KvChain):
    """Attends to every token before."""

    def __init__(self, seed: bytes, kv: bytes) -> None:
        self._hash = hashlib.sha256(seed + kv)

    def extend(self, name: bytes) -> bytes:
        probe = self._hash.copy()
        probe.update(name)
        kv = probe.digest()[:TOKEN_BYTES]
        self._hash.update(kv)
        return kv

    def digest(self) -> bytes:
        return self._hash.digest()


class _LocalChain(KvChain):
    """Attends to a window, or to its own chunk of tokens."""

    def __init__(self, seed: bytes, group: Group, num_tokens: int, kv: bytes) -> None:
        self._seed = seed
        self._group = group
        self._num_tokens = num_tokens
        self._kept = bytearray(kv)
        self._first = first_needed_token(group, num_tokens)

    def extend(self, name: bytes) -> bytes:
        first = first_needed_token(self._group, self._num_tokens)
        del self._kept[: (first - self._first) * TOKEN_BYTES]
        self._first = first
        kv = hashlib.sha256(self._seed + self._kept + name).digest()[:TOKEN_BYTES]
        self._kept += kv
        self._num_tokens += 1
        return kv

    def digest(self) -> bytes:
        return hashlib.sha256(self._seed + self._kept).digest()


class _StateChain(KvChain):
    """Keeps one state, which every token changes."""

    def __init__(self, seed: bytes, state: bytes) -> None:
        self._seed = seed
        self._state = state

    def extend(self, name: bytes) -> bytes:
        self._state = hashlib.sha256(self._seed + self._state + name).digest()[:TOKEN_BYTES]
        return self._state

    def digest(self) -> bytes:
        return self._state


class _DraftChain(KvChain):
    """A draft model's layers: a token's KV is known only with the token after it.

    So each call returns the KV of the token *before* the one that it is given.
    """

    is_sampled = False

    def __init__(self, seed: bytes) -> None:
        self._seed = seed
        self._is_first = True

    def extend(self, name: bytes) -> bytes:
        if self._is_first:
            self._is_first = False
            return b""
        return hashlib.sha256(self._seed + name).digest()[:TOKEN_BYTES]

    def digest(self) -> bytes:
        return b""


def sample(parts: Iterable[Sequence[KvChain]]) -> int:
    """Return the token that follows what ``parts`` have attended to, each in one or more copies.

    Copies that agree count once: the token does not tell how many there are. One that differs from
    the others changes it.
    """
    joined = hashlib.sha256()
    for copies in parts:
        for digest in dict.fromkeys(chain.digest() for chain in copies if chain.is_sampled):
            joined.update(digest)
    return int.from_bytes(joined.digest()[:2], "little")
