"""Real vLLM engines of several ranks share a pool: tensor, pipeline and data parallel."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvtide.stores import open_store
from kvtide.testing import Arena
from tests.engines.vllm import data_parallel_scenario
from tests.engines.vllm.engines import BLOCK, engine
from tests.engines.vllm.models import build
from tests.engines.vllm.pools import ON_EACH_STORE
from tests.engines.vllm.ranks_scenario import PATIENT, PROMPT_TOKENS, Answer, RanksRun, ask, run

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

NUM_CHUNKS = PROMPT_TOKENS // BLOCK
LOADED = NUM_CHUNKS * BLOCK
SHARED = {"store_tp_size": 2}
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


def ask_one_rank(model: Path, url: str, seed: int, **arguments: Any) -> Answer:
    """Let an engine of one rank, in this process, answer a prompt."""
    with engine(model, url, options={**PATIENT, **SHARED}, **arguments) as one:
        return ask(one, seed)


def num_present(url: str, keys: list[str]) -> int:
    """How many of these keys a pool has."""
    with closing(open_store(url)) as store:
        return sum(store.exists(keys))


@ON_EACH_STORE
def test_tensor_parallel_sizes_share_a_pool(
    llama: Path, pool_url: str, expected: dict[int, list[int]]
) -> None:
    """Two ranks load what two and what one have stored, and one what two have; tokens are equal."""
    alone = ask_one_rank(llama, pool_url, SECOND)
    assert alone.tokens == expected[SECOND]
    assert alone.counters["saved_chunks"] == 2 * NUM_CHUNKS, "one value for each shard"
    cold = run(RanksRun(str(llama), pool_url, tp_size=2, seeds=(FIRST, SECOND), options=SHARED))
    assert cold[FIRST].tokens == expected[FIRST]
    assert cold[FIRST].num_cached_tokens == 0
    assert cold[FIRST].counters["saved_bytes"] > 0
    for keys in cold[FIRST].keys.values():
        assert num_present(pool_url, keys) == NUM_CHUNKS, "every rank stored its part"
    assert cold[SECOND].tokens == expected[SECOND]
    assert cold[SECOND].num_cached_tokens == LOADED, "what one rank has stored"
    assert cold[SECOND].counters.get("saved_bytes", 0) == 0
    warm = run(RanksRun(str(llama), pool_url, tp_size=2, options=SHARED))[FIRST]
    assert (warm.tokens, warm.num_cached_tokens) == (expected[FIRST], LOADED)
    assert warm.counters["looked_up_keys"] == 2 * NUM_CHUNKS
    other = ask_one_rank(llama, pool_url, FIRST)
    assert (other.tokens, other.num_cached_tokens) == (expected[FIRST], LOADED)


def test_with_zeros_for_what_other_sizes_stored_the_tokens_differ(
    llama: Path, pool_url: str, expected: dict[int, list[int]]
) -> None:
    """The control: both directions really read what they load."""
    assert ask_one_rank(llama, pool_url, SECOND).tokens == expected[SECOND]
    two = run(
        RanksRun(
            str(llama),
            pool_url,
            tp_size=2,
            seeds=(FIRST, SECOND),
            options=SHARED,
            zeros=True,
        )
    )
    assert two[FIRST].tokens == expected[FIRST], "nothing was loaded"
    assert two[SECOND].num_cached_tokens == LOADED
    assert two[SECOND].tokens != expected[SECOND]
    alone = ask_one_rank(llama, pool_url, FIRST, module="tests.engines.vllm.zeroing_connector")
    assert alone.num_cached_tokens == LOADED
    assert alone.tokens != expected[FIRST]


def test_a_hit_ends_where_any_rank_lacks_its_part_and_a_bad_part_fails_the_load_once(
    llama: Path, pool_url: str, expected: dict[int, list[int]]
) -> None:
    """The other rank's parts are all there; both ranks act on one length."""
    cold = run(RanksRun(str(llama), pool_url, tp_size=2, seeds=(HOLED, SPOILED)))
    with closing(open_store(pool_url)) as store:
        [_, second_part] = cold[HOLED].keys.values()
        store.remove([second_part[7]])
        [_, second_part] = cold[SPOILED].keys.values()
        arena = Arena(store)
        num_bytes = cold[SPOILED].counters["saved_bytes"] // (2 * NUM_CHUNKS)
        store.remove([second_part[5]])
        arena.put([(second_part[5], bytes(num_bytes))])
    warm = run(RanksRun(str(llama), pool_url, tp_size=2, seeds=(HOLED, SPOILED)))
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
    assert len(cold.keys) == 2
    for keys in cold.keys.values():
        assert num_present(pool_url, keys) == NUM_CHUNKS
    warm = run(case)[FIRST]
    assert (warm.tokens, warm.num_cached_tokens) == (expected[FIRST], LOADED)


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
