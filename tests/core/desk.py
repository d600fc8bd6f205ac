"""Saving for one request, step by step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import count

from kvtide.core.coordinator import Coordinator
from kvtide.core.jobs import BoundaryJob, BoundaryPut, JobEnd, JobReport
from kvtide.core.requests import RequestTracker
from kvtide.core.save_limits import SaveLimits, SavePolicy
from kvtide.core.saving import Saving
from kvtide.core.transfer import HandOff, PlannedStore, Scheduled
from kvtide.testing.requests import RecordingRequest, fake_hashes


class Desk:
    """Saving for one request, admitted with ``num_tokens`` tokens of which some are computed."""

    def __init__(
        self,
        coordinator: Coordinator,
        num_tokens: int,
        *,
        num_computed: int = 0,
        max_pinned_blocks: int = 1000,
        policy: SavePolicy | None = None,
        decode_job_tokens: int = 1,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self.saving = Saving(
            coordinator,
            policy or SavePolicy(decode=True),
            SaveLimits(max_pinned_blocks, 1 << 20, decode_job_tokens=decode_job_tokens),
            num_ranks=1,
            counters=self.counters,
            take_job_id=count(1).__next__,
        )
        self.view = RecordingRequest(
            num_tokens=num_tokens,
            hashes=fake_hashes(num_tokens // coordinator.hash_block_size),
            tables=[list(range(1, 50)) for _ in coordinator.groups],
        )
        self.tracker = RequestTracker("r", 0, num_tokens)
        self.saving.begin(self.tracker, self.scheduled(num_computed, 0))

    def scheduled(self, computed: int, num_tokens: int) -> Scheduled:
        return Scheduled(self.view, computed, num_tokens, is_admission=False)

    def publish(self, *offers: HandOff, certain: int = 1000, now_s: float = 0.0) -> list[int]:
        """Hand states off; return the boundaries that are saved."""
        planned = self.saving.publishing.publish(self.tracker, self.view, offers, certain, now_s)
        self.jobs = [one.job for one in planned]
        return [puts_of(one)[0].end_token for one in planned]

    def certain(self, scheduled: Scheduled) -> int:
        return self.saving.certain_token(self.tracker, scheduled)

    def emit(self, scheduled: Scheduled) -> list[PlannedStore]:
        """Save what a step makes certain."""
        return list(self.saving.emit(self.tracker, self.view, self.certain(scheduled), 0.0))

    def settle_proofs(self, scheduled: Scheduled) -> list[PlannedStore]:
        """Save the proofs that a step computes."""
        certain = self.certain(scheduled)
        return list(self.saving.publishing.settle_proofs(self.tracker, scheduled, certain, 0.0))

    def rest(self, scheduled: Scheduled) -> None:
        """End a step."""
        self.saving.agenda.put_off(self.tracker, self.certain(scheduled))

    def end(self, job_id: int, end: JobEnd) -> list[int]:
        report = JobReport()
        report.end(job_id, end)
        return self.saving.on_report(report, 0.0)


def puts_of(planned: PlannedStore) -> Sequence[BoundaryPut]:
    """What a boundary job writes."""
    assert isinstance(planned.job, BoundaryJob)
    return planned.job.puts
