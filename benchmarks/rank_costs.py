"""What lookups, puts and gets cost on one store, by the keys of all parts and by markers.

Sides take turns; each call is measured by the clock and by the CPU time of this process, in which
a Mooncake master's is not.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from measuring import Row, compared, figure
from rank_parts import (
    BLOCK,
    COORDINATOR,
    Databases,
    Values,
    databases_of,
    expect_ok,
    marker_databases,
)

from kvtide.core.keys import HashWindow
from kvtide.core.lookup import drive, lookup
from kvtide.runtime.tags import TAG_BYTES
from kvtide.stores import Store
from kvtide.testing.requests import fake_hashes

BENCH = "rank_markers"
KIB = 1 << 10
TP_SIZES = (2, 8)
MOST_RANKS = max(TP_SIZES)
VALUE_BYTES = 64 * KIB
STEP_CHUNKS = 32
KEYS_PER_CALL = 1024


@dataclass(frozen=True, slots=True)
class Cost:
    """What a call took, in seconds: of the clock, and of this process's CPU time."""

    wall_s: float
    cpu_s: float

    @classmethod
    def of(cls, call: Callable[[], object]) -> Cost:
        """Make the call."""
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        call()
        return cls(time.perf_counter() - wall_s, time.process_time() - cpu_s)


Costs = Mapping[str, Sequence[Cost]]


def take_turns(sides: Mapping[str, Callable[[], object]], num_rounds: int) -> Costs:
    """Return what each side's call took in each round; the first round is not counted."""
    costs: dict[str, list[Cost]] = {name: [] for name in sides}
    for _ in range(num_rounds + 1):
        for name, call in sides.items():
            costs[name].append(Cost.of(call))
    return {name: each[1:] for name, each in costs.items()}


def median_s(costs: Sequence[Cost]) -> float:
    """Return the median of the clock's seconds."""
    return statistics.median(cost.wall_s for cost in costs)


def cost_rows(case: str, unit: str, scale: float, costs: Costs) -> Iterator[Row]:
    """Compare ``parts`` with ``markers``; ``scale`` makes seconds the unit."""
    for what, field in (("", "wall_s"), (", CPU", "cpu_s")):
        ours, theirs = (
            [getattr(cost, field) * scale for cost in costs[side]] for side in ("parts", "markers")
        )
        yield compared(BENCH, f"{case}{what}", unit, ours, theirs)


class Lookups:
    """Lookups of prompts on one store; ``contexts`` are their lengths in tokens, ascending."""

    def __init__(self, store: Store, contexts: Sequence[int]) -> None:
        self._store, self._contexts = store, contexts
        self._hashes = fake_hashes(contexts[-1] // BLOCK)
        self._others = fake_hashes(contexts[-1] // BLOCK, seed="nobody has it")
        self.longest_s: tuple[float, float] = (0.0, 0.0)
        """What the longest full hit takes on most ranks: by parts, by markers."""

    def stock(self) -> None:
        """Put every part and marker; the parts' bytes do not matter to lookups."""
        window, values = HashWindow(self._hashes), Values.of(self._store, TAG_BYTES)
        for database in (*databases_of(MOST_RANKS)[0], *marker_databases()[0]):
            for first in range(0, len(window), KEYS_PER_CALL):
                chunks = range(first, min(first + KEYS_PER_CALL, len(window)))
                expect_ok(self._store.put(values.batch(database.keys(window, chunks), first)))

    def rows(self, name: str, num_rounds: int) -> Iterator[Row]:
        """Compare full hits of each length and number of ranks, and cold misses."""
        for tp_size in TP_SIZES:
            for num_tokens in self._contexts:
                case = f"{name}, TP {tp_size}, hit of {num_tokens:,} tokens"
                hits = self._sides(tp_size, num_tokens, is_there=True)
                asked = [hit() for hit in hits.values()]
                yield figure(BENCH, f"{case}: keys", "keys", *map(sum, asked))
                yield figure(BENCH, f"{case}: calls", "calls", *map(len, asked))
                costs = take_turns(hits, num_rounds)
                yield from cost_rows(case, "ms", 1e3, costs)
            case = f"{name}, TP {tp_size}, cold miss"
            misses = self._sides(tp_size, self._contexts[-1], is_there=False)
            yield figure(BENCH, f"{case}: keys", "keys", *(sum(miss()) for miss in misses.values()))
            yield from cost_rows(case, "ms", 1e3, take_turns(misses, 4 * num_rounds))
        self.longest_s = median_s(costs["parts"]), median_s(costs["markers"])

    def _sides(
        self, tp_size: int, num_tokens: int, *, is_there: bool
    ) -> dict[str, Callable[[], list[int]]]:
        hashes = (self._hashes if is_there else self._others)[: num_tokens // BLOCK]
        expected = num_tokens if is_there else 0
        return {
            "parts": partial(self._look, databases_of(tp_size), hashes, expected),
            "markers": partial(self._look, marker_databases(), hashes, expected),
        }

    def _look(self, databases: Databases, hashes: Sequence[bytes], expected: int) -> list[int]:
        """Look a prompt up, check the answer, and return how many keys each call had."""
        num_keys: list[int] = []

        def exists(keys: list[str]) -> list[bool]:
            num_keys.append(len(keys))
            return self._store.exists(keys)

        query = COORDINATOR.query(len(hashes) * BLOCK + 1, hashes)
        hit = drive(lookup(query, COORDINATOR.boundaries, databases), exists)
        assert hit.hit_token == expected
        return num_keys


class Transfers:
    """Puts and gets of new values on one store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._values, self._tags = Values.of(store, VALUE_BYTES), Values.of(store, TAG_BYTES)
        self._window = HashWindow([])
        self._num_steps = 0
        self.marker_s = 0.0
        """What putting a marker takes."""

    def save_rows(self, name: str, num_rounds: int) -> Iterator[Row]:
        """Compare putting a step's parts, rank after rank, with putting its markers."""
        for tp_size in TP_SIZES:
            parts, markers = databases_of(tp_size), marker_databases()
            sides = {
                "parts": partial(self._put_new, parts),
                "markers": partial(self._put, markers, self._tags),
            }
            costs = take_turns(sides, num_rounds)
            case = f"{name}, TP {tp_size}, save"
            yield from cost_rows(case, "us/chunk", 1e6 / STEP_CHUNKS, costs)
            self.marker_s = median_s(costs["markers"]) / STEP_CHUNKS

    def get_rate(self, num_rounds: int) -> float:
        """Return the bytes per second at which one rank gets 128 values, as a median."""
        [[database, *_]] = databases_of(MOST_RANKS)
        window = HashWindow(fake_hashes(128, seed="to be read"))
        batch = self._values.batch(database.keys(window, range(len(window))))
        expect_ok(self._store.put(batch))
        costs = take_turns({"get": lambda: expect_ok(self._store.get(batch))}, num_rounds)
        return batch.total_bytes / median_s(costs["get"])

    def _put_new(self, databases: Databases) -> None:
        self._num_steps += 1
        self._window = HashWindow(fake_hashes(STEP_CHUNKS, seed=f"step {self._num_steps}"))
        self._put(databases, self._values)

    def _put(self, databases: Databases, values: Values) -> None:
        for database in databases[0]:
            keys = database.keys(self._window, range(STEP_CHUNKS))
            expect_ok(self._store.put(values.batch(keys)))


def room_by_filling(store: Store, pool_bytes: int, value_bytes: int) -> float:
    """Return what a value takes of a pool, by how many are left of more than fit."""
    values, [[database, *_]] = Values.of(store, value_bytes), databases_of(MOST_RANKS)
    most = pool_bytes // max(value_bytes, 4 * KIB)  # a value has a page of its own
    window = HashWindow(fake_hashes(most * 9 // 8, seed="fill"))
    batches = [
        database.keys(window, range(first, min(first + KEYS_PER_CALL, len(window))))
        for first in range(0, len(window), KEYS_PER_CALL)
    ]
    for keys in batches:
        expect_ok(store.put(values.batch(keys)))
    return pool_bytes / sum(sum(store.exists(keys)) for keys in batches)
