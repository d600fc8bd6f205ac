"""vLLM's KV cache specs one by one: their kind, why one is refused, and what names its bytes."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtide.core.groups import ChunkedLocal, FullAttention, Group, Mamba, SlidingWindow
from kvtide.engines.vllm import specs as module
from kvtide.engines.vllm.specs import describe_specs, group_of
from tests.engines.vllm.configs import attention_spec, state_spec, uniform


@pytest.mark.parametrize(
    "kind, fields, expected",
    [
        ("FullAttentionSpec", {}, FullAttention(64, proof_tokens=64)),
        ("FullAttentionSpec", {"sliding_window": 128}, FullAttention(64, proof_tokens=64)),
        ("FullAttentionSpec", {"attention_chunk_size": 128}, FullAttention(64, proof_tokens=64)),
        ("MLAAttentionSpec", {}, FullAttention(64, proof_tokens=64)),
        ("MLAAttentionSpec", {"tokens_per_state": 4}, FullAttention(64, proof_tokens=64)),
        (
            "MLAAttentionSpec",
            {"non_causal_multi_token_decode": True},
            FullAttention(64, proof_tokens=64),
        ),
        ("SlidingWindowSpec", {"sliding_window": 128}, SlidingWindow(64, 128, proof_tokens=64)),
        ("SlidingWindowMLASpec", {"sliding_window": 9}, SlidingWindow(64, 9, proof_tokens=64)),
        (
            "ChunkedLocalAttentionSpec",
            {"attention_chunk_size": 256},
            ChunkedLocal(64, 256, proof_tokens=64),
        ),
    ],
)
def test_a_spec_has_one_kind(kind: str, fields: dict[str, Any], expected: Group) -> None:
    """The block size is the one given, which the engine may have resolved otherwise."""
    spec = attention_spec(kind, **fields)
    assert module.faults_of(spec) == []
    assert group_of(spec, 64, 64) == expected
    assert group_of(uniform(spec, spec), 64, 64) == expected


def test_a_state_takes_no_proof() -> None:
    """Draft models have no states, and the engine's lookup of states drops nothing."""
    assert module.faults_of(state_spec()) == []
    assert group_of(state_spec(), 96, 96) == Mamba(96)


REFUSED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("CrossAttentionSpec", {}, ["cross attention", "encoder-decoder"]),
    ("EncoderOnlyAttentionSpec", {}, ["encoder-only", "encoder-decoder"]),
    ("SinkFullAttentionSpec", {"sink_len": 4}, ["sink blocks", "cannot serve"]),
    ("RSWASpec", {"rswa_window": 64}, ["reference sliding-window", "cannot serve"]),
    ("HiddenStateCacheSpec", {}, ["hidden states", "--speculative-config"]),
    ("CircularBufferSpec", {}, ["circular buffer", "cannot serve"]),
    ("FullAttentionSpec", {"non_causal": True}, ["non-causal", "cannot serve"]),
    ("FullAttentionSpec", {"tokens_per_state": Fraction(1, 4)}, ["4 states per token"]),
]


@pytest.mark.parametrize("kind, fields, words", REFUSED)
def test_other_kinds_are_refused_by_name(
    kind: str, fields: dict[str, Any], words: list[str]
) -> None:
    """The kind, the reason, and what to do, also where one layer of several is of such a kind."""
    spec = attention_spec(kind, **fields)
    (fault,) = module.faults_of(spec)
    for word in words:
        assert word in fault
    assert "remove" in fault
    assert module.faults_of(uniform(attention_spec(), spec)) == [fault]


@pytest.mark.parametrize("mode", ["none", "all"])
def test_states_outside_the_aligned_mode_are_refused(mode: str) -> None:
    """The setting to change is named."""
    (fault,) = module.faults_of(state_spec(mamba_cache_mode=mode))
    assert repr(mode) in fault
    assert "--mamba-cache-mode align" in fault


def test_a_kind_that_nobody_knows_is_refused() -> None:
    """A subclass of a plugin's may keep its blocks otherwise."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    class PluginSpec(FullAttentionSpec):
        """A plugin's."""

    spec = PluginSpec(block_size=32, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
    (fault,) = module.faults_of(spec)
    assert "PluginSpec" in fault


def test_layers_of_two_kinds_in_one_group_are_refused() -> None:
    """One block table cannot follow two rules."""
    window = attention_spec("SlidingWindowSpec", sliding_window=64)
    wide = attention_spec("SlidingWindowSpec", sliding_window=128)
    for other in (attention_spec(), wide):
        (fault,) = module.faults_of(uniform(window, other))
        assert "different attention kinds" in fault


def test_a_uniform_group_is_described_by_its_distinct_layers() -> None:
    """The wrapper itself and repeated layers change no byte, so they change no description."""
    small, large = attention_spec(), attention_spec(head_size=64)
    assert describe_specs(uniform(small, small)) == describe_specs(small)
    assert describe_specs(uniform(small, large, small)) == {
        "layers": [describe_specs(small), describe_specs(large)]
    }


def all_specs() -> list[Any]:
    """Specs no two of which hold the same bytes."""
    from vllm.v1.kv_cache_interface import SparseCacheRole

    window = "SlidingWindowSpec"
    latent: dict[str, Any] = {"num_kv_heads": 1, "sliding_window": 64}
    return [
        attention_spec(),
        attention_spec(block_size=64),
        attention_spec(head_size_v=64),
        attention_spec(dtype=torch.float32),
        attention_spec("MLAAttentionSpec"),
        attention_spec("MLAAttentionSpec", tokens_per_state=4),
        attention_spec("MLAAttentionSpec", cache_dtype_str="fp8_ds_mla"),
        attention_spec("MLAAttentionSpec", model_version="deepseek_v4"),
        attention_spec("MLAAttentionSpec", alignment=576),
        attention_spec("MLAAttentionSpec", cache_role=SparseCacheRole.INDEXER),
        attention_spec(window, sliding_window=64),
        attention_spec(window, sliding_window=128),
        attention_spec(window, sliding_window=64, extra_retained_tokens=2),
        attention_spec("SlidingWindowMLASpec", **latent),
        attention_spec("SlidingWindowMLASpec", **latent, model_version="deepseek_v4"),
        attention_spec("ChunkedLocalAttentionSpec", attention_chunk_size=64),
        attention_spec("ChunkedLocalAttentionSpec", attention_chunk_size=128),
        state_spec(),
        state_spec(shapes=((96, 3), (2, 32, 16))),
        state_spec(dtypes=(torch.bfloat16, torch.bfloat16)),
        state_spec(tp_replicated=True),
    ]


def test_specs_of_other_bytes_are_described_otherwise() -> None:
    """Sizes, element types, windows and the shapes of states all count."""
    described = [repr(describe_specs(spec)) for spec in all_specs()]
    assert len(set(described)) == len(described)


def test_the_family_of_a_state_and_the_order_of_its_convolution_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Equal shapes are not equal states."""
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

    first = describe_specs(state_spec())
    other = next(kind for kind in MambaAttentionBackendEnum if kind.name != first["mamba_type"])
    assert describe_specs(state_spec(mamba_type=other)) != first
    monkeypatch.setattr(module.features, "conv_state_layout", lambda: "DS")
    assert describe_specs(state_spec()) != first


@pytest.mark.parametrize(
    "spec, changes",
    [
        (state_spec, {"num_speculative_blocks": 2}),
        (state_spec, {"num_prefill_checkpoint_blocks": 1}),
        (state_spec, {"page_size_padded": 40_960}),
        (attention_spec, {"page_size_padded": 40_960}),
    ],
)
def test_what_changes_no_byte_is_not_described(spec: Any, changes: dict[str, Any]) -> None:
    """How many blocks a request holds, and the padding of pages, which is never copied."""
    assert describe_specs(spec(**changes)) == describe_specs(spec())


def test_descriptions_are_json() -> None:
    """They become part of the identity as they are."""
    described = [describe_specs(spec) for spec in all_specs()]
    assert json.loads(json.dumps(described)) == described


def test_the_page_of_models_names_every_spec() -> None:
    """What is served and what is refused by name stands where an operator looks for it."""
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    served, refused = page.split("## Refused")
    for kind in module._KINDS:
        assert f"`{kind.__name__}`" in served
    for name in [*module._NOT_SERVED, "HiddenStateCacheSpec"]:
        assert f"`{name}`" in refused
