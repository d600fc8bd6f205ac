"""The counters as a JSON file, for people and scripts that watch an engine from outside."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path

MIN_INTERVAL_S = 0.2
_LAST_WORD_S = 1.0

logger = logging.getLogger(__name__)


def path_of(stats_path: str, engine_index: int) -> str:
    """Return the file of one of several data parallel engines that have one configuration."""
    return f"{stats_path}.dp{engine_index}" if stats_path and engine_index else stats_path


class StatsFile:
    """Writes counters to ``path``, whole or not at all, at most five times a second.

    A thread of its own writes, so that a slow file system delays no step. Best effort: a failure
    is logged once and never reaches the engine.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._changed = threading.Condition()
        self._latest: dict[str, int] | None = None
        self._next_s = 0.0
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._has_failed = False

    def is_due(self, now_s: float) -> bool:
        """Tell whether :meth:`write` would take counters now; asked before they are gathered."""
        return now_s >= self._next_s

    def write(self, counters: Mapping[str, int], now_s: float) -> None:
        """Let ``counters`` be written soon."""
        self._next_s = now_s + MIN_INTERVAL_S
        with self._changed:
            self._latest = dict(counters)
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="kvtide-statistics", daemon=True
                )
                self._thread.start()

    def close(self, counters: Mapping[str, int]) -> None:
        """Write the last word and stop, unless that takes longer than a second."""
        self.write(counters, 0.0)
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(_LAST_WORD_S)

    def _run(self) -> None:
        written: dict[str, int] = {}
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._latest is not None or self._is_closed)
                counters, self._latest = self._latest, None
            if counters is None:
                return
            if counters != written:
                written = counters
                self._write(counters)

    def _write(self, counters: Mapping[str, int]) -> None:
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            temporary.write_text(json.dumps(counters, sort_keys=True), encoding="utf-8")
            temporary.replace(self._path)
        except OSError as error:
            if not self._has_failed:
                logger.warning("kvtide cannot write its counters to %s: %s", self._path, error)
            self._has_failed = True
