"""The ranks of a vLLM engine: how each group's blocks are divided among them, and who shares.

vLLM tells of multi-head latent attention that every tensor parallel rank holds the same bytes, and
of grouped-query attention nothing: where ranks outnumber a layer's KV heads, ranks in a row hold
copies of one (``QKVParallelLinear``). Whether that is so is decided here from the model's
configuration, and where it is not certain each rank keeps bytes of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtide.config import PoolConfig
from kvtide.core.topology import ParallelSizes, Split, Topology
from kvtide.engines.vllm import features
from kvtide.engines.vllm.settings import plain
from kvtide.engines.vllm.specs import is_held_by_all_ranks, is_latent, is_state
from kvtide.errors import ConfigError

_HEAD_COUNTS = re.compile(
    r"(kv|key_value).*head|head.*kv|attention_groups|query_group|n_heads_in_group"
)
"""Names under which configurations of models keep a number of KV heads, or what decides it."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """Whether engines of other tensor parallel sizes share the pool.

    ``shards`` are into how many the heads of each group are cut, ``None`` where only engines of the
    same size share. ``reasons`` say why, where the option asks for more.
    """

    shards: tuple[int, ...] | None = None
    reasons: tuple[str, ...] = ()

    def describe(self, store_tp_size: int, group_ids: Sequence[int]) -> str:
        """Return a line on what is shared; ``group_ids`` are vLLM's numbers of the groups."""
        if self.shards is None:
            return (
                f"store_tp_size is {store_tp_size}, but the pool is shared only with engines of "
                f"this one's tensor parallel size: {'; '.join(self.reasons)}"
            )
        shards = ", ".join(
            f"KV cache group {number} in {count} shard{'s' if count > 1 else ''} of its heads"
            for number, count in zip(group_ids, self.shards, strict=True)
        )
        return (
            f"store_tp_size is {store_tp_size}: the pool is shared with engines that have this "
            f"option, of every tensor parallel size that divides it: {shards}"
        )


@dataclass(frozen=True, slots=True)
class RankPlan:
    """Who holds what of an engine's blocks, and who shares it, as one process sees it.

    vLLM shows the scheduler one layer of a group of several kinds, and a pipeline stage its own
    layers only: what counts is what the ranks that store have planned.
    """

    topology: Topology
    sharing: Sharing = Sharing()


def parallel_sizes(vllm_config: Any) -> ParallelSizes:
    """Return the sizes of the engine's kinds of parallelism, those that share one scheduler."""
    parallel = vllm_config.parallel_config
    return ParallelSizes(
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        pcp_size=getattr(parallel, "prefill_context_parallel_size", 1),
        dcp_size=parallel.decode_context_parallel_size,
    )


def this_rank(sizes: ParallelSizes) -> int:
    """Return the number of the rank that this process is.

    Raises:
        ConfigError: vLLM forms its ranks in another way than kvtide knows.
    """
    if sizes.num_ranks == 1:
        return 0
    found = features.rank_place()
    for rank in range(sizes.num_ranks):
        if sizes.place(rank) == found:
            return rank
    raise ConfigError(
        f"this rank stands at {found} in vLLM's parallel groups, where kvtide knows no rank of "
        f"{sizes}: run without kvtide (remove --kv-transfer-config), and report this"
    )


def plan_ranks(
    config: PoolConfig, group_ids: Sequence[int], kv_cache_config: Any, vllm_config: Any
) -> RankPlan:
    """Return who holds what of the groups ``group_ids``, and who shares it.

    Raises:
        ConfigError: the options or the model do not fit the parallel sizes.
    """
    sizes = parallel_sizes(vllm_config)
    if sizes.num_ranks == 1 and not config.store_tp_size:
        return RankPlan(Topology.undivided(len(group_ids)))
    total = total_kv_heads(vllm_config)
    groups = [
        _GroupHeads(kv_cache_config, number, vllm_config, sizes, total) for number in group_ids
    ]
    faults = list(_faults(config, groups, sizes))
    if faults:
        raise ConfigError(faults)
    if config.key_format == "vllm":
        return RankPlan(Topology(sizes, tuple(group.in_tree_split() for group in groups)))
    try:
        own = RankPlan(Topology(sizes, tuple(group.split() for group in groups)))
    except ValueError as error:
        raise ConfigError(
            f"kvtide cannot tell which rank of {sizes} holds what ({error}): run without it "
            "(remove --kv-transfer-config), and report this"
        ) from error
    if not config.store_tp_size:
        return own
    sharing = _sharing(config.store_tp_size, groups, sizes)
    if sharing.shards is None:
        return RankPlan(own.topology, sharing)
    return RankPlan(Topology(sizes, tuple(map(Split, sharing.shards))), sharing)


def _sharing(store_tp_size: int, groups: Sequence[_GroupHeads], sizes: ParallelSizes) -> Sharing:
    """Return how the heads are cut for engines of other sizes, or why they are not."""
    if sizes.dcp_size > 1 or sizes.pcp_size > 1:
        reason = "context parallel ranks hold other blocks than engines without them"
        return Sharing(reasons=(reason,))
    reasons = tuple(
        f"KV cache group {group.number} {reason}"
        for group in groups
        for reason in group.reasons_not_to_share(store_tp_size)
    )
    if reasons:
        return Sharing(reasons=reasons)
    return Sharing(tuple(group.num_shards(store_tp_size) for group in groups))


def _faults(
    config: PoolConfig, groups: Sequence[_GroupHeads], sizes: ParallelSizes
) -> Iterator[str]:
    if sizes.pcp_size > 1 and len(groups) > 1:
        yield (
            f"--prefill-context-parallel-size {sizes.pcp_size} is not supported for a model of "
            f"{len(groups)} KV cache groups: set it to 1 or remove --kv-transfer-config"
        )
    if sizes.pcp_size > 1 and sizes.dcp_size > 1:
        for group in groups:
            if not group.is_held_by_all and not group.is_certain:
                yield (
                    f"KV cache group {group.number} does not tell how its heads are divided among "
                    "ranks, and prefill-context and decode-context parallel ranks divide its "
                    "tokens: set one of the two sizes to 1, or remove --kv-transfer-config"
                )
    if sizes.pcp_size > 1 and config.key_format == "vllm":
        yield (
            f"--prefill-context-parallel-size {sizes.pcp_size} cannot be used with key_format "
            "'vllm': set it to 1, or leave key_format at 'kvtide'"
        )
    if config.store_tp_size % sizes.tp_size:
        yield (
            f"store_tp_size is {config.store_tp_size}, which this engine's tensor parallel size "
            f"{sizes.tp_size} does not divide: set it, in all engines that share the pool, to "
            "the least common multiple of their tensor parallel sizes"
        )
    if config.key_format == "vllm":
        for group in groups:
            has_copies = group.in_tree_split().num_shards < sizes.tp_size
            if has_copies and not group.is_latent and not group.is_certain:
                yield (
                    f"KV cache group {group.number} may have layers of different numbers of KV "
                    "heads, of which vLLM's in-tree connector stores copies that are none: leave "
                    "key_format at 'kvtide'"
                )


class _GroupHeads:
    """What is known of how one group's heads are divided among tensor parallel ranks."""

    def __init__(
        self,
        kv_cache_config: Any,
        number: int,
        vllm_config: Any,
        sizes: ParallelSizes,
        total_heads: int | None,
    ) -> None:
        spec = kv_cache_config.kv_cache_groups[number].kv_cache_spec
        self.number = number
        self._sizes = sizes
        self._layers = features.each_layer_spec(spec)
        self._is_token_sharded = features.block_span(spec, vllm_config) != spec.block_size
        self._has_states = any(is_state(layer) for layer in self._layers)
        self._total_heads = total_heads
        self._in_tree_heads = int(vllm_config.model_config.get_total_num_kv_heads())
        self.is_latent = all(is_latent(layer) for layer in self._layers)
        self.is_held_by_all = all(is_held_by_all_ranks(layer) for layer in self._layers)
        """Whether every tensor parallel rank holds the same bytes."""

    @property
    def is_certain(self) -> bool:
        """Whether it is certain how many heads each layer has in all."""
        total, tp_size = self._total_heads, self._sizes.tp_size
        is_known = all(not is_latent(la) or is_held_by_all_ranks(la) for la in self._layers)
        if not total or not is_known or self._has_states or (total % tp_size and tp_size % total):
            return False
        wanted = max(1, total // tp_size)
        return all(getattr(layer, "num_kv_heads", 0) == wanted for layer in self._layers)

    def split(self) -> Split:
        """Return how the group is divided where only engines of one kind share."""
        tp_size = self._sizes.tp_size
        if self.is_held_by_all:
            return Split(1, self._is_token_sharded)
        if self.is_certain and self._total_heads:
            return Split(min(tp_size, self._total_heads), self._is_token_sharded)
        # A key for each rank holds whatever it has, its tokens of a block included.
        return Split(tp_size)

    def in_tree_split(self) -> Split:
        """Return how vLLM's in-tree connector divides the group.

        As its ``_spec_tp_replication_factor`` and ``_init_lookup_key_prefixes`` have it: with
        decode-context parallelism every rank has keys of its own.
        """
        tp_size = self._sizes.tp_size
        if self._sizes.dcp_size > 1:
            return Split(tp_size)
        if self._has_states:
            return Split(tp_size)
        if self.is_latent:
            return Split(1)
        return Split(min(tp_size, self._in_tree_heads or tp_size))

    def num_shards(self, store_tp_size: int) -> int:
        """Return into how many shards the group's heads are cut for all tensor parallel sizes."""
        if self.is_held_by_all:
            return 1
        assert self._total_heads is not None
        return min(store_tp_size, self._total_heads)

    def reasons_not_to_share(self, store_tp_size: int) -> Iterator[str]:
        """Yield why engines of other tensor parallel sizes cannot use the group's values."""
        if self.is_held_by_all:
            return
        total = self._total_heads
        if self._has_states:
            yield "holds states, which are not divided by heads"
        elif any(is_held_by_all_ranks(layer) for layer in self._layers):
            yield "has layers with heads, and others without"
        elif not self.is_certain or not total:
            yield (
                "may have layers of different numbers of KV heads, or a number that the tensor "
                "parallel size does not divide"
            )
        elif total % store_tp_size and store_tp_size % total:
            yield (
                f"has {total} KV heads, which {store_tp_size} shards do not divide: set "
                f"store_tp_size to a multiple or divisor of {total} that all sizes divide"
            )
        elif any(_is_packed(layer) for layer in self._layers):
            yield "packs its heads in another way"


def _is_packed(layer: Any) -> bool:
    """Tell whether what lies side by side in a block is something else than heads."""
    return getattr(layer, "num_head_slots", None) is not None


def total_kv_heads(vllm_config: Any) -> int | None:
    """Return how many KV heads each attention layer has in all, ``None`` where it may differ.

    Some models have layers of two kinds with numbers of their own, and a draft model's layers may
    be among a group's.
    """
    models = [vllm_config.model_config]
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is not None and speculative.uses_draft_kv_cache():
        models.append(speculative.draft_model_config)
    total = int(vllm_config.model_config.get_total_num_kv_heads())
    for model in models:
        if model is None or int(model.get_total_num_kv_heads()) != total:
            return None
        counts = _head_counts(plain(model.hf_text_config, "hf_text_config"))
        if any(count != total for count in counts):
            return None
    return total


def _head_counts(config: object, name: str = "") -> Iterator[object]:
    """Yield every number of KV heads that a configuration has, at whatever depth."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            yield from _head_counts(value, str(key) if not isinstance(value, Mapping) else "")
    elif isinstance(config, list):
        for value in config:
            yield from _head_counts(value, name)
    elif config is not None and _HEAD_COUNTS.search(name):
        yield config
