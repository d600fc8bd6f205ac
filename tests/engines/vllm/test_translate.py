"""What kvtide takes from vLLM's configuration, and what it refuses with every fault named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtide.core.groups import ChunkedLocal, FullAttention, Group, Mamba, SlidingWindow
from kvtide.engines.vllm import features
from kvtide.engines.vllm.translate import check_engine, translate_groups
from kvtide.errors import ConfigError, UnsupportedModelError
from tests.engines.vllm.configs import attention_spec, cache_config, state_spec, uniform


@pytest.fixture
def config(model_folder: Path, make_config: Callable[..., Any]) -> Any:
    """The configuration of a plain engine."""
    return make_config(model_folder)


def window(size: int = 128, **changes: Any) -> Any:
    """A sliding-window spec."""
    return attention_spec("SlidingWindowSpec", sliding_window=size, **changes)


def chunked(size: int = 256) -> Any:
    """A chunked-local spec."""
    return attention_spec("ChunkedLocalAttentionSpec", attention_chunk_size=size)


def faults_of(kv_cache_config: Any, config: Any) -> tuple[str, ...]:
    """Why a model is refused."""
    with pytest.raises(UnsupportedModelError) as caught:
        translate_groups(kv_cache_config, config)
    return caught.value.faults


def test_full_attention_is_one_group_of_its_block_size(config: Any) -> None:
    """A plain model gives one full-attention group; all sizes are its block size."""
    plan = translate_groups(cache_config((attention_spec(), 4)), config)
    assert plan.groups == (FullAttention(32),)
    assert (plan.group_ids, plan.num_layers) == ((0,), (4,))
    assert (plan.hash_block_size, plan.partial_hits, plan.num_unsettled_tokens) == (32, False, 0)


HYBRIDS: dict[str, tuple[Callable[[], list[Any]], tuple[Group, ...]]] = {
    "Gemma3": (
        lambda: [window(256), window(256), window(256), attention_spec()],
        (*[SlidingWindow(32, 256)] * 3, FullAttention(32)),
    ),
    "Llama4": (
        lambda: [chunked(), chunked(), attention_spec()],
        (ChunkedLocal(32, 256), ChunkedLocal(32, 256), FullAttention(32)),
    ),
    "Qwen3-Next": (
        lambda: [state_spec(block_size=96), attention_spec(block_size=96)],
        (Mamba(96), FullAttention(96)),
    ),
    "Mamba2 alone": (lambda: [state_spec()], (Mamba(32),)),
    "windows of a latent cache": (
        lambda: [
            attention_spec("MLAAttentionSpec", block_size=64),
            attention_spec("SlidingWindowMLASpec", sliding_window=512, num_kv_heads=1),
        ],
        (FullAttention(64), SlidingWindow(32, 512)),
    ),
}


@pytest.mark.parametrize("name", HYBRIDS)
def test_each_group_of_a_hybrid_keeps_its_kind_and_block_size(config: Any, name: str) -> None:
    """Groups come in the engine's order; hashes are as fine as the finest block."""
    specs, expected = HYBRIDS[name]
    plan = translate_groups(cache_config(*((spec, 1) for spec in specs())), config)
    assert plan.groups == expected
    assert plan.group_ids == tuple(range(len(expected)))
    assert plan.hash_block_size == min(group.block_size for group in expected)
    coordinator = plan.coordinator()
    assert coordinator.groups == expected
    assert coordinator.lcm_block_size == max(group.block_size for group in expected)


def deepseek_v4(**changes: Any) -> list[Any]:
    """Groups shaped like DeepSeek-V4's: compressed latent cache, windows, compressor states."""
    sparse = attention_spec(
        "MLAAttentionSpec", block_size=256, tokens_per_state=4, model_version="deepseek_v4"
    )
    sizes = [(64, 128), (64, 512), (4, 16), (8, 64)]
    return [sparse] + [
        attention_spec(
            "SlidingWindowMLASpec",
            block_size=block,
            sliding_window=tokens,
            num_kv_heads=1,
            model_version="deepseek_v4",
            **changes,
        )
        for block, tokens in sizes
    ]


def test_compressed_states_are_ordinary_blocks(config: Any) -> None:
    """A block of a quarter of the states stands for the same tokens; hits end where it does."""
    plan = translate_groups(cache_config(*((spec, 1) for spec in deepseek_v4())), config)
    assert plan.groups == (
        FullAttention(256),
        SlidingWindow(64, 128),
        SlidingWindow(64, 512),
        SlidingWindow(4, 16),
        SlidingWindow(8, 64),
    )
    assert plan.hash_block_size == 4
    assert plan.coordinator().alignment == 256
    assert plan.specs[0]["tokens_per_state"] == 4


def test_what_is_retained_below_a_window_belongs_to_it(config: Any) -> None:
    """The engine publishes those blocks after a load, so they have to be loaded."""
    plan = translate_groups(
        cache_config((attention_spec(), 1), (window(128, extra_retained_tokens=3), 1)), config
    )
    assert plan.groups[1] == SlidingWindow(32, 131)


def test_the_engine_holds_what_a_window_with_retained_tokens_requires() -> None:
    """The engine's own rule of what it skips agrees with the core's, token by token."""
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    from kvtide.engines.vllm.specs import group_of

    for size, extra in ((128, 0), (128, 3), (40, 7), (1, 2)):
        spec = window(size, extra_retained_tokens=extra)
        manager = SimpleNamespace(sliding_window=size, extra_retained_tokens=extra)
        for num_tokens in range(1, 400):
            skipped = SlidingWindowManager.get_num_skipped_tokens(manager, num_tokens)  # type: ignore[arg-type]
            assert group_of(spec, 32).required(num_tokens).start == skipped // 32


@pytest.mark.parametrize("opt_out", ["enable_kv_transfer", "prefix_cacheable"])
def test_groups_outside_prefix_caching_are_left_out(config: Any, opt_out: str) -> None:
    """They are no fault, whatever their kind, and the others keep the engine's numbers."""
    outside = (
        attention_spec("CrossAttentionSpec")
        if opt_out == "enable_kv_transfer"
        else attention_spec("CircularBufferSpec", block_size=8)
    )
    kv_cache_config = cache_config((outside, 1), (attention_spec(), 2), (window(), 1))
    if opt_out == "enable_kv_transfer":
        kv_cache_config.kv_cache_groups[0].enable_kv_transfer = False
    plan = translate_groups(kv_cache_config, config)
    assert plan.group_ids == (1, 2)
    assert plan.groups == (FullAttention(32), SlidingWindow(32, 128))
    assert plan.num_layers == (2, 1)


def test_a_window_that_the_engine_replays_is_left_out(config: Any) -> None:
    """With bounded replay the engine recomputes the last window after a hit of any kind."""
    specs = deepseek_v4(bounded_replay=True)
    plan = translate_groups(cache_config(*((spec, 1) for spec in specs)), config)
    assert plan.group_ids == (0,)


def test_groups_outside_prefix_caching_may_not_move_the_ends_of_hits(config: Any) -> None:
    """Hits at other places than the engine's would begin inside what it cannot resume."""
    ring = attention_spec("CircularBufferSpec", block_size=48)
    (fault,) = faults_of(cache_config((ring, 1), (attention_spec(), 2)), config)
    assert "unit of hits 96 tokens" in fault
    assert "remove --kv-transfer-config" in fault


def test_specs_hold_no_layer_names(config: Any) -> None:
    """Names differ by pipeline stage and by model class; bytes do not."""
    mixed = uniform(attention_spec(), attention_spec(head_size=64))
    plan = translate_groups(cache_config((attention_spec(), 4), (mixed, 2)), config)
    assert "layer" not in repr(plan.specs).replace("'layers'", "")


def test_every_group_that_stands_in_the_way_is_named(config: Any) -> None:
    """A model lists all its groups at once, not one per restart."""
    cross, layer = attention_spec("CrossAttentionSpec"), "model.layers.{}.self_attn.attn"
    faults = faults_of(
        cache_config((cross, 3), (attention_spec(), 1), (state_spec(mamba_cache_mode="none"), 1)),
        config,
    )
    assert [fault.split(" holds ")[0] for fault in faults] == [
        f"KV cache group 0 ({layer.format(0)}, {layer.format(1)} and 1 more layers)",
        f"KV cache group 2 ({layer.format(4)})",
    ]


@pytest.mark.parametrize("by", ["role", "place"])
def test_managers_that_keep_longer_hits_are_refused(config: Any, by: str) -> None:
    """Groups backed by host memory answer hits of their own: they are refused at start."""
    from vllm.v1.kv_cache_interface import KVCacheGroupRole

    plan = cache_config((attention_spec(), 2))
    if by == "role":
        plan.kv_cache_groups[0].role = KVCacheGroupRole.HISPARSE_SOURCE
    else:
        plan.kv_cache_groups[0].host_resident = True
    (fault,) = faults_of(plan, config)
    for words in ("group 0", "host memory", "hisparse_config"):
        assert words in fault


def test_a_manager_of_a_plugin_that_keeps_longer_hits_is_refused(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever registered it: the class says so itself."""
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    monkeypatch.setattr(FullAttentionManager, "retains_longer_hit", True)
    (fault,) = faults_of(cache_config((attention_spec(), 2)), config)
    assert "hits of its own" in fault


def test_a_model_without_attention_is_refused(config: Any) -> None:
    """A model with no KV cache has nothing to pool."""
    assert "no KV cache group" in faults_of(cache_config(), config)[0]


def test_block_sizes_the_engine_rejects_are_a_setting_error(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What vLLM says against its own block sizes is passed on as a wrong setting."""

    def reject(*_: object) -> tuple[int, int]:
        raise ValueError("Invalid prefix_match_unit=16")

    monkeypatch.setattr(features.kv_cache_utils, "resolve_kv_cache_block_sizes", reject)
    with pytest.raises(ConfigError, match="prefix_match_unit=16"):
        translate_groups(cache_config((attention_spec(), 4)), config)


def test_the_size_of_a_hash_travels_with_the_engines_plan(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker's own block size setting may be older than the groups: the plan counts."""
    plan = cache_config((state_spec(block_size=96), 1), (attention_spec(block_size=96), 1))
    monkeypatch.setattr(features.kv_cache_utils, "resolve_kv_cache_block_sizes", None)
    plan.hash_block_size, plan.cache_hit_alignment_tokens = 32, 96
    translated = translate_groups(plan, config)
    assert (translated.hash_block_size, translated.partial_hits) == (32, False)
    plan.cache_hit_alignment_tokens = 32
    translated = translate_groups(plan, config)
    assert (translated.hash_block_size, translated.partial_hits) == (32, True)
    assert translated.coordinator().alignment == 32


@pytest.mark.parametrize(
    "interval, groups, expected",
    [
        (None, "window", None),
        (0, "window", 0),
        (64, "window", 64),
        (64, "state", 64),
        (0, "full", None),
        (0, "chunked", None),
    ],
)
def test_retention_acts_on_windows_and_states_alone(
    config: Any, interval: int | None, groups: str, expected: int | None
) -> None:
    """The engine keeps full attention and chunked-local groups dense whatever it was given."""
    other = {
        "window": window(),
        "state": state_spec(),
        "full": attention_spec(head_size=64),
        "chunked": chunked(),
    }[groups]
    plan = cache_config((attention_spec(), 1), (other, 1))
    plan.prefix_cache_retention_interval = interval
    translated = translate_groups(plan, config)
    assert translated.retention_interval == expected
    assert translated.coordinator().retention_interval == expected


@pytest.mark.parametrize("interval", [48, -32])
def test_retention_that_does_not_fit_is_a_setting_error(config: Any, interval: int) -> None:
    """It must be a multiple of the engine's unit; the message names the setting."""
    plan = cache_config((attention_spec(), 1), (window(), 1))
    plan.prefix_cache_retention_interval = interval
    with pytest.raises(ConfigError, match=f"--prefix-cache-retention-interval {interval} .* 32"):
        translate_groups(plan, config)


def test_a_plain_engine_has_no_faults(config: Any) -> None:
    """The defaults of vLLM are fine."""
    assert check_engine(config) == []


def test_all_faults_are_told_at_once(config: Any) -> None:
    """Each wrong setting is named together with its remedy, all of them in one go."""
    cache = config.cache_config
    cache.enable_prefix_caching = False
    cache.prefix_caching_hash_algo = "xxhash"
    cache.kv_sharing_fast_prefill = True
    faults = check_engine(config)
    for setting, remedy in (
        ("prefix caching is off", "--enable-prefix-caching"),
        ("--prefix-caching-hash-algo xxhash", "PYTHONHASHSEED"),
        ("--kv-sharing-fast-prefill", "remove it"),
    ):
        assert any(setting in fault and remedy in fault for fault in faults), setting
    assert len(faults) == 3


def test_an_executor_that_drops_reports_is_refused(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of pipeline stages Ray's older one hands on the last one's report: loads would never end."""
    from vllm import envs

    config.parallel_config.distributed_executor_backend = "ray"
    monkeypatch.setattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", False, raising=False)
    assert check_engine(config) == []
    config.parallel_config.pipeline_parallel_size = 2
    assert "--distributed-executor-backend mp" in check_engine(config)[0]
    monkeypatch.setattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True, raising=False)
    assert check_engine(config) == []


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
