"""A language model of arithmetic: its KV cache and its tokens follow from the bytes it reads.

The KV of a token depends on every byte of KV before it *as read from the blocks*, and so does the
next token. A wrong byte anywhere in a block that a request attends to changes its output, as it
would in a real model; what the bytes should be can be computed from the tokens alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

TOKEN_BYTES = 8
"""The KV of one token in one group on one rank."""
VOCABULARY = 1 << 16


class KvChain:
    """The KV of one group on one rank, token after token."""

    __slots__ = ("_hash",)

    def __init__(self, seed: bytes, kv: bytes = b"") -> None:
        self._hash = hashlib.sha256(seed + kv)

    def extend(self, token: int) -> bytes:
        """Return the KV of the next token, and attend to it from now on."""
        probe = self._hash.copy()
        probe.update(token.to_bytes(4, "little"))
        kv = probe.digest()[:TOKEN_BYTES]
        self._hash.update(kv)
        return kv

    def digest(self) -> bytes:
        """Return what all the KV so far comes to."""
        return self._hash.digest()


def sample(chains: Iterable[KvChain]) -> int:
    """Return the token that follows what ``chains`` (every rank and group) have attended to."""
    joined = b"".join(chain.digest() for chain in chains)
    return int.from_bytes(hashlib.sha256(joined).digest()[:2], "little")


def chain_hashes(tokens: Sequence[int], block_size: int, parents: Sequence[bytes]) -> list[bytes]:
    """Return the hashes of the full blocks of ``tokens`` past those in ``parents``."""
    chain: list[bytes] = []
    parent = parents[-1] if parents else b""
    for start in range(len(parents) * block_size, len(tokens) - block_size + 1, block_size):
        block = b"".join(t.to_bytes(4, "little") for t in tokens[start : start + block_size])
        parent = hashlib.sha256(parent + block).digest()
        chain.append(parent)
    return chain


class TrueKv:
    """What one request's KV cache must hold, computed from its tokens and never from blocks."""

    def __init__(self, seeds: Sequence[bytes], tokens: Sequence[int] = ()) -> None:
        self._chains = [KvChain(seed) for seed in seeds]
        self.kv = [bytearray() for _ in seeds]
        """Per seed (rank and group) the KV of all tokens."""
        self.extend(tokens)

    @property
    def num_tokens(self) -> int:
        """How many tokens it covers."""
        return len(self.kv[0]) // TOKEN_BYTES

    def extend(self, tokens: Sequence[int]) -> None:
        """Append the KV of more tokens."""
        for chain, kv in zip(self._chains, self.kv, strict=True):
            for token in tokens:
                kv.extend(chain.extend(token))

    def next_token(self) -> int:
        """Return the token that follows."""
        return sample(self._chains)


@dataclass(slots=True)
class KvModel:
    """The model under one set of weights; ``truth`` tells what a cached block must hold.

    ``block_sizes`` are the groups' blocks in tokens. Seeds are ordered by rank, then group.
    """

    num_ranks: int
    block_sizes: tuple[int, ...]
    weights: int = 0
    truth: dict[tuple[int, int, int, bytes], bytes] = field(default_factory=dict)
    """By weights, rank, group and hash: the bytes of that block."""

    def seeds(self) -> list[bytes]:
        """Return the seed of every chain."""
        return [
            f"{self.weights}/{rank}/{group}/".encode()
            for rank in range(self.num_ranks)
            for group in range(len(self.block_sizes))
        ]

    def seed_index(self, rank: int, group_id: int) -> int:
        """Return where the chain of a rank and group is in :meth:`seeds`."""
        return rank * len(self.block_sizes) + group_id

    def generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Return what an engine without a pool must answer."""
        true = TrueKv(self.seeds(), prompt)
        output: list[int] = []
        for _ in range(num_tokens):
            token = true.next_token()
            output.append(token)
            true.extend([token])
        return output

    def learn_truth(
        self, true: TrueKv, hashes: Sequence[bytes], hash_block_size: int, first_hash: int = 0
    ) -> None:
        """Note what the blocks of a request that end within ``hashes[first_hash:]`` must hold."""
        for rank in range(self.num_ranks):
            for group_id, block_size in enumerate(self.block_sizes):
                kv = true.kv[self.seed_index(rank, group_id)]
                ratio = block_size // hash_block_size
                for chunk in range(first_hash // ratio, len(hashes) // ratio):
                    span = slice(
                        chunk * block_size * TOKEN_BYTES, (chunk + 1) * block_size * TOKEN_BYTES
                    )
                    name = hashes[(chunk + 1) * ratio - 1]
                    self.truth[self.weights, rank, group_id, name] = bytes(kv[span])
