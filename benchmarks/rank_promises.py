"""What lookups promise in a full store where values vanish one by one, and what is really there.

Requests come back by popularity to a store that holds a fraction of their prompts. Each is looked
up, what was promised is read by every rank, and what was not there is computed and put. Ranks put
their queues of jobs each at its own pace, up to ``MAX_QUEUED_JOBS`` apart. Three ways of promising
are compared: by every rank's parts (kvtide's), by a marker per chunk, which is put once all ranks
have put the next job too (their reports reach the scheduler with a later step), and by the first
rank's part alone.

Nobody writes between a lookup and its load, so every broken promise here is of the lookup's making.
Each store evicts by its own rules.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from rank_parts import (
    BLOCK,
    COORDINATOR,
    Databases,
    Values,
    databases_of,
    marker_databases,
)

from kvtide.core.keys import HashWindow
from kvtide.core.lookup import drive, lookup
from kvtide.runtime.tags import TAG_BYTES
from kvtide.stores import Status, Store
from kvtide.testing.requests import fake_hashes

Way = Literal["every rank", "marker", "first rank"]
WAYS: tuple[Way, ...] = ("every rank", "marker", "first rank")
TP_SIZE = 8
VALUE_BYTES = 16 << 10
JOB_CHUNKS = 32
MAX_QUEUED_JOBS = 4
SHARED_CHUNKS, OWN_CHUNKS = 32, (16, 112)
NUM_FAMILIES, NUM_PROMPTS = 8, 128
SKEW = 0.8


@dataclass(slots=True)
class Tally:
    """What became of the promises of one way.

    A *sign* is what stands for a chunk at the end: its marker or, for the ways without, the first
    rank's part. It is *stale* where another part of the chunk is gone.
    """

    num_chunks: int = 0
    num_hits: int = 0
    num_broken: int = 0
    promised_chunks: int = 0
    vain_chunks: int = 0
    """Chunks promised in loads that failed: they are all read, and then some of them again."""
    usable_chunks: int = 0
    """Chunks before the first promised one that some rank lacks."""
    num_signs: int = 0
    num_stale: int = 0

    @property
    def failed_share(self) -> float:
        """Which share of hits ended in a load that failed."""
        return self.num_broken / self.num_hits

    def add(self, other: Tally) -> None:
        """Count what another has counted as well."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Prompts:
    """Prompts that share their beginnings within a family, and who comes next."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - the same requests for every way
        self._weights = list(accumulate((rank + 1) ** -SKEW for rank in range(NUM_PROMPTS)))
        self.all = [
            fake_hashes(SHARED_CHUNKS, seed=f"{seed}/family {number % NUM_FAMILIES}")
            + fake_hashes(self._random.randint(*OWN_CHUNKS), seed=f"{seed}/prompt {number}")
            for number in range(NUM_PROMPTS)
        ]

    def next(self) -> list[bytes]:
        """Return the hashes of the next request."""
        [prompt] = self._random.choices(self.all, cum_weights=self._weights)
        return prompt


@dataclass(slots=True)
class Job:
    """Chunks of a prompt to be put by every rank."""

    window: HashWindow
    chunks: range
    num_ranks_left: int = TP_SIZE
    is_in: bool = True


class Service:
    """An engine of ``TP_SIZE`` ranks on ``store`` that believes lookups of one way."""

    def __init__(self, store: Store, way: Way) -> None:
        self.tally = Tally()
        self._store, self._way = store, way
        self._parts, self._markers = databases_of(TP_SIZE), marker_databases()
        self._values, self._tags = Values.of(store, VALUE_BYTES), Values.of(store, TAG_BYTES)
        self._queues: list[deque[Job]] = [deque() for _ in range(TP_SIZE)]
        self._reported: deque[Job] = deque()
        self._pace = random.Random(5)  # noqa: S311 - ranks are late in the same way for all

    def serve(self, hashes: Sequence[bytes]) -> None:
        """Look a prompt up, load what was promised, and save what was computed."""
        tally, window = self.tally, HashWindow(hashes)
        query = COORDINATOR.query(len(hashes) * BLOCK + 1, hashes)
        questions = lookup(query, COORDINATOR.boundaries, self._asked())
        promised = drive(questions, self._store.exists).hit_token // BLOCK
        usable = self._load(window, promised)
        tally.num_chunks += len(hashes)
        tally.num_hits += promised > 0
        tally.promised_chunks += promised
        tally.usable_chunks += usable
        if usable < promised:
            tally.num_broken += 1
            tally.vain_chunks += promised
            self._load(window, usable)  # the engine asks again, and gets what lies before the gap
        for first in range(usable, len(hashes), JOB_CHUNKS):
            job = Job(window, range(first, min(first + JOB_CHUNKS, len(hashes))))
            for queue in self._queues:
                queue.append(job)
            self.put_until(MAX_QUEUED_JOBS)

    def put_until(self, num_left: int) -> None:
        """Let ranks put, in a random order, until none has more than ``num_left`` jobs queued."""
        while max(map(len, self._queues)) > num_left:
            rank = self._pace.choice([r for r, queue in enumerate(self._queues) if queue])
            job = self._queues[rank].popleft()
            job.is_in &= self._put(rank, job)
            job.num_ranks_left -= 1
            if not job.num_ranks_left:
                self._mark(job)

    def count_signs(self, prompts: Sequence[Sequence[bytes]]) -> None:
        """Ask for everything, once nothing else is asked any more."""
        names = list(dict.fromkeys(name for hashes in prompts for name in hashes))
        window, chunks = HashWindow(names), range(len(names))
        parts = [self._store.exists(part.keys(window, chunks)) for part in self._parts[0]]
        signs = parts[0]
        if self._way == "marker":
            signs = self._store.exists(self._markers[0][0].keys(window, chunks))
        wholes = [all(present) for present in zip(*parts, strict=True)]
        self.tally.num_signs = sum(signs)
        self.tally.num_stale = sum(
            sign and not whole for sign, whole in zip(signs, wholes, strict=True)
        )

    def _asked(self) -> Databases:
        if self._way == "marker":
            return self._markers
        return self._parts if self._way == "every rank" else [self._parts[0][:1]]

    def _load(self, window: HashWindow, num_chunks: int) -> int:
        """Read every rank's parts; return how many chunks all of them have."""
        usable = num_chunks
        for part in self._parts[0] if num_chunks else ():
            keys = part.keys(window, range(num_chunks))
            is_read = [status is Status.OK for status in self._store.get(self._values.batch(keys))]
            usable = min(usable, [*is_read, False].index(False))
        return usable

    def _put(self, rank: int, job: Job) -> bool:
        """Put a rank's parts of a job as a worker does; tell whether all of them are in."""
        keys = self._parts[0][rank].keys(job.window, job.chunks)
        batch = self._values.batch(keys, job.chunks.start)
        if self._store.checks_before_put:
            present = self._store.exists(keys)
            batch = batch.select([i for i, is_there in enumerate(present) if not is_there])
        return set(self._store.put(batch)) <= {Status.OK}

    def _mark(self, job: Job) -> None:
        """Put the markers of the job before this one, whose last rank has just reported."""
        if self._way != "marker":
            return
        for due in self._take_reported():
            keys = self._markers[0][0].keys(due.window, due.chunks)
            self._store.put(self._tags.batch(keys, due.chunks.start))
        if job.is_in:
            self._reported.append(job)

    def _take_reported(self) -> Iterator[Job]:
        while self._reported:
            yield self._reported.popleft()


def promises(store: Store, way: Way, num_requests: int, seed: int) -> Tally:
    """Serve requests on a store, and count what the last two thirds of them were promised."""
    prompts, service = Prompts(seed), Service(store, way)
    for number in range(num_requests):
        if number == num_requests // 3:
            service.tally = Tally()
        service.serve(prompts.next())
    service.put_until(0)
    service.count_signs(prompts.all)
    return service.tally
