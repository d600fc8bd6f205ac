"""The counters as a JSON file, for people and scripts that watch an engine from outside."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

_MIN_INTERVAL_S = 0.2

logger = logging.getLogger(__name__)


class StatsFile:
    """Writes counters to ``path``, whole or not at all, at most five times a second.

    Writing is best effort: a failure is logged once and never reaches the engine.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._last: Mapping[str, int] = {}
        self._next_s = 0.0
        self._failed = False

    def write(self, counters: Mapping[str, int], now_s: float) -> None:
        """Write ``counters`` if they changed and the last write is long enough ago."""
        if now_s < self._next_s or counters == self._last:
            return
        self._next_s = now_s + _MIN_INTERVAL_S
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            temporary.write_text(json.dumps(dict(counters), sort_keys=True), encoding="utf-8")
            temporary.replace(self._path)
        except OSError as error:
            if not self._failed:
                logger.warning("kvtide cannot write its counters to %s: %s", self._path, error)
            self._failed = True
            return
        self._last = dict(counters)
