"""A language model of arithmetic: its KV cache and its tokens follow from the bytes it reads.

The KV of a token depends on every byte of KV that it may attend to *as read from the blocks*, and
so does the next token. A wrong byte anywhere in a block that a request attends to changes its
output, as it would in a real model; what the bytes should be can be computed from the tokens alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtide.core.groups import Group
from kvtide.testing.engine_attention import TOKEN_BYTES, TokenChain, is_draft, make_chain, sample

VOCABULARY = 1 << 16


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

    def __init__(
        self, groups: Sequence[Group], seeds: Sequence[bytes], tokens: Sequence[int] = ()
    ) -> None:
        self._names = TokenChain()
        self._chains = [
            make_chain(groups[index % len(groups)], seed) for index, seed in enumerate(seeds)
        ]
        self.kv = [bytearray() for _ in seeds]
        """Per seed (rank and group) the KV of all tokens, or the state after each of them.

        A draft group lacks the last token's.
        """
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append the KV of more tokens."""
        for token in tokens:
            name = self._names.extend(token)
            for chain, kv in zip(self._chains, self.kv, strict=True):
                kv.extend(chain.extend(name))

    def span(self, index: int, first_token: int, end_token: int) -> bytes:
        """Return the KV of tokens ``[first_token, end_token)`` of seed ``index``."""
        return bytes(self.kv[index][first_token * TOKEN_BYTES : end_token * TOKEN_BYTES])

    def next_token(self) -> int:
        """Return the token that follows."""
        return sample(self._chains)


@dataclass(slots=True)
class KvModel:
    """The model under one set of weights; ``truth`` tells what a cached block must hold.

    Seeds are ordered by rank, then group.
    """

    num_ranks: int
    groups: tuple[Group, ...]
    hash_block_size: int
    has_cut_names: bool = False
    """Whether the hashes inside a block name its beginning, too."""
    weights: int = 0
    truth: dict[tuple[int, int, int, bytes], bytes] = field(default_factory=dict)
    """By weights, rank, group and hash: the bytes with which that block must begin.

    What comes after the tokens that the hash covers may be anything; so may the KV of a draft
    group's last token, whose successor the hash does not cover.
    """

    def seeds(self) -> list[bytes]:
        """Return the seed of every chain."""
        return [
            f"{self.weights}/{rank}/{group}/".encode()
            for rank in range(self.num_ranks)
            for group in range(len(self.groups))
        ]

    def seed_index(self, rank: int, group_id: int) -> int:
        """Return where the chain of a rank and group is in :meth:`seeds`."""
        return rank * len(self.groups) + group_id

    def true_kv(self, tokens: Sequence[int] = ()) -> TrueKv:
        """Return what the KV cache of ``tokens`` must hold."""
        return TrueKv(self.groups, self.seeds(), tokens)

    def generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Return what an engine without a pool must answer."""
        true = self.true_kv(prompt)
        output: list[int] = []
        for _ in range(num_tokens):
            token = true.next_token()
            output.append(token)
            true.extend([token])
        return output

    def learn_truth(self, true: TrueKv, hashes: Sequence[bytes], first_hash: int = 0) -> None:
        """Note what the blocks of a request must hold that ``hashes[first_hash:]`` name."""
        for rank in range(self.num_ranks):
            for group_id, group in enumerate(self.groups):
                index = self.seed_index(rank, group_id)
                for number in range(first_hash, len(hashes)):
                    end_token = (number + 1) * self.hash_block_size
                    if end_token % group.block_size and not self.has_cut_names:
                        continue
                    first_token = (end_token - 1) // group.block_size * group.block_size
                    if group.is_state:
                        first_token = end_token - 1
                    content = true.span(index, first_token, end_token - is_draft(group))
                    self.truth[self.weights, rank, group_id, hashes[number]] = content
