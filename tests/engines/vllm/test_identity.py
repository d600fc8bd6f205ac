"""The engine part of a key's identity: equal in every process, different for different bytes."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtide.core.keys import CacheIdentity
from kvtide.engines.lora import PENDING, AdapterDigests
from kvtide.engines.vllm import features, settings
from kvtide.engines.vllm import identity as module
from kvtide.engines.vllm.identity import engine_identity
from kvtide.engines.vllm.translate import translate_groups
from kvtide.errors import ConfigError
from tests.engines.model_folders import LLAMA, flip_byte, make_folder
from tests.engines.vllm.configs import attention_spec, cache_config, state_spec

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 10000.0,
}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 16,
    "long_factor": [2.0] * 16,
    "original_max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}

SCRIPT = """
import json, sys
from kvtide.core.keys import CacheIdentity
from kvtide.engines.vllm.identity import engine_identity
from kvtide.engines.vllm.translate import translate_groups
from tests.engines.vllm.configs import attention_spec, cache_config, engine_config
config = engine_config(
    sys.argv[1],
    enable_lora=True,
    quantization="fp8_per_tensor",
    quantization_config={"ignore": ["*q_proj*"]},
    speculative_config={
        "model": sys.argv[1], "method": "draft_model", "num_speculative_tokens": 2
    },
)
plan = translate_groups(cache_config((attention_spec(), 4)), config)
data = engine_identity(config, plan)
print("IDENTITY", CacheIdentity(engine=data, worker="").fingerprint(), json.dumps(data))
"""


def identity_of(config: Any, spec: Any = None, layers: int = 4, **arguments: Any) -> Any:
    """Return the engine identity of a configuration with one group."""
    plan = translate_groups(cache_config((spec or attention_spec(), layers)), config)
    return engine_identity(config, plan, **arguments)


def fingerprint(data: Any) -> str:
    """Return the fingerprint an identity gives a key."""
    return CacheIdentity(engine=data, worker="").fingerprint()


def test_two_processes_agree_exactly(tmp_path: Path) -> None:
    """Fresh interpreters, other folders of the same model, other hash orders: one fingerprint."""
    first = make_folder(tmp_path / "a" / "model")
    second = shutil.copytree(first, tmp_path / "elsewhere")
    lines = []
    for folder in (first, second):
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
        environment.pop("PYTHONHASHSEED", None)
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(folder)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        lines += [line for line in done.stdout.splitlines() if line.startswith("IDENTITY")]
    assert len(lines) == 2
    assert lines[0] == lines[1]


def test_it_is_plain_data_without_places(model_folder: Path, make_config: Any) -> None:
    """The identity survives JSON, and holds no path, host or memory address."""
    data = identity_of(make_config(model_folder))
    assert json.loads(json.dumps(data)) == data
    text = json.dumps(data)
    assert str(model_folder.parent) not in text
    assert " at 0x" not in text
    assert os.uname().nodename not in text


@pytest.mark.parametrize(
    "arguments",
    [
        {"dtype": "float32"},
        {"kv_cache_dtype": "fp8"},
        {"hf_overrides": {"rope_parameters": YARN}},
        {"hf_overrides": {"rope_theta": 500_000.0}},
        {"hf_overrides": {"rms_norm_eps": 1e-3}},
        {"prefix_caching_hash_algo": "sha256_cbor"},
        {"load_format": "safetensors"},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"disable_sliding_window": True},
        {"model_loader_extra_config": {"enable_multithread_load": True}},
        {"additional_config": {"layout": "nz"}},
        {"attention_config": {"disable_flashinfer_q_quantization": True}},
        {"enable_lora": True},
    ],
    ids=str,
)
def test_settings_that_change_bytes_change_it(
    arguments: dict[str, Any], model_folder: Path, make_config: Callable[..., Any]
) -> None:
    """Whatever changes the KV cache of given tokens, with the same weights, changes the key."""
    plain = identity_of(make_config(model_folder))
    assert fingerprint(identity_of(make_config(model_folder, **arguments))) != fingerprint(plain)


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_model_len": 1024},
        {"max_num_batched_tokens": 512, "max_num_seqs": 4},
        {"max_num_seqs": 4},
        {"gpu_memory_utilization": 0.5},
        {"kv_cache_memory_bytes": 1 << 28},
        {"max_logprobs": 5, "disable_log_stats": True},
        {"download_dir": "/tmp", "use_tqdm_on_load": False},
        {"tokenizer_mode": "slow", "generation_config": "vllm"},
        {"served_model_name": "other"},
        {"seed": 7},
        {"num_gpu_blocks_override": 100},
        {"prefix_cache_retention_interval": 64},
        {"enable_mamba_shared_prefix_checkpoint": True},
        {"enforce_eager": False},
        {"data_parallel_size": 1, "disable_log_stats": False},
    ],
    ids=str,
)
def test_settings_that_change_no_byte_leave_it(
    arguments: dict[str, Any], model_folder: Path, make_config: Callable[..., Any]
) -> None:
    """Sizes of memory and batches, names and seeds of sampling: engines that differ share."""
    plain = identity_of(make_config(model_folder))
    assert identity_of(make_config(model_folder, **arguments)) == plain


@pytest.mark.parametrize(
    "name, value",
    [
        ("model_impl", "transformers"),
        ("quantization", "fp8"),
        ("quantization_config", {"ignore": ["*q_proj*"]}),
        ("code_revision", "abc"),
        ("model_class_overrides", {"Llama": "other:Llama"}),
    ],
)
def test_how_the_model_is_built_changes_it(
    name: str, value: object, model_folder: Path, make_config: Callable[..., Any]
) -> None:
    """Another implementation or quantisation of the same files computes other bytes."""
    config = make_config(model_folder)
    plain = identity_of(config)
    setattr(config.model_config, name, value)
    assert fingerprint(identity_of(config)) != fingerprint(plain)


@pytest.mark.parametrize(
    "spec, layers",
    [
        ({"block_size": 64}, 4),
        ({"head_size": 64}, 4),
        ({"num_kv_heads": 1}, 4),
        ({"sliding_window": 128}, 4),
        ({}, 3),
    ],
    ids=str,
)
def test_the_resolved_groups_change_it(
    spec: dict[str, Any], layers: int, model_folder: Path, make_config: Callable[..., Any]
) -> None:
    """Block size, heads, windows and the number of layers are part of it."""
    config = make_config(model_folder)
    changed = identity_of(config, attention_spec(**spec), layers)
    assert fingerprint(changed) != fingerprint(identity_of(config))


def test_retention_leaves_it(model_folder: Path, make_config: Callable[..., Any]) -> None:
    """Which blocks of a window an engine keeps does not change what is in them."""
    config = make_config(model_folder)
    window = attention_spec("SlidingWindowSpec", sliding_window=128)
    identities = []
    for interval in (None, 0, 64):
        groups = cache_config((attention_spec(), 1), (window, 1))
        groups.prefix_cache_retention_interval = interval
        plan = translate_groups(groups, config)
        assert plan.retention_interval == interval
        identities.append(engine_identity(config, plan))
    assert identities[0] == identities[1] == identities[2]


def test_the_element_type_of_states_changes_it(
    model_folder: Path, make_config: Callable[..., Any]
) -> None:
    """By the setting and by the resolved group, each of its own."""
    import torch

    plain, other = make_config(model_folder), make_config(model_folder)
    # Set behind the platform's back: the CPU's allows one type alone.
    other.cache_config.mamba_ssm_cache_dtype = "float16"
    assert differ(plain, other)
    half = state_spec(dtypes=(torch.bfloat16, torch.float16))
    assert fingerprint(identity_of(plain, state_spec())) != fingerprint(identity_of(plain, half))


def test_other_weights_under_the_same_name_change_it(
    tmp_path: Path, make_config: Callable[..., Any]
) -> None:
    """Folders that share their last part, and a fine-tune in place, never share a key."""
    first = make_folder(tmp_path / "a" / "model")
    second = make_folder(tmp_path / "b" / "model", seed=2)
    prints = [fingerprint(identity_of(make_config(folder))) for folder in (first, second)]
    flip_byte(next(first.glob("*1-of*.safetensors")), 5_000)
    prints.append(fingerprint(identity_of(make_config(first))))
    assert len(set(prints)) == 3


def test_the_seed_of_the_hashes_changes_it(
    model_folder: Path, make_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes with differing PYTHONHASHSEED name tokens differently: they do not meet."""
    config = make_config(model_folder)
    prints = set()
    for seed in (None, "0", "1"):
        if seed is None:
            monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        else:
            monkeypatch.setenv("PYTHONHASHSEED", seed)
        prints.add(fingerprint(identity_of(config)))
    assert len(prints) == 3


def test_length_counts_where_positions_depend_on_it(
    model_folder: Path, make_config: Callable[..., Any]
) -> None:
    """LongRoPE picks its factors by the configured maximum length."""
    prints = [
        fingerprint(
            identity_of(
                make_config(
                    model_folder, max_model_len=length, hf_overrides={"rope_parameters": LONG}
                )
            )
        )
        for length in (2048, 6000)
    ]
    assert prints[0] != prints[1]


def test_rope_kinds_are_found_wherever_they_are() -> None:
    """Old and new spellings, and one entry per layer type, are read."""
    found = module._rope_types(
        {
            "type": "not rope",
            "text_config": {"rope_scaling": {"type": "su"}},
            "rope_parameters": {"full_attention": {"rope_type": "yarn"}},
        }
    )
    assert found == {"su", "yarn"}


def test_weights_without_content_need_a_version(
    model_folder: Path, make_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random weights, object stores and other hubs are refused until the operator names them."""
    dummy = make_config(model_folder, load_format="dummy")
    with pytest.raises(ConfigError, match="weights_version"):
        identity_of(dummy)
    named = [fingerprint(identity_of(dummy, weights_version=version)) for version in ("1", "2")]
    assert named[0] != named[1]
    remote = make_config(model_folder)
    remote.model_config.model_weights = "s3://bucket/model"
    with pytest.raises(ConfigError, match="weights_version"):
        identity_of(remote)
    elsewhere = make_config(model_folder)
    elsewhere.model_config.model = "org/model"
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    with pytest.raises(ConfigError, match="ModelScope"):
        identity_of(elsewhere)


def test_a_draft_model_in_the_cache_is_part_of_it(
    tmp_path: Path, model_folder: Path, make_config: Callable[..., Any]
) -> None:
    """Draft layers share the target's blocks, so another draft means other bytes."""
    prints = [fingerprint(identity_of(make_config(model_folder)))]
    for seed in (5, 6):
        draft = make_folder(tmp_path / f"draft-{seed}", seed)
        speculative = {"model": str(draft), "method": "draft_model", "num_speculative_tokens": 2}
        prints.append(
            fingerprint(identity_of(make_config(model_folder, speculative_config=speculative)))
        )
    assert len(set(prints)) == 3


def test_speculation_without_a_draft_model_leaves_it(
    model_folder: Path, make_config: Callable[..., Any]
) -> None:
    """N-gram drafts put nothing into the cache."""
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    assert identity_of(make_config(model_folder, speculative_config=speculative)) == identity_of(
        make_config(model_folder)
    )


def differ(*configs: Any) -> bool:
    """Tell whether all of these configurations have identities of their own."""
    return len({fingerprint(identity_of(config)) for config in configs}) == len(configs)


def test_online_quantisation_counts_with_all_of_its_settings(
    model_folder: Path, make_config: Callable[..., Any]
) -> None:
    """They are kept in objects of the engine's own, which are told by their fields."""

    def quantised(quantization: str, settings: dict[str, Any] | None = None) -> Any:
        return make_config(model_folder, quantization=quantization, quantization_config=settings)

    assert differ(
        quantised("fp8_per_tensor"),
        quantised("fp8_per_tensor", {"ignore": ["*q_proj*"]}),
        quantised("fp8_per_tensor", {"linear": {"activation": "fp8_per_token"}}),
        quantised("fp8_per_block"),
        quantised("online", {"linear": "fp8_per_tensor", "ignore": ["*k_proj*"]}),
        quantised("online", {"targets": {"*q_proj*": "fp8_per_tensor"}}),
        quantised("online", {"targets": {"*q_proj*": "fp8_per_block"}}),
    )
    again = [identity_of(quantised("fp8_per_tensor", {"ignore": ["a"]})) for _ in range(2)]
    assert again[0] == again[1]


@pytest.mark.parametrize(
    "arguments",
    [
        {"lora_target_modules": ["q_proj"]},
        {"enable_tower_connector_lora": True},
        {"enable_moe_shared_loras": True},
        {"enable_mixed_moe_lora_format": True},
        {"lora_dtype": "float16"},
    ],
    ids=str,
)
def test_how_adapters_are_applied_changes_it(
    arguments: dict[str, Any], model_folder: Path, make_config: Callable[..., Any]
) -> None:
    """One adapter's files mean different weights under different settings."""
    assert differ(
        make_config(model_folder, enable_lora=True),
        make_config(model_folder, enable_lora=True, **arguments),
    )


def test_room_for_adapters_leaves_it(model_folder: Path, make_config: Callable[..., Any]) -> None:
    """How many adapters of which rank fit is not what they compute."""
    few = make_config(model_folder, enable_lora=True)
    many = make_config(
        model_folder, enable_lora=True, max_loras=4, max_cpu_loras=9, max_lora_rank=32
    )
    assert identity_of(few) == identity_of(many)


def test_how_pictures_and_films_are_read_changes_it(
    tmp_path: Path, model_folder: Path, make_config: Callable[..., Any]
) -> None:
    """Encoders, pruning and processors decide the embeddings; scales count by their content."""
    from vllm.config import MultiModalConfig

    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "b.json").write_text('{"layer": 1}')
    (tmp_path / "copy.json").write_text("{}")

    def config(**arguments: Any) -> Any:
        made = make_config(model_folder)
        made.model_config.multimodal_config = MultiModalConfig()
        for name, value in arguments.items():
            setattr(made.model_config.multimodal_config, name, value)
        return made

    scales = "mm_encoder_fp8_scale_path"
    assert differ(
        make_config(model_folder),
        config(),
        config(video_pruning_rate=0.5),
        config(video_pruning_method="other"),
        config(mm_encoder_attn_dtype="fp8"),
        config(mm_encoder_attn_backend="TORCH_SDPA"),
        config(mm_processor_kwargs={"size": 5}),
        config(**{scales: str(tmp_path / "a.json")}),
        config(**{scales: str(tmp_path / "b.json")}),
    )
    moved = config(**{scales: str(tmp_path / "copy.json")})
    assert not differ(moved, config(**{scales: str(tmp_path / "a.json")}))
    assert not differ(config(), config(mm_processor_cache_gb=1, skip_mm_profiling=True))
    with pytest.raises(ConfigError, match=scales):
        identity_of(config(**{scales: str(tmp_path / "no.json")}))


def test_how_a_draft_model_is_run_changes_it(
    tmp_path: Path, model_folder: Path, make_config: Callable[..., Any]
) -> None:
    """Drafting in parallel writes other states into the draft layers' cache."""
    draft = make_folder(tmp_path / "draft", 5)
    settings = {"model": str(draft), "method": "draft_model", "num_speculative_tokens": 2}
    configs = [make_config(model_folder, speculative_config=settings) for _ in range(2)]
    configs[1].speculative_config.parallel_drafting = True
    assert differ(*configs)
    configs[1].speculative_config.parallel_drafting = False
    configs[1].speculative_config.rejection_sample_method = "synthetic"
    assert not differ(*configs)


def test_what_has_no_plain_form_is_refused_by_name(
    model_folder: Path, make_config: Callable[..., Any]
) -> None:
    """Never is it told by its type alone, under which other values would share its keys."""
    config = make_config(model_folder)
    config.load_config.model_loader_extra_config = {"hook": [1, object()]}
    with pytest.raises(ConfigError, match=r"load_config\.model_loader_extra_config\['hook'\]\[1\]"):
        identity_of(config)
    with pytest.raises(ConfigError, match=r"a value holds a builtins\.function"):
        settings.plain(lambda: None, "a value")
    with pytest.raises(ConfigError, match=r"a value holds a types\.SimpleNamespace"):
        settings.content(SimpleNamespace(), {}, "a value")


GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1024,
    "sliding_window": 64,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
DEEPSEEK2 = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize("config", [GEMMA3, DEEPSEEK2], ids=lambda config: config["model_type"])
def test_ordinary_models_have_an_identity(
    config: dict[str, Any], tmp_path: Path, make_config: Callable[..., Any]
) -> None:
    """Nothing in their configurations is refused, and sizes of memory do not count either."""
    folder = make_folder(tmp_path / "model", config=config)
    plain = identity_of(make_config(folder))
    assert plain == identity_of(
        make_config(
            folder,
            max_model_len=1024,
            max_num_seqs=4,
            max_num_batched_tokens=1024,
            gpu_memory_utilization=0.5,
            served_model_name="other",
        )
    )


class Kind(Enum):
    """An enumeration with and without names of its own."""

    NAMED = "named"
    EMPTY = None


def test_plain_data_tells_values_apart() -> None:
    """Numbers, sets, nested objects, classes and torch's names each have one form."""
    import torch
    from vllm.config.quantization import QuantSpec, kFp8StaticTensorSym

    for value, expected in [
        (
            {"y": {3, 1}, "z": (1.5, None), "_name_or_path": "/p"},
            {"y": ["1", "3"], "z": ["1.5", None]},
        ),
        ({1: True}, {"1": True}),
        (SimpleNamespace(to_dict=lambda: {"a": 1}), {"a": 1}),
        ([Kind.NAMED, Kind.EMPTY], ["named", "EMPTY"]),
        (torch.float8_e4m3fn, "float8_e4m3fn"),
        (np.float64(0.5), "0.5"),
        (Path("/a"), "/a"),
        (b"\x01", "01"),
        (OrderedDict, "collections.OrderedDict"),
        (fingerprint, f"{__name__}.fingerprint"),
    ]:
        assert settings.plain(value, "a value") == expected
    quantised = settings.plain(QuantSpec(weight=kFp8StaticTensorSym), "a value")
    assert quantised["activation"] is None
    assert quantised["weight"]["scale"]["group_shape"] == [-1, -1]


CONSIDERED = {
    "ModelConfig": (
        settings.MODEL,
        """code_revision convert disable_cascade_attn disable_sliding_window dtype hf_config
        hf_text_config is_submodel_config model_class_overrides model_impl quantization
        quantization_config runner trust_remote_code word_embeddings_untied_by_checkpoint""",
    ),
    "CacheConfig": (
        settings.CACHE,
        """cache_dtype is_attention_free kv_cache_dtype_skip_layers kv_sharing_fast_prefill
        mamba_cache_dtype mamba_cache_mode mamba_page_size_padded mamba_ssm_cache_dtype
        replayssm_buffer_len skip_page_size_padded sliding_window swa_bounded_replay
        use_kda_recoverssm use_replayssm""",
    ),
    "LoRAConfig": (
        settings.LORA,
        """enable_mixed_moe_lora_format enable_moe_shared_loras enable_tower_connector_lora
        fully_sharded_loras lora_dtype max_lora_cls_labels target_modules""",
    ),
    "MultiModalConfig": (
        settings.MULTIMODAL,
        """allow_missing_mm_embeddings enable_mm_embeds language_model_only media_io_kwargs
        mm_device_do_normalize mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_only
        mm_encoder_tp_mode mm_hasher_algorithm mm_processor_kwargs video_pruning_method
        video_pruning_rate""",
    ),
    "LoadConfig": (settings.LOAD, "ignore_patterns load_format model_loader_extra_config"),
    "SpeculativeConfig": (
        settings.SPECULATIVE,
        """attention_backend code_revision disable_eagle_block_drop disable_padded_drafter_batch
        draft_tensor_parallel_size dspark_draft_topk index_share_for_mtp_iteration
        kv_cache_dtype method moe_backend num_speculative_tokens parallel_drafting quantization
        tensor_parallel_size use_heterogeneous_vocab""",
    ),
    "AttentionConfig": (
        settings.ATTENTION,
        """disable_flashinfer_q_quantization flash_attn_version flex_attn_block_m
        flex_attn_block_n flex_attn_kv_block_size flex_attn_q_block_size hisparse_config
        indexer_kv_dtype indexer_sparse_logits minimax_m3_msa_decode_backend
        mla_prefill_backend sparse_mla_force_mqa use_non_causal use_prefill_query_quantization
        use_trtllm_attention""",
    ),
}


@pytest.mark.skipif(features.release() != (0, 32), reason="the fields are those of vLLM 0.32")
@pytest.mark.parametrize("name", CONSIDERED)
def test_every_setting_was_considered(name: str) -> None:
    """Each is part of the identity or is left out for a reason, and none is only forgotten."""
    import vllm.config

    left_out, hashed = CONSIDERED[name]
    fields = {field.name for field in dataclasses.fields(getattr(vllm.config, name))}
    assert fields == set(left_out) | set(hashed.split())
    assert not set(left_out) & set(hashed.split())
    assert all(left_out.values())


def test_an_architecture_of_its_own_changes_it(
    tmp_path: Path, make_config: Callable[..., Any]
) -> None:
    """Equal weights under a changed configuration file are another model."""
    first = make_folder(tmp_path / "a")
    second = make_folder(tmp_path / "b", config={**LLAMA, "rms_norm_eps": 1e-3})
    assert identity_of(make_config(first)) != identity_of(make_config(second))


def test_a_requests_adapter_is_told_by_content(tmp_path: Path) -> None:
    """No adapter, one that is being read, one that is known and one replaced in place."""
    from vllm.lora.request import LoRARequest

    digests = AdapterDigests(digest=lambda path: f"digest of {path}")
    lora = LoRARequest("name", 1, str(tmp_path))
    fused = LoRARequest("name", 1, str(tmp_path), is_3d_lora_weight=True)
    assert module.adapter_identity(digests, None) == ""
    assert module.adapter_identity(digests, lora) is PENDING
    deadline = time.monotonic() + 10
    while module.adapter_identity(digests, lora) is PENDING and time.monotonic() < deadline:
        time.sleep(0.001)
    assert module.adapter_identity(digests, lora) == f"digest of {tmp_path}"
    assert module.adapter_identity(digests, fused) == f"digest of {tmp_path}:3d"
    again = LoRARequest("name", 1, str(tmp_path), load_inplace=True)
    assert module.adapter_identity(digests, again) is None
    assert module.adapter_identity(digests, lora) is None
    digests.close()
