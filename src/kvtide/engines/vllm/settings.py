"""vLLM's configuration objects as data: all of their settings but those known not to matter.

What is left out is listed here, each with the reason. A setting that a later release adds is
therefore part of the identity at first: at worst engines that could share do not, whereas a
setting that nobody thought of would let them exchange bytes that differ.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path, PurePath
from types import FunctionType
from typing import Any

from kvtide.errors import ConfigError

_ELSEWHERE = "it is a part of the identity of its own"
_PLACE = "a place: what lies there is told by its content"
_CAPACITY = "how much fits, not what is computed"
_ACCESS = "who may read or reach what"
_TEXT = "between text and tokens; keys name tokens"
_SAMPLING = "after the last layer"
_MEMORY = "how memory is held and given back"
_LAUNCH = "how kernels are launched"
_SPEED = "how fast weights are read"
_RESOLVED = "an input or a result of the groups' block sizes, which are in the identity"
_REUSE = "which blocks are kept and found, not what is in them"
_NO_CACHE = "drafts without a KV cache"

MODEL = {
    "model": _PLACE,
    "model_weights": _PLACE,
    "revision": _PLACE,
    "hf_config_path": _PLACE,
    "config_format": "how the configuration was read, not what it says",
    "hf_overrides": "its effect is in hf_config",
    "multimodal_config": _ELSEWHERE,
    "hf_token": _ACCESS,
    "allowed_local_media_path": _ACCESS,
    "allowed_media_domains": _ACCESS,
    "allow_deprecated_quantization": _ACCESS,
    "enable_prompt_embeds": "an interface; embeddings are part of the engine's hashes",
    "max_model_len": f"{_CAPACITY}; where positions depend on it, it is added",
    "spec_target_max_model_len": _CAPACITY,
    "tokenizer": _TEXT,
    "tokenizer_mode": _TEXT,
    "tokenizer_revision": _TEXT,
    "skip_tokenizer_init": _TEXT,
    "io_processor_plugin": _TEXT,
    "renderer_num_workers": _TEXT,
    "served_model_name": "a name in the API",
    "seed": _SAMPLING,
    "generation_config": _SAMPLING,
    "override_generation_config": _SAMPLING,
    "return_sampling_mask": _SAMPLING,
    "max_logprobs": _SAMPLING,
    "logprobs_mode": _SAMPLING,
    "use_fp64_gumbel": _SAMPLING,
    "enable_trace_replay": _SAMPLING,
    "logits_processors": _SAMPLING,
    "pooler_config": _SAMPLING,
    "enforce_eager": _LAUNCH,
    "enable_sleep_mode": _MEMORY,
    "sleep_preserve_parameter_names": _MEMORY,
    "sleep_mode_backend": _MEMORY,
    "sleep_mode_offload_cudagraph": _MEMORY,
    "enable_nccl_comm_suspend": _MEMORY,
    "enable_cumem_allocator": _MEMORY,
}

CACHE = {
    "block_size": _RESOLVED,
    "user_specified_block_size": _RESOLVED,
    "_block_size_resolved": _RESOLVED,
    "prefix_match_unit": _RESOLVED,
    "effective_attention_block_size": _RESOLVED,
    "hash_block_size": _RESOLVED,
    "cache_hit_alignment_tokens": _RESOLVED,
    "mamba_block_size": _RESOLVED,
    "kv_cache_layout": "each rank tells how its bytes lie",
    "prefix_caching_hash_algo": _ELSEWHERE,
    "enable_prefix_caching": _REUSE,
    "prefix_cache_retention_interval": _REUSE,
    "enable_mamba_shared_prefix_checkpoint": _REUSE,
    "gpu_memory_utilization": _CAPACITY,
    "num_gpu_blocks_override": _CAPACITY,
    "num_gpu_blocks": _CAPACITY,
    "num_cpu_blocks": _CAPACITY,
    "kv_cache_size_tokens": _CAPACITY,
    "kv_cache_max_concurrency": _CAPACITY,
    "kv_cache_memory_bytes": _CAPACITY,
    "kv_offloading_size": _CAPACITY,
    "kv_offloading_backend": _CAPACITY,
}

LORA = {
    "max_loras": _CAPACITY,
    "max_cpu_loras": _CAPACITY,
    "max_lora_rank": _CAPACITY,
    "specialize_active_lora": _LAUNCH,
    "default_mm_loras": "each request names the adapter that it got",
}

MULTIMODAL = {
    "limit_per_prompt": _CAPACITY,
    "interleave_mm_strings": _TEXT,
    "mm_processor_cache_gb": _CAPACITY,
    "mm_processor_cache_type": _CAPACITY,
    "mm_shm_cache_max_object_size_mb": _CAPACITY,
    "mm_ipc_gpu_memory_gb": _CAPACITY,
    "mm_tensor_ipc": "how inputs travel between processes",
    "skip_mm_profiling": _MEMORY,
    "mm_encoder_fp8_scale_path": _PLACE,
    "mm_encoder_fp8_scale_save_path": "what is written, not what is computed",
    "mm_encoder_fp8_scale_save_margin": "what is written, not what is computed",
}

LOAD = {
    "download_dir": _PLACE,
    "device": "where weights lie while they are read",
    "pt_load_map_location": "where weights lie while they are read",
    "safetensors_load_strategy": _SPEED,
    "safetensors_prefetch_num_threads": _SPEED,
    "safetensors_prefetch_block_size": _SPEED,
    "use_tqdm_on_load": "what is shown",
}

SPECULATIVE = {
    "model": _PLACE,
    "revision": _PLACE,
    "draft_model_config": _ELSEWHERE,
    "draft_load_config": _ELSEWHERE,
    "target_model_config": _ELSEWHERE,
    "target_parallel_config": _ELSEWHERE,
    "draft_parallel_config": "its sizes are draft_tensor_parallel_size and the target's",
    "max_model_len": _CAPACITY,
    "enforce_eager": _LAUNCH,
    "enable_adaptive_verification": "how many drafts are tried",
    "num_speculative_tokens_per_batch_size": "how many drafts are tried",
    "rejection_sample_method": _SAMPLING,
    "synthetic_acceptance_rates": _SAMPLING,
    "synthetic_acceptance_length": _SAMPLING,
    "draft_sample_method": _SAMPLING,
    "use_local_argmax_reduction": _SAMPLING,
    "prompt_lookup_max": _NO_CACHE,
    "prompt_lookup_min": _NO_CACHE,
    "suffix_decoding_max_tree_depth": _NO_CACHE,
    "suffix_decoding_max_cached_requests": _NO_CACHE,
    "suffix_decoding_max_spec_factor": _NO_CACHE,
    "suffix_decoding_min_token_prob": _NO_CACHE,
}

ATTENTION = {
    "backend": "each rank tells which backend packs its bytes",
    "backend_per_kind": "each rank tells which backend packs its bytes",
    "flash_attn_max_num_splits_for_cuda_graph": _LAUNCH,
    "tq_max_kv_splits_for_cuda_graph": _LAUNCH,
    "tokenspeed_mla_min_split_kv": _LAUNCH,
    "sparse_mla_prefill_workspace_factor": _MEMORY,
}

# Names of places and of the software that wrote a file; none of them changes a byte of KV cache.
_NOT_CONTENT = frozenset({"_name_or_path", "name_or_path", "transformers_version", "_commit_hash"})


def content(config: Any, left_out: Mapping[str, str], where: str) -> dict[str, object] | None:
    """Return a configuration object's settings as JSON data, ``None`` for no object.

    ``where`` is what the object is called in messages.

    Raises:
        ConfigError: a setting holds what cannot be told apart from other values; it is named.
    """
    if config is None:
        return None
    fields = _fields(config)
    if fields is None:
        raise _untellable(config, where)
    return {name: plain(value, f"{where}.{name}") for name, value in fields if name not in left_out}


def digest(data: object) -> str:
    """Return the digest of JSON data."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def file_digest(path: str | None, where: str) -> str | None:
    """Return the digest of a small file that a setting names, ``None`` for none.

    Raises:
        ConfigError: the file cannot be read.
    """
    if not path:
        return None
    try:
        return hashlib.blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()
    except OSError as error:
        raise ConfigError(f"{where} names the file {path}, which cannot be read: {error}") from None


def plain(value: Any, where: str) -> Any:  # noqa: PLR0911 - one line per kind of value
    """Return ``value`` as JSON data that is equal in every process, and only for equal values.

    Raises:
        ConfigError: there is no such form; the message names ``where``.
    """
    if value is None or (isinstance(value, (bool, int, str)) and not isinstance(value, Enum)):
        return value
    if isinstance(value, Enum):
        return value.value if isinstance(value.value, str) and value.value else value.name
    if isinstance(value, float):
        return repr(float(value))
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, (bytes, bytearray)):
        return value.hex()
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(plain(item, where), sort_keys=True) for item in value)
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{number}]") for number, item in enumerate(value)]
    if isinstance(value, (type, FunctionType)):
        return _name_in_module(value, where)
    if callable(getattr(value, "to_dict", None)):  # says more than fields where there are both
        return plain(value.to_dict(), where)
    if (fields := _fields(value)) is not None:
        return {name: plain(item, f"{where}.{name}") for name, item in fields}
    if isinstance(value, Mapping):
        return {
            _key(key, where): plain(item, f"{where}[{key!r}]")
            for key, item in value.items()
            if key not in _NOT_CONTENT
        }
    return _foreign(value, where)


def _fields(value: Any) -> Iterator[tuple[str, Any]] | None:
    """Return names and values of a dataclass's or a pydantic model's fields, else ``None``."""
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
    elif isinstance(declared := getattr(type(value), "model_fields", None), Mapping):
        names = list(declared)
    else:
        return None
    return ((name, getattr(value, name, None)) for name in names)


def _foreign(value: Any, where: str) -> Any:
    """Return the plain form of what libraries define: torch's names, and numbers."""
    kind = type(value)
    if kind.__module__ == "torch" and kind.__name__ in ("dtype", "device"):
        return str(value).removeprefix("torch.")
    if kind.__module__ == "numpy" and callable(getattr(value, "tolist", None)):
        return plain(value.tolist(), where)
    raise _untellable(value, where)


def _key(key: Any, where: str) -> str:
    return key if isinstance(key, str) else json.dumps(plain(key, where), sort_keys=True)


def _name_in_module(value: Any, where: str) -> str:
    if "<" in value.__qualname__:  # a lambda or a local function: many have this name
        raise _untellable(value, where)
    return f"{value.__module__}.{value.__qualname__}"


def _untellable(value: Any, where: str) -> ConfigError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return ConfigError(
        f"vLLM's setting {where} holds a {kind}, which cannot be told apart from other values of "
        "its kind, so engines that differ in it would share: set it to plain data (numbers, text, "
        "lists, dictionaries) or leave it out"
    )
