"""Back-off: how long to leave something alone that failed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Delays:
    """The first wait after a failure, which doubles with each further one, up to ``max_s``."""

    first_s: float = 0.5
    max_s: float = 30.0


@dataclass(slots=True)
class BackOff:
    """One thing's failures in a row. Times are seconds of the caller's steady clock."""

    delays: Delays
    retry_at_s: float = 0.0
    _delay_s: float = 0.0

    @property
    def has_failed(self) -> bool:
        """Whether the last attempt failed, however long ago."""
        return self._delay_s > 0

    def fail(self, now_s: float) -> None:
        """Note a failure: the next attempt waits, twice as long as the one before it.

        Failures during a wait are of one wave (what was under way when it began) and count once.
        """
        if self.is_waiting(now_s):
            return
        self._delay_s = min(self.delays.max_s, self._delay_s * 2 or self.delays.first_s)
        self.retry_at_s = now_s + self._delay_s

    def succeed(self) -> None:
        """Note a success: the next failure waits the first delay again; a wait under way stays."""
        self._delay_s = 0.0

    def is_waiting(self, now_s: float) -> bool:
        """Tell whether it is too early for another attempt."""
        return now_s < self.retry_at_s
