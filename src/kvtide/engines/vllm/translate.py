"""From vLLM's configuration to the core's groups, or to the full list of what stands against it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvtide.core.coordinator import Coordinator
from kvtide.core.groups import ChunkedLocal, Group, SlidingWindow
from kvtide.engines.vllm import features
from kvtide.engines.vllm.features import BlockSizes
from kvtide.engines.vllm.specs import CANNOT_SERVE, describe_specs, faults_of, group_of
from kvtide.errors import ConfigError, UnsupportedModelError


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The KV cache groups kvtide works on, in the core's words and in the engine's.

    ``groups[i]`` is the engine's group ``group_ids[i]``. ``hash_block_size`` is in tokens.
    ``specs`` describes the groups as JSON data for the identity, without layer names;
    ``num_layers[i]`` counts the layers of a group in this process's view (under pipeline
    parallelism the first stage's only). ``partial_hits``, ``retention_interval`` and
    ``stores_dense`` are as in :class:`~kvtide.core.coordinator.Coordinator`. The KV cache of the
    last ``num_unsettled_tokens`` that a request has computed may still be rewritten (draft modules
    that read several tokens ahead): it is not to be saved before that many more are computed.
    ``max_step_tokens`` is how many tokens may be computed beyond what is settled.
    """

    groups: tuple[Group, ...]
    group_ids: tuple[int, ...]
    hash_block_size: int
    specs: tuple[dict[str, object], ...]
    num_layers: tuple[int, ...]
    partial_hits: bool = False
    retention_interval: int | None = None
    stores_dense: bool = False
    num_unsettled_tokens: int = 0
    max_step_tokens: int = 1 << 20

    def coordinator(self) -> Coordinator:
        """Return the joint decisions over these groups, the same in every process."""
        return Coordinator(
            self.groups,
            self.hash_block_size,
            self.partial_hits,
            self.retention_interval,
            self.stores_dense,
        )


def translate_groups(kv_cache_config: Any, vllm_config: Any) -> GroupPlan:
    """Return the core's groups for the engine's prefix-cacheable KV cache groups.

    Groups that the engine keeps out of prefix caching are left out whatever their kind: the engine
    fills them itself after a hit, its own or a loaded one.

    Raises:
        UnsupportedModelError: the model has groups kvtide cannot serve; every such group is named,
            with its kind and what to do.
        ConfigError: the engine's block sizes or retention do not fit together.
    """
    ids = features.prefix_cacheable_group_ids(kv_cache_config)
    chosen = [kv_cache_config.kv_cache_groups[number] for number in ids]
    faults = list(_group_faults(ids, chosen))
    if faults:
        raise UnsupportedModelError(faults)
    sizes = _block_sizes(kv_cache_config, vllm_config)
    groups = tuple(_groups(kv_cache_config, vllm_config, ids, sizes))
    faults = list(_joint_faults(groups, ids, chosen, sizes))
    if faults:
        raise UnsupportedModelError(faults)
    return GroupPlan(
        groups=groups,
        group_ids=ids,
        hash_block_size=sizes.hashed,
        specs=tuple(describe_specs(group.kv_cache_spec) for group in chosen),
        num_layers=tuple(len(group.layer_names) for group in chosen),
        partial_hits=sizes.hit_alignment < sizes.scheduler,
        retention_interval=_retention_interval(kv_cache_config, groups, sizes),
        max_step_tokens=features.max_step_tokens(vllm_config),
        num_unsettled_tokens=max(0, features.num_prefill_lookahead_tokens(vllm_config) - 1),
    )


def eagle_proof_tokens(block_size: int, hash_block_size: int, *, is_fine_grained: bool) -> int:
    """Return how many tokens beyond a hit a group of a draft model has to match.

    The rule of vLLM's ``kv_cache_utils.eagle_proof_margin``: what the engine drops of such a hit,
    one block, or one hash block where hits may end inside a block.
    """
    return min(block_size, hash_block_size) if is_fine_grained else block_size


def _groups(
    kv_cache_config: Any, vllm_config: Any, ids: tuple[int, ...], sizes: BlockSizes
) -> Iterator[Group]:
    drafts = _draft_groups(kv_cache_config, vllm_config, ids)
    for number in ids:
        group = kv_cache_config.kv_cache_groups[number]
        block_size = features.block_span(group.kv_cache_spec, vllm_config)
        # Of managers that cannot look inside blocks the engine asks, where hits may end there, that
        # their blocks are one hash long: so it need not be asked which manager a group has.
        proof_tokens = eagle_proof_tokens(
            block_size, sizes.hashed, is_fine_grained=sizes.hit_alignment < sizes.scheduler
        )
        yield group_of(group.kv_cache_spec, block_size, proof_tokens if number in drafts else 0)


def _draft_groups(kv_cache_config: Any, vllm_config: Any, ids: tuple[int, ...]) -> set[int]:
    """Return the groups whose hits the engine proves by the tokens behind them.

    As vLLM's coordinators have it: those it flagged; all of them where it drops blocks and flagged
    none; and any group of the same spec as one of them, because it looks them up together.
    """
    groups = kv_cache_config.kv_cache_groups
    drafts = {number for number, group in enumerate(groups) if group.is_eagle_group}
    if features.drops_eagle_block(vllm_config) and not drafts:
        drafts = set(range(len(groups)))
    kinds = {
        number: (
            features.manager_class(groups[number]),
            # What a scheduler sees of a group of uniform type is its first layer's spec.
            features.each_layer_spec(groups[number].kv_cache_spec)[0],
        )
        for number in ids
    }
    return {
        number
        for number in ids
        if any(kinds[number] == kinds[draft] for draft in drafts if draft in kinds)
    }


def _block_sizes(kv_cache_config: Any, vllm_config: Any) -> BlockSizes:
    try:
        return features.resolve_block_sizes(kv_cache_config, vllm_config)
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"vLLM rejects the KV cache block sizes: {error}") from error


def _retention_interval(
    kv_cache_config: Any, groups: tuple[Group, ...], sizes: BlockSizes
) -> int | None:
    """Return the retention the engine was given, ``None`` where it has nothing to act on.

    The engine keeps chunked-local groups dense whatever it was given, as it does full attention.
    """
    interval: int | None = kv_cache_config.prefix_cache_retention_interval
    if interval is None or not any(
        group.is_state or isinstance(group, SlidingWindow) for group in groups
    ):
        return None
    if interval < 0 or interval % sizes.scheduler:
        raise ConfigError(
            f"--prefix-cache-retention-interval {interval} does not fit this model: give 0 or a "
            f"multiple of {sizes.scheduler}, in tokens"
        )
    return interval


def check_engine(vllm_config: Any) -> list[str]:
    """Return every setting under which kvtide would be wrong or useless, with its remedy.

    An empty list means the engine's settings are fine; the model itself is judged by
    :func:`translate_groups`.
    """
    faults: list[str] = []
    if features.loses_reports_of_stages(vllm_config):
        faults.append(
            "with pipeline parallelism Ray's older executor hands on what one stage reports only, "
            "so loads would never end: set the environment variable "
            "VLLM_USE_RAY_V2_EXECUTOR_BACKEND=1 where this vLLM has it, or use "
            "--distributed-executor-backend mp"
        )
    cache = vllm_config.cache_config
    if not cache.enable_prefix_caching and not features.prefix_caching_forced_off(vllm_config):
        faults.append(
            "prefix caching is off: add --enable-prefix-caching. If vLLM switched it off for "
            "this model itself, a prefix of the model cannot be reused and kvtide must not be "
            "configured"
        )
    algorithm = cache.prefix_caching_hash_algo
    if features.hash_differs_by_process(algorithm):
        faults.append(
            f"--prefix-caching-hash-algo {algorithm} names the same tokens differently in every "
            "process: use sha256 (the default), or set the environment variable PYTHONHASHSEED "
            "to one value in all engines that share the store"
        )
    if getattr(cache, "calculate_kv_scales", False):
        faults.append(
            "--calculate-kv-scales measures KV cache scales anew in each process, so stored "
            "bytes mean something else elsewhere: use scales from the checkpoint"
        )
    if getattr(cache, "kv_sharing_fast_prefill", False):
        faults.append("--kv-sharing-fast-prefill is not supported yet: remove it")
    return faults


def _group_faults(ids: tuple[int, ...], groups: list[Any]) -> Iterator[str]:
    if not ids:
        yield f"the model has no KV cache group whose prefixes can be reused: {CANNOT_SERVE}"
    for number, group in zip(ids, groups, strict=True):
        where = _where(number, group)
        if features.group_retains_longer_hits(group):
            yield (
                f"{where} is backed by host memory or finds hits of its own, and kvtide's are "
                "joint over all groups: leave hisparse_config out of --attention-config"
            )
            continue
        for fault in faults_of(group.kv_cache_spec):
            yield f"{where} holds {fault}"


def _joint_faults(
    groups: tuple[Group, ...], ids: tuple[int, ...], chosen: list[Any], sizes: BlockSizes
) -> Iterator[str]:
    for number, group, spec in zip(ids, groups, chosen, strict=True):
        if isinstance(group, ChunkedLocal) and group.proof_tokens:
            yield (
                f"{_where(number, spec)} holds chunked local attention, which vLLM cannot look up "
                "for a draft model: remove --speculative-config, or give "
                "--disable-hybrid-kv-cache-manager"
            )
    lcm_block_size = math.lcm(*(group.block_size for group in groups))
    if lcm_block_size != sizes.scheduler:
        yield (
            f"the groups outside prefix caching make vLLM's unit of hits {sizes.scheduler} tokens "
            f"where the others' blocks make it {lcm_block_size}, so hits would end where the "
            f"engine cannot resume: {CANNOT_SERVE}"
        )


def _where(number: int, group: Any, limit: int = 2) -> str:
    names = group.layer_names
    shown = ", ".join(names[:limit])
    if len(names) > limit:
        shown += f" and {len(names) - limit} more layers"
    return f"KV cache group {number} ({shown})"
