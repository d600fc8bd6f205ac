"""The programs of a Mooncake pool: how they are called, and when they are ready.

The *master* knows which key lies where; an *owner* gives the pool a segment of its memory. A
segment dies with its owner, which is why it is a process of its own and not an engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvtide.errors import StoreLostError, StoreOpenError
from kvtide.stores.mooncake_metrics import MasterMetrics, read_metrics
from kvtide.stores.mooncake_package import mooncake_program
from kvtide.stores.ports import listens
from kvtide.stores.processes import ProcessId

MASTER, OWNER = "mooncake_master", "mooncake_client"
"""The names of the two programs in the package."""
START_TIMEOUT_S = 20.0
"""A master starts in 0.1 to 1.2 s and an owner in 0.1 s: one that takes this long hangs."""

_POLL_S = 0.02
_TAIL_LINES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """Where a pool of one master and one owner listens, and how much it holds."""

    host: str = "127.0.0.1"
    port: int = 50051
    metrics_port: int = 9003
    segment_bytes: int = 1 << 30
    lease_ms: int = 10_000
    """How long a key that was read or asked for cannot be evicted or removed."""
    master_flags: Mapping[str, str | int] = field(default_factory=dict)
    """Other flags of the master, without their dash."""

    @property
    def url(self) -> str:
        """The URL under which a store opens this pool."""
        return f"mooncake://{self.host}:{self.port}"


def master_command(settings: PoolSettings) -> list[str]:
    """Return the command line of the master.

    Raises:
        StoreOpenError: the package is not installed, or not whole.
    """
    flags: dict[str, str | int] = {
        "rpc_address": settings.host,
        "rpc_port": settings.port,
        "metrics_host": settings.host,
        "metrics_port": settings.metrics_port,
        "rpc_thread_num": 2,
        "enable_metric_reporting": "false",  # into the log, which would be little else
        "default_kv_lease_ttl": settings.lease_ms,
        **settings.master_flags,
    }
    return [mooncake_program(MASTER), *_written(flags)]


def owner_command(settings: PoolSettings, owner_port: int) -> list[str]:
    """Return the command line of an owner, whose own service is at ``owner_port``.

    Raises:
        StoreOpenError: the package is not installed, or not whole.
    """
    flags: dict[str, str | int] = {
        "host": segment_name(settings, owner_port),
        "port": owner_port,
        "global_segment_size": settings.segment_bytes,
        "master_server_address": f"{settings.host}:{settings.port}",
        "metadata_server": "P2PHANDSHAKE",
        "protocol": "tcp",
    }
    return [mooncake_program(OWNER), *_written(flags)]


def segment_name(settings: PoolSettings, owner_port: int) -> str:
    """Return the name under which the master has the segment of the owner at ``owner_port``.

    Without a port in its ``-host`` an owner invents one, and its segment could not be told from
    the one that a dead owner left behind.
    """
    return f"{settings.host}:{owner_port}"


def wait_for_master(
    settings: PoolSettings, master: ProcessId, log: Path, timeout_s: float = START_TIMEOUT_S
) -> MasterMetrics:
    """Wait until ``master`` itself serves both of its ports, and return its metrics.

    Raises:
        StoreOpenError: it ended, or the time is up; the message has the end of its log.
    """

    def ready() -> MasterMetrics | None:
        # Whose the port is matters: a master that finds it taken takes a second to give up.
        if not all(listens(master.pid, port) for port in (settings.port, settings.metrics_port)):
            return None
        return _answer(settings)

    return _wait_until(ready, master, log, "the Mooncake master", timeout_s)


def wait_for_segment(
    settings: PoolSettings,
    owner: ProcessId,
    owner_port: int,
    log: Path,
    timeout_s: float = START_TIMEOUT_S,
) -> MasterMetrics:
    """Wait until the master has the segment of ``owner``, and return its metrics.

    Raises:
        StoreOpenError: it ended, or the time is up; the message has the end of its log.
    """
    name = segment_name(settings, owner_port)

    def ready() -> MasterMetrics | None:
        metrics = _answer(settings)
        return metrics if metrics is not None and name in metrics.segments else None

    return _wait_until(ready, owner, log, "the owner of the pool's memory", timeout_s)


def log_tail(log: Path, num_lines: int = _TAIL_LINES) -> str:
    """Return where a log is and its last lines, as the end of a message."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:]
    except OSError:
        return f"; it has no log at {log}"
    return "\n".join([f"; the last lines of {log}:", *(f"  | {line[:300]}" for line in lines)])


def _wait_until(
    ready: Callable[[], MasterMetrics | None],
    process: ProcessId,
    log: Path,
    what: str,
    timeout_s: float,
) -> MasterMetrics:
    deadline = time.monotonic() + timeout_s
    while True:
        found = ready()
        if found is not None:
            return found
        if not process.is_alive():
            raise StoreOpenError(f"{what} ended{log_tail(log)}")
        if time.monotonic() > deadline:
            raise StoreOpenError(f"{what} was not ready within {timeout_s:g} s{log_tail(log)}")
        time.sleep(_POLL_S)


def _answer(settings: PoolSettings) -> MasterMetrics | None:
    try:
        return read_metrics(settings.host, settings.metrics_port)
    except StoreLostError:
        return None


def _written(flags: Mapping[str, str | int]) -> list[str]:
    return [f"-{name}={value}" for name, value in flags.items()]
