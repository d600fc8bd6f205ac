"""Retention: at which boundaries a later request may find everything it needs to resume.

Full attention keeps every chunk anyway. Window and state groups are worth storing only where some
boundary that is kept asks for them, so keeping fewer boundaries makes them sparse. The policy and
its words are vLLM's ``prefix_cache_retention_interval`` and ``replay_boundaries``.
"""

from __future__ import annotations

from dataclasses import dataclass


def replay_boundaries(num_prompt_tokens: int, unit: int, *, has_proof: bool) -> tuple[int, ...]:
    """Return where a later request that begins with the same prompt resumes.

    The same prompt again resumes below its last token, a longer one may resume at its end; the two
    differ where the prompt ends on a multiple of ``unit`` tokens. With proof tokens each lies one
    unit lower, since the unit above must be matched too. (As in vLLM's ``replay_boundaries``.)
    """
    resend = (num_prompt_tokens - 1) // unit * unit
    if not has_proof:
        return (resend,) if resend > 0 else ()
    extension = num_prompt_tokens // unit * unit
    lower = {resend - unit, extension - unit}
    return tuple(sorted(boundary for boundary in lower if boundary > 0))


@dataclass(frozen=True, slots=True)
class Retention:
    """Which multiples of ``unit`` tokens are kept as boundaries.

    ``interval`` ``None`` keeps all of them, a positive multiple of ``unit`` one per so many tokens,
    0 none; any but ``None`` also keeps the replay boundaries of the prompt.

    Raises:
        ValueError: the interval is negative or no multiple of the unit.
    """

    unit: int
    interval: int | None = None

    def __post_init__(self) -> None:
        if self.interval is not None and (self.interval < 0 or self.interval % self.unit):
            raise ValueError(
                f"the retention interval {self.interval} must be a multiple of {self.unit} tokens"
            )

    @property
    def step(self) -> int:
        """The distance of the boundaries kept along the whole request; 0 where there are none."""
        return self.unit if self.interval is None else self.interval

    def replayed(self, num_prompt_tokens: int | None, *, has_proof: bool) -> tuple[int, ...]:
        """Return the boundaries kept for the sake of the prompt, beside the multiples of ``step``.

        ``num_prompt_tokens`` ``None``: the prompt is not known.
        """
        if self.interval is None or num_prompt_tokens is None:
            return ()
        return replay_boundaries(num_prompt_tokens, self.unit, has_proof=has_proof)
