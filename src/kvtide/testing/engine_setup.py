"""How a scripted engine is configured, what it records, and the time it lives in."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kvtide.core.admission import AdmissionLimits
from kvtide.core.back_off import Delays
from kvtide.core.saving import SavePolicy
from kvtide.runtime.limits import WorkerLimits
from kvtide.testing.engine_ranks import HookOrder

SMALL_STAGING = WorkerLimits(staging_bytes=256 << 10, load_staging_bytes=64 << 10, stage_wait_s=0.0)
"""Room for 64 values to write and 16 to read: small enough to fill up in a test."""


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """How the engine and the pool are configured; sizes in tokens and blocks.

    ``num_blocks`` counts the null block. ``tell_preemptions=False`` hides preemptions: a request
    comes back as a new one, and that is all the pool learns. ``report_delay`` holds what the ranks
    report back for so many steps and hands it over in one piece. ``grant_limit`` grants at most so
    many of the tokens that the pool promised. With ``threaded=False`` the pool does nothing until
    :meth:`~kvtide.testing.engine.ScriptedEngine.run_pool`.
    """

    num_blocks: int = 64
    block_sizes: tuple[int, ...] = (4,)
    max_tokens_per_step: int = 32
    max_running: int = 8
    num_ranks: int = 1
    num_drafts: int = 0
    order: HookOrder = HookOrder.SAVE_THEN_REPORT
    tell_preemptions: bool = True
    report_delay: int = 0
    grant_limit: int | None = None
    threaded: bool = False
    max_pinned_blocks: int | None = None
    max_job_tokens: int | None = None
    delays: Delays = field(default_factory=lambda: Delays(0.5, 4.0))
    lookup_timeout_s: float = 1.0
    admission: AdmissionLimits = field(default_factory=AdmissionLimits)
    saves: SavePolicy = field(default_factory=lambda: SavePolicy(decode=True))
    worker: WorkerLimits = SMALL_STAGING

    @property
    def hash_block_size(self) -> int:
        """The unit in which tokens are hashed."""
        return math.gcd(*self.block_sizes)

    @property
    def lcm_block_size(self) -> int:
        """The unit in which requests hit, load and save."""
        return math.lcm(*self.block_sizes)

    @property
    def pin_budget(self) -> int:
        """How many blocks jobs may hold at once; one unit is allowed in any case."""
        unit_blocks = sum(self.lcm_block_size // size for size in self.block_sizes)
        budget = self.num_blocks if self.max_pinned_blocks is None else self.max_pinned_blocks
        return max(budget, unit_blocks)


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
