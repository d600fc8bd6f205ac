"""vLLM's KV cache specs: the attention kind of each, what stands against it, and its bytes' names.

A new kind of spec is refused until it has an entry here, and so is a subclass of a known one: what
derives from full attention may recycle blocks (R-SWA), add blocks (sinks) or be no attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from kvtide.core.groups import ChunkedLocal, FullAttention, Group, Mamba, SlidingWindow
from kvtide.engines.vllm import features
from kvtide.engines.vllm.settings import plain

CANNOT_SERVE = "kvtide cannot serve such a model: run it without (remove --kv-transfer-config)"

_GroupMaker = Callable[[Any, int, int], Group]


def _full_attention(_: Any, block_size: int, proof_tokens: int) -> Group:
    # A window or chunk size on such a spec changes nothing: without its hybrid manager the engine
    # keeps all blocks and only computes less. States of several tokens (``tokens_per_state`` above
    # one, the compressed attention of DeepSeek-V4) change nothing either: blocks are whole
    # numbers of states, so a block holds fewer bytes but still stands for its own tokens, and the
    # engine itself lets no hit end inside a state.
    return FullAttention(block_size, proof_tokens=proof_tokens)


def _sliding_window(spec: Any, block_size: int, proof_tokens: int) -> Group:
    # With several draft modules the engine keeps ``extra_retained_tokens`` below the window. It
    # gives a request that loads a prefix real blocks for them (``get_num_skipped_tokens``) and
    # publishes all of its blocks by hash when the load has ended, so what is not loaded would be
    # found by other requests as if it were. Hence they are part of the window.
    window = spec.sliding_window + getattr(spec, "extra_retained_tokens", 0)
    return SlidingWindow(block_size, window, proof_tokens=proof_tokens)


def _chunked_local(spec: Any, block_size: int, proof_tokens: int) -> Group:
    return ChunkedLocal(block_size, spec.attention_chunk_size, proof_tokens=proof_tokens)


def _state(_: Any, block_size: int, __: int) -> Group:
    # The engine's lookup of states never drops a block: draft models have no states.
    return Mamba(block_size)


_KINDS: dict[type, _GroupMaker] = {
    FullAttentionSpec: _full_attention,
    MLAAttentionSpec: _full_attention,
    SlidingWindowSpec: _sliding_window,
    SlidingWindowMLASpec: _sliding_window,
    ChunkedLocalAttentionSpec: _chunked_local,
    MambaSpec: _state,
}

_ENCODER = "encoder-decoder models have no prefix to reuse"
_NOT_SERVED = {
    "CrossAttentionSpec": ("cross attention", _ENCODER),
    "EncoderOnlyAttentionSpec": ("encoder-only attention", _ENCODER),
    "SinkFullAttentionSpec": (
        "full attention with sink blocks",
        "its first blocks belong to the model and not to the request",
    ),
    "RSWASpec": (
        "reference sliding-window attention",
        "what it needs of a prefix depends on where the prompt ended",
    ),
    "CircularBufferSpec": (
        "a circular buffer",
        "its block is overwritten as the request goes on",
    ),
}


def group_of(spec: Any, block_size: int, proof_tokens: int = 0) -> Group:
    """Return the core's group for a spec without faults.

    ``block_size`` is the resolved span of one block-table entry, ``proof_tokens`` what a draft
    model has to match beyond a hit; states take none.
    """
    layer = features.each_layer_spec(spec)[0]
    return _KINDS[type(layer)](layer, block_size, proof_tokens)


def is_state(layer: Any) -> bool:
    """Tell whether a layer's spec, not that of a group of layers, is of states."""
    return isinstance(layer, MambaSpec)


def is_held_by_all_ranks(layer: Any) -> bool:
    """Tell whether every tensor parallel rank holds the same bytes of a layer of this spec.

    Of latent attention vLLM says how many shards there are; where it does not, there may be some.
    Releases before 0.31 cannot say it, and had copies only.
    """
    if isinstance(layer, MambaSpec):
        return bool(getattr(layer, "tp_replicated", False))
    return is_latent(layer) and getattr(layer, "max_tp_shards", 1) == 1


def is_latent(layer: Any) -> bool:
    """Tell whether a layer's spec is of latent attention (MLA)."""
    return isinstance(layer, (MLAAttentionSpec, SlidingWindowMLASpec))


def faults_of(spec: Any) -> list[str]:
    """Return what stands against serving a group of this spec, each with its remedy.

    Each reads on after "KV cache group N (layers) holds".
    """
    layers = features.each_layer_spec(spec)
    faults = sorted({fault for layer in layers for fault in _faults_of_layer(layer)})
    if not faults and len({group_of(layer, layer.block_size) for layer in layers}) > 1:
        faults.append(f"layers of different attention kinds: {CANNOT_SERVE}")
    return faults


def _faults_of_layer(spec: Any) -> Iterator[str]:
    name = type(spec).__name__
    if name == "HiddenStateCacheSpec":
        yield (
            "hidden states, which are no KV cache of a prefix (HiddenStateCacheSpec): remove the "
            "method extract_hidden_states from --speculative-config"
        )
    elif type(spec) not in _KINDS:
        kind, reason = _NOT_SERVED.get(name, ("a kind of cache", "kvtide does not know it"))
        yield f"{kind} ({name}), {reason}: {CANNOT_SERVE}"
    elif isinstance(spec, MambaSpec) and spec.mamba_cache_mode != "align":
        yield (
            f"Mamba or linear-attention states in the cache mode {spec.mamba_cache_mode!r}, which "
            "keeps no state at a block's end: add --mamba-cache-mode align and "
            "--enable-prefix-caching"
        )
    elif getattr(spec, "non_causal", False):
        yield (
            "non-causal attention, where a token's KV cache depends on the tokens behind it: "
            f"{CANNOT_SERVE}"
        )
    elif not isinstance(getattr(spec, "tokens_per_state", 1), int):
        yield (
            f"{1 / spec.tokens_per_state} states per token, which name parts of a sound that "
            f"tokens do not name: {CANNOT_SERVE}"
        )


def describe_specs(spec: Any) -> dict[str, object]:
    """Return a group's spec as JSON data: what decides its bytes, and no layer names.

    A uniform-type group is described by its layers' distinct specs, in order.
    """
    distinct: list[dict[str, object]] = []
    for layer in features.each_layer_spec(spec):
        described = _describe_layer(layer)
        if described not in distinct:
            distinct.append(described)
    return distinct[0] if len(distinct) == 1 else {"layers": distinct}


def _describe_layer(spec: Any) -> dict[str, object]:
    described: dict[str, object] = {"kind": type(spec).__name__}
    if isinstance(spec, MambaSpec):
        described["conv_layout"] = features.conv_state_layout()
    for name in _SPEC_FIELDS:
        value = getattr(spec, name, None)
        if value is not None:
            described[name] = plain(value, f"{type(spec).__name__}.{name}")
    return described


# Not kv_quant_mode: its numbers are aliases of each other in some releases. Its effect is in
# dtype, state_content_bytes and the configured cache dtype. Not the padding of pages either: it is
# never copied.
_SPEC_FIELDS = (
    "block_size",
    "num_kv_heads",
    "head_size",
    "head_size_v",
    "dtype",
    "sliding_window",
    "extra_retained_tokens",
    "attention_chunk_size",
    "num_head_slots",
    "state_content_bytes",
    "tokens_per_state",
    "cache_dtype_str",
    "cache_role",
    "model_version",
    "alignment",
    "shapes",
    "dtypes",
    "mamba_type",
    "tp_replicated",
)
