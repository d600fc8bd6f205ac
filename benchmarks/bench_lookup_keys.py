"""How many keys a lookup of a prompt of 131,072 tokens asks for, by kind of model.

    python benchmarks/bench_lookup_keys.py [--rounds 20]

Each model is looked up in a store that has everything, in one that has nothing, and in one where
windows and states end after nine tenths of the prompt; two of them on eight ranks as well. Where
vLLM is installed, the lookup of its own store connector is run on the same groups, ranks, prompt
and store: its keys are the peer. Times are of the longest burst of key building between two store
calls, in CPU time of its thread.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from statistics import median
from types import SimpleNamespace
from typing import Any

from measuring import Row, at_most, figure, report

from kvtide.core.coordinator import Coordinator
from kvtide.core.groups import FullAttention, Group, Mamba, SlidingWindow
from kvtide.core.keys import CacheIdentity, namespace_for
from kvtide.core.lookup import lookup
from kvtide.core.topology import ParallelSizes, Topology
from kvtide.testing.requests import fake_hashes

NUM_TOKENS = 128 << 10
NAMESPACE = namespace_for("", CacheIdentity({}, None))
DEEPSEEK = (
    FullAttention(256),
    SlidingWindow(64, 128),
    SlidingWindow(64, 512),
    SlidingWindow(4, 16),
    SlidingWindow(8, 64),
)
IS_THERE = {
    "full hit": lambda _group, _share: True,
    "cold miss": lambda _group, _share: False,
    "windows and states end at 90 %": lambda group, share: group.is_downward_closed or share <= 0.9,
}
"""Whether a store has the chunk of a group that ends at a share of the prompt."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model's groups, and how many keys its lookups may ask for.

    ``tp_size`` ranks have parts of their own of every chunk.
    """

    name: str
    coordinator: Coordinator
    goals: dict[str, int] = field(default_factory=dict)
    tp_size: int = 1


MODELS = (
    Model("full", Coordinator((FullAttention(16),), 16)),
    Model(
        "full + window 4,096",
        Coordinator((FullAttention(16), SlidingWindow(16, 4096)), 16),
        {"full hit": 8192 + 256 + 64, "cold miss": 128},
    ),
    Model("full + window 32,768", Coordinator((FullAttention(16), SlidingWindow(16, 32768)), 16)),
    Model("like DeepSeek-V4", Coordinator(DEEPSEEK, 4), {"full hit": 600, "cold miss": 128}),
    Model("window 4,096 alone", Coordinator((SlidingWindow(16, 4096),), 16)),
    Model("full + states", Coordinator((FullAttention(512), Mamba(512)), 512)),
    Model(
        "full + states, partial hits",
        Coordinator((FullAttention(512), Mamba(512)), 16, partial_hits=True),
    ),
    Model("states alone", Coordinator((Mamba(512),), 512)),
    Model(
        "full, TP 8",
        Coordinator((FullAttention(16),), 16),
        {"full hit": 8 * 8192, "cold miss": 64},
        tp_size=8,
    ),
    Model(
        "full + window 4,096, TP 8",
        Coordinator((FullAttention(16), SlidingWindow(16, 4096)), 16),
        {"full hit": 8 * (8192 + 256 + 64), "cold miss": 128},
        tp_size=8,
    ),
)


class Asked:
    """What one lookup of kvtide asked, and how long its bursts were."""

    def __init__(self, model: Model, is_there: Callable[[Group, float], bool]) -> None:
        coordinator = model.coordinator
        hashes = fake_hashes(NUM_TOKENS // coordinator.hash_block_size)
        places = {value.hex(): index for index, value in enumerate(hashes, 1)}
        sizes = ParallelSizes(model.tp_size)
        topology = Topology.undivided(len(coordinator.groups), sizes)
        databases = coordinator.databases(NAMESPACE, topology.all_parts())
        query = coordinator.query(NUM_TOKENS + 1, hashes)
        probe = lookup(query, coordinator.boundaries, databases)
        groups = {
            part.prefix: coordinator.groups[group_id]
            for group_id, parts in enumerate(databases)
            for part in parts
        }
        self.bursts: list[float] = []
        self.num_keys = 0
        answers: list[bool] | None = None
        while True:
            start = time.thread_time()
            try:
                keys = next(probe) if answers is None else probe.send(answers)
            except StopIteration as stop:
                self.bursts.append(time.thread_time() - start)
                self.hit = stop.value.hit_token
                return
            self.bursts.append(time.thread_time() - start)
            self.num_keys += len(keys)
            named = [key.rpartition("@") for key in keys]
            answers = [
                is_there(groups[prefix], places[name] / len(hashes)) for prefix, _, name in named
            ]


def vllm_num_keys(model: Model, is_there: Callable[[Group, float], bool]) -> tuple[int, int]:
    """Return how many keys the lookup of vLLM's store connector asks for, and its hit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator import (
            MooncakeStoreCoordinator,
        )
        from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import (
            MooncakeStoreWorker,
        )
        from vllm.v1.kv_cache_interface import KVCacheGroupSpec
    coordinator = model.coordinator
    groups = [KVCacheGroupSpec(["layer"], vllm_spec(group)) for group in coordinator.groups]
    hashes = fake_hashes(NUM_TOKENS // coordinator.hash_block_size)
    places = {value.hex(): index for index, value in enumerate(hashes, 1)}
    asked: list[str] = []
    prefixes = [[f"{rank}@{g}" for rank in range(model.tp_size)] for g in range(len(groups))]

    def batch_is_exist(keys: Sequence[str]) -> list[int]:
        asked.extend(keys)
        named = [key.split("@") for key in keys]
        return [
            int(is_there(coordinator.groups[int(g)], places[name] / len(hashes)))
            for _, g, name in named
        ]

    worker = SimpleNamespace(
        _capacity_only=False,
        coord=MooncakeStoreCoordinator(
            groups,
            coordinator.lcm_block_size,
            coordinator.hash_block_size,
            enable_partial_hash_hits=coordinator.partial_hits,
        ),
        hash_block_size=coordinator.hash_block_size,
        store=SimpleNamespace(batch_is_exist=batch_is_exist),
        token_dbs=[SimpleNamespace(block_size=group.block_size) for group in coordinator.groups],
        _kv_cache_groups=groups,
        _lookup_key_prefixes=prefixes,
        _record_kv_connector_operation=lambda *_args, **_kwargs: None,
        _tail_key_boundaries=lambda *_args: (),
    )
    result: Any = MooncakeStoreWorker.lookup(worker, NUM_TOKENS + 1, hashes)
    return len(asked), int(result.hit_length)


def vllm_spec(group: Group) -> Any:
    """Return vLLM's spec of a group."""
    import torch
    from vllm.v1 import kv_cache_interface as interface

    if isinstance(group, Mamba):
        return interface.MambaSpec(
            block_size=group.block_size,
            shapes=((4, 4),),
            dtypes=(torch.float32,),
            mamba_cache_mode="align",
        )
    fields: dict[str, Any] = {
        "block_size": group.block_size,
        "num_kv_heads": 1,
        "head_size": 64,
        "dtype": torch.bfloat16,
    }
    if isinstance(group, SlidingWindow):
        return interface.SlidingWindowSpec(**fields, sliding_window=group.window)
    return interface.FullAttentionSpec(**fields)


def rows(model: Model, rounds: int, *, with_vllm: bool) -> Iterator[Row]:
    """Count keys and calls in each of the stores, and time the longest burst in any of them."""
    longest_s = 0.0
    for state, is_there in IS_THERE.items():
        runs = [Asked(model, is_there) for _ in range(rounds)]
        asked = runs[-1]
        peer = None
        if with_vllm:
            peer, hit = vllm_num_keys(model, is_there)
            assert hit == asked.hit, f"{model.name}, {state}: {asked.hit} and vLLM {hit}"
        goal = model.goals.get(state)
        case = f"{model.name}, {state}"
        if goal is None:
            yield figure("lookup_keys", case, "keys", asked.num_keys, peer)
        else:
            yield at_most("lookup_keys", case, "keys", asked.num_keys, goal, peer=peer)
        yield figure("lookup_keys", f"{model.name}, {state}: calls", "calls", len(asked.bursts) - 1)
        each = [median(burst) for burst in zip(*(run.bursts for run in runs), strict=True)]
        longest_s = max(longest_s, *each)
    case = f"{model.name}: longest burst"
    yield at_most("lookup_keys", case, "ms", longest_s * 1e3, 1)


def main() -> None:
    """Look every model up and write build/bench/lookup_keys.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    with_vllm = find_spec("vllm") is not None
    found = [row for model in MODELS for row in rows(model, options.rounds, with_vllm=with_vllm)]
    print(f"written: {report('lookup_keys', found)}")


if __name__ == "__main__":
    main()
