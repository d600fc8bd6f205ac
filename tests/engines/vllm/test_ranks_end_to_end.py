"""Real vLLM engines of several ranks share a pool: tensor, pipeline and data parallel.

``make ranks`` runs more of them, and prints a table.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from kvtide.stores import open_store
from kvtide.testing import Arena
from tests.engines.vllm import data_parallel_scenario
from tests.engines.vllm.engines import BLOCK
from tests.engines.vllm.models import build
from tests.engines.vllm.pools import pool_of
from tests.engines.vllm.ranks_lab import ask_one_rank, present
from tests.engines.vllm.ranks_scenario import PROMPT_TOKENS, Answer, RanksRun, run

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

NUM_CHUNKS = PROMPT_TOKENS // BLOCK
LOADED = NUM_CHUNKS * BLOCK
FIRST, SECOND, HOLED, SPOILED = range(4)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with two KV heads."""
    return build("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def expected(llama: Path) -> dict[int, list[int]]:
    """What two tensor parallel ranks without kvtide answer to each prompt."""
    seeds = (FIRST, SECOND, HOLED, SPOILED)
    answers = run(RanksRun(str(llama), "", tp_size=2, seeds=seeds))
    return {seed: answer.tokens for seed, answer in answers.items()}


# ------------------------------------------------------------ one pool for one rank and for two
# Engines run in fixtures, so that no single test lasts long.


@pytest.fixture(scope="module", params=["local", "mooncake"])
def shared_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A pool for both sizes."""
    with pool_of(request.param, request) as url:
        yield url


@pytest.fixture(scope="module")
def one_rank(llama: Path, shared_url: str) -> RanksRun:
    """An engine of one rank, whose values engines of two can read."""
    return RanksRun(str(llama), shared_url, options={"store_tp_size": 2})


@pytest.fixture(scope="module")
def stored_by_one(one_rank: RanksRun) -> Answer:
    """One rank answered the second prompt, before anybody else."""
    return ask_one_rank(replace(one_rank, seeds=(SECOND,)))


@pytest.fixture(scope="module")
def two_ranks(one_rank: RanksRun, stored_by_one: Answer) -> dict[int, Answer]:
    """Then two ranks answered both prompts, and both again with zeros for what is loaded."""
    assert stored_by_one.num_cached_tokens == 0
    return run(replace(one_rank, tp_size=2, seeds=(FIRST, SECOND), zeros=True))


def test_one_rank_stores_a_value_for_each_shard(
    stored_by_one: Answer, expected: dict[int, list[int]]
) -> None:
    """As finely cut as the larger engine's."""
    assert stored_by_one.tokens == expected[SECOND]
    assert stored_by_one.counters["saved_chunks"] == 2 * NUM_CHUNKS


def test_two_ranks_load_what_one_has_stored_and_store_each_its_own_part(
    shared_url: str, two_ranks: dict[int, Answer], expected: dict[int, list[int]]
) -> None:
    """The control: with zeros for what is loaded the tokens differ."""
    cold, warm = two_ranks[FIRST], two_ranks[SECOND]
    assert (cold.tokens, cold.num_cached_tokens) == (expected[FIRST], 0)
    assert present(shared_url, cold) == [[NUM_CHUNKS, NUM_CHUNKS]]
    assert [rank["saved_chunks"] for rank in cold.by_rank] == [NUM_CHUNKS, NUM_CHUNKS]
    assert (warm.tokens, warm.num_cached_tokens) == (expected[SECOND], LOADED)
    assert warm.counters.get("saved_bytes", 0) == 0
    assert warm.tokens_of_zeros != expected[SECOND]


def test_two_ranks_load_what_two_have_stored(
    one_rank: RanksRun, two_ranks: dict[int, Answer], expected: dict[int, list[int]]
) -> None:
    """In a fresh process, which asks for no key twice."""
    assert two_ranks[FIRST].counters["saved_bytes"] > 0
    warm = run(replace(one_rank, tp_size=2))[FIRST]
    assert (warm.tokens, warm.num_cached_tokens) == (expected[FIRST], LOADED)
    assert warm.counters["looked_up_keys"] == 2 * NUM_CHUNKS


def test_one_rank_loads_what_two_have_stored(
    one_rank: RanksRun, two_ranks: dict[int, Answer], expected: dict[int, list[int]]
) -> None:
    """The control: with zeros for what is loaded the tokens differ."""
    assert two_ranks[FIRST].counters["saved_bytes"] > 0
    warm = ask_one_rank(replace(one_rank, zeros=True))
    assert (warm.tokens, warm.num_cached_tokens) == (expected[FIRST], LOADED)
    assert warm.tokens_of_zeros != expected[FIRST]


# ------------------------------------------------------------ engines of one size


def test_a_hit_ends_where_any_rank_lacks_its_part_and_a_bad_part_fails_the_load_once(
    llama: Path, pool_url: str, expected: dict[int, list[int]]
) -> None:
    """The other rank's parts are all there; both ranks act on one length."""
    case = RanksRun(str(llama), pool_url, tp_size=2, seeds=(HOLED, SPOILED))
    cold = run(case)
    with closing(open_store(pool_url)) as store:
        [[_, second_part]] = cold[HOLED].keys
        store.remove([second_part[7]])
        [[_, second_part]] = cold[SPOILED].keys
        arena = Arena(store)
        num_bytes = cold[SPOILED].counters["saved_bytes"] // (2 * NUM_CHUNKS)
        store.remove([second_part[5]])
        arena.put([(second_part[5], bytes(num_bytes))])
    warm = run(case)
    assert warm[HOLED].tokens == expected[HOLED]
    assert warm[HOLED].num_cached_tokens == 7 * BLOCK
    assert warm[SPOILED].tokens == expected[SPOILED]
    assert warm[SPOILED].counters["failed_loads"] == 1
    assert warm[SPOILED].counters["load_jobs"] == 2
    assert warm[SPOILED].counters["bad_values"] == 1
    assert warm[SPOILED].num_cached_tokens == 5 * BLOCK, "the next answer ended before it"


def test_pipeline_stages_store_and_load_their_own_layers(
    llama: Path, pool_url: str, expected: dict[int, list[int]]
) -> None:
    """A hit needs both stages' parts; tokens are those of any other engine."""
    case = RanksRun(str(llama), pool_url, pp_size=2)
    cold = run(case)[FIRST]
    assert (cold.tokens, cold.num_cached_tokens) == (expected[FIRST], 0)
    assert present(pool_url, cold) == [[NUM_CHUNKS, NUM_CHUNKS]]
    warm = run(replace(case, zeros=True))[FIRST]
    assert (warm.tokens, warm.num_cached_tokens) == (expected[FIRST], LOADED)
    assert warm.tokens_of_zeros != expected[FIRST]


def test_data_parallel_engines_share_a_pool_and_no_file(
    llama: Path, pool_url: str, expected: dict[int, list[int]], tmp_path: Path
) -> None:
    """The second answers with what the first has computed; each keeps counters of its own."""
    first, second = data_parallel_scenario.run(llama, pool_url, str(tmp_path / "counters.json"))
    assert (first["tokens"], first["num_cached_tokens"]) == (expected[FIRST], 0)
    assert first["counters"]["saved_chunks"] == NUM_CHUNKS
    assert (second["tokens"], second["num_cached_tokens"]) == (expected[FIRST], LOADED)
    assert second["counters"]["loaded_chunks"] == NUM_CHUNKS
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "counters.json",
        "counters.json.dp1",
    ]
