"""Real vLLM configurations for tests, and KV cache plans of every kind of group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvtide.core.topology import ParallelSizes


def engine_config(folder: object, **arguments: Any) -> Any:
    """Return the ``VllmConfig`` that vLLM makes of these engine arguments."""
    from vllm.engine.arg_utils import EngineArgs

    chosen: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "block_size": 32,
        "max_model_len": 2048,
        "kv_transfer_config": {
            "kv_connector": "StubConnector",
            "kv_connector_module_path": "tests.engines.vllm.stub_connector",
            "kv_role": "kv_both",
        },
    }
    return EngineArgs(**(chosen | arguments)).create_engine_config()


def engine_of(
    sizes: ParallelSizes, *, total_kv_heads: int = 2, model: object = None, **config: object
) -> Any:
    """Return what of a ``VllmConfig`` says how an engine's ranks divide its KV cache.

    ``config`` has more of the model's settings; ``model`` replaces the whole model.
    """
    settings = {"num_key_value_heads": total_kv_heads, **config}
    model = model or SimpleNamespace(
        get_total_num_kv_heads=lambda: total_kv_heads, hf_text_config=settings
    )
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=sizes.tp_size,
            pipeline_parallel_size=sizes.pp_size,
            prefill_context_parallel_size=sizes.pcp_size,
            decode_context_parallel_size=sizes.dcp_size,
        ),
        model_config=model,
        speculative_config=None,
    )


def attention_spec(kind: str = "FullAttentionSpec", **changes: Any) -> Any:
    """Return an attention spec of the named class, for two heads of 32 in bfloat16."""
    import torch
    from vllm.v1 import kv_cache_interface as interface

    fields: dict[str, Any] = {
        "block_size": 32,
        "num_kv_heads": 2,
        "head_size": 32,
        "dtype": torch.bfloat16,
    }
    if kind == "MLAAttentionSpec":
        fields |= {"num_kv_heads": 1, "head_size": 576}
    return getattr(interface, kind)(**(fields | changes))


def state_spec(**changes: Any) -> Any:
    """Return the spec of a short convolution and a state behind it, in the cache mode ``align``."""
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    fields: dict[str, Any] = {
        "block_size": 32,
        "shapes": ((3, 96), (2, 32, 16)),
        "dtypes": (torch.bfloat16, torch.float32),
        "mamba_cache_mode": "align",
    }
    return MambaSpec(**(fields | changes))


def uniform(*specs: Any) -> Any:
    """Return vLLM's wrapper for layers of one type whose specs differ."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    layers = {f"layer.{number}": spec for number, spec in enumerate(specs)}
    return UniformTypeKVCacheSpecs(block_size=specs[0].block_size, kv_cache_specs=layers)


def cache_config(*groups: tuple[Any, int], num_blocks: int = 64) -> Any:
    """Return a ``KVCacheConfig`` of groups given as ``(spec, number of layers)``.

    Layers of a group lie one after the other; groups overlay each other from offset 0.
    """
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

    tensors, specs = [], []
    first = 0
    for spec, count in groups:
        names = [f"model.layers.{first + number}.self_attn.attn" for number in range(count)]
        first += count
        page = spec.page_size_bytes
        specs.append(KVCacheGroupSpec(names, spec))
        tensors.append(
            KVCacheTensor(
                size=page * num_blocks * count,
                layers=names,
                layer_stride=page * num_blocks,
                block_stride=page,
            )
        )
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=tensors, kv_cache_groups=specs)
