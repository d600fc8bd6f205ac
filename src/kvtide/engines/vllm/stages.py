"""What the ranks of an engine tell of their memory, brought together: one layout a stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvtide.core.layout import StoreLayout, common_layout
from kvtide.core.topology import Topology
from kvtide.engines.vllm.metadata import KVTideHandshake
from kvtide.errors import ConfigError


def stage_layouts(
    topology: Topology, handshakes: Sequence[KVTideHandshake]
) -> tuple[list[StoreLayout], Topology]:
    """Return the layout of each pipeline stage, and which stages have layers of each group.

    Raises:
        ConfigError: a rank is missing, or ranks that should hold alike lay their bytes out
            differently.
    """
    if not handshakes:
        raise ConfigError(
            "no rank told its memory layout: inside MultiConnector only the first connector's "
            "handshake arrives, so list KVTideConnector first in its connectors"
        )
    if any(handshake.topology != topology for handshake in handshakes):
        raise ConfigError(
            "the ranks of this engine disagree on how its KV cache is divided among them: start "
            "all of them with the same settings, and without kvtide (remove "
            "--kv-transfer-config) if that does not help"
        )
    layouts: list[StoreLayout] = []
    for stage in range(topology.sizes.pp_size):
        told = {
            handshake.rank: handshake.layout
            for handshake in handshakes
            if topology.sizes.place(handshake.rank).pp_rank == stage
        }
        _check_complete(topology, stage, told)
        layout = common_layout(list(told.values()))
        if layout is None:
            raise ConfigError(
                "the ranks of this engine lay out their KV cache differently, so they cannot "
                "share keys: run ranks of one kind, with the same attention backend"
            )
        layouts.append(layout)
    return layouts, _with_stages(topology, layouts)


def _check_complete(topology: Topology, stage: int, told: dict[int, StoreLayout]) -> None:
    """Refuse a stage of which some tensor parallel rank said nothing.

    Where prefill-context parallel ranks hold copies, vLLM passes on what one of them says.
    """
    place = topology.sizes.place
    ranks = range(topology.num_ranks)
    wanted = {place(rank).tp_rank for rank in ranks if place(rank).pp_rank == stage}
    missing = wanted - {place(rank).tp_rank for rank in told}
    if missing:
        raise ConfigError(
            f"tensor parallel ranks {sorted(missing)} of pipeline stage {stage} told no memory "
            "layout: run all ranks of an engine under one scheduler, with kvtide in each of them"
        )


def _with_stages(topology: Topology, layouts: Sequence[StoreLayout]) -> Topology:
    """Return the topology with the stages that have layers of each group."""
    splits = []
    for group_id, split in enumerate(topology.splits):
        stages = tuple(
            stage
            for stage, layout in enumerate(layouts)
            if layout.groups[group_id].values_per_block
        )
        splits.append(split if len(stages) == len(layouts) else replace(split, stages=stages))
    return replace(topology, splits=tuple(splits))
