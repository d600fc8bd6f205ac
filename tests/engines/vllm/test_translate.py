"""What kvtide takes from vLLM's configuration, and what it refuses with every fault named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtide.core.groups import FullAttention
from kvtide.engines.vllm import features
from kvtide.engines.vllm.translate import check_engine, translate_groups
from kvtide.errors import ConfigError, UnsupportedModelError
from tests.engines.vllm.configs import attention_spec, cache_config


@pytest.fixture
def config(model_folder: Path, make_config: Callable[..., Any]) -> Any:
    """The configuration of a plain engine."""
    return make_config(model_folder)


def uniform(*specs: Any) -> Any:
    """Return vLLM's wrapper for layers of one type whose specs differ."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    layers = {f"layer.{number}": spec for number, spec in enumerate(specs)}
    return UniformTypeKVCacheSpecs(block_size=specs[0].block_size, kv_cache_specs=layers)


def test_full_attention_is_one_group_of_its_block_size(config: Any) -> None:
    """A plain model gives one full-attention group; all sizes are its block size."""
    plan = translate_groups(cache_config((attention_spec(), 4)), config)
    assert plan.groups == (FullAttention(32),)
    assert (plan.group_ids, plan.num_layers) == ((0,), (4,))
    assert plan.hash_block_size == 32


def test_mla_is_full_attention(config: Any) -> None:
    """A latent cache needs every earlier chunk, as full attention does."""
    plan = translate_groups(cache_config((attention_spec("MLAAttentionSpec"), 3)), config)
    assert plan.groups == (FullAttention(32),)


@pytest.mark.parametrize("field", ["sliding_window", "attention_chunk_size"])
def test_a_window_on_a_full_attention_spec_is_full_attention(config: Any, field: str) -> None:
    """Without the hybrid manager the engine keeps every block and only computes less."""
    spec = attention_spec(**{field: 128})
    plan = translate_groups(cache_config((spec, 4)), config)
    assert plan.groups == (FullAttention(32),)
    assert plan.specs[0][field] == 128


def test_a_uniform_group_is_resolved_to_its_layers(config: Any) -> None:
    """Layers of different head sizes in one full-attention group are described one by one."""
    mixed = uniform(attention_spec(), attention_spec(head_size=64))
    plan = translate_groups(cache_config((mixed, 2)), config)
    assert plan.groups == (FullAttention(32),)
    assert len(plan.specs[0]["layers"]) == 2  # type: ignore[arg-type]


def test_a_uniform_group_of_equal_layers_is_described_like_a_plain_one(config: Any) -> None:
    """The wrapper itself changes no byte, so it changes no key."""
    plain = translate_groups(cache_config((attention_spec(), 2)), config)
    wrapped = uniform(attention_spec(), attention_spec())
    assert translate_groups(cache_config((wrapped, 2)), config).specs == plain.specs


def test_specs_hold_no_layer_names(config: Any) -> None:
    """Names differ by pipeline stage and by model class; bytes do not."""
    plan = translate_groups(cache_config((attention_spec(), 4)), config)
    assert "model.layers" not in repr(plan.specs)


@pytest.mark.parametrize(
    "spec, word",
    [
        (("SlidingWindowSpec", {"sliding_window": 128}), "sliding-window"),
        (("SlidingWindowMLASpec", {"sliding_window": 128}), "sliding-window MLA"),
        (("ChunkedLocalAttentionSpec", {"attention_chunk_size": 256}), "chunked local"),
        (("CrossAttentionSpec", {}), "cross attention"),
        (("EncoderOnlyAttentionSpec", {}), "encoder-only"),
        (("SinkFullAttentionSpec", {"sink_len": 4}), "sink"),
        (("RSWASpec", {"rswa_window": 64}), "reference sliding-window"),
        (("HiddenStateCacheSpec", {}), "hidden-state"),
        (("FullAttentionSpec", {"non_causal": True}), "non-causal"),
        (("MLAAttentionSpec", {"tokens_per_state": 4}), "compressed"),
    ],
)
def test_other_kinds_are_refused_by_name(
    config: Any, spec: tuple[str, dict[str, Any]], word: str
) -> None:
    """A group of any other kind is refused with its number, its kind and what to do."""
    plan = cache_config((attention_spec(spec[0], **spec[1]), 2))
    with pytest.raises(UnsupportedModelError) as caught:
        translate_groups(plan, config)
    (fault,) = caught.value.faults
    assert word in fault
    for part in ("group 0", "model.layers.0.self_attn.attn", "not supported yet", "without kvtide"):
        assert part in fault


def test_a_state_is_refused_by_name(config: Any) -> None:
    """Mamba and linear attention keep one state, not a row of blocks."""
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    spec = MambaSpec(block_size=96, shapes=((2, 8),), dtypes=(torch.float32,))
    with pytest.raises(UnsupportedModelError, match="Mamba or linear-attention state"):
        translate_groups(cache_config((spec, 1)), config)


def test_every_group_that_stands_in_the_way_is_named(config: Any) -> None:
    """A hybrid model lists all its groups at once, not one per restart."""
    window = attention_spec("SlidingWindowSpec", sliding_window=128)
    plan = cache_config((window, 1), (attention_spec(), 1), (window, 1))
    with pytest.raises(UnsupportedModelError) as caught:
        translate_groups(plan, config)
    assert [fault.split(" (")[0] for fault in caught.value.faults] == [
        "KV cache group 0",
        "KV cache group 2",
    ]


def test_more_than_one_group_is_refused(config: Any) -> None:
    """Two groups of supported kinds are still one too many for now."""
    plan = cache_config((attention_spec(), 2), (attention_spec(head_size=64), 2))
    with pytest.raises(UnsupportedModelError, match="2 KV cache groups"):
        translate_groups(plan, config)


def test_a_kind_inside_a_uniform_group_is_found(config: Any) -> None:
    """One layer of another kind makes its whole group unusable."""
    mixed = uniform(attention_spec(), attention_spec("RSWASpec", rswa_window=64))
    with pytest.raises(UnsupportedModelError, match="reference sliding-window"):
        translate_groups(cache_config((mixed, 2)), config)


def test_managers_that_keep_longer_hits_are_refused(config: Any) -> None:
    """Groups backed by host memory answer hits of their own: they are refused at start."""
    from vllm.v1.kv_cache_interface import KVCacheGroupRole

    plan = cache_config((attention_spec(), 2))
    plan.kv_cache_groups[0].role = KVCacheGroupRole.HISPARSE_SOURCE
    with pytest.raises(UnsupportedModelError, match="backed by host memory"):
        translate_groups(plan, config)


def test_a_model_without_attention_is_refused(config: Any) -> None:
    """A model with no KV cache has nothing to pool."""
    with pytest.raises(UnsupportedModelError, match="no KV cache group"):
        translate_groups(cache_config(), config)


def test_block_sizes_the_engine_rejects_are_a_setting_error(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What vLLM says against its own block sizes is passed on as a wrong setting."""

    def reject(*_: object) -> tuple[int, int]:
        raise ValueError("Invalid prefix_match_unit=16")

    monkeypatch.setattr(features.kv_cache_utils, "resolve_kv_cache_block_sizes", reject)
    with pytest.raises(ConfigError, match="prefix_match_unit=16"):
        translate_groups(cache_config((attention_spec(), 4)), config)


def test_a_plain_engine_has_no_faults(config: Any) -> None:
    """The defaults of vLLM are fine."""
    assert check_engine(config) == []


def test_all_faults_are_told_at_once(config: Any) -> None:
    """Each wrong setting is named together with its remedy, all of them in one go."""
    parallel, cache = config.parallel_config, config.cache_config
    parallel.tensor_parallel_size = parallel.pipeline_parallel_size = 2
    parallel.prefill_context_parallel_size = parallel.decode_context_parallel_size = 2
    cache.enable_prefix_caching = False
    cache.prefix_caching_hash_algo = "xxhash"
    cache.kv_sharing_fast_prefill = True
    faults = check_engine(config)
    for setting, remedy in (
        ("--tensor-parallel-size 2", "set it to 1"),
        ("--pipeline-parallel-size 2", "set it to 1"),
        ("--prefill-context-parallel-size 2", "set it to 1"),
        ("--decode-context-parallel-size 2", "set it to 1"),
        ("prefix caching is off", "--enable-prefix-caching"),
        ("--prefix-caching-hash-algo xxhash", "PYTHONHASHSEED"),
        ("--kv-sharing-fast-prefill", "remove it"),
    ):
        assert any(setting in fault and remedy in fault for fault in faults), setting
    assert len(faults) == 7


def test_scales_measured_at_run_time_are_refused(config: Any) -> None:
    """Releases that measure KV cache scales anew in each process write bytes of their own."""
    cache = SimpleNamespace(
        enable_prefix_caching=True, prefix_caching_hash_algo="sha256", calculate_kv_scales=True
    )
    (fault,) = check_engine(SimpleNamespace(parallel_config=SimpleNamespace(), cache_config=cache))
    assert "--calculate-kv-scales" in fault


def test_prefix_caching_that_the_platform_turned_off_for_mla_is_fine(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLA on a CPU has no prefix cache of its own, but hashes blocks and takes external hits."""
    config.cache_config.enable_prefix_caching = False
    assert check_engine(config)
    monkeypatch.setattr(type(config.model_config), "use_mla", True)
    assert check_engine(config) == []


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_hashes_that_differ_by_process_need_a_seed(
    config: Any, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are refused without PYTHONHASHSEED and accepted with it."""
    config.cache_config.prefix_caching_hash_algo = algorithm
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert len(check_engine(config)) == 1
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert check_engine(config) == []
    assert features.hash_scheme(algorithm)["seed"] == "0"
