"""The budgets and deadlines of one rank's transfers: nothing queued or in flight lacks one."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvtide.errors import ConfigError

MIB = 1 << 20
MAY_BE_ZERO = ("stage_wait_s", "flush_timeout_s")


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Bounds of a :class:`~kvtide.runtime.worker.PoolWorker`; every one must be positive.

    ``stage_wait_s`` is how long a job may wait for room in staging while it holds its blocks (0
    allowed). ``save_timeout_s`` runs from the step that brought the job, ``load_timeout_s``
    from there or from the last part that any load proved.
    A store call carries at most ``max_batch_keys`` and ``max_batch_bytes``, but always one value.
    """

    staging_bytes: int = 256 * MIB
    load_staging_bytes: int = 256 * MIB
    stage_wait_s: float = 0.1
    save_timeout_s: float = 30.0
    load_timeout_s: float = 3.0
    flush_timeout_s: float = 4.0
    max_queued_puts: int = 256
    max_queued_loads: int = 1024
    max_batch_keys: int = 512
    max_batch_bytes: int = 64 * MIB
    max_bad_keys: int = 65536

    def __post_init__(self) -> None:
        faults = [
            f"{item.name} must be positive, not {getattr(self, item.name)}"
            for item in fields(self)
            if getattr(self, item.name) <= 0
            and not (item.name in MAY_BE_ZERO and getattr(self, item.name) == 0)
        ]
        if faults:
            raise ConfigError(faults)
