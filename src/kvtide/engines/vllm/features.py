"""What the installed vLLM offers: the only place that knows its releases differ.

Everything is probed by feature, never by version number; the number itself is used for a warning
outside the tested range, for refusing releases that miss what loads need, and as part of a key's
namespace. Names that came with later releases have a fallback of the same shape here.
"""

from __future__ import annotations

import logging
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType, SimpleNamespace
from typing import Any

import vllm
from vllm import envs
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kvtide.core.topology import RankPlace
from kvtide.errors import ConfigError

logger = logging.getLogger(__name__)

OLDEST = (0, 30)
NEWEST = (0, 33)
"""The releases kvtide supports, both included."""
IN_TREE = (0, 32)
"""The release whose own Mooncake connector ``key_format: vllm`` is held to."""

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
except ImportError:

    @dataclass
    class KVConnectorTransferResults:  # type: ignore[no-redef]
        """The completions of one step, in the shape of the engine's own class."""

        finished_sending: set[str] = field(default_factory=set)
        finished_recving: set[str] = field(default_factory=set)
        failed_recving: set[str] = field(default_factory=set)


try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # before 0.32 the engine does not ask where a hit came from
    CacheHitSource = None


def release() -> tuple[int, int] | None:
    """Return the installed vLLM's major and minor number, ``None`` for an unnumbered build."""
    match = re.match(r"(\d+)\.(\d+)", str(getattr(vllm, "__version__", "")))
    if match is None:
        return None
    number = (int(match[1]), int(match[2]))
    return number if number > (0, 1) else None


def check_release() -> None:
    """Warn once outside the supported range of vLLM releases; refuse what cannot work.

    Raises:
        ConfigError: the release is older than 0.30, where a failed load has no safe way back.
    """
    number = release()
    if number is not None and number < OLDEST:
        raise ConfigError(
            f"vLLM {vllm.__version__} is too old for kvtide: it cannot report a failed load. "
            f"Install vllm {_text(OLDEST)} to {_text(NEWEST)}."
        )
    if number is None or number > NEWEST:
        _warn_once(
            f"kvtide is tested with vLLM {_text(OLDEST)} to {_text(NEWEST)}, not with "
            f"{vllm.__version__}; compare its output with and without kvtide before relying on it"
        )


def check_in_tree_form() -> None:
    """Warn once where this release's own Mooncake connector may store in another form."""
    if release() != IN_TREE:
        _warn_once(
            f"key_format 'vllm' is tested against the Mooncake connector of vLLM {_text(IN_TREE)}, "
            f"not of {vllm.__version__}, which may name or lay out KV cache otherwise: compare its "
            "output with and without kvtide before relying on it"
        )


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        logger.warning(message)


def _text(number: tuple[int, int]) -> str:
    return f"{number[0]}.{number[1]}"


def release_namespace() -> str:
    """Return the part of a key that names the vLLM release: equal hashes are not equal bytes."""
    number = release()
    return f"vllm-{_text(number)}" if number is not None else f"vllm-{vllm.__version__}"


def hash_scheme(algorithm: str) -> dict[str, str | None]:
    """Return what besides tokens goes into the engine's block hashes, as data for the identity.

    ``seed`` is the root's seed as configured, ``None`` where the engine's own applies. It is
    read from the environment and not from ``get_none_hash_seed()``: the engine seeds its root
    only after it has made the connector, so that function still answers its default then.
    """
    return {
        "algorithm": algorithm,
        "seed": os.environ.get("PYTHONHASHSEED"),
        "root": str(getattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", "unknown")),
        "extra_keys": "tagged" if _has_tagged_extra_keys() else "plain",
    }


def _has_tagged_extra_keys() -> bool:
    probe = SimpleNamespace(lora_request=SimpleNamespace(lora_name="name", lora_path="path"))
    try:
        keys = kv_cache_utils._gen_lora_extra_hash_keys(probe)  # noqa: SLF001 - nothing else tells
    except AttributeError:
        return False
    return bool(keys) and isinstance(keys[0], tuple)


def hash_differs_by_process(algorithm: str) -> bool:
    """Tell whether two engines would name the same tokens differently.

    Hashes that are not cryptographic start from random bytes unless ``PYTHONHASHSEED`` is set.
    """
    return algorithm.startswith("xxhash") and "PYTHONHASHSEED" not in os.environ


def prefix_cacheable_group_ids(kv_cache_config: Any) -> tuple[int, ...]:
    """Return the engine's ids of the groups whose blocks may be stored and loaded by hash."""
    if hasattr(kv_cache_config, "prefix_cacheable_group_ids"):
        return tuple(kv_cache_config.prefix_cacheable_group_ids)
    return tuple(
        group_id
        for group_id, group in enumerate(kv_cache_config.kv_cache_groups)
        if getattr(group, "enable_kv_transfer", True)
        and getattr(group.kv_cache_spec, "prefix_cacheable", True)
    )


def layer_specs(kv_cache_spec: Any) -> Mapping[str, Any] | None:
    """Return the specs of the layers of a uniform-type group by layer, ``None`` for others."""
    specs = getattr(kv_cache_spec, "kv_cache_specs", None)
    return specs if isinstance(specs, Mapping) else None


def each_layer_spec(kv_cache_spec: Any) -> tuple[Any, ...]:
    """Return the specs of the layers of a uniform-type group, of others the group's own."""
    layers = layer_specs(kv_cache_spec)
    return (kv_cache_spec,) if layers is None else tuple(layers.values())


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """The engine's units in tokens: of scheduling, of one block hash, and of a hit's end."""

    scheduler: int
    hashed: int
    hit_alignment: int


def resolve_block_sizes(kv_cache_config: Any, vllm_config: Any) -> BlockSizes:
    """Return the engine's block sizes, as it resolves them over all its groups.

    Read off the groups wherever they tell: the block size among a worker's settings may be older.
    """
    groups = kv_cache_config.kv_cache_groups
    scheduler = math.lcm(*(block_span(group.kv_cache_spec, vllm_config) for group in groups))
    hashed = getattr(kv_cache_config, "hash_block_size", None)
    if hashed is None:  # before 0.32
        _, hashed = kv_cache_utils.resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        hashed = hashed if len(groups) > 1 else scheduler
    alignment = getattr(kv_cache_config, "cache_hit_alignment_tokens", None)
    if alignment is None:
        may_cut = _allows_partial_hits(kv_cache_config, vllm_config, hashed)
        alignment = hashed if may_cut else scheduler
    return BlockSizes(scheduler, int(hashed), int(alignment))


def _allows_partial_hits(kv_cache_config: Any, vllm_config: Any, hash_block_size: int) -> bool:
    """Tell whether hits may end inside a block, where the engine does not say so itself.

    Before 0.32 only its scheduler knows. A hit is then taken to end with a block, which it may.
    """
    probe = getattr(kv_cache_utils, "partial_hash_hits_enabled", None)
    if probe is None:
        return False
    groups = kv_cache_config.kv_cache_groups
    dcp = vllm_config.parallel_config.decode_context_parallel_size
    return bool(probe(groups, hash_block_size, dcp, [manager_class(group) for group in groups]))


def block_span(kv_cache_spec: Any, vllm_config: Any) -> int:
    """Return how many tokens one entry of a group's block table stands for."""
    dcp = vllm_config.parallel_config.decode_context_parallel_size
    return int(kv_cache_utils.resolve_dcp_kv_block_size(kv_cache_spec, dcp))


def rank_place() -> RankPlace:
    """Return where this process stands in the engine's parallel groups."""
    from vllm.distributed import parallel_state

    def rank_in(name: str) -> int:
        group = getattr(parallel_state, name, None)
        return 0 if group is None else int(group().rank_in_group)

    return RankPlace(
        pp_rank=rank_in("get_pp_group"),
        pcp_rank=rank_in("get_pcp_group"),
        tp_rank=rank_in("get_tp_group"),
        dcp_rank=rank_in("get_dcp_group"),
    )


def manager_class(group: Any) -> Any:
    """Return the class of the engine's manager for a group."""
    spec = each_layer_spec(group.kv_cache_spec)[0]
    return KVCacheSpecRegistry.get_manager_class(spec, getattr(group, "role", None))


def group_retains_longer_hits(group: Any) -> bool:
    """Tell whether a group's manager keeps hits beyond the common one (host-backed sources)."""
    role = getattr(group, "role", None)
    return (
        getattr(role, "value", role) not in (None, "default")
        or bool(getattr(group, "host_resident", False))
        or bool(getattr(manager_class(group), "retains_longer_hit", False))
    )


def token_interleave(vllm_config: Any) -> int:
    """Return how many tokens in a row a decode-context parallel rank has of a block.

    Asked on a rank once its connectors are made: for some of them vLLM sets it there alone.
    """
    parallel = vllm_config.parallel_config
    older = getattr(parallel, "dcp_kv_cache_interleave_size", 1)
    return int(getattr(parallel, "cp_kv_cache_interleave_size", older))


def loses_reports_of_stages(vllm_config: Any) -> bool:
    """Tell whether the executor passes on what the last pipeline stage alone reports.

    Ray's older one does: loads of which a stage's end is not heard would never end.
    """
    from vllm import envs

    parallel = vllm_config.parallel_config
    is_ray = getattr(parallel, "distributed_executor_backend", None) == "ray"
    is_newer = getattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", False)
    return bool(is_ray and getattr(parallel, "pipeline_parallel_size", 1) > 1 and not is_newer)


def data_parallel_index(vllm_config: Any) -> int:
    """Return the number of this engine among those that share its work (data parallel)."""
    return int(getattr(vllm_config.parallel_config, "data_parallel_index", 0) or 0)


def max_step_tokens(vllm_config: Any) -> int:
    """Return how many tokens may be in flight at once: what windows keep beside their reach."""
    in_flight = getattr(vllm_config, "max_in_flight_tokens", None)
    return int(in_flight or vllm_config.scheduler_config.max_num_batched_tokens)


def has_own_loop() -> bool:
    """Tell whether the engine steps by itself, in a process of its own, as servers have it.

    Then it goes on while the connector has work, and rests after a step that computed nothing. In
    its caller's process it stops when the last request has ended; before, it spins, and keeps the
    interpreter from the threads that it waits for.
    """
    return bool(envs.VLLM_ENABLE_V1_MULTIPROCESSING)


def boundary_hand_offs(scheduler_output: Any) -> Mapping[str, Sequence[tuple[int, int, int]]]:
    """Return the states offered in this step: by request ``(group, block, boundary)``.

    Releases without such offers have no state groups to serve.
    """
    block_state = getattr(scheduler_output, "kv_connector_block_state", None)
    return getattr(block_state, "boundary_state_offloads", None) or {}


def drops_eagle_block(vllm_config: Any) -> bool:
    """Tell whether hits are proven for a draft model by the tokens behind them (EAGLE, MTP)."""
    speculative = getattr(vllm_config, "speculative_config", None)
    return speculative is not None and bool(speculative.use_eagle_block_drop())


def num_prefill_lookahead_tokens(vllm_config: Any) -> int:
    """Return how many tokens beyond the computed ones a draft model reads while it prefills."""
    if hasattr(vllm_config, "num_prefill_lookahead_tokens"):
        return int(vllm_config.num_prefill_lookahead_tokens)
    speculative = getattr(vllm_config, "speculative_config", None)  # as 0.30 has it
    if speculative is None or not speculative.use_eagle():
        return 0
    return int(speculative.num_speculative_tokens) if speculative.use_multi_module_mtp() else 1


def conv_state_layout() -> str:
    """Return the order of dimensions in which layers keep their convolution states."""
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout

    return str(get_conv_state_layout())


def note_shared_prefix(request: Any, num_tokens: int) -> None:
    """Ask the engine to keep a request's states after so many tokens, as it does on its own.

    It looks for such places in its own cache alone; the pool knows of others. The engine ends a
    step there, and takes the note again with each question about the request.
    """
    if num_tokens > getattr(request, "shared_prefix_boundary", num_tokens):
        request.shared_prefix_boundary = num_tokens


def transfer_results(
    finished_recving: set[str], failed_recving: set[str]
) -> KVConnectorTransferResults:
    """Return one step's load completions; a failed id must be among the finished ones too."""
    return KVConnectorTransferResults(
        finished_sending=set(),
        finished_recving=finished_recving | failed_recving,
        failed_recving=failed_recving,
    )


def external_hit_sources(num_tokens: int, medium: str) -> dict[Any, int]:
    """Return the engine's per-source count of a hit; ``medium`` is ``host``, ``disk``, ``p2p``."""
    if num_tokens == 0 or CacheHitSource is None:
        return {}
    return {CacheHitSource(medium): num_tokens}


def attention_traits(vllm_config: Any, layer_names: Iterable[str]) -> dict[str, str]:
    """Return, per layer, what decides how its KV cache bytes are packed inside a block.

    Shape and strides do not tell everything: CPU kernels pack keys for one instruction set, so
    bytes of an AMX host are noise on another; a device's backends may differ likewise. Known in
    a worker once its layers exist; layers that tell nothing get an empty string.
    """
    layers = vllm_config.compilation_config.static_forward_context
    traits = {}
    for name in layer_names:
        layer = layers.get(name)
        backend = getattr(layer, "attn_backend", None)
        parts = [backend.get_name() if backend is not None else "", getattr(layer, "isa", "")]
        traits[name] = "/".join(str(part) for part in parts if part)
    return traits


def prefix_caching_forced_off(vllm_config: Any) -> bool:
    """Tell whether the platform, not the operator, switched the engine's own prefix cache off.

    The CPU platform does so for MLA without AMX because its kernels are slow there, not because
    a prefix would be wrong: block hashes are still computed and external hits still taken.
    """
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu() and getattr(vllm_config.model_config, "use_mla", False))


def require_recompute(vllm_config: Any) -> None:
    """Make the engine recompute what cannot be loaded instead of failing the request.

    The scheduler reads the setting right after it has constructed its connector. Inside a
    ``MultiConnector`` this connector has a configuration of its own, which nobody reads: there
    the operator must choose.

    Raises:
        ConfigError: the surrounding ``MultiConnector`` lets requests fail.
    """
    outer = _surrounding_config()
    if outer is None:
        vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
    elif outer.kv_transfer_config.kv_load_failure_policy != "recompute":
        raise ConfigError(
            "inside MultiConnector a failed load would fail its request: set "
            '"kv_load_failure_policy": "recompute" in --kv-transfer-config, beside '
            '"kv_connector": "MultiConnector"'
        )


def _surrounding_config() -> Any:
    """Return the configuration of the ``MultiConnector`` that is making this connector.

    It hands its children copies and no way back, so the only trace of it is that it is running.
    """
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - see above
    while frame is not None:
        caller = frame.f_locals.get("self")
        if type(caller).__name__ == "MultiConnector":
            return getattr(caller, "_vllm_config", None)
        frame = frame.f_back
    return None
