"""How close the local store comes to memcpy, and what a key costs.

    python benchmarks/bench_local_store.py [--path /dev/shm/kvtide-bench] [--size 1GiB]

Puts are measured in the steady state: the pool is full and every value evicts another. memcpy
copies the same bytes between page-aligned, present buffers, in turns with the store's calls.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import random
import shutil
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from measuring import Row, alternate, report

from kvtide.core.batch import Batch
from kvtide.stores import Status, Store, open_store
from kvtide.stores.memory_buffer import aligned_buffer, region_of
from kvtide.units import format_size, parse_size

DEFAULT_PATH = Path("/dev/shm/kvtide-bench")  # noqa: S108 - removed before and after
KIB = 1 << 10
VALUE_SIZES = (64 * KIB, 512 * KIB, 2048 * KIB)
NUM_KEYS = (1, 256, 4096)
BUFFER_BYTES = 256 << 20
MEMCPY_SHARE = 0.6
EXISTS_US = 0.8


def keys() -> Iterator[str]:
    """Yield pool keys as they are in use: 131 characters, a common prefix and a random hash."""
    generator = random.Random(7)  # noqa: S311 - the same keys each time
    prefix = "kvtide@" + "m" * 59 + "@"
    while True:
        yield f"{prefix}{generator.getrandbits(256):064x}"


class Buffer:
    """Registered memory that is walked round, so that no value is still in a CPU cache."""

    def __init__(self, store: Store, value_bytes: int) -> None:
        self.array = aligned_buffer(BUFFER_BYTES)
        store.register(region_of(self.array))
        self.value_bytes = value_bytes
        self._next = 0

    def addresses(self, count: int) -> list[int]:
        """Return where the next ``count`` values go."""
        start, per_buffer = self._next, BUFFER_BYTES // self.value_bytes
        self._next = (start + count) % per_buffer
        first: int = self.array.ctypes.data
        return [first + (start + i) % per_buffer * self.value_bytes for i in range(count)]

    def batch(self, names: Sequence[str]) -> Batch:
        """Return a batch of one-segment values in the next places."""
        addresses = [[address] for address in self.addresses(len(names))]
        return Batch(names, addresses, [[self.value_bytes]] * len(names), range(len(names)))


def expect_ok(statuses: list[Status]) -> None:
    """Stop the benchmark if it measures failures; a cache may have evicted one key in fifty."""
    if statuses.count(Status.OK) < 0.98 * len(statuses):
        raise SystemExit(f"calls failed: {Counter(statuses)}")


def transfer_rows(store: Store, pool_bytes: int, value_bytes: int, rounds: int) -> Iterator[Row]:
    """Measure put and get of one value size against memcpy."""
    source, target = Buffer(store, value_bytes), Buffer(store, value_bytes)
    fresh = keys()
    # Twice the pool: the pages are mapped, the hand has been round, the steady state is reached.
    for _ in range(2 * pool_bytes // BUFFER_BYTES):
        names = list(itertools.islice(fresh, BUFFER_BYTES // value_bytes))
        expect_ok(store.put(source.batch(names)))
    most = pool_bytes // 8 // value_bytes
    for count in sorted({min(num_keys, most) for num_keys in NUM_KEYS}):
        medians = transfer_times(store, source, target, fresh, count, rounds)
        for name in ("put", "get"):
            gb_s = count * value_bytes / medians[name] / 1e9
            peer = count * value_bytes / medians["memcpy"] / 1e9
            judged = value_bytes == 512 * KIB and count > 1
            yield Row(
                "local_store",
                f"{name} {format_size(value_bytes)} x {count}",
                "GB/s",
                gb_s,
                peer,
                gb_s / peer,
                f">= {MEMCPY_SHARE}" if judged else None,
                gb_s / peer >= MEMCPY_SHARE if judged else None,
            )


def transfer_times(
    store: Store, source: Buffer, target: Buffer, fresh: Iterator[str], count: int, rounds: int
) -> dict[str, float]:
    """Return the median seconds of a put, a get and a memcpy of ``count`` values."""
    # What is got was put so long ago that it left the CPU's caches.
    lag = max(1, (64 << 20) // (count * source.value_bytes)) - 1
    waiting: deque[Sequence[str]] = deque()
    names = iter([list(itertools.islice(fresh, count)) for _ in range(rounds + lag)])

    def put() -> None:
        batch = source.batch(next(names))
        expect_ok(store.put(batch))
        waiting.append(batch.keys)

    def get() -> None:
        expect_ok(store.get(target.batch(waiting.popleft())))

    def memcpy() -> None:
        pairs = zip(source.addresses(count), target.addresses(count), strict=True)
        for origin, destination in pairs:
            ctypes.memmove(destination, origin, source.value_bytes)

    for _ in range(lag):
        put()
    memcpy()
    return alternate({"put": put, "memcpy": memcpy, "get": get}, rounds)


def exists_rows(store: Store, rounds: int) -> Iterator[Row]:
    """Measure ``exists`` where every key is present, and where every second one is absent."""
    buffer = aligned_buffer(4 * KIB)
    store.register(region_of(buffer))
    fresh = keys()
    present = list(itertools.islice(fresh, 16_384))
    address = buffer.ctypes.data
    store.put(Batch(present, [[address]] * len(present), [[4 * KIB]] * len(present)))
    absent = list(itertools.islice(fresh, 4_096))
    generator = random.Random(3)  # noqa: S311 - the same choice each time
    for num_keys, mixed in itertools.product(NUM_KEYS, (False, True)):
        pool = present[: len(absent)] + absent if mixed else present
        asked = iter([generator.sample(pool, num_keys) for _ in range(rounds)])
        median = alternate({"exists": lambda asked=asked: store.exists(next(asked))}, rounds)
        microseconds = median["exists"] / num_keys * 1e6
        judged = num_keys == 4096
        yield Row(
            "local_store",
            f"exists x {num_keys}{' half absent' if mixed else ''}",
            "us/key",
            microseconds,
            None,
            None,
            f"<= {EXISTS_US}" if judged else None,
            microseconds <= EXISTS_US if judged else None,
        )


def main() -> None:
    """Run every case and write build/bench/local_store.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", type=Path, default=DEFAULT_PATH)
    parser.add_argument("--size", type=parse_size, default=1 << 30)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    rows: list[Row] = []
    for value_bytes in (*VALUE_SIZES, 0):
        shutil.rmtree(options.path, ignore_errors=True)
        store = open_store(f"local://{options.path}?size={options.size}")
        try:
            if value_bytes:
                rows += transfer_rows(store, options.size, value_bytes, options.rounds)
            else:
                rows += exists_rows(store, options.rounds)
        finally:
            store.close()
            shutil.rmtree(options.path, ignore_errors=True)
    print(f"written: {report('local_store', rows)}")


if __name__ == "__main__":
    main()
