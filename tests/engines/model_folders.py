"""Model folders for the tests: small, but with a real safetensors header."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
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
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


def write_safetensors(path: Path, tensors: Mapping[str, bytes]) -> None:
    """Write a file of one-byte tensors in the safetensors format."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    low = 0
    for name, data in tensors.items():
        header[name] = {
            "dtype": "U8",
            "shape": [len(data)],
            "data_offsets": [low, low + len(data)],
        }
        low += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensors.values()))


def random_tensors(seed: int, *, count: int = 8, size: int = 96 * 1024) -> dict[str, bytes]:
    """Return ``count`` tensors whose content depends on ``seed`` alone."""
    source = random.Random(seed)
    return {f"layers.{number}.weight": source.randbytes(size) for number in range(count)}


def make_folder(
    path: Path, seed: int = 1, config: Mapping[str, object] = LLAMA, shards: int = 2
) -> Path:
    """Make a model folder with ``shards`` safetensors files, and return it."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    for number in range(shards):
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        write_safetensors(path / name, random_tensors(seed * 100 + number))
    index = {"metadata": {}, "weight_map": {}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def flip_byte(path: Path, offset: int) -> None:
    """Change one byte of a file and nothing else."""
    with path.open("r+b") as stream:
        stream.seek(offset)
        old = stream.read(1)
        stream.seek(offset)
        stream.write(bytes([old[0] ^ 0xFF]))
