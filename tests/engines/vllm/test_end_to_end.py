"""A real vLLM engine saves its KV cache and loads it back: bytes, tokens, roles and life cycles."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtide.engines.vllm import features
from tests.engines.vllm import speculation_scenario
from tests.engines.vllm.engines import BLOCK, InProcessEngine, engine, prompt_of
from tests.engines.vllm.pools import ON_EACH_STORE

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

PROMPT = prompt_of(500)
FULL_BLOCKS = len(PROMPT) // BLOCK * BLOCK


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, list[int]]:
    """What an engine without kvtide answers."""
    with engine(model, None) as plain:
        [tokens] = plain.generate(PROMPT)
        [other] = plain.generate(prompt_of(300, seed=1))
        [longer] = plain.generate(PROMPT, num_tokens=80)
    return {"prompt": tokens, "other": other, "longer": longer}


def saved_by(model: Path, pool_url: str, **arguments: Any) -> None:
    """Let an engine compute the prompt and save its KV cache."""
    with engine(model, pool_url, **arguments) as cold:
        cold.generate(PROMPT)
        cold.settle()
        assert cold.counters["saved_bytes"] > 0


def test_another_engine_loads_what_one_has_computed(
    model: Path, pool_url: str, expected: dict[str, list[int]]
) -> None:
    """All full blocks below the last token come from the pool; the tokens are the same."""
    with engine(model, pool_url) as cold:
        [output] = cold.run(PROMPT)
        assert list(output.outputs[0].token_ids) == expected["prompt"]
        assert output.num_cached_tokens == 0
        cold.settle()
        assert cold.counters["saved_chunks"] == FULL_BLOCKS // BLOCK
    with engine(model, pool_url) as warm:
        [output] = warm.run(PROMPT)
        assert list(output.outputs[0].token_ids) == expected["prompt"]
        assert output.num_cached_tokens == FULL_BLOCKS
        warm.settle()
        assert warm.counters["saved_chunks"] == 0, "what was loaded is not saved again"
        assert warm.counters["loaded_tokens"] == FULL_BLOCKS
        warm.worker.check_idle()


def test_with_loaded_values_replaced_by_zeros_the_tokens_differ(
    model: Path, pool_url: str, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: the tokens really depend on what was loaded."""
    from kvtide.engines.vllm.tensors import TensorBlocks

    saved_by(model, pool_url)
    write = TensorBlocks.write
    monkeypatch.setattr(
        TensorBlocks,
        "write",
        lambda blocks, group_id, ids, data: write(blocks, group_id, ids, np.zeros_like(data)),
    )
    with engine(model, pool_url) as warm:
        [output] = warm.run(PROMPT)
        assert output.num_cached_tokens == FULL_BLOCKS
        assert list(output.outputs[0].token_ids) != expected["prompt"]


def test_the_bytes_loaded_are_the_bytes_computed(model: Path, pool_url: str) -> None:
    """Claims about bytes compare bytes: each block of the warm engine equals the cold one's."""
    kept: list[dict[bytes, bytes]] = []
    for _ in range(2):
        with engine(model, pool_url) as one:
            one.generate(PROMPT, num_tokens=1)
            one.settle()
            kept.append(block_bytes(one))
    cold, warm = kept
    assert len(cold) == FULL_BLOCKS // BLOCK
    assert cold == warm


def block_bytes(one: InProcessEngine) -> dict[bytes, bytes]:
    """The bytes of every cached block, by its hash."""
    manager = one.core.scheduler.kv_cache_manager
    memory = one.worker._memory
    payload = memory.layout.groups[0].payload_bytes
    found = {}
    for block in manager.block_pool.blocks:
        if block.block_hash is not None:
            out = np.zeros((1, payload), dtype=np.uint8)
            memory.read(0, [block.block_id], out)
            found[bytes(block.block_hash)] = out.tobytes()
    return found


def test_a_prompt_is_saved_while_it_is_computed_chunk_by_chunk(model: Path, pool_url: str) -> None:
    """Two prefill steps, two jobs; not only the first step is stored."""
    with engine(model, pool_url) as cold:
        cold.generate(PROMPT, num_tokens=1)
        cold.settle()
        assert cold.counters["store_jobs"] == 2
        assert cold.counters["saved_chunks"] == FULL_BLOCKS // BLOCK


@pytest.fixture(params=["caller's loop", "own loop"])
def has_own_loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether engines take themselves for a server's: decodes are saved in portions then."""
    is_own = bool(request.param == "own loop")
    monkeypatch.setattr(features, "has_own_loop", lambda: is_own)
    return is_own


@pytest.mark.parametrize("decode", [False, True])
def test_decode_is_saved_only_if_asked_for(
    model: Path, pool_url: str, expected: dict[str, list[int]], decode: bool, has_own_loop: bool
) -> None:
    """A conversation's next turn finds what the last one generated.

    In its caller's process no step follows the last request's end, and nothing is put off.
    """
    options = {"save_decode_cache": decode, "decode_portion_tokens": 128}
    with engine(model, pool_url, options=options) as cold:
        [answer] = cold.generate(PROMPT, num_tokens=80)
        if has_own_loop:
            cold.settle()
    assert answer == expected["longer"]
    turn = PROMPT + answer
    with engine(model, pool_url) as warm:
        [output] = warm.run(turn)
        whole = (len(turn) - 1) // BLOCK * BLOCK
        assert output.num_cached_tokens == (whole if decode else FULL_BLOCKS)


@pytest.mark.usefixtures("has_own_loop")
def test_a_consumer_loads_and_saves_no_prefill(
    model: Path, pool_url: str, expected: dict[str, list[int]]
) -> None:
    """With decode saving it saves what it generates."""
    with engine(model, pool_url, kv_role="kv_consumer") as consumer:
        consumer.generate(PROMPT)
        consumer.settle()
        assert consumer.counters["saved_bytes"] == 0
    saved_by(model, pool_url, kv_role="kv_producer")
    options = {"save_decode_cache": True, "decode_portion_tokens": 128}
    with engine(model, pool_url, kv_role="kv_consumer", options=options) as consumer:
        [output] = consumer.run(PROMPT, num_tokens=80)
        consumer.settle()
        assert list(output.outputs[0].token_ids) == expected["longer"]
        assert output.num_cached_tokens == FULL_BLOCKS
        # The prompt ends inside block 15; blocks 15 to 17 are complete only by decoding.
        assert consumer.counters["saved_chunks"] == (len(PROMPT) + 79) // BLOCK - 15


def test_models_in_folders_of_one_name_never_share_a_key(
    model: Path, pool_url: str, tmp_path: Path, expected: dict[str, list[int]]
) -> None:
    """Two checkpoints called .../final: another model's KV cache is a miss."""
    import torch
    from safetensors.torch import load_file, save_file

    other = tmp_path / "b" / "final"
    shutil.copytree(model, other)
    weights = load_file(other / "model.safetensors")
    name = next(name for name in weights if "k_proj" in name)
    weights[name] = weights[name] + torch.ones_like(weights[name]) * 0.01
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    assert json.loads((other / "config.json").read_text()) == json.loads(
        (model / "config.json").read_text()
    )
    saved_by(model, pool_url)
    with engine(other, pool_url) as one:
        [output] = one.run(PROMPT)
        assert output.num_cached_tokens == 0
    moved = tmp_path / "elsewhere"
    shutil.copytree(model, moved)
    with engine(moved, pool_url) as one:
        [output] = one.run(PROMPT)
        assert output.num_cached_tokens == FULL_BLOCKS, "the same weights elsewhere are the same"
        assert list(output.outputs[0].token_ids) == expected["prompt"]


@ON_EACH_STORE
def test_prompts_of_one_batch_share_and_differ(
    model: Path, pool_url: str, expected: dict[str, list[int]]
) -> None:
    """Several requests at once, some with a common prefix, cold and warm: the same tokens."""
    prompts = [PROMPT, prompt_of(300, seed=1), PROMPT[:200] + prompt_of(150, seed=2), PROMPT[:40]]
    with engine(model, None) as plain:
        want = [plain.generate(prompt)[0] for prompt in prompts]
    with engine(model, pool_url) as cold:
        assert [cold.generate(prompt)[0] for prompt in prompts] == want
        cold.settle()
        cold.forget_local()
        got = cold.run(*prompts)
        assert [list(output.outputs[0].token_ids) for output in got] == want
        assert sum(output.num_cached_tokens for output in got) > 0
        cold.settle()
        cold.worker.check_idle()
    assert want[0] == expected["prompt"]
    assert want[1] == expected["other"]


def test_after_a_reset_of_the_cache_nothing_stored_before_is_found(
    model: Path, pool_url: str
) -> None:
    """The weights may have changed; a second engine on the pool keeps what is its own."""
    with engine(model, pool_url) as one:
        one.generate(PROMPT)
        one.settle()
        assert one.llm.reset_prefix_cache(reset_connector=True)
        [output] = one.run(PROMPT)
        assert output.num_cached_tokens == 0
        one.settle()
        one.forget_local()
        [output] = one.run(PROMPT)
        assert output.num_cached_tokens == FULL_BLOCKS, "what is computed now is found again"
    with engine(model, pool_url) as other:
        [output] = other.run(PROMPT)
        assert output.num_cached_tokens == FULL_BLOCKS


def test_after_a_reset_that_failed_nothing_is_saved_until_one_succeeds(
    model: Path, pool_url: str
) -> None:
    """The engine has kept its own cache: KV cache of the old weights must not get the new name."""
    with engine(model, pool_url) as one:
        one.generate(PROMPT)
        one.settle()
        num_saved = one.counters["saved_chunks"]
        block_pool = one.core.scheduler.kv_cache_manager.block_pool
        held = block_pool.get_new_blocks(1)
        assert not one.llm.reset_prefix_cache(reset_connector=True)
        block_pool.free_blocks(held)
        [output] = one.run([*PROMPT, *prompt_of(4 * BLOCK, seed=7)])
        assert output.num_cached_tokens == FULL_BLOCKS, "of the old weights, from vLLM's own cache"
        one.settle()
        assert one.counters["saved_chunks"] == num_saved
        assert one.llm.reset_prefix_cache(reset_connector=True)
        one.generate(PROMPT)
        one.settle()
        assert one.counters["saved_chunks"] == num_saved + FULL_BLOCKS // BLOCK
        one.forget_local()
        [output] = one.run(PROMPT)
        assert output.num_cached_tokens == FULL_BLOCKS


def test_a_request_that_must_compute_its_whole_prompt_does(model: Path, pool_url: str) -> None:
    """Prompt logprobs need every token computed; nothing is claimed."""
    saved_by(model, pool_url)
    with engine(model, pool_url) as one:
        [output] = one.run(PROMPT, num_tokens=4, prompt_logprobs=1)
        assert not output.num_cached_tokens
        assert one.counters["loaded_tokens"] == 0


@ON_EACH_STORE
@pytest.mark.usefixtures("has_own_loop")
def test_requests_preempted_for_lack_of_memory_resume_with_the_same_tokens(
    model: Path, pool_url: str
) -> None:
    """Six requests on a cache for two: preempted, looked up again, loaded or recomputed."""
    prompts = [prompt_of(300, seed=seed) for seed in range(6)]
    small = {"num_gpu_blocks_override": 30, "max_model_len": 512}
    with engine(model, None, **small) as plain:
        want = [plain.generate(prompt, num_tokens=120)[0] for prompt in prompts]
    with engine(
        model, pool_url, options={"save_decode_cache": True, "decode_portion_tokens": 128}, **small
    ) as one:
        assert one.generate(*prompts, num_tokens=120) == want
        one.settle()
        one.pool.check_integrity()
        one.worker.check_idle()
        assert one.counters["saved_bytes"] > 0


def multi(store: str, **outer: Any) -> dict[str, Any]:
    """VLLM's arguments for kvtide as a child of MultiConnector."""
    child = {
        "kv_connector": "KVTideConnector",
        "kv_connector_module_path": "kvtide.engines.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": store},
    }
    return {
        "kv_transfer_config": {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": [child]},
            **outer,
        }
    }


def test_inside_a_multi_connector_it_works_if_failed_loads_are_recomputed(
    model: Path, pool_url: str, expected: dict[str, list[int]]
) -> None:
    """There kvtide cannot choose that itself: it says what to set."""
    from kvtide.errors import ConfigError

    with (
        pytest.raises(ConfigError, match='"kv_load_failure_policy": "recompute"'),
        engine(model, None, **multi(pool_url)),
    ):
        pass
    saved_by(model, pool_url)
    with engine(model, None, **multi(pool_url, kv_load_failure_policy="recompute")) as one:
        [output] = one.run(PROMPT)
        assert list(output.outputs[0].token_ids) == expected["prompt"]
        assert output.num_cached_tokens == FULL_BLOCKS


def test_drafts_are_never_saved_and_speculation_changes_no_token(
    model: Path, pool_url: str, expected: dict[str, list[int]]
) -> None:
    """With n-gram drafts and decode saving: the next turn finds only accepted tokens."""
    turn = PROMPT + expected["longer"]
    with engine(model, None) as plain:
        [want] = plain.generate(turn)
    result = speculation_scenario.run(model, pool_url, speculation_scenario.N_GRAMS)
    assert result["num_drafts"] > 0
    assert result["answer"] == expected["longer"]
    assert result["next_answer"] == want
    assert result["next_hit"] == (len(turn) - 1) // BLOCK * BLOCK


@ON_EACH_STORE
@pytest.mark.usefixtures("has_own_loop")
def test_aborts_at_any_moment_leave_nothing_behind(model: Path, pool_url: str) -> None:
    """While they wait, load, compute and save: blocks, pins and jobs return to zero."""
    from vllm import SamplingParams

    prompts = [prompt_of(400, seed=seed) for seed in range(4)]
    parameters = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    options = {"save_decode_cache": True, "decode_portion_tokens": 128}
    with engine(model, pool_url, options=options, num_gpu_blocks_override=40) as one:
        one.generate(*prompts)
        one.settle()
        for num_steps in range(12):
            one.forget_local()
            ids = [f"abort-{num_steps}-{number}" for number in range(4)]
            for request_id, prompt in zip(ids, prompts, strict=True):
                one.llm.llm_engine.add_request(request_id, {"prompt_token_ids": prompt}, parameters)
            for _ in range(num_steps):
                one.llm.llm_engine.step()
            one.llm.llm_engine.abort_request(ids)
            one.step_until(lambda: not one.core.scheduler.has_requests())
            one.settle()
            one.pool.check_integrity()
            one.worker.check_idle()
        assert one.pool.num_loads == one.pool.num_inquiries == 0
        assert one.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 39
