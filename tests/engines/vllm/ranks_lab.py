"""What the cases of several ranks share: models, pools, plain engines, and rows of evidence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from kvtide.runtime.tags import TAG_BYTES
from kvtide.stores import open_store
from tests.engines.vllm.families import BY_MODEL, Family
from tests.engines.vllm.models import build
from tests.engines.vllm.pools import SharedMooncake, local_pool, shared_mooncake
from tests.engines.vllm.ranks_scenario import Answer, RanksEngine, RanksRun, run

FIRST, SECOND = 1, 2
"""Seeds of prompts."""
ONE_HEAD = "llama-one-head"
"""Fewer KV heads than ranks: they hold copies."""
_MODELS = {**BY_MODEL, ONE_HEAD: replace(BY_MODEL["llama"], model=ONE_HEAD)}


@dataclass(frozen=True, slots=True)
class Row:
    """What was seen of a case.

    ``loaded`` are the tokens that an engine took from the pool, ``parts`` the keys present of each
    part of each group, ``saved`` the KiB that each rank wrote of them. ``verdicts`` say yes or no
    to a column, or to what ``note`` tells.
    """

    engines: str
    model: str
    store: str
    loaded: str = ""
    parts: str = ""
    saved: str = ""
    verdicts: dict[str, bool] = field(default_factory=dict)
    note: str = ""


_FOR_MORE = ", please check the stack trace above for the root cause"


class VllmCannotError(Exception):
    """vLLM does not run a combination on this machine, without kvtide; the message says why."""


class Lab:
    """Where cases run; for the time of a ``with`` block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._resources = ExitStack()
        self._mooncake: SharedMooncake | None = None
        self._plain: dict[str, dict[int, list[int]]] = {}
        self._one_copy_bytes: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._resources.close()

    @contextmanager
    def pool(self, store: str) -> Iterator[str]:
        """Give the URL of an empty pool, ``local`` or ``mooncake``."""
        if store == "local":
            with local_pool() as url:
                yield url
        else:
            if self._mooncake is None:
                self._mooncake = self._resources.enter_context(shared_mooncake())
            yield self._mooncake.emptied()

    def family(self, model: str) -> Family:
        """What is known of a model."""
        return _MODELS[model]

    def folder_of(self, model: str) -> Path:
        """Where a model lies."""
        return build(model, self._folder)

    def case(self, model: str, url: str, **changes: Any) -> RanksRun:
        """An engine for a model, which is asked the first prompt."""
        family = self.family(model)
        changes["arguments"] = {**family.arguments, **changes.get("arguments", {})}
        return RanksRun(
            str(self.folder_of(model)),
            url,
            **{"seeds": (FIRST,), "num_prompt_tokens": family.num_prompt_tokens, **changes},
        )

    def plain(self, model: str, **changes: Any) -> dict[int, list[int]]:
        """What an engine without kvtide answers to both prompts.

        Raises:
            VllmCannotError: it does not.
        """
        case = self.case(model, "", seeds=(FIRST, SECOND), **changes)
        if repr(case) not in self._plain:
            try:
                answers = run(case)
            except AssertionError as error:
                raise VllmCannotError(_last_error(str(error))) from error
            self._plain[repr(case)] = {seed: answer.tokens for seed, answer in answers.items()}
        return self._plain[repr(case)]

    def one_copy_bytes(self, model: str) -> int:
        """How many bytes an engine of one rank stores of a prompt, without tags."""
        if model not in self._one_copy_bytes:
            with self.pool("local") as url:
                answer = ask_one_rank(self.case(model, url))
            self._one_copy_bytes[model] = payload_bytes(answer)
        return self._one_copy_bytes[model]


def ask_one_rank(case: RanksRun) -> Answer:
    """Let an engine of one rank, in this process, answer a prompt."""
    with RanksEngine(case) as one:
        return one.ask(case.seeds[0])


def payload_bytes(answer: Answer) -> int:
    """The bytes that were saved, without tags."""
    return answer.counters["saved_bytes"] - TAG_BYTES * answer.counters["saved_chunks"]


def present(url: str, answer: Answer) -> list[list[int]]:
    """How many keys of each part of each group a pool has."""
    with closing(open_store(url)) as store:
        return [[sum(store.exists(keys)) for keys in group] for group in answer.keys]


def shown(groups: Sequence[Sequence[int]]) -> str:
    """Numbers of parts, by group."""
    return " ".join("+".join(map(str, parts)) for parts in groups)


def kib_by_rank(answer: Answer) -> str:
    """What each rank has written."""
    return "+".join(f"{counted.get('saved_bytes', 0) / 1024:.0f}" for counted in answer.by_rank)


def _last_error(log: str) -> str:
    lines = [line for line in log.splitlines() if "Error" in line]
    return lines[-1].strip().removesuffix(_FOR_MORE) if lines else log[-200:]
