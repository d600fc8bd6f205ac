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
from collections.abc import Callable, Iterator
from pathlib import Path

from measuring import Row, alternate, report

from kvtide.core.batch import Batch
from kvtide.stores import Status, Store, open_store
from kvtide.stores.memory_buffer import aligned_buffer, region_of
from kvtide.stores.url import format_size, parse_size

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


def batch_of(names: list[str], address: int, value_bytes: int) -> Batch:
    """Return a batch of one-segment values, laid one after the other round the buffer."""
    per_buffer = BUFFER_BYTES // value_bytes
    addresses = [[address + i % per_buffer * value_bytes] for i in range(len(names))]
    return Batch(names, addresses, [[value_bytes]] * len(names), range(len(names)))


def transfer_rows(store: Store, pool_bytes: int, value_bytes: int, rounds: int) -> Iterator[Row]:
    """Measure put and get of one value size against memcpy."""
    source, target = aligned_buffer(BUFFER_BYTES), aligned_buffer(BUFFER_BYTES)
    store.register(region_of(source))
    store.register(region_of(target))
    fresh = keys()
    take = lambda count: list(itertools.islice(fresh, count))  # noqa: E731
    # Twice the pool: the pages are mapped, the hand has been round, the steady state is reached.
    for _ in range(2 * pool_bytes // BUFFER_BYTES):
        names = take(BUFFER_BYTES // value_bytes)
        store.put(batch_of(names, source.ctypes.data, value_bytes))
    for num_keys in NUM_KEYS:
        count = min(num_keys, pool_bytes // 2 // value_bytes)
        puts = iter([batch_of(take(count), source.ctypes.data, value_bytes) for _ in range(rounds)])
        last: list[Batch] = []

        def put(puts: Iterator[Batch] = puts, last: list[Batch] = last) -> None:
            last[:] = [next(puts)]
            statuses = store.put(last[0])
            if any(status is not Status.OK for status in statuses):
                raise SystemExit(f"a put failed: {set(statuses)}")

        def get(last: list[Batch] = last) -> None:
            statuses = store.get(batch_of(list(last[0].keys), target.ctypes.data, value_bytes))
            if any(status is not Status.OK for status in statuses):
                raise SystemExit(f"a get failed: {set(statuses)}")

        copy = copier(source.ctypes.data, target.ctypes.data, value_bytes, count)
        copy()
        medians = alternate({"put": put, "memcpy": copy, "get": get}, rounds)
        for name in ("put", "get"):
            gb_s = count * value_bytes / medians[name] / 1e9
            peer = count * value_bytes / medians["memcpy"] / 1e9
            judged = value_bytes == 512 * KIB and num_keys > 1
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


def copier(source: int, target: int, value_bytes: int, count: int) -> Callable[[], None]:
    """Return a call that copies ``count`` values with nothing but memcpy."""
    per_buffer = BUFFER_BYTES // value_bytes

    def copy() -> None:
        for index in range(count):
            offset = index % per_buffer * value_bytes
            ctypes.memmove(target + offset, source + offset, value_bytes)

    return copy


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
