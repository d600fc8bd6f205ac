"""kvtide and vLLM's in-tree Mooncake connector on one real pool: each loads what the other stored.

Two engines live side by side, as when one instance after another is moved: one with the in-tree
connector, in a process of its own, and one with kvtide and ``key_format: vllm``. Their answers are
compared with those of an engine without a connector.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import pytest

from kvtide.testing.mooncake import MooncakePool
from tests.engines.vllm.engines import InProcessEngine, engine, prompt_of
from tests.engines.vllm.families import BY_MODEL, HIT, NUM_OUTPUT_TOKENS, SHARED, Family
from tests.engines.vllm.family_runs import answer_with_zeros
from tests.engines.vllm.in_tree_engine import Answer, InTreeEngine, write_config
from tests.engines.vllm.models import build

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(600),  # three engines, one of which imports vLLM anew
]

MODELS = ["llama", "gemma3", "llama4", "lfm2"]
"""Full attention alone; then beside windows, local attention and states."""
OPTIONS = {"save_decode_cache": True}


@dataclass(slots=True)
class Direction:
    """One side stored a prompt, the other loaded it, and a prompt that shares its beginning."""

    prompt: list[int]
    plain: list[int] = field(default_factory=list)
    """The tokens of an engine without a connector."""
    plain_partial: list[int] = field(default_factory=list)
    stored: Answer | None = None
    loaded: Answer | None = None
    loaded_partial: Answer | None = None
    num_stored_keys: int = 0
    num_added_keys: int = 0
    """By the side that loaded the prompt."""

    @property
    def partial(self) -> list[int]:
        """A prompt that shares the beginning only."""
        return self.prompt[:SHARED] + prompt_of(100, seed=9)


@dataclass(slots=True)
class Evidence:
    """What was seen of a model, in both directions."""

    family: Family
    from_in_tree: Direction
    from_kvtide: Direction
    loaded_tokens: int = 0
    saved_bytes: int = 0
    controls: dict[str, list[int]] = field(default_factory=dict)
    """The tokens of kvtide's engine where zeros were loaded for one kind of group."""

    @property
    def directions(self) -> list[Direction]:
        """Both."""
        return [self.from_in_tree, self.from_kvtide]


@pytest.fixture(scope="session")
def models_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where models are kept for the session."""
    return tmp_path_factory.mktemp("interop")


@pytest.fixture(scope="module", params=MODELS)
def evidence(request: pytest.FixtureRequest, models_folder: Path) -> Evidence:
    """What the engines did on one pool of their own."""
    family = BY_MODEL[request.param]
    folder = build(family.model, models_folder)
    seen = Evidence(family, Direction(family.first), Direction(prompt_of(HIT + 1, seed=77)))
    with engine(folder, None, **family.arguments) as plain:
        for direction in seen.directions:
            direction.plain = answer(plain, direction.prompt).tokens
            direction.plain_partial = answer(plain, direction.partial).tokens
    with MooncakePool() as pool:
        config = write_config(pool, models_folder)
        with (
            mock.patch.dict(os.environ, MOONCAKE_CONFIG_PATH=str(config)),
            InTreeEngine(folder, config, family.arguments, OPTIONS) as in_tree,
        ):
            share(pool, folder, in_tree, seen)
    return seen


def share(pool: MooncakePool, folder: Path, in_tree: InTreeEngine, seen: Evidence) -> None:
    """Let each side store a prompt and the other one load it."""
    first, second = seen.directions
    first.stored = in_tree.answer(first.prompt, NUM_OUTPUT_TOKENS)
    first.num_stored_keys = pool.metrics().num_keys
    options = {"key_format": "vllm", **OPTIONS}
    with engine(folder, "mooncake://", options=options, **seen.family.arguments) as kvtide:
        first.loaded = answer(kvtide, first.prompt)
        first.num_added_keys = pool.metrics().num_keys - first.num_stored_keys
        seen.loaded_tokens = kvtide.counters["loaded_tokens"]
        first.loaded_partial = answer(kvtide, first.partial)
        seen.controls = {
            kind: answer_with_zeros(kvtide, kind, first.prompt, NUM_OUTPUT_TOKENS)
            for kind in seen.family.kinds
        }
        before = pool.metrics().num_keys
        second.stored = answer(kvtide, second.prompt)
        seen.saved_bytes = kvtide.counters["saved_bytes"]
    after = pool.metrics().num_keys
    second.num_stored_keys = after - before
    second.loaded = in_tree.answer(second.prompt, NUM_OUTPUT_TOKENS)
    second.num_added_keys = pool.metrics().num_keys - after
    second.loaded_partial = in_tree.answer(second.partial, NUM_OUTPUT_TOKENS)


def answer(one: InProcessEngine, prompt: list[int]) -> Answer:
    """Answer a prompt from an empty cache of the engine's own, and let what it saves be saved."""
    one.forget_local()
    [output] = one.run(prompt, num_tokens=NUM_OUTPUT_TOKENS)
    if one.connector is not None:
        one.settle()
    return Answer(list(output.outputs[0].token_ids), output.num_cached_tokens)


def test_kvtide_loads_what_the_in_tree_connector_stored(evidence: Evidence) -> None:
    """All but the last token, and it says the same as without any connector."""
    seen = evidence.from_in_tree
    assert seen.stored == (seen.plain, 0)
    assert seen.num_stored_keys > 0
    assert seen.loaded == (seen.plain, HIT)
    assert evidence.loaded_tokens == HIT


def test_the_in_tree_connector_loads_what_kvtide_stored(evidence: Evidence) -> None:
    """The other way round."""
    seen = evidence.from_kvtide
    assert seen.stored == (seen.plain, 0)
    assert evidence.saved_bytes > 0
    assert seen.num_stored_keys > 0
    assert seen.loaded == (seen.plain, HIT)


def test_a_prompt_that_shares_its_beginning_resumes_there_on_either_side(
    evidence: Evidence,
) -> None:
    """At the last boundary below the difference of which every group has what it needs."""
    for seen in evidence.directions:
        assert seen.loaded_partial == (seen.plain_partial, evidence.family.partial_hit)
    assert 0 < evidence.family.partial_hit < HIT


def test_with_zeros_for_the_values_of_any_one_kind_of_group_the_tokens_differ(
    evidence: Evidence,
) -> None:
    """The negative control: the tokens depend on what kvtide loads, of each kind."""
    right = evidence.from_in_tree.plain
    assert sorted(evidence.controls) == evidence.family.kinds
    assert [kind for kind, tokens in evidence.controls.items() if tokens == right] == []


def test_both_sides_store_the_same_keys(evidence: Evidence) -> None:
    """Whoever comes second finds everything there that it would have stored itself."""
    assert [seen.num_added_keys for seen in evidence.directions] == [0, 0]
    assert evidence.from_in_tree.num_stored_keys == evidence.from_kvtide.num_stored_keys
