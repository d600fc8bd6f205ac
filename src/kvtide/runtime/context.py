"""What the three threads of one rank share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtide.runtime.bad_keys import BadKeys
from kvtide.runtime.ledger import Ledger
from kvtide.runtime.limits import WorkerLimits
from kvtide.runtime.memory import BlockMemory
from kvtide.runtime.prefixes import PrefixDatabases
from kvtide.runtime.values import TAGGED, ValueFormat
from kvtide.stores.base import Store


@dataclass(frozen=True, slots=True)
class StoreShare:
    """Which chunks of a job this rank stores.

    ``put_step`` ranks hold the same bytes, and this one stores the chunks whose absolute index is
    ``put_step_rank`` modulo ``put_step``.
    """

    put_step: int = 1
    put_step_rank: int = 0


@dataclass(frozen=True, slots=True)
class RankContext:
    """One rank's memory, store, open jobs and bounds, and the format of its values.

    Deadlines are read off ``clock``. With ``threaded=False`` no thread is ever started.
    """

    memory: BlockMemory
    store: Store
    databases: PrefixDatabases
    limits: WorkerLimits
    values: ValueFormat = TAGGED
    clock: Callable[[], float] = time.monotonic
    threaded: bool = True
    ledger: Ledger = field(default_factory=Ledger)
    bad_keys: BadKeys = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bad_keys", BadKeys(self.limits.max_bad_keys))

    @property
    def row_bytes(self) -> list[int]:
        """What a value of each group takes of a slab."""
        return [self.values.row_bytes(group.payload_bytes) for group in self.memory.layout.groups]
