"""What is probed of vLLM's releases."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import vllm

from kvtide.engines.vllm import features
from kvtide.errors import ConfigError
from tests.engines.vllm.configs import attention_spec, cache_config, state_spec


def test_the_installed_release_is_supported(caplog: pytest.LogCaptureFixture) -> None:
    """The tests run on a release inside the range, which draws no warning."""
    with caplog.at_level(logging.WARNING):
        features.check_release()
    assert not caplog.records
    assert features.release_namespace().startswith("vllm-0.3")


@pytest.mark.parametrize("version", ["0.29.0", "0.28.1", "0.9.2.post1"])
def test_an_older_release_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 0.30 a failed load has no way back."""
    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(ConfigError, match=r"Install vllm 0\.30 to 0\.33"):
        features.check_release()


@pytest.mark.parametrize("version", ["0.34.0", "1.0.0", "dev", "0.1.dev1+gabc"])
def test_an_unknown_release_draws_one_warning(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A newer or unnumbered build is served, with one warning however often it is checked."""
    monkeypatch.setattr(vllm, "__version__", version)
    with caplog.at_level(logging.WARNING):
        features.check_release()
        features.check_release()
    assert len(caplog.records) == 1


def test_the_in_tree_form_draws_a_warning_on_other_releases_than_the_one_it_is_tested_with(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another release may name or lay out KV cache otherwise, and nothing would tell."""
    monkeypatch.setattr(features, "_warned", set())
    for version in ("0.32.0", "0.32.1+cpu"):
        monkeypatch.setattr(vllm, "__version__", version)
        features.check_in_tree_form()
    assert not caplog.records
    monkeypatch.setattr(vllm, "__version__", "0.33.0")
    features.check_in_tree_form()
    features.check_in_tree_form()
    [record] = caplog.records
    assert "vLLM 0.32, not of 0.33.0" in record.getMessage()


def test_patch_releases_share_a_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.32.0 and 0.32.1 exchange blocks; 0.32 and 0.33 do not."""
    names = []
    for version in ("0.32.0", "0.32.1+cpu", "0.33.0"):
        monkeypatch.setattr(vllm, "__version__", version)
        names.append(features.release_namespace())
    assert names == ["vllm-0.32", "vllm-0.32", "vllm-0.33"]


def test_the_hash_scheme_follows_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unset seed, and each set one, are different schemes."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    unset = features.hash_scheme("sha256")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    zero = features.hash_scheme("sha256")
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    assert unset != zero != features.hash_scheme("sha256") != unset
    assert unset["extra_keys"] in ("tagged", "plain")


def test_cacheable_groups_are_computed_where_the_engine_does_not_tell() -> None:
    """The fallback agrees with the engine's own answer."""
    config = cache_config((attention_spec(), 1), (attention_spec(), 1), (attention_spec(), 1))
    config.kv_cache_groups[1].enable_kv_transfer = False
    bare = SimpleNamespace(kv_cache_groups=config.kv_cache_groups)
    assert features.prefix_cacheable_group_ids(config) == (0, 2)
    assert features.prefix_cacheable_group_ids(bare) == (0, 2)


def test_hits_end_with_blocks_where_only_the_engines_scheduler_knows_better(
    make_config: Any, model_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 0.32 nothing tells a connector; ending with a block is always right."""
    config = make_config(model_folder)
    groups = cache_config((state_spec(block_size=64), 1), (attention_spec(block_size=32), 1))
    assert features.resolve_block_sizes(groups, config) == features.BlockSizes(64, 32, 32)
    ours = ("resolve_kv_cache_block_sizes", "resolve_dcp_kv_block_size")
    older = SimpleNamespace(**{name: getattr(features.kv_cache_utils, name) for name in ours})
    monkeypatch.setattr(features, "kv_cache_utils", older)
    assert features.resolve_block_sizes(groups, config) == features.BlockSizes(64, 32, 64)


def test_a_failed_load_is_a_finished_one_too() -> None:
    """The engine waits for ``finished_recving`` whatever became of the load."""
    results = features.transfer_results({"a"}, {"b"})
    assert results.finished_recving == {"a", "b"}
    assert results.failed_recving == {"b"}
    assert not results.finished_sending


@pytest.mark.skipif(features.CacheHitSource is None, reason="this vLLM asks for no sources")
def test_sources_of_a_hit_add_up() -> None:
    """All tokens of a hit are counted under one medium; nothing is nothing."""
    assert sum(features.external_hit_sources(64, "disk").values()) == 64
    assert features.external_hit_sources(0, "host") == {}


def test_traits_tell_backends_and_instruction_sets_apart() -> None:
    """CPU kernels pack keys for one instruction set: equal shapes are not equal bytes."""

    def layer(isa: str | None) -> Any:
        backend = SimpleNamespace(get_name=lambda: "CPU_ATTN")
        return SimpleNamespace(attn_backend=backend, **({"isa": isa} if isa else {}))

    layers = {"a": layer("amx"), "b": layer("vec"), "c": layer(None), "d": object()}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    traits = features.attention_traits(config, [*layers, "unknown"])
    assert list(traits.values()) == ["CPU_ATTN/amx", "CPU_ATTN/vec", "CPU_ATTN", "", ""]


def test_how_many_tokens_in_a_row_a_rank_has_is_read_off_every_release() -> None:
    """The setting has had two names, and releases without it have one token."""

    def found(**settings: int) -> int:
        config = SimpleNamespace(parallel_config=SimpleNamespace(**settings))
        return features.token_interleave(config)

    assert found() == 1
    assert found(dcp_kv_cache_interleave_size=8) == 8
    assert found(dcp_kv_cache_interleave_size=8, cp_kv_cache_interleave_size=16) == 16
