"""kvtide's counters through vLLM's own telemetry."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvtide.engines.vllm.telemetry import COUNTERS, KVTidePromMetrics, KVTideStats


def metrics_in(registry: CollectorRegistry, engines: int = 1) -> KVTidePromMetrics:
    """Register the metrics the way vLLM does, in a registry of one's own."""

    def counter(**arguments: Any) -> Counter:
        return Counter(**arguments, registry=registry)

    return KVTidePromMetrics(
        SimpleNamespace(kv_transfer_config=None),
        {Counter: counter, Gauge: Gauge, Histogram: Histogram},
        ["model_name", "engine"],
        {number: ["m", str(number)] for number in range(engines)},
    )


def value(registry: CollectorRegistry, name: str, engine: int = 0) -> float | None:
    """Return a counter's value as a scrape shows it."""
    labels = {"model_name": "m", "engine": str(engine)}
    return registry.get_sample_value(f"vllm:kvtide_{name}_total", labels)


def test_snapshots_add_up_in_any_order_and_change_nothing() -> None:
    """Adding is commutative, and leaves both snapshots as they were."""
    first, second = KVTideStats.of({"saved_bytes": 3, "lookups": 1}), KVTideStats.of({"lookups": 2})
    assert first.aggregate(second).data == second.aggregate(first).data
    assert first.aggregate(second).reduce() == {"lookups": 3, "saved_bytes": 3}
    assert first.data == {"saved_bytes": 3, "lookups": 1}


def test_nothing_counted_is_empty() -> None:
    """Zeros are left out, and a reset snapshot is empty."""
    assert KVTideStats.of({"saved_bytes": 0}).is_empty()
    assert KVTideStats().is_empty()
    stats = KVTideStats.of({"saved_bytes": 1})
    assert not stats.is_empty()
    stats.reset()
    assert stats.is_empty()


def test_a_snapshot_travels_between_processes() -> None:
    """It pickles, its payload is plain data, and the payload makes it again."""
    stats = KVTideStats.of({"saved_bytes": 5, "load_seconds": 0.25})
    assert pickle.loads(pickle.dumps(stats)).data == stats.data
    payload = stats.to_dict() if hasattr(stats, "to_dict") else stats.data
    assert KVTideStats(data=payload).reduce() == {"load_seconds": 0.25, "saved_bytes": 5}


def test_every_counter_is_there_before_anything_happened() -> None:
    """A first scrape shows all counters, documented, at zero."""
    registry = CollectorRegistry()
    metrics_in(registry)
    assert all(value(registry, name) == 0 for name in COUNTERS)


def test_reports_add_up_per_engine() -> None:
    """Each report adds to the series of the engine it came from."""
    registry = CollectorRegistry()
    metrics = metrics_in(registry, engines=2)
    metrics.observe({"saved_bytes": 10}, 1)
    metrics.observe({"saved_bytes": 5, "lookups": 1}, 1)
    assert value(registry, "saved_bytes", 1) == 15
    assert value(registry, "saved_bytes", 0) == 0


def test_strange_reports_are_survived() -> None:
    """Unknown names and engines, no report and values no counter takes raise nothing."""
    registry = CollectorRegistry()
    metrics = metrics_in(registry)
    for report in (None, {}, {"unknown": 1}, {"lookups": -1}, {"lookups": "many"}):
        metrics.observe(report, 0)
        metrics.observe(report, 7)
    assert value(registry, "lookups") == 0


def test_vllm_logs_a_line_of_what_moved() -> None:
    """Through vLLM's own logger, the snapshots of an interval become one line."""
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging

    logging = KVConnectorLogging(None)
    logging.connector_cls = SimpleNamespace(
        build_kv_connector_stats=lambda data: KVTideStats(data=data)
    )
    lines: list[str] = []
    for _ in range(2):
        logging.observe({"saved_bytes": 4, "lookups": 1})
    logging.log(lambda text, arguments: lines.append(text % arguments))
    logging.log(lambda text, arguments: lines.append(text % arguments))
    assert lines == ["KV Transfer metrics: lookups=2, saved_bytes=8"]
