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
from kvtide.core.topology import WHOLE, Part
from kvtide.engines.vllm.ranks import Sharing


@dataclass
class KVTideMetadata(KVConnectorMetadata):
    """One step's plan, from the scheduler to every worker.

    ``must_rest`` says that the step computes nothing while requests wait for the pool, in an engine
    whose loop does not rest by itself.
    """

    plan: StepPlan = field(default_factory=StepPlan)
    must_rest: bool = False


@dataclass
class KVTideWorkerMetadata(KVConnectorWorkerMetadata):
    """One rank's report, or several merged; vLLM calls ``aggregate`` in any order."""

    report: JobReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVTideWorkerMetadata:
        """Return the report of both, which is this one's: a copy for each rank would add up."""
        assert isinstance(other, KVTideWorkerMetadata)
        self.report.absorb(other.report)
        return self


@dataclass
class KVTideHandshake(KVConnectorHandshakeMetadata):
    """What the scheduler must know of a rank before a key can be named.

    ``parts`` are what it holds of each group's blocks. ``token_interleave`` is how many tokens in a
    row a decode-context parallel rank has of a block; vLLM may settle that on the ranks alone.
    """

    layout: StoreLayout
    rank: int = 0
    parts: tuple[tuple[Part, ...], ...] = ((WHOLE,),)
    sharing: Sharing = field(default_factory=Sharing)
    token_interleave: int = 1
