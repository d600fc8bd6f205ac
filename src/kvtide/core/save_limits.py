"""What an engine of this role saves, and what saving may hold at once."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtide.core.back_off import Delays


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """Which tokens an engine of this role saves.

    The last ``num_unsettled_tokens`` that are computed are left for later: a draft model of several
    modules may write their KV cache once more.
    """

    prefill: bool = True
    decode: bool = False
    num_unsettled_tokens: int = 0

    @property
    def any(self) -> bool:
        """Whether anything is saved at all."""
        return self.prefill or self.decode


@dataclass(frozen=True, slots=True)
class SaveLimits:
    """What saving may hold at once, and how it waits after a failure.

    ``max_pinned_blocks`` bounds the engine's blocks that jobs hold; ``max_job_tokens`` bounds one
    job, and ``max_open_tokens`` all that have not ended: what lies in a worker's staging memory.
    Of a request that decodes a job has ``decode_job_tokens`` or more, down to whole units, but for
    the rest at its end.
    """

    max_pinned_blocks: int
    max_job_tokens: int
    max_open_tokens: int = 1 << 62
    delays: Delays = field(default_factory=Delays)
    decode_job_tokens: int = 0
