"""The engine part of a key's identity: what vLLM's configuration says about the bytes.

Whatever changes the KV cache of given tokens is in here, and nothing that only says where or how
the engine runs: no paths, host names, times or sizes of memory. Two processes with the same
configuration must get equal data, so values are reduced to plain JSON in a fixed form.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from kvtide.engines.adapters import AdapterDigests, Pending
from kvtide.engines.vllm import features
from kvtide.engines.vllm.translate import GroupPlan
from kvtide.engines.weights import weights_identity
from kvtide.errors import ConfigError

PAYLOAD_FORMAT = 1
"""Raised whenever the bytes of a block are laid out differently in its stored value."""

# Names of places and of the software that wrote a file; none of them changes a byte of KV cache.
_NOT_CONTENT = frozenset({"_name_or_path", "name_or_path", "transformers_version", "_commit_hash"})
# Rotary embeddings whose values depend on nothing but the position and the model's own settings.
_FIXED_ROPE = frozenset({"default", "linear", "llama3", "yarn", "mrope", "proportional"})


def engine_identity(
    vllm_config: Any, plan: GroupPlan, *, weights_version: str | None = None
) -> dict[str, object]:
    """Return the engine part of the identity as JSON data.

    Raises:
        ConfigError: the weights of the model, or of a draft model whose layers share its KV
            cache, cannot be told apart from others; the message names ``weights_version``.
    """
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    return {
        "payload_format": PAYLOAD_FORMAT,
        "engine": features.release_namespace(),
        "weights": _weights_of(model, vllm_config.load_config, weights_version),
        "model": _model_identity(model),
        "kv_cache": {
            "dtype": _plain(cache.cache_dtype),
            "skip_layers": _plain(getattr(cache, "kv_cache_dtype_skip_layers", [])),
        },
        "hash": features.hash_scheme(cache.prefix_caching_hash_algo),
        "hash_block_size": plan.hash_block_size,
        "groups": list(plan.specs),
        "num_layers": list(plan.num_layers),
        "parallel": _parallel_identity(vllm_config.parallel_config),
        "lora_dtype": _plain(getattr(getattr(vllm_config, "lora_config", None), "lora_dtype", "")),
        "draft": _draft_identity(vllm_config, weights_version),
    }


def adapter_identity(digests: AdapterDigests, lora_request: Any) -> str | Pending | None:
    """Return the identity of a request's adapter, empty for a request without one.

    ``PENDING`` while it is computed in the background; ``None`` where none can be had: such a
    request neither saves nor loads. It does no I/O and may run on the scheduling thread.
    """
    if lora_request is None:
        return ""
    digest = digests.get(
        lora_request.lora_int_id,
        lora_request.lora_path,
        replaced_in_place=bool(getattr(lora_request, "load_inplace", False)),
    )
    # The same files mean other weights when read as fused three-dimensional tensors.
    if isinstance(digest, str) and getattr(lora_request, "is_3d_lora_weight", False):
        return f"{digest}:3d"
    return digest


def _weights_of(model: Any, load: Any, weights_version: str | None) -> dict[str, object]:
    # Where the weights come from an object store, ``model`` is a local folder with the
    # configuration only, and ``model_weights`` names the real place.
    place = getattr(model, "model_weights", "") or model.model
    load_format = _plain(getattr(load, "load_format", "auto"))
    if not weights_version:
        _check_weights_are_readable(place, str(load_format))
    identity = weights_identity(
        place,
        model.revision,
        hub_cache=getattr(load, "download_dir", None),
        weights_version=weights_version,
    )
    return {"identity": identity, "load_format": load_format}


def _check_weights_are_readable(place: str, load_format: str) -> None:
    remedy = "set weights_version in kv_connector_extra_config to a name of these weights"
    if load_format == "dummy":
        raise ConfigError(f"--load-format dummy gives the model no weights to tell: {remedy}")
    on_hub = os.environ.get("VLLM_USE_MODELSCOPE", "").lower() not in ("1", "true")
    if not on_hub and not Path(place).exists():
        raise ConfigError(
            f"model {place!r} comes from ModelScope, whose downloads carry no commit: {remedy}, "
            "or pass the downloaded folder as --model"
        )


def _model_identity(model: Any) -> dict[str, object]:
    # The resolved configuration holds what --hf-overrides changed, rope scaling among it.
    config = _plain(model.hf_config.to_dict())
    identity: dict[str, object] = {
        "config": _digest(config),
        "dtype": _plain(model.dtype),
        "quantization": _plain(getattr(model, "quantization", None)),
        "quantization_config": _digest(_plain(getattr(model, "quantization_config", None))),
        "implementation": _plain(getattr(model, "model_impl", "auto")),
        "classes": _plain(getattr(model, "model_class_overrides", {})),
        "code_revision": _plain(getattr(model, "code_revision", None)),
        "disable_sliding_window": bool(getattr(model, "disable_sliding_window", False)),
    }
    if not _rope_types(config) <= _FIXED_ROPE:
        identity["max_model_len"] = model.max_model_len
    multimodal = getattr(model, "multimodal_config", None)
    if multimodal is not None:
        names = ("mm_processor_kwargs", "video_pruning_rate")
        identity["multimodal"] = {name: _plain(getattr(multimodal, name, None)) for name in names}
    return identity


def _rope_types(config: object, *, in_rope: bool = False) -> set[str]:
    """Return the kinds of rotary scaling anywhere in a configuration.

    Some pick their factors by the configured maximum length (LongRoPE does), so for all but
    those known not to, that length is part of the identity.
    """
    found: set[str] = set()
    if isinstance(config, list):
        return found.union(*(_rope_types(value, in_rope=in_rope) for value in config))
    if isinstance(config, dict):
        for key, value in config.items():
            if in_rope and key in ("rope_type", "type") and isinstance(value, str):
                found.add(value)
            rope_here = in_rope or key in ("rope_scaling", "rope_parameters")
            found |= _rope_types(value, in_rope=rope_here)
    return found


def _parallel_identity(parallel: Any) -> dict[str, object]:
    names = (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
        "dcp_kv_cache_interleave_size",
        "cp_kv_cache_interleave_size",
    )
    identity: dict[str, object] = {name: _plain(getattr(parallel, name, 1)) for name in names}
    identity["layer_partition"] = os.environ.get("VLLM_PP_LAYER_PARTITION", "")
    return identity


def _draft_identity(vllm_config: Any, weights_version: str | None) -> dict[str, object] | None:
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is None or not speculative.uses_draft_kv_cache():
        return None
    draft = speculative.draft_model_config
    if draft is None:
        return {"method": _plain(speculative.method)}
    load = getattr(speculative, "draft_load_config", None) or vllm_config.load_config
    return {
        "method": _plain(speculative.method),
        "weights": _weights_of(draft, load, weights_version),
        "model": _model_identity(draft),
        "kv_cache_dtype": _plain(getattr(speculative, "kv_cache_dtype", None)),
    }


def _plain(value: Any) -> Any:  # noqa: PLR0911 - one line per kind of value
    """Return ``value`` as JSON data that is equal in every process.

    What has no plain form is told by its type alone: a ``repr`` may hold an address.
    """
    if isinstance(value, Enum):
        return _plain(value.value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items() if k not in _NOT_CONTENT}
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(_plain(item), sort_keys=True) for item in value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    if hasattr(value, "to_dict"):
        return _plain(value.to_dict())
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _digest(plain: object) -> str:
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
