"""A small model with random weights, the same in every process, made without a download.

Run as ``python -m kvtide.engines.vllm.demo_model FOLDER``, for it imports torch and transformers.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

NAME = "llama-4x256-r1"
"""Names the weights: change it with anything below that changes them."""

MAX_TOKENS = 40960
VOCABULARY = 1024


def model_folder() -> Path:
    """Return where the model is kept between runs: in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "kvtide" / "models" / NAME


def is_built(folder: Path) -> bool:
    """Tell whether ``folder`` holds the model; it appears whole or not at all."""
    return (folder / "config.json").exists()


def build(folder: Path) -> None:
    """Make the model in ``folder``: a Llama of 4 layers with 2 KV heads, 20 MB."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1234)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            vocab_size=VOCABULARY,
            max_position_embeddings=MAX_TOKENS,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            tie_word_embeddings=False,
        )
    )
    with torch.no_grad():
        for weights in model.parameters():
            # Wider than usual: with the usual spread the attention of random weights is so even
            # that the output would hardly depend on the KV cache, and the demo would prove nothing.
            if weights.dim() > 1:
                torch.nn.init.normal_(weights, std=0.08)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        model.to(torch.float32).save_pretrained(partial)
        partial.chmod(0o755)
        partial.rename(folder)
    except OSError:
        # Another process may have been first; its weights are the same.
        if not is_built(folder):
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
