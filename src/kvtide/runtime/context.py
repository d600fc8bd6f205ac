"""What the three threads of one rank share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtide.core.topology import RankRole
from kvtide.runtime.bad_keys import BadKeys
from kvtide.runtime.ledger import Ledger
from kvtide.runtime.limits import WorkerLimits
from kvtide.runtime.memory import BlockMemory
from kvtide.runtime.prefixes import PrefixDatabases
from kvtide.runtime.values import TAGGED, ValueFormat
from kvtide.stores.base import Store


@dataclass(frozen=True, slots=True)
class RankContext:
    """One rank's memory, store, open jobs and bounds, what it holds, and its values' format.

    ``role`` and ``memory`` agree in how many parts of a block there are. Deadlines are read off
    ``clock``. With ``threaded=False`` no thread is ever started.
    """

    memory: BlockMemory
    store: Store
    databases: PrefixDatabases
    limits: WorkerLimits
    role: RankRole
    values: ValueFormat = TAGGED
    clock: Callable[[], float] = time.monotonic
    threaded: bool = True
    ledger: Ledger = field(default_factory=Ledger)
    bad_keys: BadKeys = field(init=False)

    def __post_init__(self) -> None:
        layouts = self.memory.layout.groups
        num_values = [group.values_per_block for group in layouts]
        assert num_values == [len(parts) for parts in self.role.parts], f"{self.role} {layouts}"
        object.__setattr__(self, "bad_keys", BadKeys(self.limits.max_bad_keys, self.clock))

    @property
    def row_bytes(self) -> list[int]:
        """What the values of one block of each group take of a slab, one row each."""
        return [
            self.values.row_bytes(group.payload_bytes) * group.values_per_block
            for group in self.memory.layout.groups
        ]
