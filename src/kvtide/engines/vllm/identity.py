"""The engine part of a key's identity: what vLLM's configuration says about the bytes.

Whatever changes the KV cache of given tokens is in here, and nothing that only says where or how
the engine runs: no paths, host names, times or sizes of memory. Which settings those are is told
in :mod:`kvtide.engines.vllm.settings`. Two processes with the same configuration get equal data.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtide.engines.lora import AdapterDigests, Pending
from kvtide.engines.vllm import features, settings
from kvtide.engines.vllm.settings import content, plain
from kvtide.engines.vllm.translate import GroupPlan
from kvtide.engines.weights import weights_identity
from kvtide.errors import ConfigError

PAYLOAD_FORMAT = 1
"""Raised whenever the bytes of a block are laid out differently in its stored value."""

# Rotary embeddings whose values depend on nothing but the position and the model's own settings.
_FIXED_ROPE = frozenset({"default", "linear", "llama3", "yarn", "mrope", "proportional"})


def engine_identity(
    vllm_config: Any, plan: GroupPlan, *, weights_version: str | None = None
) -> dict[str, Any]:
    """Return the engine part of the identity as JSON data.

    Settings are given as digests: some releases keep credentials among them.

    Raises:
        ConfigError: the weights of the model, or of a draft model whose layers share its KV
            cache, or a setting cannot be told apart from others; the message names what to set.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    lora = getattr(vllm_config, "lora_config", None)
    attention = getattr(vllm_config, "attention_config", None)
    return {
        "payload_format": PAYLOAD_FORMAT,
        "engine": features.release_namespace(),
        "weights": _weights_of(model, vllm_config.load_config, weights_version),
        "model": _model_identity(model),
        "kv_cache": _digest_of(cache, settings.CACHE, "cache_config"),
        "attention": _digest_of(attention, settings.ATTENTION, "attention_config"),
        "additional": _additional_identity(vllm_config),
        "hash": features.hash_scheme(cache.prefix_caching_hash_algo),
        "hash_block_size": plan.hash_block_size,
        "groups": list(plan.specs),
        "num_layers": list(plan.num_layers),
        "parallel": _parallel_identity(vllm_config.parallel_config),
        "lora": _digest_of(lora, settings.LORA, "lora_config"),
        "draft": _draft_identity(vllm_config, weights_version),
    }


def _digest_of(config: Any, left_out: Mapping[str, str], where: str) -> str | None:
    data = content(config, left_out, where)
    return None if data is None else settings.digest(data)


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
    if not weights_version:
        _check_weights_are_readable(place, str(plain(load.load_format, "load_config.load_format")))
    identity = weights_identity(
        place,
        model.revision,
        hub_cache=getattr(load, "download_dir", None),
        weights_version=weights_version,
    )
    return {"identity": identity, "load": _digest_of(load, settings.LOAD, "load_config")}


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
    data = content(model, settings.MODEL, "model_config") or {}
    identity: dict[str, object] = {
        "settings": settings.digest(data),
        "multimodal": _multimodal_identity(getattr(model, "multimodal_config", None)),
    }
    # The resolved configuration holds what --hf-overrides changed, rope scaling among it.
    if not _rope_types(data["hf_config"]) <= _FIXED_ROPE:
        identity["max_model_len"] = model.max_model_len
    return identity


def _multimodal_identity(multimodal: Any) -> dict[str, object] | None:
    if multimodal is None:
        return None
    where = "multimodal_config"
    scales = getattr(multimodal, "mm_encoder_fp8_scale_path", None)
    return {
        "settings": _digest_of(multimodal, settings.MULTIMODAL, where),
        "scales": settings.file_digest(scales, f"{where}.mm_encoder_fp8_scale_path"),
    }


def _additional_identity(vllm_config: Any) -> str:
    """Return the digest of what a platform outside vLLM is told."""
    additional = getattr(vllm_config, "additional_config", None) or {}
    if not isinstance(additional, Mapping):
        return str(additional.compute_hash())
    return settings.digest(plain(additional, "additional_config"))


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


def of_all_sizes(identity: Mapping[str, Any], shards: Sequence[int]) -> dict[str, Any]:
    """Return an identity that does not tell the tensor parallel size, but how heads are cut."""
    sizes = {**identity["parallel"], "tensor_parallel_size": {"shards": list(shards)}}
    return {**identity, "groups": _of_all_heads(identity["groups"]), "parallel": sizes}


def _of_all_heads(specs: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Return descriptions of groups without the number of heads that one rank has."""
    described: list[dict[str, object]] = []
    for spec in specs:
        kept = {name: value for name, value in spec.items() if name != "num_kv_heads"}
        if isinstance(layers := kept.get("layers"), list):
            kept["layers"] = _of_all_heads(layers)
        described.append(kept)
    return described


def _parallel_identity(parallel: Any) -> dict[str, object]:
    # Not how tokens of a block are divided, nor which layers a stage has: the ranks tell that.
    names = (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
    )
    return {name: getattr(parallel, name, 1) for name in names}


def _draft_identity(vllm_config: Any, weights_version: str | None) -> dict[str, object] | None:
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is None or not speculative.uses_draft_kv_cache():
        return None
    identity: dict[str, object] = {
        "settings": _digest_of(speculative, settings.SPECULATIVE, "speculative_config")
    }
    draft = speculative.draft_model_config
    if draft is not None:
        load = getattr(speculative, "draft_load_config", None) or vllm_config.load_config
        identity["weights"] = _weights_of(draft, load, weights_version)
        identity["model"] = _model_identity(draft)
    return identity
