"""A language model of arithmetic: its KV cache and its tokens follow from the bytes it reads.

The KV of a token depends on every byte of KV that it may attend to *as read from the blocks*, and
so does the next token. A wrong byte anywhere in a block that a request attends to changes its
output, as it would in a real model; what the bytes should be can be computed from the tokens alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtide.core.groups import Group
from kvtide.core.topology import Part
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


class GroupPart(NamedTuple):
    """A part of one group."""

    group_id: int
    part: Part


class TrueKv:
    """What one request's KV cache must hold, computed from its tokens and never from blocks."""

    def __init__(
        self, seeds: Mapping[GroupPart, tuple[Group, bytes]], tokens: Sequence[int] = ()
    ) -> None:
        self._names = TokenChain()
        self._chains = {name: make_chain(*seed) for name, seed in seeds.items()}
        self.kv = {name: bytearray() for name in seeds}
        """Per part the KV of all tokens, or the state after each of them.

        A draft group lacks the last token's.
        """
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append the KV of more tokens."""
        for token in tokens:
            name = self._names.extend(token)
            for key, chain in self._chains.items():
                self.kv[key].extend(chain.extend(name))

    def span(self, name: GroupPart, first_token: int, end_token: int) -> bytes:
        """Return the KV of tokens ``[first_token, end_token)`` in one part."""
        return bytes(self.kv[name][first_token * TOKEN_BYTES : end_token * TOKEN_BYTES])

    def next_token(self) -> int:
        """Return the token that follows."""
        return sample([chain] for chain in self._chains.values())


@dataclass(slots=True)
class KvModel:
    """The model under one set of weights; ``truth`` tells what a cached block must hold.

    ``parts`` has those of each group's chunks. Which ranks hold them makes no difference to what
    they hold, nor to the tokens.
    """

    groups: tuple[Group, ...]
    parts: Sequence[Sequence[Part]]
    hash_block_size: int
    has_cut_names: bool = False
    """Whether the hashes inside a block name its beginning, too."""
    weights: int = 0
    truth: dict[tuple[int, GroupPart, bytes], bytes] = field(default_factory=dict)
    """By weights, part and hash: the bytes with which that part of a block must begin.

    What comes after the tokens that the hash covers may be anything; so may the KV of a draft
    group's last token, whose successor the hash does not cover.
    """

    @property
    def names(self) -> list[GroupPart]:
        """Every part of every group, in an order that does not depend on who holds it."""
        return [
            GroupPart(group_id, part)
            for group_id, parts in enumerate(self.parts)
            for part in sorted(parts)
        ]

    def seed(self, name: GroupPart) -> bytes:
        """Return what makes the bytes of a part differ from those of all others."""
        return f"{self.weights}/{name.group_id}/{tuple(name.part)}".encode()

    def true_kv(self, tokens: Sequence[int] = ()) -> TrueKv:
        """Return what the KV cache of ``tokens`` must hold."""
        seeds = {name: (self.groups[name.group_id], self.seed(name)) for name in self.names}
        return TrueKv(seeds, tokens)

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
        for name in self.names:
            group = self.groups[name.group_id]
            for number in range(first_hash, len(hashes)):
                end_token = (number + 1) * self.hash_block_size
                if end_token % group.block_size and not self.has_cut_names:
                    continue
                first_token = (end_token - 1) // group.block_size * group.block_size
                if group.is_state:
                    first_token = end_token - 1
                content = true.span(name, first_token, end_token - is_draft(group))
                self.truth[self.weights, name, hashes[number]] = content
