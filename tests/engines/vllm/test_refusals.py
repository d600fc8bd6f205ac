"""What kvtide cannot serve is refused when the engine starts, with all that has to change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtide.errors import ConfigError, KVTideError, StoreOpenError
from tests.engines.vllm.engines import engine

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


def refusal(model: Path, store: str, **arguments: Any) -> KVTideError:
    """The error with which an engine does not start."""
    with pytest.raises(KVTideError) as refused, engine(model, store, **arguments):
        pass
    return refused.value


@pytest.fixture(scope="module")
def lfm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny hybrid: short convolutions and full attention in turn."""
    import torch
    import transformers

    torch.manual_seed(1)
    config = transformers.Lfm2Config(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
        conv_L_cache=3,
        conv_dim=64,
        conv_dim_out=64,
        block_dim=64,
        block_ff_dim=64,
        block_multiple_of=32,
        block_auto_adjust_ff_dim=False,
        vocab_size=1024,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        max_position_embeddings=2048,
    )
    folder = tmp_path_factory.mktemp("lfm2")
    transformers.Lfm2ForCausalLM(config).save_pretrained(folder)
    return folder


def test_a_group_that_cannot_be_served_is_named_with_the_setting(lfm2: Path) -> None:
    """Without prefix caching vLLM keeps no state that a later request could resume from."""
    error = refusal(lfm2, "memory://refused", enable_prefix_caching=False)
    assert isinstance(error, ConfigError)
    for words in (
        "prefix caching is off",
        "KV cache group 0",
        "model.layers.0",
        "Mamba or linear-attention states",
        "--mamba-cache-mode align",
    ):
        assert words in str(error), words


def test_all_faults_of_options_and_settings_are_told_at_once(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One restart mends everything."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    error = refusal(
        model,
        "memory://refused",
        options={"pin_fractoin": 0.1, "save_timeout_s": -1, "staging_size": "a lot"},
        prefix_caching_hash_algo="xxhash",
        enable_prefix_caching=False,
    )
    assert isinstance(error, ConfigError)
    for words in (
        "did you mean pin_fraction",
        "save_timeout_s must be",
        "staging_size must be",
        "--prefix-caching-hash-algo xxhash",
        "--enable-prefix-caching",
    ):
        assert words in str(error), words


@pytest.mark.parametrize(
    "store, words",
    [
        ("nonsense://x", "no store is called 'nonsense'"),
        ("local:///proc/nowhere?size=64MiB", "/proc/nowhere"),
        ("local:///dev/shm/kvtide-refused?size=900TiB", "are free"),
        ("memory://x?sise=1", "did you mean 'size'"),  # codespell:ignore sise
    ],
)
def test_a_store_that_cannot_be_opened_is_one_clear_error(
    model: Path, store: str, words: str
) -> None:
    """It says what cannot be had and what to change."""
    error = refusal(model, store)
    assert isinstance(error, ConfigError | StoreOpenError)
    assert words in str(error)
