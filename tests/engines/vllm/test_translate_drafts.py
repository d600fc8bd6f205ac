"""Which groups must prove a hit for a draft model and how far, held to vLLM's own coordinators."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvtide.core.groups import FullAttention, Mamba, SlidingWindow
from kvtide.engines.vllm import features
from kvtide.engines.vllm.translate import GroupPlan, eagle_proof_tokens, translate_groups
from kvtide.errors import UnsupportedModelError
from tests.engines.model_folders import make_folder
from tests.engines.vllm.configs import attention_spec, cache_config, state_spec, uniform


@pytest.fixture
def config(tmp_path: Path, model_folder: Path, make_config: Callable[..., Any]) -> Any:
    """An engine with a draft model that reads the target's hidden states."""
    draft = make_folder(tmp_path / "draft", 5)
    settings = {"model": str(draft), "method": "draft_model", "num_speculative_tokens": 3}
    config = make_config(model_folder, speculative_config=settings)
    config.speculative_config.method = "mtp"
    return config


def window(size: int = 128, block_size: int = 32) -> Any:
    """A sliding-window spec."""
    return attention_spec("SlidingWindowSpec", sliding_window=size, block_size=block_size)


def proofs(plan: GroupPlan) -> list[int]:
    """The proof tokens of each group."""
    return [group.proof_tokens for group in plan.groups]


def test_all_groups_prove_where_none_is_flagged(config: Any) -> None:
    """The engine cannot tell which is the draft's, so it takes all of them; states never."""
    plan = translate_groups(
        cache_config((attention_spec(), 1), (window(), 1), (state_spec(), 1)), config
    )
    assert plan.groups == (
        FullAttention(32, proof_tokens=32),
        SlidingWindow(32, 128, proof_tokens=32),
        Mamba(32),
    )


def test_a_single_group_proves_with_a_block(config: Any) -> None:
    """A draft model's layers share the group of the model's own."""
    plan = translate_groups(cache_config((attention_spec(), 5)), config)
    assert plan.groups == (FullAttention(32, proof_tokens=32),)


def test_a_flagged_group_proves_alone(config: Any) -> None:
    """Where the engine knows the draft's group, the others need no proof."""
    kv_cache_config = cache_config((attention_spec(), 1), (window(), 1))
    kv_cache_config.kv_cache_groups[1].is_eagle_group = True
    assert proofs(translate_groups(kv_cache_config, config)) == [0, 32]


def test_groups_of_equal_specs_share_the_flag(config: Any) -> None:
    """The engine looks them up together, on a worker behind the wrapper of uniform groups too."""
    equal = [window(128), uniform(window(128), window(128)), window(256)]
    kv_cache_config = cache_config(*((spec, 1) for spec in equal), (attention_spec(), 1))
    kv_cache_config.kv_cache_groups[1].is_eagle_group = True
    assert proofs(translate_groups(kv_cache_config, config)) == [32, 32, 0, 0]


@pytest.mark.parametrize("off", ["no speculation", "n-gram", "drop disabled"])
def test_without_the_drop_of_a_block_nothing_is_proven(config: Any, off: str) -> None:
    """The engine keeps hits whole then, and so does kvtide."""
    if off == "no speculation":
        config.speculative_config = None
    elif off == "n-gram":
        config.speculative_config.method = "ngram"
    else:
        config.speculative_config.disable_eagle_block_drop = True
    plan = translate_groups(cache_config((attention_spec(), 1), (window(), 1)), config)
    assert proofs(plan) == [0, 0]


def test_chunked_local_attention_with_a_draft_model_is_refused(config: Any) -> None:
    """The engine asserts that it never looks such a group up; the settings are named."""
    chunked = attention_spec("ChunkedLocalAttentionSpec", attention_chunk_size=256)
    kv_cache_config = cache_config((chunked, 1), (attention_spec(), 1))
    with pytest.raises(UnsupportedModelError) as caught:
        translate_groups(kv_cache_config, config)
    (fault,) = caught.value.faults
    for words in ("group 0", "--speculative-config", "--disable-hybrid-kv-cache-manager"):
        assert words in fault
    kv_cache_config.kv_cache_groups[1].is_eagle_group = True
    assert proofs(translate_groups(kv_cache_config, config)) == [0, 32]


@pytest.mark.parametrize("modules, unsettled", [(0, 0), (1, 0), (2, 2), (3, 2)])
def test_several_draft_modules_leave_tokens_unsettled(
    config: Any, modules: int, unsettled: int
) -> None:
    """A chain of modules reads as many tokens ahead as it drafts, and may rewrite all but one."""
    config.speculative_config.draft_model_config.hf_config.num_nextn_predict_layers = modules
    if not modules:
        config.speculative_config = None
    plan = translate_groups(cache_config((attention_spec(), 1)), config)
    assert plan.num_unsettled_tokens == unsettled


@pytest.mark.parametrize("modules, ahead", [(1, 1), (3, 3)])
def test_the_lookahead_is_counted_where_the_engine_does_not_tell(
    config: Any, modules: int, ahead: int
) -> None:
    """The fallback for 0.30 agrees with the engine's own answer."""

    class Bare:
        """A configuration as 0.30 has it."""

        speculative_config = config.speculative_config

    config.speculative_config.draft_model_config.hf_config.num_nextn_predict_layers = modules
    for each in (config, Bare()):
        assert features.num_prefill_lookahead_tokens(each) == ahead
    Bare.speculative_config = None
    assert features.num_prefill_lookahead_tokens(Bare()) == 0


def test_the_length_of_a_proof_is_the_engines() -> None:
    """A block, or one hash block where hits may end inside blocks."""
    from vllm.v1.core.kv_cache_utils import eagle_proof_margin

    for hash_block_size in (4, 16, 32):
        for blocks in (1, 2, 8, 33):
            for is_fine in (False, True):
                block_size = blocks * hash_block_size
                assert eagle_proof_tokens(
                    block_size, hash_block_size, is_fine_grained=is_fine
                ) == eagle_proof_margin(block_size, hash_block_size, is_fine)


def random_groups(random: Random) -> tuple[Any, int | None]:
    """Return a plan of several groups that vLLM accepts, and a unit of hashes or ``None``."""
    unit = random.choice([None, 8, 16])
    specs: list[Any] = [attention_spec(block_size=random.choice([32, 64]))]
    for _ in range(random.randrange(1, 4)):
        block_size = random.choice([16, 32, 64] if unit != 16 else [16, 32])
        kind = random.choice(["full", "window", "state", "latent"])
        if kind == "full":
            specs.append(attention_spec(block_size=block_size, head_size=random.choice([32, 64])))
        elif kind == "window":
            specs.append(window(random.choice([64, 128]), block_size))
        elif kind == "state":
            specs.append(state_spec(block_size=block_size * 2))
        else:
            specs.append(attention_spec("MLAAttentionSpec", block_size=block_size))
    kv_cache_config = cache_config(*((spec, 1) for spec in specs))
    if random.random() < 0.6:
        for group in kv_cache_config.kv_cache_groups:
            group.is_eagle_group = random.random() < 0.3
    return kv_cache_config, unit


def engine_coordinator(kv_cache_config: Any, config: Any) -> Any:
    """Return vLLM's own coordinator for a plan."""
    from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    scheduler, hashed = resolve_kv_cache_block_sizes(kv_cache_config, config)
    return get_kv_cache_coordinator(
        kv_cache_config,
        max_model_len=2048,
        max_in_flight_tokens=256,
        use_eagle=config.speculative_config.use_eagle_block_drop(),
        enable_caching=True,
        enable_kv_cache_events=False,
        dcp_world_size=1,
        pcp_world_size=1,
        scheduler_block_size=scheduler,
        hash_block_size=hashed,
    )


@pytest.mark.parametrize("seed", range(10))
def test_random_models_prove_as_in_the_engines_coordinator(config: Any, seed: int) -> None:
    """Which groups, how far, and whether hits may end inside blocks: all as vLLM has it."""
    from vllm.v1.core.kv_cache_utils import eagle_proof_margin

    random = Random(seed)
    seen = set()
    for _ in range(40):
        kv_cache_config, unit = random_groups(random)
        config.cache_config.prefix_match_unit = unit
        config.speculative_config.disable_eagle_block_drop = random.random() < 0.3
        plan = translate_groups(kv_cache_config, config)
        oracle = engine_coordinator(kv_cache_config, config)
        assert plan.partial_hits == oracle.enable_partial_hash_hits
        assert plan.hash_block_size == oracle.hash_block_size
        assert plan.coordinator().alignment == oracle._cache_hit_alignment_tokens
        assert proofs(plan) == [
            eagle_proof_margin(
                manager.block_size,
                oracle.hash_block_size,
                oracle.enable_partial_hash_hits and manager.supports_fine_grained_hash_lookup,
            )
            if manager.use_eagle and not group.is_state
            else 0
            for manager, group in zip(oracle.single_type_managers, plan.groups, strict=True)
        ]
        seen.add((plan.partial_hits, any(proofs(plan))))
    assert len(seen) > 2, "the cases are all alike"
