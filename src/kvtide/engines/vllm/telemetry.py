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

COUNTERS: Mapping[str, str] = {
    "saved_tokens": "Tokens whose KV cache was written to the store or was found there.",
    "saved_chunks": "Chunks written to the store.",
    "saved_bytes": "Bytes written to the store.",
    "present_chunks": "Chunks that were to be written and were in the store already.",
    "refused_chunks": "Chunks not written because a budget or the store was full.",
    "failed_saves": "Chunks whose write failed.",
    "lookups": "Requests looked up in the store.",
    "lookup_keys": "Keys asked for by lookups.",
    "lookup_misses": "Lookups that found nothing.",
    "lookup_timeouts": "Lookups whose answer came too late and was taken as a miss.",
    "hit_tokens": "Tokens found in the store and promised to the engine.",
    "loaded_tokens": "Tokens whose KV cache was loaded from the store.",
    "loaded_chunks": "Chunks loaded from the store.",
    "loaded_bytes": "Bytes loaded from the store.",
    "failed_loads": "Loads that were reported as failed and recomputed.",
    "invalid_chunks": "Chunks read from the store whose content did not verify.",
    "store_errors": "Store calls that failed as a whole.",
}
"""The counters by name, with what they count. Others may be sent; they are logged as they are."""

Number = int | float


class KVTideStats(KVConnectorStats):  # type: ignore[misc]
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


class KVTidePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
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
