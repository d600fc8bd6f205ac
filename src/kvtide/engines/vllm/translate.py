"""From vLLM's configuration to the core's groups, or to the full list of what stands against it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from kvtide.core.coordinator import Coordinator
from kvtide.core.groups import FullAttention, Group
from kvtide.engines.vllm import features
from kvtide.errors import ConfigError, UnsupportedModelError

_DISABLE = (
    "run this model without kvtide (remove --kv-transfer-config); support for such models comes "
    "with a later release"
)
_KINDS = {
    "SlidingWindowSpec": "sliding-window attention",
    "SlidingWindowMLASpec": "sliding-window MLA",
    "ChunkedLocalAttentionSpec": "chunked local attention",
    "MambaSpec": "Mamba or linear-attention state",
    "CrossAttentionSpec": "cross attention",
    "EncoderOnlyAttentionSpec": "encoder-only attention",
    "SinkFullAttentionSpec": "full attention with sink blocks",
    "RSWASpec": "reference sliding-window attention",
    "HiddenStateCacheSpec": "hidden-state cache",
    "CircularBufferSpec": "circular buffer",
}


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The KV cache groups kvtide works on, in the core's words and in the engine's.

    ``groups[i]`` is the engine's group ``group_ids[i]``. ``hash_block_size`` is in tokens.
    ``specs`` describes the groups as JSON data for the identity, without layer names;
    ``num_layers[i]`` counts the layers of a group in this process's view (under pipeline
    parallelism the first stage's only).
    """

    groups: tuple[Group, ...]
    group_ids: tuple[int, ...]
    hash_block_size: int
    specs: tuple[dict[str, object], ...]
    num_layers: tuple[int, ...]
    partial_hits: bool = False
    retention_interval: int | None = None
    num_unsettled_tokens: int = 0

    def coordinator(self) -> Coordinator:
        """Return the joint decisions over these groups."""
        return Coordinator(
            self.groups, self.hash_block_size, self.partial_hits, self.retention_interval
        )


def translate_groups(kv_cache_config: Any, vllm_config: Any) -> GroupPlan:
    """Return the core's groups for the engine's prefix-cacheable KV cache groups.

    Raises:
        UnsupportedModelError: the model has a group kvtide cannot serve yet, or more than one;
            every such group is named, with its kind and what to do.
        ConfigError: the engine rejects its own block sizes (``--prefix-match-unit``).
    """
    faults = list(_group_faults(kv_cache_config))
    if faults:
        raise UnsupportedModelError(faults)
    ids = features.prefix_cacheable_group_ids(kv_cache_config)
    try:
        hash_block_size = features.resolve_hash_block_size(kv_cache_config, vllm_config)
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"vLLM rejects the KV cache block sizes: {error}") from error
    chosen = [kv_cache_config.kv_cache_groups[number] for number in ids]
    specs = [describe_specs(group.kv_cache_spec) for group in chosen]
    return GroupPlan(
        groups=tuple(FullAttention(group.kv_cache_spec.block_size) for group in chosen),
        group_ids=ids,
        hash_block_size=hash_block_size,
        specs=tuple(specs),
        num_layers=tuple(len(group.layer_names) for group in chosen),
    )


def check_engine(vllm_config: Any) -> list[str]:
    """Return every setting under which kvtide would be wrong or useless, with its remedy.

    An empty list means the engine's settings are fine; the model itself is judged by
    :func:`translate_groups`.
    """
    faults = list(_parallel_faults(vllm_config.parallel_config))
    cache = vllm_config.cache_config
    if not cache.enable_prefix_caching and not features.prefix_caching_forced_off(vllm_config):
        faults.append(
            "prefix caching is off: add --enable-prefix-caching. If vLLM switched it off for "
            "this model itself, a prefix of the model cannot be reused and kvtide must not be "
            "configured"
        )
    algorithm = cache.prefix_caching_hash_algo
    if features.hash_differs_by_process(algorithm):
        faults.append(
            f"--prefix-caching-hash-algo {algorithm} names the same tokens differently in every "
            "process: use sha256 (the default), or set the environment variable PYTHONHASHSEED "
            "to one value in all engines that share the store"
        )
    if getattr(cache, "calculate_kv_scales", False):
        faults.append(
            "--calculate-kv-scales measures KV cache scales anew in each process, so stored "
            "bytes mean something else elsewhere: use scales from the checkpoint"
        )
    if getattr(cache, "kv_sharing_fast_prefill", False):
        faults.append("--kv-sharing-fast-prefill is not supported yet: remove it")
    return faults


def _parallel_faults(parallel: Any) -> Iterator[str]:
    for flag, attribute in (
        ("--tensor-parallel-size", "tensor_parallel_size"),
        ("--pipeline-parallel-size", "pipeline_parallel_size"),
        ("--prefill-context-parallel-size", "prefill_context_parallel_size"),
        ("--decode-context-parallel-size", "decode_context_parallel_size"),
    ):
        size = getattr(parallel, attribute, 1)
        if size > 1:
            yield f"{flag} {size} is not supported yet: set it to 1 or remove --kv-transfer-config"


def _group_faults(kv_cache_config: Any) -> Iterator[str]:
    groups = kv_cache_config.kv_cache_groups
    cacheable = features.prefix_cacheable_group_ids(kv_cache_config)
    if not cacheable:
        yield f"the model has no KV cache group whose prefixes can be reused: {_DISABLE}"
    for number, group in enumerate(groups):
        where = f"KV cache group {number} ({_some(group.layer_names)})"
        if features.group_retains_longer_hits(group):
            yield f"{where} is backed by host memory, which is not supported yet: {_DISABLE}"
            continue
        for kind in sorted({*_unsupported_kinds(group.kv_cache_spec)}):
            yield f"{where} holds {kind}, which is not supported yet: {_DISABLE}"
    supported = not any(_unsupported_kinds(group.kv_cache_spec) for group in groups)
    if len(groups) > 1 and supported:
        yield (
            f"the model has {len(groups)} KV cache groups, and more than one is not supported "
            f"yet: {_DISABLE}"
        )


def _unsupported_kinds(spec: Any) -> list[str]:
    layers = features.layer_specs(spec)
    if layers is not None:
        return [kind for layer in layers.values() for kind in _unsupported_kinds(layer)]
    # The type itself, not a subclass: what derives from full attention recycles blocks (R-SWA),
    # adds blocks (sinks) or is no attention at all. A *window* on a full-attention spec is fine:
    # the engine then keeps all blocks and only computes less.
    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
        name = type(spec).__name__
        return [f"{_KINDS[name]} ({name})" if name in _KINDS else name]
    if getattr(spec, "non_causal", False) or getattr(spec, "non_causal_multi_token_decode", False):
        return ["non-causal attention"]
    if getattr(spec, "tokens_per_state", 1) != 1:
        return ["compressed attention states"]
    return []


def describe_specs(spec: Any) -> dict[str, object]:
    """Return a group's spec as JSON data: what decides its bytes, and no layer names.

    A uniform-type group is described by its layers' distinct specs, in order.
    """
    layers = features.layer_specs(spec)
    if layers is not None:
        distinct: list[dict[str, object]] = []
        for layer in layers.values():
            described = describe_specs(layer)
            if described not in distinct:
                distinct.append(described)
        return distinct[0] if len(distinct) == 1 else {"layers": distinct}
    described = {"kind": type(spec).__name__}
    for name in _SPEC_FIELDS:
        value = getattr(spec, name, None)
        if value is not None:
            described[name] = value if isinstance(value, (int, str)) else str(value)
    return described


# Not kv_quant_mode: its numbers are aliases of each other in some releases. Its effect is in
# dtype, state_content_bytes and the configured cache dtype.
_SPEC_FIELDS = (
    "block_size",
    "num_kv_heads",
    "head_size",
    "head_size_v",
    "dtype",
    "sliding_window",
    "attention_chunk_size",
    "num_head_slots",
    "state_content_bytes",
    "tokens_per_state",
    "cache_dtype_str",
    "model_version",
)


def _some(names: list[str], limit: int = 2) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more layers"
