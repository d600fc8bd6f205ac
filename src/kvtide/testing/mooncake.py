"""A real Mooncake pool for tests: a master and an owner on loopback, to be killed and paused."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from kvtide.errors import StoreOpenError
from kvtide.stores.mooncake_metrics import MasterMetrics, read_metrics
from kvtide.stores.mooncake_package import program_environment
from kvtide.stores.mooncake_programs import (
    PoolSettings,
    master_command,
    owner_command,
    wait_for_master,
    wait_for_segment,
)
from kvtide.stores.ports import free_ports
from kvtide.stores.processes import ProcessId
from kvtide.testing.guarded import GuardedPrograms

_NUM_TRIES = 3
"""Somebody may take a port between our finding it free and the master's listening."""


class MooncakePool:
    """A Mooncake master and an owner of memory on free ports, for as long as a ``with`` lasts.

    Both are ended on the way out, and also when the test's own process is killed. ``lease_ms`` is
    how long a key that was read or asked for can be neither evicted nor removed; ``master_flags``
    are other flags of ``mooncake_master`` without their dash, such as ``{"client_ttl": 1}``, the
    seconds after which a dead owner's segment is given up. Logs are in ``folder``, a temporary
    one unless given.

    Methods may be called from any thread, but not two at a time that concern the same process.

    Raises:
        StoreOpenError: the package or a library is missing, or a program did not start; the
            message says what to install, or has the end of the log.
    """

    def __init__(
        self,
        *,
        segment_bytes: int = 64 << 20,
        lease_ms: int = 10_000,
        master_flags: Mapping[str, str | int] | None = None,
        folder: Path | None = None,
    ) -> None:
        self._settings = PoolSettings(
            segment_bytes=segment_bytes, lease_ms=lease_ms, master_flags=dict(master_flags or {})
        )
        self._given_folder = folder
        self._folder = folder or Path()
        self._programs: GuardedPrograms | None = None
        self._master: ProcessId | None = None
        self._owner: ProcessId | None = None
        self._owner_port = 0

    def __enter__(self) -> Self:
        if self._programs is not None:
            raise StoreOpenError("the pool was started before: make another")
        to_remove = None
        if self._given_folder is None:
            to_remove = self._folder = Path(tempfile.mkdtemp(prefix="kvtide-mooncake-"))
        self._programs = GuardedPrograms(program_environment(), to_remove)
        try:
            self._start_somewhere()
            self.start_owner()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        states = ", ".join(
            f"{name} {'runs' if process and process.is_alive() else 'is down'}"
            for name, process in (("master", self._master), ("owner", self._owner))
        )
        return f"<MooncakePool {self.url}: {states}>"

    @property
    def host(self) -> str:
        """The address that both listen on."""
        return self._settings.host

    @property
    def port(self) -> int:
        """The master's port."""
        return self._settings.port

    @property
    def metrics_port(self) -> int:
        """The port of the master's metrics."""
        return self._settings.metrics_port

    @property
    def url(self) -> str:
        """The URL under which a store opens the pool; parameters may be appended."""
        return self._settings.url

    @property
    def master_log(self) -> Path:
        """What the master said."""
        return self._folder / "master.log"

    @property
    def owner_log(self) -> Path:
        """What the owners said, one after another."""
        return self._folder / "owner.log"

    def metrics(self) -> MasterMetrics:
        """Ask the master.

        Raises:
            StoreLostError: it does not answer.
        """
        return read_metrics(self.host, self.metrics_port)

    def start_master(self) -> None:
        """Start the master at its port, empty, and wait until it has the owner's segment again.

        An owner that lives mounts its segment anew within about two seconds; one that is dead or
        paused is not waited for.
        """
        self._start_master()
        owner = self._owner
        if owner is not None and owner.is_alive() and not owner.is_stopped():
            wait_for_segment(self._settings, owner, self._owner_port, self.owner_log)

    def kill_master(self) -> None:
        """Kill the master as a crash would, with all it knew; when this returns it is gone."""
        _required(self._master, "master").kill()

    def pause_master(self) -> None:
        """Let the master hang: connections stay open, and nothing is answered."""
        _required(self._master, "master").pause()

    def resume_master(self) -> None:
        """Let the master go on."""
        _required(self._master, "master").resume()

    def start_owner(self) -> None:
        """Start an owner with a fresh segment, and wait until the master has it.

        The segment of an owner that was killed stays with the master for its ``client_ttl``.
        """
        if self._owner is not None and self._owner.is_alive():
            raise StoreOpenError("the owner runs already: kill_owner() first")
        # A port of its own for each: the segment is named after it.
        [self._owner_port] = free_ports(1)
        command = owner_command(self._settings, self._owner_port)
        self._owner = self._started().start(command, self.owner_log)
        wait_for_segment(self._settings, self._owner, self._owner_port, self.owner_log)

    def kill_owner(self) -> None:
        """Kill the owner as a crash would, with its segment; when this returns it is gone."""
        _required(self._owner, "owner").kill()

    def pause_owner(self) -> None:
        """Let the owner hang: connections stay open, and nothing is transferred."""
        _required(self._owner, "owner").pause()

    def resume_owner(self) -> None:
        """Let the owner go on."""
        _required(self._owner, "owner").resume()

    def close(self) -> None:
        """End both processes and remove the temporary folder. Harmless when repeated."""
        if self._programs is not None:
            self._programs.close()

    def _start_somewhere(self) -> None:
        for tries_left in reversed(range(_NUM_TRIES)):
            port, metrics_port = free_ports(2)
            self._settings = replace(self._settings, port=port, metrics_port=metrics_port)
            try:
                self._start_master()
            except StoreOpenError:
                if not tries_left:
                    raise
            else:
                return

    def _start_master(self) -> None:
        if self._master is not None and self._master.is_alive():
            raise StoreOpenError("the master runs already: kill_master() first")
        self._master = self._started().start(master_command(self._settings), self.master_log)
        wait_for_master(self._settings, self._master, self.master_log)

    def _started(self) -> GuardedPrograms:
        if self._programs is None:
            raise StoreOpenError("the pool was not started: use it in a `with` statement")
        return self._programs


def _required(process: ProcessId | None, what: str) -> ProcessId:
    if process is None:
        raise StoreOpenError(f"the {what} was not started: use the pool in a `with` statement")
    return process
