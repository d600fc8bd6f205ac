"""A real vLLM engine with adapters: whose KV cache is loaded, told by the adapters' content."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kvtide.engines.vllm import features
from tests.engines.vllm.engines import BLOCK, InProcessEngine, engine, prompt_of

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

PROMPT = prompt_of(300)
FULL_BLOCKS = len(PROMPT) // BLOCK * BLOCK
ADAPTERS = {"enable_lora": True, "max_loras": 1}


def make_adapter(folder: Path, seed: int) -> Path:
    """Make an adapter for the small Llama's attention, in the format of PEFT."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    random = torch.Generator().manual_seed(seed)
    sizes = {"q_proj": 256, "k_proj": 128, "v_proj": 128}
    tensors = {}
    for layer in range(4):
        for name, size in sizes.items():
            start = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{start}.lora_A.weight"] = 0.1 * torch.randn(8, 256, generator=random)
            tensors[f"{start}.lora_B.weight"] = 0.1 * torch.randn(size, 8, generator=random)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 8,
        "lora_alpha": 16,
        "bias": "none",
        "target_modules": list(sizes),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def replace(folder: Path, content: Path) -> None:
    """Put another adapter's files into a folder."""
    shutil.rmtree(folder)
    shutil.copytree(content, folder)


def answer(
    one: InProcessEngine, adapter: Path | None, adapter_id: int = 1
) -> tuple[list[int], int]:
    """Return the tokens after the prompt, and how many of the prompt's came from a cache."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    [output] = one.llm.generate(
        [{"prompt_token_ids": PROMPT}],
        SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False),
        lora_request=LoRARequest("name", adapter_id, str(adapter)) if adapter else None,
        use_tqdm=False,
    )
    return list(output.outputs[0].token_ids), output.num_cached_tokens or 0


def test_an_adapters_kv_cache_is_loaded_for_equal_adapters_only(
    model: Path, tmp_path: Path
) -> None:
    """Other content under the same name and path is a miss, and so is no adapter.

    Tokens are always those of an engine without kvtide.
    """
    first = make_adapter(tmp_path / "original", 1)
    second = make_adapter(tmp_path / "second", 2)
    served = Path(shutil.copytree(first, tmp_path / "served"))
    moved = Path(shutil.copytree(first, tmp_path / "moved"))
    with engine(model, None, **ADAPTERS) as plain:
        want, _ = answer(plain, first)
        plain.forget_local()
        want_second, _ = answer(plain, second, adapter_id=2)
        plain.forget_local()
        want_base, _ = answer(plain, None)
    assert len({tuple(want), tuple(want_second), tuple(want_base)}) == 3

    pool = Path("/dev/shm") / f"kvtide-test-lora-{tmp_path.name}-{tmp_path.parent.name}"
    url = f"local://{pool}?size=64MiB"
    try:
        with engine(model, url, **ADAPTERS) as cold:
            assert answer(cold, served) == (want, 0)
            cold.settle()
            assert cold.counters["saved_chunks"] == FULL_BLOCKS // BLOCK
        replace(served, second)
        with engine(model, url, **ADAPTERS) as changed:
            assert answer(changed, served) == (want_second, 0), "other content, same name and path"
        replace(served, first)
        with engine(model, url, **ADAPTERS) as warm:
            assert answer(warm, None) == (want_base, 0)
            assert answer(warm, served) == (want, FULL_BLOCKS)
            warm.settle()
            assert warm.counters["loaded_tokens"] == FULL_BLOCKS
            # Another folder is the same adapter to kvtide, but not in all releases to vLLM.
            hit = 0 if features.hash_scheme("sha256")["extra_keys"] == "tagged" else FULL_BLOCKS
            warm.forget_local()
            assert answer(warm, moved, adapter_id=3) == (want, hit)
    finally:
        shutil.rmtree(pool, ignore_errors=True)
