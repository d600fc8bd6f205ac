"""kvtide's counters in vLLM's own telemetry: its log line and its Prometheus endpoint.

Each process counts up in a snapshot of what happened since it was last asked; vLLM ships that to
the process that logs, where snapshots of one interval are added together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvtide.metrics import COUNTERS

Number = int | float


class KVTideStats(KVConnectorStats):
    """Counters since the last report; ``data`` is a flat mapping of names to numbers."""

    data: dict[str, Number]

    @classmethod
    def of(cls, counters: Mapping[str, Number]) -> KVTideStats:
        """Return a snapshot of ``counters``, leaving out those that are zero."""
        return cls(data={name: value for name, value in counters.items() if value})

    def reset(self) -> None:
        """Start a new interval."""
        self.data = {}

    def is_empty(self) -> bool:
        """Tell whether nothing was counted."""
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KVTideStats:
        """Return the sum of two snapshots. Neither changes: vLLM may keep both."""
        total = dict(self.data)
        for name, value in other.data.items():
            total[name] = total.get(name, 0) + value
        return KVTideStats(data=total)

    def reduce(self) -> dict[str, Number]:
        """Return what the engine's periodic log line shows: counters that moved, by name."""
        return {
            name: round(value, 3) if isinstance(value, float) else value
            for name, value in sorted(self.data.items())
            if value
        }


class KVTidePromMetrics(KVConnectorPromMetrics):
    """The counters as Prometheus counters ``vllm:kvtide_<name>``, one series per engine.

    The prefix is vLLM's own: it forgets its metrics by it when an engine is made anew.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """Register every counter, so that a scrape shows zeros before anything happened."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._series: dict[int, dict[str, Any]] = {engine: {} for engine in per_engine_labelvalues}
        for name, text in COUNTERS.items():
            counter = self._counter_cls(
                name=f"vllm:kvtide_{name}", documentation=text, labelnames=labelnames
            )
            for engine, values in per_engine_labelvalues.items():
                self._series[engine][name] = counter.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any] | None, engine_idx: int = 0) -> None:
        """Add one report. Unknown names, and values no counter takes, are left out."""
        series = self._series.get(engine_idx, {})
        for name, value in (transfer_stats_data or {}).items():
            if name in series and isinstance(value, (int, float)) and value > 0:
                series[name].inc(value)
