"""Real engines with models of every cache kind: what is loaded is what was computed.

Each family's engines run once (see ``family_runs``), and every test looks at what they did.
``make families`` prints it as a table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm import speculation_scenario
from tests.engines.vllm.engines import InProcessEngine, engine, prompt_of
from tests.engines.vllm.families import BY_MODEL, FAMILIES, HIT, SHARED
from tests.engines.vllm.family_runs import Evidence, Plain, gather
from tests.engines.vllm.models import DRAFT, build
from tests.engines.vllm.pools import pool_of

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="session")
def models_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where models are kept for the session."""
    return tmp_path_factory.mktemp("families")


ON_MOONCAKE = ("llama", "gemma3", "qwen3-next", "deepseek-v2")
"""Full attention, windows, states, latent caches: the kinds of values that a store meets."""
RUNS = [
    (family, kind)
    for family in FAMILIES
    for kind in ("local", "mooncake")
    if kind == "local" or family.model in ON_MOONCAKE
]


@pytest.fixture(scope="module")
def plains() -> dict[str, Plain]:
    """What the engines without a pool did, which is the same beside each kind of pool."""
    return {}


@pytest.fixture(scope="module", params=RUNS, ids=lambda run: f"{run[0].model}-{run[1]}")
def evidence(
    request: pytest.FixtureRequest, models_folder: Path, plains: dict[str, Plain]
) -> Evidence:
    """What the engines of a family did, on a pool of some kind."""
    family, kind = request.param
    with pool_of(kind, request) as url:
        seen = gather(family, models_folder, url, plains.get(family.model))
    plains[family.model] = seen.plain
    return seen


def test_the_engine_has_the_groups_that_the_family_stands_for(evidence: Evidence) -> None:
    """The kinds and block sizes of this table's models."""
    assert evidence.plain.groups == list(evidence.family.groups)


def test_on_an_empty_pool_the_tokens_are_the_same_and_the_cache_is_saved(
    evidence: Evidence,
) -> None:
    """Cold beside plain."""
    assert evidence.cold.tokens == evidence.plain.first
    assert evidence.cold.hit == 0
    assert evidence.cold.saved_bytes > 0


def test_a_fresh_process_loads_all_but_the_last_token_and_says_the_same(
    evidence: Evidence,
) -> None:
    """Warm beside plain; it loads what a hit there needs of each group, and no more."""
    family, warm = evidence.family, evidence.warm
    assert warm.hits["again"] == warm.loaded_tokens == HIT == len(family.again([0])) - 1
    assert warm.loaded_chunks == sum(family.loaded_chunks)
    assert warm.tokens["again"] == evidence.plain.first[family.num_decoded :]


def test_the_values_in_the_pool_are_the_bytes_of_the_blocks(evidence: Evidence) -> None:
    """Each chunk that was saved, of every group, beside the engine's own block."""
    cold = evidence.cold
    assert len(cold.in_pool) == cold.saved_chunks
    assert {place: cold.in_blocks.get(place) for place in cold.in_pool} == cold.in_pool


def test_the_blocks_that_were_loaded_hold_the_bytes_that_were_computed(
    evidence: Evidence,
) -> None:
    """Each chunk that was loaded, of every group, beside the first engine's block."""
    loaded = evidence.family.loaded_places
    blocks = evidence.warm.in_blocks
    assert {place: blocks.get(place) for place in loaded} == {
        place: evidence.cold.in_blocks[place] for place in loaded
    }


def test_with_zeros_for_the_values_of_any_one_kind_of_group_the_tokens_differ(
    evidence: Evidence,
) -> None:
    """The negative control: the tokens depend on what was loaded, of each kind."""
    family = evidence.family
    right = evidence.plain.first[family.num_decoded :]
    assert sorted(evidence.warm.controls) == family.kinds
    assert [kind for kind, tokens in evidence.warm.controls.items() if tokens == right] == []


def test_a_prompt_that_shares_its_beginning_resumes_where_every_group_can(
    evidence: Evidence,
) -> None:
    """At the boundary below the difference that all groups hold, where the engine would too."""
    assert evidence.warm.hits["partial"] == evidence.family.partial_hit < HIT
    assert evidence.plain.own_hits.get("partial", evidence.family.partial_hit) == (
        evidence.family.partial_hit
    )
    assert evidence.warm.tokens["partial"] == evidence.plain.partial


def test_the_next_turn_of_a_conversation_resumes_behind_the_first(evidence: Evidence) -> None:
    """What was generated is loaded too, as far as the engine would have kept it."""
    assert evidence.warm.hits["turn"] == evidence.family.turn_hit >= HIT
    assert evidence.plain.own_hits.get("turn", evidence.family.turn_hit) == evidence.family.turn_hit
    assert evidence.warm.tokens["turn"] == evidence.plain.turn


@pytest.mark.parametrize("name", ["gemma3", "qwen3-next"])
def test_a_beginning_that_several_prompts_share_is_found_by_the_third_of_them(
    name: str, models_folder: Path, pool_url: str
) -> None:
    """With vLLM's default retention, which keeps windows and states only where prompts end.

    The second prompt finds full attention beyond its hit, and has the rest kept there too.
    """
    family = BY_MODEL[name]
    model = build(name, models_folder)
    others = [family.first[:SHARED] + prompt_of(81, seed=seed) for seed in (10, 11)]
    prompts = [family.first, *others]
    arguments = {**family.arguments, "prefix_cache_retention_interval": 0}
    answers = []
    for url in (None, pool_url):
        with engine(model, url, **arguments) as one:
            for prompt in prompts:
                one.forget_local()
                answers += one.run(prompt)
                if url is not None:
                    one.settle()
    hits = [answer.num_cached_tokens for answer in answers]
    assert hits == [0, 0, 0, 0, 0, 384]
    tokens = [list(answer.outputs[0].token_ids) for answer in answers]
    assert tokens[:3] == tokens[3:]


NUM_PREEMPTED_OUTPUT = 120


@pytest.mark.parametrize("name, num_blocks", [("gemma3", 38), ("qwen3-next", 20)])
def test_requests_preempted_for_lack_of_memory_resume_from_the_pool_with_the_same_tokens(
    name: str, num_blocks: int, models_folder: Path, pool_url: str
) -> None:
    """Four requests on a cache for two.

    An engine that resumes computes what it had generated as if it were a part of the prompt, which
    rounds differently in bfloat16. So each part of an answer is compared with a plain engine's,
    from where the request was resumed; and only the prompt is saved, for the same reason.
    """
    family = BY_MODEL[name]
    model = build(name, models_folder)
    prompts = [prompt_of(100, seed=seed) for seed in range(4)]
    arguments = {**family.arguments, "prefix_cache_retention_interval": 0}
    small = {"num_gpu_blocks_override": num_blocks, "max_model_len": 256}
    with engine(model, pool_url, **arguments, **small) as one:
        cuts = note_preemptions(one, prompts)
        answers = one.generate(*prompts, num_tokens=NUM_PREEMPTED_OUTPUT)
        one.settle()
        one.pool.check_integrity()
        one.worker.check_idle()
        assert any(cuts)
        assert one.counters["loaded_tokens"] > 0
    with engine(model, None, **arguments) as plain:
        for prompt, answer, cut in zip(prompts, answers, cuts, strict=True):
            assert answer == answered_in_parts(plain, prompt, answer, sorted(cut))


def note_preemptions(one: InProcessEngine, prompts: list[list[int]]) -> list[set[int]]:
    """Return, per prompt, how many tokens were generated whenever its request is preempted."""
    cuts: list[set[int]] = [set() for _ in prompts]
    scheduler = one.core.scheduler
    preempt = scheduler._preempt_request

    def noting(request: Any, *arguments: Any, **options: Any) -> Any:
        cuts[prompts.index(request.prompt_token_ids)].add(request.num_output_tokens)
        return preempt(request, *arguments, **options)

    scheduler._preempt_request = noting
    return cuts


def answered_in_parts(
    plain: InProcessEngine, prompt: list[int], answer: list[int], cuts: list[int]
) -> list[int]:
    """Return a plain engine's answer, where after each cut ``answer`` so far is a prompt."""
    tokens: list[int] = []
    for begin, end in zip([0, *cuts], [*cuts, len(answer)], strict=True):
        if begin < end:
            plain.forget_local()
            tokens += plain.generate(prompt + answer[:begin], num_tokens=end - begin)[0]
    return tokens


@pytest.mark.parametrize("name", ["gemma3", "llama"])
def test_with_drafts_the_pool_helps_as_far_as_the_engines_own_cache(
    name: str, models_folder: Path, pool_url: str
) -> None:
    """N-grams with windows; an EAGLE draft, whose last block is proof of the one before it."""
    model = build(name, models_folder)
    prompt = prompt_of(500)
    with engine(model, None) as plain:
        [answer] = plain.generate(prompt, num_tokens=80)
        [next_answer] = plain.generate(prompt + answer)
    speculation = speculation_scenario.N_GRAMS
    if name == "llama":
        speculation = speculation_scenario.eagle(build(DRAFT, models_folder))
    result = speculation_scenario.run(model, pool_url, speculation)
    assert result["num_drafts"] > 0
    assert result["answer"] == answer
    assert result["again"] == answer[: len(result["again"])]
    assert result["next_answer"] == next_answer
    assert result["pool_hit"] == result["own_hit"] == {"gemma3": 480, "llama": 448}[name]
    assert result["next_hit"] == {"gemma3": 480, "llama": 544}[name]
