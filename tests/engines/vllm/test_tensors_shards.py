"""Shards of heads: what engines of different tensor parallel sizes exchange, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from kvtide.engines.vllm import rows as rows_module
from kvtide.engines.vllm import tensors
from kvtide.engines.vllm.tensors import TensorBlocks
from kvtide.errors import UnsupportedModelError
from tests.engines.vllm.configs import attention_spec, cache_config
from tests.engines.vllm.layouts import ALL_LAYOUTS, LAYOUTS, allocate, planned

NUM_BLOCKS = 8
BLOCK_IDS = [5, 1, 6]
TAIL = 24


@dataclass(frozen=True)
class Model:
    """A model's attention layers: what all engines that serve it agree on."""

    num_heads: int = 4
    num_layers: int = 2
    block_size: int = 4
    head_size: int = 3
    dtype: torch.dtype = torch.bfloat16
    has_padding: bool = False

    def spec(self, tp_size: int) -> Any:
        """Return what vLLM says of a rank's layers."""
        spec = attention_spec(
            num_kv_heads=self.num_heads // tp_size,
            block_size=self.block_size,
            head_size=self.head_size,
            dtype=self.dtype,
        )
        if not self.has_padding:
            return spec
        return replace(spec, page_size_padded=spec.page_size_bytes + 64)

    def kv_cache(self) -> Any:
        """Return what the model computes: bytes of layers, blocks, heads, tokens and content."""
        content = 2 * self.head_size * self.dtype.itemsize
        shape = (self.num_layers, NUM_BLOCKS, self.num_heads, self.block_size, content)
        return np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)


class Rank:
    """The memory of one rank of an engine, over random bytes."""

    def __init__(
        self, model: Model, layout: str, num_shards: int, tp_size: int = 1, tp_rank: int = 0
    ) -> None:
        self.config = planned(model.spec(tp_size), model.num_layers, layout, NUM_BLOCKS)
        self.raw, self.caches = allocate(self.config, layout)
        heads = model.num_heads // tp_size
        self._heads = slice(tp_rank * heads, (tp_rank + 1) * heads)
        self.num_parts = num_shards // tp_size
        self.blocks = TensorBlocks(self.caches, self.config, [0], num_parts=[self.num_parts])
        self.payload = self.blocks.layout.groups[0].payload_bytes

    def fill(self, kv_cache: Any, block_ids: Any = slice(None)) -> None:
        """Write the rank's heads by plain indexing, as an attention kernel would."""
        layers = torch.from_numpy(kv_cache[:, :, self._heads])
        for cache, layer in zip(self.caches.values(), layers, strict=True):
            cache.view(torch.uint8)[block_ids] = layer[block_ids]

    def values(self, kv_cache: Any) -> Any:
        """Return what it stores of each block, in an array of blocks, parts and bytes."""
        self.fill(kv_cache)
        rows = np.full((len(BLOCK_IDS) * self.num_parts, self.payload + TAIL), 7, np.uint8)
        self.blocks.read(0, BLOCK_IDS, rows)
        assert (rows[:, self.payload :] == 7).all()
        return rows[:, : self.payload].reshape(len(BLOCK_IDS), self.num_parts, self.payload)

    def loaded(self, values: Any) -> torch.Tensor:
        """Return its whole memory after it loaded values."""
        rows = np.full((len(BLOCK_IDS) * self.num_parts, self.payload + TAIL), 7, np.uint8)
        rows[:, : self.payload] = values.reshape(-1, self.payload)
        self.blocks.write(0, BLOCK_IDS, rows)
        return self.raw.clone()

    def filled(self, kv_cache: Any) -> torch.Tensor:
        """Return what its memory would be after it had computed the blocks by itself."""
        before = self.raw.clone()
        self.fill(kv_cache, BLOCK_IDS)
        after = self.raw.clone()
        self.raw.copy_(before)
        return after


def engine(model: Model, layout: str, num_shards: int, tp_size: int) -> list[Rank]:
    """Return all ranks of an engine."""
    return [Rank(model, layout, num_shards, tp_size, rank) for rank in range(tp_size)]


def stored(ranks: list[Rank], kv_cache: Any) -> Any:
    """Return what an engine stores, in an array of blocks, shards and bytes."""
    return np.concatenate([rank.values(kv_cache) for rank in ranks], axis=1)


def loads(ranks: list[Rank], values: Any, kv_cache: Any) -> bool:
    """Tell whether loading leaves every rank with its heads of the blocks, and all else as it was.

    Each rank takes its own range of shards.
    """
    expected = [rank.filled(kv_cache) for rank in ranks]
    shares = np.split(values, len(ranks), axis=1)
    found = [rank.loaded(share) for rank, share in zip(ranks, shares, strict=True)]
    return all(map(torch.equal, found, expected))


def divisors(number: int) -> list[int]:
    """Return what divides a number."""
    return [count for count in range(1, number + 1) if number % count == 0]


@st.composite
def models(draw: st.DrawFn) -> tuple[Model, int]:
    """Draw a model, and how many shards its heads are cut into."""
    num_heads = draw(st.integers(1, 8))
    model = Model(
        num_heads,
        num_layers=draw(st.integers(1, 3)),
        block_size=draw(st.integers(1, 5)),
        head_size=draw(st.integers(1, 5)),
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float32, torch.uint8])),
        has_padding=draw(st.booleans()),
    )
    return model, draw(st.sampled_from(divisors(num_heads)))


def can_lay_out(model: Model, layout: str) -> bool:
    """Tell whether vLLM has this layout: heads outside of blocks leave pages no place to pad."""
    return layout in LAYOUTS or not model.has_padding


@given(drawn=models(), layout=st.sampled_from(ALL_LAYOUTS))
def test_engines_of_every_size_store_the_same_bytes(drawn: tuple[Model, int], layout: str) -> None:
    """A rank's values are those of its heads, whatever else it holds; all loads are exact."""
    model, num_shards = drawn
    assume(can_lay_out(model, layout))
    kv_cache = model.kv_cache()
    engines = [engine(model, layout, num_shards, size) for size in divisors(num_shards)]
    alone = stored(engines[0], kv_cache)
    layout_alone = engines[0][0].blocks.layout
    assert len(layout_alone.groups[0].segment_bytes) == model.num_layers
    assert alone.nbytes == kv_cache[:, BLOCK_IDS].nbytes
    for ranks in engines:
        assert np.array_equal(stored(ranks, kv_cache), alone)
        for rank in ranks:
            assert rank.blocks.layout.describe() == layout_alone.describe()
            assert rank.blocks.layout.groups[0].values_per_block == num_shards // len(ranks)
        assert loads(engine(model, layout, num_shards, len(ranks)), alone, kv_cache)


@given(drawn=models(), layouts=st.tuples(*[st.sampled_from(ALL_LAYOUTS)] * 2), data=st.data())
def test_layouts_are_described_alike_exactly_when_their_bytes_are(
    drawn: tuple[Model, int], layouts: tuple[str, str], data: st.DataObject
) -> None:
    """Heads before tokens or after them, in one layer's blocks or between other layers'."""
    model, num_shards = drawn
    assume(all(can_lay_out(model, layout) for layout in layouts))
    kv_cache = model.kv_cache()
    sizes = [data.draw(st.sampled_from(divisors(num_shards))) for _ in layouts]
    one, other = (
        engine(model, layout, num_shards, size) for layout, size in zip(layouts, sizes, strict=True)
    )
    are_alike = one[0].blocks.layout.describe() == other[0].blocks.layout.describe()
    assert are_alike == np.array_equal(stored(one, kv_cache), stored(other, kv_cache))
    if are_alike:
        assert loads(other, stored(one, kv_cache), kv_cache)


@pytest.mark.parametrize("num_shards, are_alike", [(2, False), (4, True)])
def test_head_major_and_token_major_meet_in_single_heads_alone(
    num_shards: int, are_alike: bool
) -> None:
    """With two heads in a shard the order of heads and tokens is in its bytes; with one it is not.

    No engine of another size meets the wrong order either.
    """
    model = Model(num_heads=4)
    head_major, token_major = (
        [engine(model, layout, num_shards, size)[0] for size in divisors(num_shards)]
        for layout in ("LBHNC", "BLNHC")
    )
    for one in head_major:
        for other in token_major:
            alike = one.blocks.layout.describe() == other.blocks.layout.describe()
            assert alike is are_alike


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_shards_in_the_wrong_order_would_be_seen(layout: str, tp_size: int) -> None:
    """The check of loads is no tautology: turned shards, and those of other ranks, fail it."""
    model = Model()
    kv_cache = model.kv_cache()
    values = stored(engine(model, layout, 4, 1), kv_cache)
    assert loads(engine(model, layout, 4, tp_size), values, kv_cache)
    assert not loads(engine(model, layout, 4, tp_size), values[:, ::-1], kv_cache)
    assert not loads(engine(model, layout, 4, tp_size), values[:, [2, 3, 0, 1]], kv_cache)
    assert not loads(engine(model, layout, 4, tp_size), values[:, [1, 0, 3, 2]], kv_cache)


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@pytest.mark.parametrize("num_shards", [2, 4])
@pytest.mark.parametrize("blocks_in_staging", [0, 1, 2])
def test_the_devices_indexing_agrees_with_the_hosts(
    layout: str, num_shards: int, blocks_in_staging: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy made for devices, run on host tensors in small parts, moves the same bytes.

    A staging buffer shorter than a block still takes whole blocks.
    """
    model = Model()
    kv_cache = model.kv_cache()
    values = stored(engine(model, layout, num_shards, 2), kv_cache)
    monkeypatch.setattr(rows_module, "HostRows", rows_module.TorchRows)
    rank = Rank(model, layout, num_shards)
    block_bytes = rank.payload * num_shards
    monkeypatch.setattr(tensors, "DEVICE_STAGING_BYTES", blocks_in_staging * block_bytes + 1)
    copied: list[int] = []
    monkeypatch.setattr(tensors, "copy_rows", counting(tensors.copy_rows, copied))
    expected = rank.filled(kv_cache)
    rows = values.reshape(-1, rank.payload).copy()
    rank.blocks._device_copy(0, np.array(BLOCK_IDS), rows, to_host=False)
    assert torch.equal(rank.raw, expected)
    found = np.zeros_like(rows)
    rank.blocks._device_copy(0, np.array(BLOCK_IDS), found, to_host=True)
    assert np.array_equal(found, rows)
    assert max(copied) == max(1, blocks_in_staging) * block_bytes


def counting(copy: Callable[[Any, Any], None], copied: list[int]) -> Callable[[Any, Any], None]:
    """Return a copy of rows that notes how many bytes it was given."""

    def counted(source: torch.Tensor, target: torch.Tensor) -> None:
        copied.append(source.numel())
        copy(source, target)

    return counted


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_layers_are_copied_as_one_where_they_lie_together(layout: str) -> None:
    """Shards change nothing of that, and where a layer lies elsewhere the bytes are the same."""
    kv_cache = Model(num_layers=3).kv_cache()
    rank = Rank(Model(num_layers=3), layout, 4)
    values = rank.values(kv_cache)
    assert len(rank.blocks._rows[0]) == 1
    second = list(rank.caches)[1]
    rank.caches[second] = rank.caches[second].clone()
    rank.blocks = TensorBlocks(rank.caches, rank.config, [0], num_parts=[4])
    assert len(rank.blocks._rows[0]) == 3
    assert np.array_equal(rank.values(kv_cache), values)


# ------------------------------------------------------------------- refusals


def whole_and_cut(cache: Any, num_parts: int = 2, **spec: Any) -> str:
    """Return why a layer's heads are not cut; its whole blocks are taken without a word."""
    config = cache_config((attention_spec(**spec), 1), num_blocks=NUM_BLOCKS)
    (name,) = config.kv_cache_groups[0].layer_names
    TensorBlocks({name: cache}, config, [0])
    with pytest.raises(UnsupportedModelError) as refused:
        TensorBlocks({name: cache}, config, [0], num_parts=[num_parts])
    (fault,) = refused.value.faults
    assert f"the KV cache of layer {name} cannot be used" in fault
    return str(fault)


@pytest.mark.parametrize(
    "shape, spec",
    [
        ((NUM_BLOCKS, 3, 32, 64), {"num_kv_heads": 3}),
        ((NUM_BLOCKS, 1, 32, 64), {"num_kv_heads": 1}),
        ((2 * NUM_BLOCKS, 2, 16, 64), {}),
        ((2, NUM_BLOCKS, 2, 32, 32), {}),
        ((NUM_BLOCKS, 2, 2048), {}),
        ((NUM_BLOCKS, 2, 2, 32, 32), {}),
        ((NUM_BLOCKS, 32, 2, 64), {}),
    ],
    ids=[
        "heads no multiple",
        "fewer heads than parts",
        "kernel blocks",
        "keys and values apart",
        "no content",
        "keys and values between",
        "tokens before heads",
    ],
)
def test_heads_that_cannot_be_cut_are_refused_with_the_option_to_remove(
    shape: tuple[int, ...], spec: dict[str, Any]
) -> None:
    """The same layer runs without ``store_tp_size``, and the message says so."""
    fault = whole_and_cut(torch.zeros(shape, dtype=torch.bfloat16), **spec)
    assert str(shape) in fault
    assert "Remove store_tp_size" in fault
    assert "without kvtide" not in fault


def test_what_no_option_mends_does_not_speak_of_one() -> None:
    """A layer without a tensor cannot be used with the option or without it."""
    config = cache_config((attention_spec(), 1), num_blocks=NUM_BLOCKS)
    with pytest.raises(UnsupportedModelError) as refused:
        TensorBlocks({}, config, [0], num_parts=[2])
    (fault,) = refused.value.faults
    assert "Run this model without kvtide" in fault
    assert "store_tp_size" not in fault


# ------------------------------------------------------------------- stages


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("is_device", [False, True])
def test_a_group_without_layers_here_is_nothing_to_copy(num_parts: int, is_device: bool) -> None:
    """A pipeline stage may have none of them; the other groups are as ever."""
    config = cache_config((attention_spec(), 2), (attention_spec(), 0), num_blocks=NUM_BLOCKS)
    del config.kv_cache_tensors[1:]
    raw, caches = allocate(config, "LBHNC")
    blocks = TensorBlocks(caches, config, [0, 1], num_parts=[num_parts] * 2)
    full, empty = blocks.layout.groups
    assert (full.values_per_block, full.payload_bytes) == (num_parts, 2 * 8192 // num_parts)
    assert (empty.values_per_block, empty.segment_bytes, empty.payload_bytes) == (0, (), 0)
    before = raw.clone()
    rows = np.full((3, TAIL), 7, np.uint8)
    for copy in copies(blocks) if is_device else (blocks.read, blocks.write):
        copy(1, np.array(BLOCK_IDS), rows)
        copy(1, np.array([], np.int64), rows[:0])
    assert (rows == 7).all()
    assert torch.equal(raw, before)


def copies(blocks: TensorBlocks) -> list[Callable[[int, Any, Any], None]]:
    """Return the copies made for devices, in both directions, of no bytes a row."""
    return [
        lambda group, ids, rows, to_host=to_host: blocks._device_copy(
            group, ids, rows[:0, :0], to_host=to_host
        )
        for to_host in (True, False)
    ]


def test_a_stage_without_any_layer_has_nothing() -> None:
    """All groups are empty, and that is no fault."""
    config = cache_config((attention_spec(), 0), num_blocks=NUM_BLOCKS)
    blocks = TensorBlocks({}, config, [0], num_parts=[2])
    assert [group.values_per_block for group in blocks.layout.groups] == [0]
    blocks.read(0, BLOCK_IDS, np.zeros((0, TAIL), np.uint8))
    blocks.record().wait()
