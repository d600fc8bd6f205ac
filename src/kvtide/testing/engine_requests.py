"""Requests of the scripted engine: their tokens, hashes, block tables and where they stand."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from enum import Enum

from kvtide.core.jobs import NULL_BLOCK_ID
from kvtide.testing.engine_blocks import EngineBlockPool
from kvtide.testing.engine_model import VOCABULARY, KvModel, chain_hashes
from kvtide.testing.requests import RecordingRequest


class EngineState(Enum):
    """Where a request is in the engine."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    """Ended; it may still hold blocks that a load writes to."""


class EngineRequest(RecordingRequest):
    """A request of :class:`~kvtide.testing.engine.ScriptedEngine`, and what the pool sees of it.

    ``tokens`` are the prompt and what was generated and accepted; only they are hashed.
    ``tables[g]`` is the block table of group ``g``. ``accepts`` says, step after step and then
    from the start, how many of the drafted tokens turn out right.
    """

    def __init__(
        self,
        request_id: str,
        prompt: Sequence[int],
        pool: EngineBlockPool,
        model: KvModel,
        guess_hit: Callable[[int, Sequence[bytes]], int],
        *,
        max_tokens: int = 1,
        may_load: bool = True,
        accepts: Sequence[int] = (0,),
    ) -> None:
        super().__init__(
            request_id,
            tables=[[] for _ in model.groups],
            num_prompt_tokens=len(prompt),
        )
        self.prompt = tuple(prompt)
        self.tokens: list[int] = []
        self.max_tokens = max_tokens
        self.may_load = may_load
        self.state = EngineState.WAITING
        self.num_computed = 0
        self.num_cached = [0] * len(model.groups)
        """Per group how many blocks of its table have been published, or passed over."""
        self.tails: dict[int, tuple[int, int]] = {}
        """By state group: the block that has just been named at a boundary inside it, and where."""
        self.is_loaded = False
        self.has_failed_load = False
        self.num_loads = 0
        self.num_external = 0
        """What the present or last load is to bring, in tokens."""
        self.num_loaded_tokens = 0
        self.num_preemptions = 0
        self.drafts: list[int] = []
        self._accepts: Iterator[int] = itertools.cycle(accepts)
        self._pool = pool
        self._model = model
        self._guess_hit = guess_hit
        self.true = model.true_kv()
        self.append(prompt)

    def __repr__(self) -> str:
        return (
            f"<EngineRequest {self.request_id} {self.state.value} "
            f"{self.num_computed}/{len(self.tokens)}>"
        )

    @property
    def output(self) -> list[int]:
        """What was generated so far."""
        return self.tokens[len(self.prompt) :]

    @property
    def is_done(self) -> bool:
        """Whether everything that was asked for is generated."""
        return len(self.output) >= self.max_tokens

    @property
    def num_reads(self) -> tuple[int, int]:
        """How often the pool has read hashes and block tables."""
        return len(self.hash_reads), len(self.block_reads)

    @property
    def held_blocks(self) -> list[int]:
        """Every block it holds a reference to."""
        return [block_id for table in self.tables for block_id in table if block_id]

    def append(self, tokens: Sequence[int]) -> None:
        """Add accepted tokens, and hash the blocks that they fill."""
        self.tokens += tokens
        self.true.extend(tokens)
        self.num_tokens = len(self.tokens)
        first = len(self.block_hashes)
        unit = self._model.hash_block_size
        self.block_hashes += chain_hashes(self.tokens, unit, self.block_hashes)
        self._model.learn_truth(self.true, self.block_hashes, first)

    def change_weights(self) -> None:
        """Expect the KV cache of the model's present weights from now on."""
        self.true = self._model.true_kv(self.tokens)
        self._model.learn_truth(self.true, self.block_hashes)

    def draft(self, num_tokens: int) -> None:
        """Draft tokens for the next step, as many of them right as the script says."""
        guess = self._model.true_kv(self.tokens) if num_tokens else self.true
        num_right = next(self._accepts)
        self.drafts = []
        for index in range(num_tokens):
            token = guess.next_token()
            token = token if index < num_right else (token + 1) % VOCABULARY
            self.drafts.append(token)
            guess.extend([token])

    def drop_blocks(self) -> list[int]:
        """Forget all blocks and return them in the order in which to free them: ends first."""
        block_ids = [block for table in self.tables for block in reversed(table) if block]
        self.tables = [[] for _ in self.tables]
        self.tails.clear()
        self.num_cached = [0] * len(self.tables)
        self.num_computed = 0
        self.is_loaded = False
        return block_ids

    def target_ids(self, group_id: int, first_chunk: int, end_chunk: int) -> Sequence[int]:
        """Return a part of a group's block table, with null for blocks that are cached."""
        return [
            NULL_BLOCK_ID if self._pool.names[block_id] else block_id
            for block_id in self.block_ids(group_id, first_chunk, end_chunk)
        ]

    def local_hit_hint(self) -> int:
        """Guess what the prefix cache holds, as the connector does."""
        return self._guess_hit(self.num_tokens, self.block_hashes)
