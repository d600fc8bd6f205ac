"""How a scripted engine is configured, what it records, and the time it lives in."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from kvtide.core.admission import AdmissionLimits
from kvtide.core.back_off import Delays
from kvtide.core.groups import FullAttention, Group
from kvtide.core.save_limits import SavePolicy
from kvtide.core.topology import ParallelSizes, Split, Topology
from kvtide.runtime.limits import WorkerLimits

SMALL_STAGING = WorkerLimits(staging_bytes=256 << 10, load_staging_bytes=64 << 10, stage_wait_s=0.0)
"""Room for 64 values to write and 16 to read: small enough to fill up in a test."""


class HookOrder(Enum):
    """When ``wait_for_save`` is called; releases and runners of vLLM differ."""

    SAVE_THEN_REPORT = "every step, before the report"
    NOT_WHEN_EMPTY = "before the report, but not in steps without tokens"
    REPORT_THEN_SAVE = "every step, after the report"
    NEVER = "never: what is unfenced at the next step's metadata is fenced then"


def full_attention(*block_sizes: int) -> tuple[Group, ...]:
    """Return one full-attention group for each block size."""
    return tuple(FullAttention(size) for size in block_sizes)


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """How the engine and the pool are configured; sizes in tokens and blocks.

    ``groups`` are the model's; one with ``proof_tokens`` belongs to a draft model.
    ``hash_block_size`` is by default the largest unit that fits all groups. With ``partial_hits``
    requests resume at its multiples. ``num_blocks`` counts the null block.
    ``sizes`` are the ranks; ``splits`` say how each group's blocks are divided among them (default:
    every tensor parallel rank has bytes of its own).
    ``tell_preemptions=False`` hides preemptions: a request comes back as a new one, and that is all
    the pool learns. ``report_delay`` holds what the ranks report back for so many steps and hands
    it over in one piece. ``grant_limit`` grants at most so many of the tokens that the pool
    promised. With ``threaded=False`` the pool does nothing until
    :meth:`~kvtide.testing.engine.ScriptedEngine.run_pool`.
    """

    num_blocks: int = 64
    groups: tuple[Group, ...] = (FullAttention(4),)
    hash_block_size: int = 0
    partial_hits: bool = False
    retention_interval: int | None = None
    max_tokens_per_step: int = 32
    max_running: int = 8
    sizes: ParallelSizes = ParallelSizes()  # noqa: RUF009 - frozen
    splits: tuple[Split, ...] = ()
    num_drafts: int = 0
    order: HookOrder = HookOrder.SAVE_THEN_REPORT
    tell_preemptions: bool = True
    report_delay: int = 0
    grant_limit: int | None = None
    threaded: bool = False
    max_pinned_blocks: int | None = None
    max_job_tokens: int | None = None
    decode_job_tokens: int = 0
    delays: Delays = field(default_factory=lambda: Delays(0.5, 4.0))
    lookup_timeout_s: float = 1.0
    admission: AdmissionLimits = field(default_factory=AdmissionLimits)
    saves: SavePolicy = field(default_factory=lambda: SavePolicy(decode=True))
    worker: WorkerLimits = SMALL_STAGING

    def __post_init__(self) -> None:
        if not self.hash_block_size:
            proofs = [group.proof_tokens for group in self.groups]
            object.__setattr__(self, "hash_block_size", math.gcd(*self.block_sizes, *proofs))

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """The groups' blocks, in tokens."""
        return tuple(group.block_size for group in self.groups)

    @property
    def topology(self) -> Topology:
        """The ranks, and what each holds of every group."""
        if not self.splits:
            return Topology.undivided(len(self.groups), self.sizes)
        return Topology(self.sizes, self.splits)

    @property
    def lcm_block_size(self) -> int:
        """The unit in which requests load and save."""
        return math.lcm(*self.block_sizes)

    @property
    def alignment(self) -> int:
        """The unit in which requests hit."""
        return self.hash_block_size if self.partial_hits else self.lcm_block_size

    @property
    def has_states(self) -> bool:
        """Whether the model has state groups."""
        return any(group.is_state for group in self.groups)

    @property
    def has_drafts(self) -> bool:
        """Whether the model has groups of a draft model."""
        return any(group.proof_tokens for group in self.groups)

    @property
    def job_tokens(self) -> int:
        """How many tokens a job may have at most, by default a part of what staging can hold."""
        if self.max_job_tokens is not None:
            return self.max_job_tokens
        topology = self.topology
        ranks, groups = range(topology.num_ranks), range(len(self.groups))
        num_values = max(len(topology.parts_held(g, rank)) for g in groups for rank in ranks)
        return max(1, 16 // num_values) * self.lcm_block_size

    @property
    def pin_budget(self) -> int:
        """How many blocks jobs may hold at once; one unit is allowed in any case."""
        unit_blocks = sum(
            (self.lcm_block_size + group.proof_tokens) // group.block_size for group in self.groups
        )
        budget = self.num_blocks if self.max_pinned_blocks is None else self.max_pinned_blocks
        return max(budget, unit_blocks)

    def reusable_state_token(self, num_tokens: int, unit: int) -> int:
        """Return the last multiple of ``unit`` at which a repetition of the tokens may resume.

        With a draft model the unit above has to be matched as well.
        """
        if self.has_drafts:
            return max(0, num_tokens // unit * unit - unit)
        return (num_tokens - 1) // unit * unit


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step did and cost: reads are those of the pool during the step, per request.

    ``num_tokens`` is what was scheduled, ``num_computed`` what was there before.
    """

    num_tokens: dict[str, int]
    num_computed: dict[str, int]
    metadata_bytes: int
    num_stores: int
    num_loads: int
    hash_reads: dict[str, list[range]]
    block_reads: dict[str, list[tuple[int, int, int]]]
    num_list_reads: int
    """How often the lists of all hashes, which are for lookups, were read to decide the step."""

    @property
    def is_poll(self) -> bool:
        """Whether nothing was computed: the engine only waited for the pool."""
        return not self.num_tokens


class ManualClock:
    """Time that passes only when a test says so, in seconds."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s
