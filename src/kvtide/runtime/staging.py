"""Staging: copies fenced jobs' blocks out of the engine's memory, and never calls the store.

A thread of its own, because a store call may hang: the engine gets its blocks back when the copy is
done, whatever becomes of the put.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtide.core.jobs import JobEnd
from kvtide.runtime.context import RankContext
from kvtide.runtime.ledger import Phase, StoreTask
from kvtide.runtime.memory import Fence
from kvtide.runtime.prefixes import interleaved
from kvtide.runtime.selection import Selection, select
from kvtide.runtime.service import KEYS_PER_BURST, Service, let_others_run
from kvtide.runtime.slab import Rows, Slab


class PutQueue(Protocol):
    """Where staged jobs go."""

    @property
    def has_room(self) -> bool:
        """Whether a job that is staged now could be taken."""

    def offer(self, task: StoreTask) -> bool:
        """Take a staged job over; False if there is no room."""


@dataclass(frozen=True, slots=True)
class FencedTasks:
    """Store jobs whose blocks may be read once ``fence`` is passed."""

    fence: Fence
    tasks: tuple[StoreTask, ...]


class Staging(Service[FencedTasks, FencedTasks]):
    """Waits for fences, copies blocks to the slab, makes values, and feeds the put queue."""

    def __init__(self, context: RankContext, slab: Slab, put_queue: PutQueue) -> None:
        super().__init__("kvtide-staging", threaded=context.threaded)
        self._memory = context.memory
        self._ledger = context.ledger
        self._databases = context.databases
        self._values = context.values
        self._row_bytes = context.row_bytes
        self._clock = context.clock
        self._stage_wait_s = context.limits.stage_wait_s
        self._slab = slab
        self._put_queue = put_queue
        self._role = context.role

    def _pop(self) -> FencedTasks | None:
        return self._queue.popleft()

    def _serve(self, work: FencedTasks) -> None:
        self.process(work)

    def process(self, work: FencedTasks) -> None:
        """Stage every job of one fence; each goes to the put queue or ends here."""
        try:
            work.fence.wait()
        except Exception:  # noqa: BLE001 - logged there
            # The work before the fence may not be done: these blocks must not be stored.
            self.faults.exception("waiting for the engine's work failed")
            for task in work.tasks:
                self._ledger.end_store(task, JobEnd.FAILED)
            return
        # Jobs of one fence share the wait, so that the last of many holds its blocks no longer.
        give_up_s = self._clock() + self._stage_wait_s
        for task in work.tasks:
            self.stage(task, wait_s=max(0.0, give_up_s - self._clock()))

    def stage(self, task: StoreTask, *, wait_s: float) -> None:
        """Copy one job's blocks to staging and hand it over, or end it."""
        end = JobEnd.FAILED
        is_handed_over = False
        try:
            if not self._may_begin(task):
                end = JobEnd.REFUSED
                return
            selections = select(task.job, self._role, self._databases.hashes_per_chunk)
            if not self._reserve_and_claim(task, selections, wait_s):
                end = JobEnd.REFUSED
                return
            self._copy(task, selections)
            self._ledger.mark_staged(task)
            if not task.keys:
                end = JobEnd.STORED
                return
            end = JobEnd.REFUSED
            is_handed_over = self._hand_over(task)
        except Exception:  # noqa: BLE001 - logged there
            self.faults.exception("staging a store job failed")
        finally:
            # Whoever ends a job frees its rows; from the hand-over on that is the sender.
            if not is_handed_over and self._ledger.end_store(task, end):
                self._slab.release(task.rows)

    def _may_begin(self, task: StoreTask) -> bool:
        """Tell whether copying has a point; asked first, since a refusal must cost little."""
        if self._ledger.is_sender_stuck or not self._put_queue.has_room:
            return False
        return self._ledger.any_open((task,))

    def _hand_over(self, task: StoreTask) -> bool:
        return self._ledger.advance(task, Phase.QUEUED) and self._put_queue.offer(task)

    def _reserve_and_claim(
        self, task: StoreTask, selections: Sequence[Selection], wait_s: float
    ) -> bool:
        """Reserve the job's rows, in the order of ``selections``; False if there is no room."""
        wanted = [
            (self._row_bytes[selection.group_id], len(selection.chunks)) for selection in selections
        ]
        reserved = self._slab.reserve(
            wanted, timeout_s=wait_s, give_up=lambda: task.phase is Phase.ENDED
        )
        if reserved is None:
            return False
        rows = [run for runs in reserved for run in runs]
        if not self._ledger.advance(task, Phase.COPYING):
            self._slab.release(rows)
            return False
        task.rows = rows
        return True

    def _copy(self, task: StoreTask, selections: Sequence[Selection]) -> None:
        databases = self._databases[task.job.prefix_id]
        runs = iter(task.rows)
        for selection in selections:
            done = 0
            while done < len(selection.chunks):
                run = next(runs)
                part = slice(done, done + run.num_rows)
                parts = databases[selection.group_id]
                for rows, piece in _bursts(run, part, KEYS_PER_BURST // len(parts)):
                    names = selection.names[piece]
                    keys = interleaved(
                        [database.keys_at(selection.hashes, names) for database in parts]
                    )
                    self._copy_rows(task, selection, rows.divided(len(parts)), piece, keys)
                    let_others_run()
                done += run.num_rows

    def _copy_rows(
        self, task: StoreTask, selection: Selection, rows: Rows, piece: slice, keys: list[str]
    ) -> None:
        view = self._slab.view(rows)
        self._memory.read(selection.group_id, selection.block_ids[piece], view)
        payload_bytes = self._memory.layout.groups[selection.group_id].payload_bytes
        self._values.seal_rows(view, keys, payload_bytes)
        num_parts = len(self._role.parts[selection.group_id])
        chunks = selection.chunks[piece]
        order = chunks if num_parts == 1 else [chunk for chunk in chunks for _ in range(num_parts)]
        task.add(keys, self._slab.addresses(rows), self._values.value_bytes(payload_bytes), order)


def _bursts(run: Rows, part: slice, max_rows: int) -> list[tuple[Rows, slice]]:
    """Cut a run of rows, and the slice of chunks it holds, so that no burst of Python is long."""
    bursts: list[tuple[Rows, slice]] = []
    max_rows = max(1, max_rows)
    for first in range(0, run.num_rows, max_rows):
        count = min(max_rows, run.num_rows - first)
        rows = Rows(run.offset + first * run.row_bytes, count, run.row_bytes)
        start = part.start + first
        bursts.append((rows, slice(start, start + count)))
    return bursts
