"""Tiny models with random weights, one of every cache kind that vLLM runs on a CPU.

Weights follow from a fixed seed, so every process that builds a model has the same; :func:`build`
keeps what it has built. They are spread wider than usual: with the usual spread the attention of
random weights is so even that hardly a token would depend on the KV cache.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_SEED = 1234
_SPREAD = 0.08
_KERNEL_SPREAD = 0.5
"""Of convolution kernels: narrower ones let hardly a token depend on the state."""
_SLOW_DECAY = -2.0
"""With transformers' own decay a linear-attention state forgets its past within a token."""

_COMMON = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a model is made: classes of transformers by name, and what its configuration adds."""

    config: str
    model: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    embedding_spread: float = _SPREAD


RECIPES = {
    "llama": Recipe("LlamaConfig", "LlamaForCausalLM"),
    "llama-one-head": Recipe("LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 1}),
    "llama-32": Recipe(
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 32,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        },
        embedding_spread=1.0,  # with less it repeats one token for ever
    ),
    "gemma3": Recipe(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "sliding_window": 128,
            "query_pre_attn_scalar": 32,
        },
    ),
    "gpt-oss": Recipe(
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 96,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "llama4": Recipe(
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {
            "no_rope_layers": [1, 1, 1, 0],
            "attention_chunk_size": 128,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 256,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
        },
    ),
    "qwen3-next": Recipe(
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "head_dim": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_conv_kernel_dim": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "decoder_sparse_step": 1,
        },
    ),
    "lfm2": Recipe(
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {
            "layer_types": ["conv", "full_attention"] * 2,
            "conv_L_cache": 3,
            "conv_dim": 128,
            "conv_dim_out": 128,
            "block_dim": 128,
            "block_ff_dim": 256,
            "block_multiple_of": 32,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": True,  # vLLM's model knows no other
        },
    ),
    "falcon-h1": Recipe(
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {
            "mamba_d_ssm": 256,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_n_groups": 1,
            "mamba_d_state": 32,
            "mamba_d_conv": 4,
        },
    ),
    "deepseek-v2": Recipe(
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "first_k_dense_replace": 3,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 128,
        },
        embedding_spread=1.0,  # with less it repeats one token for ever
    ),
}
DRAFT = "llama-eagle"
"""An EAGLE draft of one layer for the model ``llama``, whose embedding and head it shares."""


def build(name: str, folder: Path) -> Path:
    """Return the folder of the model ``name`` below ``folder``, made there if it is not yet."""
    target = folder / name
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder))
        save: Callable[[Path], None] = _save_draft
        if name != DRAFT:
            save = lambda path: _save(RECIPES[name], path)  # noqa: E731
        save(partial)
        partial.rename(target)
    return target


def _save(recipe: Recipe, folder: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(_SEED)
    config = getattr(transformers, recipe.config)(**{**_COMMON, **recipe.settings})
    model = getattr(transformers, recipe.model)(config)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if name.endswith("A_log"):
                weights.fill_(_SLOW_DECAY)
            elif weights.dim() > 1 or name.endswith("sinks"):
                torch.nn.init.normal_(weights, std=_spread_of(name, recipe))
    model.to(torch.float32).save_pretrained(folder)


def _spread_of(name: str, recipe: Recipe) -> float:
    if "embed" in name:
        return recipe.embedding_spread
    if name.endswith(".sinks"):
        return 1.0
    return _KERNEL_SPREAD if "conv.weight" in name or "conv1d.weight" in name else _SPREAD


def _save_draft(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(_SEED)
    config = LlamaConfig(
        **{**_COMMON, "num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}
    )
    weights = {
        name: torch.randn_like(values) * _SPREAD if values.dim() > 1 else torch.ones_like(values)
        for name, values in LlamaModel(config).state_dict().items()
        if name.startswith("layers.") and "input_layernorm" not in name
    }
    hidden = config.hidden_size
    weights["fc.weight"] = torch.randn(hidden, 2 * hidden) * _SPREAD
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
