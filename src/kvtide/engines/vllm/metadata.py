"""What travels between kvtide's two halves inside vLLM: a step's plan, the reports, the layout."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvtide.core.jobs import JobReport, StepPlan
from kvtide.core.layout import StoreLayout
from kvtide.core.topology import Topology


@dataclass
class KVTideMetadata(KVConnectorMetadata):
    """One step's plan, from the scheduler to every worker."""

    plan: StepPlan = field(default_factory=StepPlan)


@dataclass
class KVTideWorkerMetadata(KVConnectorWorkerMetadata):
    """One rank's report, or several merged; vLLM calls ``aggregate`` in any order."""

    report: JobReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVTideWorkerMetadata:
        """Return the report of both."""
        assert isinstance(other, KVTideWorkerMetadata)
        return KVTideWorkerMetadata(self.report.merge(other.report))


@dataclass
class KVTideHandshake(KVConnectorHandshakeMetadata):
    """What the scheduler must know of a rank before a key can be named."""

    layout: StoreLayout
    rank: int = 0
    topology: Topology = field(default_factory=lambda: Topology.undivided(1))
