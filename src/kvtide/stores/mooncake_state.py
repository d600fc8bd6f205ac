"""What a pool's folder says of it: settings and processes, in ``pool.json`` and pid files."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

from kvtide.errors import ConfigError
from kvtide.stores.mooncake_programs import PoolSettings
from kvtide.stores.processes import ProcessId

PROGRAMS = ("master", "owner")
"""What a pool consists of, in the order in which they start."""
_VERSION = 1
_MOST = 1 << 60


class ProgramState(Enum):
    """What one of the two programs does."""

    RUNS = "runs"
    PAUSED = "paused"
    """A signal stopped it, and whoever waits for it hangs."""
    DEAD = "dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
    """A pool that was started: its settings, and the processes as they were started."""

    settings: PoolSettings
    master: ProcessId | None = None
    owner: ProcessId | None = None
    owner_port: int = 0

    @property
    def processes(self) -> dict[str, ProcessId]:
        """Those that were started, by their names."""
        both = {"master": self.master, "owner": self.owner}
        return {name: process for name, process in both.items() if process is not None}

    def programs(self) -> dict[str, ProgramState]:
        """Return what each program does now."""
        found = dict.fromkeys(PROGRAMS, ProgramState.DEAD)
        for name, process in self.processes.items():
            if process.is_alive():
                paused = process.is_stopped()
                found[name] = ProgramState.PAUSED if paused else ProgramState.RUNS
        return found

    def is_dead(self) -> bool:
        """Whether nothing of it runs any more."""
        return not any(process.is_alive() for process in self.processes.values())

    def save(self, folder: Path) -> None:
        """Write the files, each replaced as a whole."""
        text = json.dumps({"version": _VERSION} | asdict(self), indent=2)
        _replace(folder / "pool.json", text + "\n")
        for name, process in self.processes.items():
            _replace(folder / f"{name}.pid", f"{process.pid}\n")

    @classmethod
    def load(cls, folder: Path) -> PoolState | None:
        """Read what was saved in ``folder``, if anything was.

        Raises:
            ConfigError: it cannot be read, or is not what :meth:`save` writes.
        """
        path = folder / "pool.json"
        try:
            return cls._parse(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"{path} cannot be read ({error!r}): end the processes whose pids are in the files"
                " *.pid beside it, if they are a pool's, and remove it"
            ) from error

    @classmethod
    def _parse(cls, text: str) -> PoolState:
        data = json.loads(text)
        if data.pop("version") != _VERSION:
            raise ValueError("another version of kvtide wrote it")
        data["settings"] = PoolSettings(**data["settings"])
        for name in PROGRAMS:
            data[name] = ProcessId(**data[name]) if data[name] else None
        state = cls(**data)
        numbers = [state.settings.port, state.settings.metrics_port, state.settings.segment_bytes]
        for process in state.processes.values():
            numbers += [process.pid, process.start_ticks]
        if not all(type(number) is int and 0 < number < _MOST for number in numbers):
            raise ValueError("what should be a number is none, or none that can be")
        return state

    @staticmethod
    def remove(folder: Path) -> None:
        """Remove the files; the logs stay."""
        for name in ("pool.json", *(f"{name}.pid" for name in PROGRAMS)):
            (folder / name).unlink(missing_ok=True)


def _replace(path: Path, text: str) -> None:
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)
