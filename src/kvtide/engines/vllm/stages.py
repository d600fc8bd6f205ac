"""What the ranks of an engine tell of themselves, brought together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvtide.core.layout import StoreLayout, common_layout
from kvtide.core.topology import ParallelSizes, Part
from kvtide.engines.vllm.metadata import KVTideHandshake
from kvtide.engines.vllm.ranks import Sharing
from kvtide.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks hold: a layout for each pipeline stage, and per group the parts of a chunk.

    ``token_interleave`` is 0 where no rank has only some tokens of a block.
    """

    layouts: tuple[StoreLayout, ...]
    parts: tuple[tuple[Part, ...], ...]
    sharing: Sharing
    token_interleave: int = 0

    def describe(self) -> dict[str, object]:
        """Return what decides the bytes behind a key, as JSON data."""
        stages = [layout.describe() for layout in self.layouts]
        return {"stages": stages, "token_interleave": self.token_interleave}


def agree(sizes: ParallelSizes, handshakes: Sequence[KVTideHandshake]) -> Agreement:
    """Return what the ranks of an engine agree on.

    Raises:
        ConfigError: a rank is missing, or ranks that should hold alike lay their bytes out
            differently.
    """
    if not handshakes:
        raise ConfigError(
            "no rank told its memory layout: inside MultiConnector only the first connector's "
            "handshake arrives, so list KVTideConnector first in its connectors"
        )
    told = {h.rank: h for h in handshakes if h.rank in range(sizes.num_ranks)}
    _check_complete(sizes, told.keys())
    layouts: list[StoreLayout] = []
    for stage in range(sizes.pp_size):
        of_stage = [h.layout for rank, h in told.items() if sizes.place(rank).pp_rank == stage]
        layout = common_layout(of_stage)
        kinds = {(len(h.parts), h.token_interleave) for h in told.values()}
        if layout is None or len(kinds) > 1:
            raise ConfigError(
                "the ranks of this engine lay out their KV cache differently, so they cannot "
                "share keys: run ranks of one kind, with the same attention backend"
            )
        layouts.append(layout)
    return Agreement(
        tuple(layouts),
        _all_parts([told[rank] for rank in sorted(told)]),
        _common_sharing(list(told.values())),
        handshakes[0].token_interleave if sizes.dcp_size > 1 else 0,
    )


def _check_complete(sizes: ParallelSizes, told: Collection[int]) -> None:
    """Refuse an engine of which some rank said nothing.

    Where prefill-context parallel ranks hold copies, vLLM passes on what one of them says.
    """

    def part_of(rank: int) -> tuple[int, ...]:
        place = sizes.place(rank)
        pcp_rank = place.pcp_rank if sizes.dcp_size > 1 else 0
        return (place.pp_rank, place.tp_rank, pcp_rank)

    missing = set(map(part_of, range(sizes.num_ranks))) - set(map(part_of, told))
    if missing:
        stage, tp_rank, _ = min(missing)
        raise ConfigError(
            f"{len(missing)} ranks told no memory layout, tensor parallel rank {tp_rank} of "
            f"pipeline stage {stage} among them: run all ranks of an engine under one scheduler, "
            "with kvtide in each of them"
        )


def _all_parts(handshakes: Sequence[KVTideHandshake]) -> tuple[tuple[Part, ...], ...]:
    """Return per group the parts that some rank holds, in the order of ranks."""
    groups = zip(*(handshake.parts for handshake in handshakes), strict=True)
    return tuple(tuple(dict.fromkeys(part for held in group for part in held)) for group in groups)


def _common_sharing(handshakes: Sequence[KVTideHandshake]) -> Sharing:
    """Return with whom an engine shares: with others than its own kind only if all ranks do."""
    found = {handshake.sharing for handshake in handshakes}
    if len(found) == 1:
        return found.pop()
    reasons = dict.fromkeys(reason for sharing in found for reason in sharing.reasons)
    return Sharing(reasons=tuple(reasons))
