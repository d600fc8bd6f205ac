"""A Mooncake pool on this machine that runs until it is told to end: for development and tests.

It is one master and one owner of memory, and a *folder* that says which they are. A process is
known by its pid together with when and in which boot it started, so that whoever has got the pid
since is neither believed nor ended. Who changes the pool holds a lock on the folder.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvtide.errors import ConfigError, StoreLostError, StoreOpenError
from kvtide.stores.mooncake_checks import differences, folder_fault, master_faults, owner_faults
from kvtide.stores.mooncake_metrics import MasterMetrics, read_metrics
from kvtide.stores.mooncake_package import program_environment
from kvtide.stores.mooncake_programs import (
    PoolSettings,
    master_command,
    owner_command,
    segment_name,
    wait_for_master,
    wait_for_segment,
)
from kvtide.stores.mooncake_state import PROGRAMS, PoolState, ProgramState
from kvtide.stores.ports import free_ports
from kvtide.stores.processes import start_detached

_GRACE_S = 5.0
"""A master takes a second to end, an owner none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    """A pool that was started, as it is now."""

    folder: Path
    state: PoolState
    programs: Mapping[str, ProgramState]
    metrics: MasterMetrics | None
    """``None`` where the master does not answer."""

    def is_healthy(self) -> bool:
        """Whether engines can use it."""
        return not self.faults()

    def faults(self) -> list[str]:
        """Return what is wrong with it, each with what to do."""
        dead = [name for name, found in self.programs.items() if found is ProgramState.DEAD]
        logs = " and ".join(str(log_of(self.folder, name)) for name in dead or PROGRAMS)
        if len(dead) == len(PROGRAMS):
            return [f"both processes are gone (see {logs}): `kvtide pool up` starts them anew"]
        faults = [
            f"the {name} is dead (see {logs}): `kvtide pool up` starts another, without what was"
            " stored"
            for name in dead
        ]
        faults += _paused_faults(self.state, self.programs)
        if faults:
            return faults
        if self.metrics is None:
            return [f"the master does not answer (see {logs}): `kvtide pool down` ends it"]
        if segment_name(self.state.settings, self.state.owner_port) not in self.metrics.segments:
            return ["the master does not have the owner's memory yet: ask again in two seconds"]
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStart:
    """What came of starting a pool."""

    settings: PoolSettings
    """Those with which it runs."""
    started: list[str]
    """Which programs were started; none where all of it ran already."""


class LocalPool:
    """The pool of one folder, which need not exist yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.expanduser().absolute()

    def __repr__(self) -> str:
        return f"<LocalPool in {self.folder}>"

    def up(self, given: Mapping[str, Any]) -> PoolStart:
        """Start the pool, and wait until it can be used.

        ``given`` are fields of :class:`PoolSettings`; the others have their defaults. Of a pool
        that runs in part the rest is started, with the settings that it has. Where all of it runs
        there is nothing to do.

        Raises:
            ConfigError: it cannot run as it was asked for, or runs with other settings; every
                fault is listed.
            StoreOpenError: Mooncake is not installed, or a program did not start. What was started
                is ended again, and the message has the end of the log.
        """
        wanted = PoolState(settings=replace(PoolSettings(), **given))
        fault = folder_fault(self.folder)
        if fault is not None:
            raise ConfigError([fault, *_faults_of(wanted)])
        with self._locked():
            state = PoolState.load(self.folder)
            if state is None or state.is_dead():
                state = wanted
            faults = [*differences(state.settings, given), *_faults_of(state)]
            if faults:
                raise ConfigError(faults)
            try:
                started = self._start_missing(state)
            except OSError as error:
                raise StoreOpenError(
                    f"the pool in {self.folder} cannot be started: {error}"
                ) from error
            return PoolStart(settings=state.settings, started=started)

    def down(self) -> list[str]:
        """End the pool; return which programs were ended, ``[]`` where nothing ran.

        The owner's memory is given back, and what was stored is gone; the logs stay.

        Raises:
            ConfigError: the folder's ``pool.json`` cannot be read.
        """
        if not (self.folder / "pool.json").exists():
            return []
        with self._locked():
            state = PoolState.load(self.folder)
            if state is None:
                return []
            ended = [name for name, process in state.processes.items() if process.is_alive()]
            for name in reversed(ended):
                state.processes[name].stop(_GRACE_S)
            PoolState.remove(self.folder)
            return ended

    def status(self) -> PoolStatus | None:
        """Return how the pool is; ``None`` where none was started, or it was ended.

        Raises:
            ConfigError: the folder's ``pool.json`` cannot be read.
        """
        state = PoolState.load(self.folder)
        if state is None:
            return None
        programs = state.programs()
        metrics = None
        if programs["master"] is ProgramState.RUNS:  # who else answers at its port is not it
            try:
                metrics = read_metrics(state.settings.host, state.settings.metrics_port)
            except StoreLostError:
                metrics = None
        return PoolStatus(folder=self.folder, state=state, programs=programs, metrics=metrics)

    def _start_missing(self, state: PoolState) -> list[str]:
        anew = state.is_dead()
        started: list[str] = []
        try:
            for name, found in state.programs().items():
                if found is ProgramState.DEAD:
                    state = self._start(name, state, anew=anew)
                    started.append(name)
                self._wait_for(name, state)
        except BaseException:
            for name in reversed(started):
                state.processes[name].stop(_GRACE_S)
            if anew:
                PoolState.remove(self.folder)
            raise
        return started

    def _start(self, name: str, state: PoolState, *, anew: bool) -> PoolState:
        """Start one program, and write down that it runs before anything can fail."""
        log = log_of(self.folder, name)
        if anew:
            log.unlink(missing_ok=True)
        if name == "owner":
            # A port of its own for each: the segment is named after it.
            [port] = free_ports(1, state.settings.host)
            process = start_detached(
                owner_command(state.settings, port), log, program_environment()
            )
            state = replace(state, owner=process, owner_port=port)
        else:
            process = start_detached(master_command(state.settings), log, program_environment())
            state = replace(state, master=process)
        try:
            state.save(self.folder)
        except BaseException:
            process.kill()
            raise
        return state

    def _wait_for(self, name: str, state: PoolState) -> None:
        process, log = state.processes[name], log_of(self.folder, name)
        if name == "owner":
            wait_for_segment(state.settings, process, state.owner_port, log)
        else:
            wait_for_master(state.settings, process, log)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the folder's lock: the second of two commands waits for the first."""
        try:
            file = (self.folder / "lock").open("w", encoding="ascii")
        except OSError as error:
            raise ConfigError(
                f"the folder {self.folder} cannot be written ({error.strerror}): run this as the"
                " user who started the pool"
            ) from error
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def log_of(folder: Path, name: str) -> Path:
    """Return the path of the log of ``"master"`` or ``"owner"``."""
    return folder / f"{name}.log"


def _paused_faults(state: PoolState, programs: Mapping[str, ProgramState]) -> list[str]:
    return [
        f"the {name} is paused: `kill -CONT {state.processes[name].pid}` lets it go on"
        for name, found in programs.items()
        if found is ProgramState.PAUSED
    ]


def _faults_of(state: PoolState) -> list[str]:
    """Return what stands against starting what is missing of ``state``."""
    programs = state.programs()
    faults = _paused_faults(state, programs)
    if programs["master"] is ProgramState.DEAD:
        faults += master_faults(state.settings)
    if programs["owner"] is ProgramState.DEAD:
        faults += owner_faults(state.settings)
    return faults
