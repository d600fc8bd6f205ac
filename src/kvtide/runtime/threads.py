"""The two threads that call the store: one puts what is staged, one fetches what is asked for.

Each may hang in a store call. Deadlines are therefore kept by someone else (:meth:`Ledger.expire`),
and what a hung call still uses, its staging rows, is freed only when it returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence

from kvtide.core.batch import Batch
from kvtide.core.jobs import JobEnd
from kvtide.errors import StoreError
from kvtide.runtime.context import RankContext
from kvtide.runtime.ledger import LoadTask, Phase, StoreTask
from kvtide.runtime.loading import LoadPart, PartValues, part_values, split_load
from kvtide.runtime.service import KEYS_PER_BURST, Service, let_others_run
from kvtide.runtime.slab import Slab
from kvtide.stores.base import Status, Store

_NO_KEYS: frozenset[str] = frozenset()
_SEVERITY = (JobEnd.LOST, JobEnd.NO_SPACE, JobEnd.FAILED)
_END_OF_PUT = {Status.OK: JobEnd.STORED, Status.NO_SPACE: JobEnd.NO_SPACE}


class WrongAnswersError(Exception):
    """A store answered with another number of entries than it was asked about."""


class KVCacheStoreSendingThread(Service[StoreTask, list[StoreTask]]):
    """Drains the put queue into one batch across jobs: checks, puts what is missing, ends jobs."""

    def __init__(self, context: RankContext, slab: Slab) -> None:
        super().__init__("kvtide-sender", threaded=context.threaded)
        self._store = context.store
        self._ledger = context.ledger
        self._bad_keys = context.bad_keys
        self._limits = context.limits
        self._slab = slab

    @property
    def has_room(self) -> bool:
        """Whether the put queue can take another job."""
        return not self._is_closed and len(self._queue) < self._limits.max_queued_puts

    def offer(self, task: StoreTask) -> bool:
        """Queue a staged job; False if the queue is full (its bytes are bounded by the slab)."""
        return self.has_room and self.submit(task)

    def drop_ended(self) -> None:
        """Forget queued jobs that a deadline ended, so that they take no one's place."""
        with self._lock:
            self._queue = deque(task for task in self._queue if task.phase is not Phase.ENDED)

    def _pop(self) -> list[StoreTask]:
        tasks: list[StoreTask] = []
        num_keys = num_bytes = 0
        while self._queue:
            task = self._queue[0]
            num_keys += len(task.keys)
            num_bytes += task.num_bytes
            is_over = (
                num_keys > self._limits.max_batch_keys or num_bytes > self._limits.max_batch_bytes
            )
            if tasks and is_over:
                break
            tasks.append(self._queue.popleft())
        return tasks

    def _serve(self, work: list[StoreTask]) -> None:
        self.process_batch(work)

    def process_batch(self, tasks: Sequence[StoreTask]) -> None:
        """Store the values of ``tasks``; every one that has not ended yet ends here."""
        live = [task for task in tasks if self._ledger.advance(task, Phase.IN_STORE)]
        outcomes: dict[str, JobEnd] = {}
        otherwise = JobEnd.FAILED
        try:
            for batch in _unique(live).split(
                max_keys=self._limits.max_batch_keys, max_bytes=self._limits.max_batch_bytes
            ):
                if self._ledger.any_open(live):
                    self._send(batch, outcomes)
        except StoreError:
            otherwise = JobEnd.LOST
            self.faults.exception("the store was lost while saving")
        except Exception:  # noqa: BLE001 - logged there
            self.faults.exception("saving to the store failed")
        finally:
            self._ledger.end_sending(
                {task: _worst(task.keys, outcomes, otherwise) for task in live}
            )
            for task in live:
                self._slab.release(task.rows)

    def _send(self, batch: Batch, outcomes: dict[str, JobEnd]) -> None:
        """Put what is missing of ``batch``; ``outcomes`` gets an entry per key as it is known."""
        bad = self._bad_keys.among(batch.keys)
        present = self._present(batch.keys, bad)
        if not present:
            self._put(batch, outcomes, bad)
            return
        stale = [key for key in batch.keys if key in bad and key in present]
        removed = remove_keys(self._store, stale) if stale else frozenset()
        missing: list[int] = []
        for index, key in enumerate(batch.keys):
            if key not in present or key in removed:
                missing.append(index)
            else:
                # A put would answer OK and leave the value that does not verify.
                outcomes[key] = JobEnd.FAILED if key in bad else JobEnd.STORED
        num_unusable = len(stale) - len(removed)
        self._ledger.count({"existing_chunks": len(batch) - len(missing) - num_unusable})
        if missing:
            self._put(batch.select(missing), outcomes, bad)

    def _present(self, keys: Sequence[str], bad: frozenset[str]) -> Collection[str]:
        """Return the keys that need no put; where the put is to find out, only the bad ones."""
        if not self._store.checks_before_put:
            return bad
        answers = self._store.exists(keys)
        _check_answers(answers, keys)
        if not any(answers):
            return _NO_KEYS
        return {key for key, is_present in zip(keys, answers, strict=True) if is_present}

    def _put(self, batch: Batch, outcomes: dict[str, JobEnd], bad: frozenset[str]) -> None:
        statuses = self._store.put(batch)
        _check_answers(statuses, batch.keys)
        saved = batch
        if statuses.count(Status.OK) < len(batch):
            saved = batch.select([i for i, status in enumerate(statuses) if status is Status.OK])
            for key, status in zip(batch.keys, statuses, strict=True):
                outcomes[key] = _END_OF_PUT.get(status, JobEnd.FAILED)
        outcomes.update(dict.fromkeys(saved.keys, JobEnd.STORED))
        self._ledger.count({"saved_chunks": len(saved), "saved_bytes": saved.total_bytes})
        mended = self._bad_keys.discard(bad.intersection(saved.keys)) if bad else None
        if mended:
            self._ledger.report_keys(mended=mended)


class KVCacheStoreRecvingThread(Service[LoadTask, LoadTask]):
    """Fetches values, proves them, and only then writes them to the engine's blocks.

    ``slab`` is used by this thread alone, one part of a load after the other.
    """

    def __init__(self, context: RankContext, slab: Slab) -> None:
        super().__init__("kvtide-receiver", threaded=context.threaded)
        self._memory = context.memory
        self._store = context.store
        self._ledger = context.ledger
        self._databases = context.databases
        self._bad_keys = context.bad_keys
        self._limits = context.limits
        self._values = context.values
        self._role = context.role
        self._row_bytes = context.row_bytes
        self._num_parts = [len(parts) for parts in context.role.parts]
        self._clock = context.clock
        self._slab = slab

    def offer(self, task: LoadTask) -> None:
        """Queue a load, or fail it at once where waiting has no point."""
        is_stuck = self._ledger.is_receiver_stuck
        has_room = len(self._queue) < self._limits.max_queued_loads
        if is_stuck or not has_room or not self.submit(task):
            self._ledger.end_load(task, task.unproven_token, lost=is_stuck)

    def drop_ended(self) -> None:
        """Forget queued loads that a deadline ended."""
        with self._lock:
            self._queue = deque(task for task in self._queue if task.phase is not Phase.ENDED)

    def _pop(self) -> LoadTask:
        return self._queue.popleft()

    def _serve(self, work: LoadTask) -> None:
        self.process_load(work)

    def process_load(self, task: LoadTask) -> None:
        """Carry out one load; it ends here unless a deadline ended it first."""
        is_whole = is_lost = False
        try:
            if self._ledger.advance(task, Phase.IN_STORE):
                is_whole = self._load(task)
        except StoreError:
            is_lost = True
            self.faults.exception("the store was lost while loading")
        except Exception:  # noqa: BLE001 - logged there
            self.faults.exception("loading from the store failed")
        finally:
            fail_token = None if is_whole else task.unproven_token
            self._ledger.end_receiving(task, fail_token, lost=is_lost)

    def _load(self, task: LoadTask) -> bool:
        """Load part after part in token order; False at the first token that is not proven."""
        layout = self._memory.layout
        databases = self._databases[task.job.prefix_id]
        block_sizes = self._databases.block_sizes
        for part in split_load(
            task.job, self._row_bytes, self._num_parts, block_sizes, self._slab.num_bytes
        ):
            values = part_values(part, databases, task.job, layout)
            fail_token = self._fetch(values)
            if fail_token is not None:
                task.unproven_token = fail_token
                return False
            self._ledger.note_progress(self._clock() + self._limits.load_timeout_s)
            if not self._write(task, part):
                return False
            if part.next_token is not None:
                task.unproven_token = part.next_token
            if part.is_blocked:
                self._ledger.count({"blocked_chunks": 1})
                return False
        return True

    def _fetch(self, values: PartValues) -> int | None:
        """Fetch and verify; return the first token that is not proven, ``None`` if all are."""
        bad = self._bad_keys.among(values.keys)
        fail_token: int | None = None
        if bad:
            names = zip(values.keys, values.tokens, strict=True)
            fail_token = min(token for key, token in names if key in bad)
            values = values.below(fail_token)
        if not values:
            return fail_token
        statuses = self._get(values)
        wrong, unproven = self._judge(values, statuses)
        if fail_token is not None:
            unproven.append(fail_token)
        self._ledger.count(
            {
                "missing_chunks": statuses.count(Status.MISSING),
                "unread_chunks": statuses.count(Status.FAILED),
            }
        )
        if wrong:
            self._distrust(wrong)
        stop_token = min(unproven, default=None)
        if stop_token is not None:
            self._forget_phantoms(values, statuses, stop_token)
        return stop_token

    def _get(self, values: PartValues) -> list[Status]:
        """Fetch values; each rank begins at another one, since copies of a part are read by all."""
        first = self._role.rank * len(values) // self._role.num_ranks
        turned = values.rotated(first) if first else values
        statuses = self._store.get(self._batch(turned))
        _check_answers(statuses, turned.keys)
        back = len(values) - first
        return [*statuses[back:], *statuses[:back]]

    def _judge(self, values: PartValues, statuses: Sequence[Status]) -> tuple[list[str], list[int]]:
        """Return the keys of what is not whole, and the tokens of all that is not proven."""
        wrong: list[str] = []
        unproven: list[int] = []
        buffer, overhead = self._slab.buffer, self._values.overhead_bytes
        columns = (values.keys, values.tokens, values.offsets, values.payload_bytes)
        judged = zip(statuses, *columns, strict=True)
        for number, (status, key, token, offset, payload_bytes) in enumerate(judged, 1):
            if number % KEYS_PER_BURST == 0:
                let_others_run()
            if status is Status.OK:
                found = buffer[offset : offset + payload_bytes + overhead]
                if self._values.is_whole(found, key, payload_bytes):
                    continue
                wrong.append(key)
            unproven.append(token)
        return wrong, unproven

    def _forget_phantoms(
        self, values: PartValues, statuses: Sequence[Status], stop_token: int
    ) -> None:
        """Remove the value at which the load stops, if the store had none to give.

        It was promised, so the store says that it exists: if that stays so, every request with
        this prefix pays a failed load, and nobody ever writes the value anew. Only this one: a
        store that fails for a moment must not lose all that was asked of it.
        """
        phantoms = [
            key
            for key, token, status in zip(values.keys, values.tokens, statuses, strict=True)
            if token == stop_token and status in (Status.MISSING, Status.FAILED)
        ]
        if phantoms:
            self._bad_keys.add(phantoms)
            removed = remove_keys(self._store, phantoms)
            self._bad_keys.discard(removed)
            self._ledger.report_keys(bad=set(phantoms) - removed)

    def _batch(self, values: PartValues) -> Batch:
        address, overhead = self._slab.address, self._values.overhead_bytes
        return Batch(
            values.keys,
            [(address + offset,) for offset in values.offsets],
            [(num_bytes + overhead,) for num_bytes in values.payload_bytes],
            values.chunks,
        )

    def _distrust(self, keys: Sequence[str]) -> None:
        """Never believe these values again: remove them, or report that they are still there."""
        self._bad_keys.add(keys)
        removed = remove_keys(self._store, keys)
        self._bad_keys.discard(removed)
        self._ledger.report_keys(bad=set(keys) - removed)
        self._ledger.count({"bad_values": len(keys)})

    def _write(self, task: LoadTask, part: LoadPart) -> bool:
        """Copy a proven part to the engine's blocks; False if the load has ended meanwhile.

        From the claim to the end of the copy no deadline can end the load, so the engine cannot
        have given the blocks to another request.
        """
        if task.fence is not None:
            task.fence.wait()
        if not self._ledger.advance(task, Phase.COPYING):
            return False
        num_bytes = num_values = 0
        for run in part.runs:
            rows = run.rows.divided(self._num_parts[run.group_id])
            self._memory.write(run.group_id, run.block_ids, self._slab.view(rows))
            num_values += rows.num_rows
            num_bytes += self._memory.layout.groups[run.group_id].payload_bytes * rows.num_rows
        self._ledger.count({"loaded_chunks": num_values, "loaded_bytes": num_bytes})
        return self._ledger.advance(task, Phase.IN_STORE)


def remove_keys(store: Store, keys: Sequence[str]) -> frozenset[str]:
    """Ask the store to forget ``keys`` and return those that are gone; never raises."""
    try:
        statuses = store.remove(keys)
        _check_answers(statuses, keys)
    except Exception:  # noqa: BLE001 - what cannot be removed stays distrusted
        return frozenset()
    gone = (Status.OK, Status.MISSING)
    return frozenset(key for key, status in zip(keys, statuses, strict=True) if status in gone)


def _check_answers(answers: Sequence[object], asked: Sequence[object]) -> None:
    if len(answers) != len(asked):
        raise WrongAnswersError(f"{len(answers)} answers to {len(asked)} keys")


def _unique(tasks: Sequence[StoreTask]) -> Batch:
    """Return the values of all tasks as one batch, each key once: requests may share a prefix."""
    batches = [task.batch() for task in tasks]
    batch = batches[0] if len(batches) == 1 else Batch.concat(batches)
    if len(set(batch.keys)) == len(batch):
        return batch
    firsts: dict[str, int] = {}
    for index, key in enumerate(batch.keys):
        firsts.setdefault(key, index)
    return batch.select(list(firsts.values()))


def _worst(keys: Sequence[str], outcomes: Mapping[str, JobEnd], otherwise: JobEnd) -> JobEnd:
    """Return how a job with these values ended; those without an outcome ended ``otherwise``."""
    ends = list(map(outcomes.get, keys))
    if ends.count(JobEnd.STORED) == len(ends):  # nearly always, and enums hash slowly
        return JobEnd.STORED
    seen = {otherwise if end is None else end for end in ends}
    return next((end for end in _SEVERITY if end in seen), JobEnd.STORED)
