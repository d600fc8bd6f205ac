"""Room: whether an engine can still compute, whatever it has loaded.

A request that waits for a load, or with what it brought, holds blocks and cannot be preempted.
vLLM admits such requests with regard to what the others still need, but it takes blocks that a
window has left behind for blocks that are there, and forgets copies of states: in a small cache all
of them may wait for each other, for ever. Full attention alone it counts right.
"""

from __future__ import annotations

from kvtide.core.coordinator import Coordinator


class Room:
    """Counts what requests want to be computed to their ends, once they hold loaded blocks.

    The engine has ``num_blocks`` blocks, one of them the null block, and computes at most
    ``max_step_tokens`` in a step.
    """

    def __init__(self, coordinator: Coordinator, num_blocks: int, max_step_tokens: int) -> None:
        self._coordinator = coordinator
        self._num_usable = num_blocks - 1
        self._max_step_tokens = max_step_tokens
        self._is_counted_right = all(group.is_downward_closed for group in coordinator.groups)
        self._wanted: dict[str, int] = {}

    @property
    def num_wanted_blocks(self) -> int:
        """How many blocks those want that load, or have loaded and do not compute yet."""
        return sum(self._wanted.values())

    def is_enough_for(self, num_tokens: int) -> bool:
        """Tell whether one more request may load; a single one always may."""
        if self._is_counted_right or not self._wanted:
            return True
        return self.num_wanted_blocks + self._wanted_by(num_tokens) <= self._num_usable

    def enter(self, request_id: str, num_tokens: int) -> None:
        """Count a request of ``num_tokens`` from the start of its load on."""
        self._wanted[request_id] = self._wanted_by(num_tokens)

    def leave(self, request_id: str) -> None:
        """Count it no more: it computes, or has given its blocks back."""
        self._wanted.pop(request_id, None)

    def _wanted_by(self, num_tokens: int) -> int:
        return self._coordinator.blocks_to_compute(num_tokens, self._max_step_tokens)
