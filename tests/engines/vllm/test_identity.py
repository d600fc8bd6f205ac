"""The engine part of a key's identity: equal in every process, different for different bytes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtide.core.keys import CacheIdentity
from kvtide.engines.adapters import PENDING, AdapterDigests
from kvtide.engines.vllm import identity as module
from kvtide.engines.vllm.identity import engine_identity
from kvtide.engines.vllm.translate import translate_groups
from kvtide.errors import ConfigError
from tests.engines.model_folders import LLAMA, flip_byte, make_folder
from tests.engines.vllm.configs import attention_spec, cache_config

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
config = engine_config(sys.argv[1])
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
        {"served_model_name": "other"},
        {"seed": 7},
        {"num_gpu_blocks_override": 100},
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
        ("code_revision", "abc"),
        ("model_class_overrides", {"Llama": "other:Llama"}),
        ("multimodal_config", SimpleNamespace(video_pruning_rate=0.5)),
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


def test_an_unknown_object_has_no_address_in_it() -> None:
    """What cannot be written as data is told by its type, never by its ``repr``."""
    plain = module._plain({"x": object(), "y": {3, 1}, "z": (1.5, None), "_name_or_path": "/p"})
    assert plain == {"x": "builtins.object", "y": ["1", "3"], "z": ["1.5", None]}
    assert module._plain(SimpleNamespace(to_dict=lambda: {"a": 1})) == {"a": 1}


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
