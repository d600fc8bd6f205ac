"""The two forms a pool can have: kvtide's own, and that of vLLM's in-tree Mooncake connector.

Engines share a pool if they agree on all of this: how keys are written and what they name, what a
value has beside its payload, what a payload is made of, and which chunks are stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvtide.config import PoolConfig
from kvtide.core.keys import KeyStyle, PoolKey, VllmPoolKey
from kvtide.core.topology import ParallelSizes
from kvtide.engines.vllm import features
from kvtide.engines.vllm.identity import engine_identity
from kvtide.engines.vllm.names import IdentityNames, ModelNames, Names
from kvtide.engines.vllm.raw_blocks import find_raw_blocks
from kvtide.engines.vllm.tensors import BlockFinder, find_layers
from kvtide.engines.vllm.translate import GroupPlan
from kvtide.runtime.values import BARE, TAGGED, ValueFormat


@dataclass(frozen=True, slots=True)
class PoolFormat:
    """One form of a pool.

    ``keys`` says how an engine of these sizes writes its keys, ``names`` makes its namespaces.
    With ``stores_dense`` chunks are stored that no hit requires, see
    :class:`~kvtide.core.coordinator.Coordinator`.
    """

    keys: Callable[[ParallelSizes], KeyStyle]
    values: ValueFormat
    find_blocks: BlockFinder
    names: Callable[[PoolConfig, Any, GroupPlan], Names]
    stores_dense: bool


def _identity_names(config: PoolConfig, vllm_config: Any, plan: GroupPlan) -> Names:
    version = config.weights_version
    engine = engine_identity(vllm_config, plan, weights_version=version or None)
    return IdentityNames(config.cache_prefix, engine, version)


def _model_names(config: PoolConfig, vllm_config: Any, _: GroupPlan) -> Names:
    features.check_in_tree_form()
    return ModelNames(config.cache_prefix, vllm_config.model_config.model)


def _in_tree_keys(sizes: ParallelSizes) -> KeyStyle:
    return VllmPoolKey(sizes.dcp_size)


FORMATS = {
    "kvtide": PoolFormat(
        lambda _: PoolKey, TAGGED, find_layers, _identity_names, stores_dense=False
    ),
    "vllm": PoolFormat(_in_tree_keys, BARE, find_raw_blocks, _model_names, stores_dense=True),
}
"""The forms by the values of the option ``key_format``."""
