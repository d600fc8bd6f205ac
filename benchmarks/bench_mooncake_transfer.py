"""What values of many segments cost on a Mooncake pool over TCP, put and got.

    python benchmarks/bench_mooncake_transfer.py [--rounds 24]

A value of a KV cache has a segment for each layer. The peer is the way of vLLM's in-tree connector:
all segments are handed to Mooncake's client, which sends each on its own. kvtide's store *gathers*
them first; kvtide's worker stages a value as a *single* segment before the store sees it. Sides
take turns on one pool, emptied before each round; what was got is compared with what was put.

The last rows are about ``Store.checks_before_put``: what a put of keys that are present costs,
beside asking ``exists`` for them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from measuring import Row, compared, left_out, report, take_turns

from kvtide.core.batch import Batch
from kvtide.errors import StoreOpenError
from kvtide.stores import Status, open_store
from kvtide.stores.memory_buffer import ByteArray, aligned_buffer, region_of
from kvtide.stores.mooncake_package import mooncake_module
from kvtide.testing.mooncake import MooncakePool

BENCH = "mooncake_transfer"
KIB, MIB = 1 << 10, 1 << 20
LAYERS = 32
POOL_BYTES = 1 << 30
GOALS = {"put": 10.0, "get": 8.0}
CASES = (
    # value, keys per call, whether the goals are judged
    (64 * KIB, 1, False),
    (64 * KIB, 16, True),
    (64 * KIB, 63, True),  # the most that Mooncake's TCP transport takes unless it is told to
    (64 * KIB, 128, True),
    (512 * KIB, 63, False),
    (2 * MIB, 16, False),
)
BUFFER_BYTES = 32 * MIB


class Peer:
    """Mooncake's own client, used as vLLM's in-tree connector uses it."""

    def __init__(self, pool: MooncakePool) -> None:
        module = mooncake_module()
        self._native: Any = module.MooncakeDistributedStore()
        self._replication = module.ReplicateConfig()
        master = f"{pool.host}:{pool.port}"
        code = self._native.setup(pool.host, "P2PHANDSHAKE", 0, 16 * MIB, "tcp", "", master)
        assert code == 0

    def register(self, array: ByteArray) -> None:
        """Announce memory."""
        assert self._native.register_buffer(array.ctypes.data, array.nbytes) == 0

    def put(self, batch: Batch) -> None:
        """Store values of several segments."""
        codes = self._native.batch_put_from_multi_buffers(
            batch.keys, batch.addresses, batch.sizes, self._replication
        )
        assert set(codes) == {0}, codes

    def get(self, batch: Batch) -> None:
        """Read values into several segments."""
        codes = self._native.batch_get_into_multi_buffers(batch.keys, batch.addresses, batch.sizes)
        assert set(codes) == {batch.value_bytes(0)}, codes

    def empty_the_pool(self) -> None:
        """Remove every key, leased or not."""
        assert self._native.remove_all(force=True) >= 0

    def close(self) -> None:
        """End the connection."""
        self._native.close()


@dataclass(frozen=True, slots=True)
class Memory:
    """The first bytes of ``buffer`` as a KV cache of ``LAYERS`` layers, or as rows of whole values.

    There are ``num_keys`` values of ``value_bytes`` bytes in it.
    """

    buffer: ByteArray
    value_bytes: int
    num_keys: int

    @property
    def content(self) -> ByteArray:
        """All bytes of the values."""
        return self.buffer[: self.value_bytes * self.num_keys]

    def batch(self, name: str, *, in_layers: bool) -> Batch:
        """Return the values under keys that begin with ``name``."""
        first = int(self.buffer.ctypes.data)
        keys = [f"{name}@{number:064x}" for number in range(self.num_keys)]
        if not in_layers:
            places = [[first + number * self.value_bytes] for number in range(self.num_keys)]
            return Batch(keys, places, [[self.value_bytes]] * self.num_keys)
        segment_bytes = self.value_bytes // LAYERS
        layers = [first + layer * segment_bytes * self.num_keys for layer in range(LAYERS)]
        addresses = [
            [layer + number * segment_bytes for layer in layers] for number in range(self.num_keys)
        ]
        return Batch(keys, addresses, [[segment_bytes] * LAYERS] * self.num_keys)


def expect_ok(statuses: list[Status]) -> None:
    """Stop the benchmark if it measures failures."""
    assert set(statuses) == {Status.OK}, statuses


class Sides:
    """kvtide's store and the peer, with the memory both may read and write."""

    def __init__(self, pool: MooncakePool) -> None:
        self.store, self.peer = open_store(pool.url), Peer(pool)
        self.source, self.target = aligned_buffer(BUFFER_BYTES), aligned_buffer(BUFFER_BYTES)
        for buffer in (self.source, self.target):
            self.store.register(region_of(buffer))
            self.peer.register(buffer)

    def close(self) -> None:
        """End both connections."""
        self.peer.close()
        self.store.close()


def transfer_rows(
    sides: Sides, value_bytes: int, num_keys: int, rounds: int, *, judged: bool
) -> Iterator[Row]:
    """Compare put and get of one value size and batch."""
    store, peer = sides.store, sides.peer
    source = Memory(sides.source, value_bytes, num_keys)
    target = Memory(sides.target, value_bytes, num_keys)
    source.content[:] = np.random.default_rng(5).integers(0, 256, source.content.size, np.uint8)

    def put(name: str) -> Callable[[], object]:
        batch = source.batch(name, in_layers=name != "single")
        if name == "peer":
            return lambda: peer.put(batch)
        return lambda: expect_ok(store.put(batch))

    def get(name: str) -> Callable[[], object]:
        batch = target.batch(name, in_layers=name != "single")
        if name == "peer":
            return lambda: peer.get(batch)
        return lambda: expect_ok(store.get(batch))

    names = ("gathered", "single", "peer")
    calls = {"put": {name: put(name) for name in names}, "get": {name: get(name) for name in names}}
    speeds: dict[str, dict[str, list[float]]] = {
        what: {name: [] for name in names} for what in calls
    }
    for number in range(rounds):
        peer.empty_the_pool()
        order = names[number % 3 :] + names[: number % 3]  # the first meets what the emptying left
        for what, contenders in calls.items():
            in_turn = {name: contenders[name] for name in order}
            for name, [took_s] in take_turns(in_turn, 1).items():
                speeds[what][name].append(value_bytes * num_keys / took_s / MIB)
        assert np.array_equal(source.content, target.content)
        target.content[:] = 0
    for what, name in ((what, name) for what in calls for name in names[:2]):
        yield compared(
            BENCH,
            f"{what} {value_bytes // KIB} KiB x {num_keys}, {name}",
            "MiB/s",
            speeds[what][name],
            speeds[what]["peer"],
            GOALS[what] if judged else None,
        )


def present_rows(sides: Sides, num_keys: int, rounds: int) -> Iterator[Row]:
    """Compare a put of keys that are present with asking for them."""
    store, memory = sides.store, Memory(sides.source, 64 * KIB, num_keys)
    sides.peer.empty_the_pool()
    names = ("single", "gathered")
    batches = {name: memory.batch(name, in_layers=name == "gathered") for name in names}
    for batch in batches.values():
        expect_ok(store.put(batch))
    times = take_turns(
        {
            "single": lambda: expect_ok(store.put(batches["single"])),
            "gathered": lambda: expect_ok(store.put(batches["gathered"])),
            "exists": lambda: store.exists(batches["single"].keys),
        },
        rounds,
    )
    each = {name: [took_s / num_keys * 1e6 for took_s in took] for name, took in times.items()}
    for name in names:
        case = f"put of {num_keys} present keys, {name}, beside exists"
        yield compared(BENCH, case, "us/key", each[name], each["exists"])
    # Without a check a put costs nothing more for an absent key; for a present one, this.
    share = statistics.median(each["exists"]) / statistics.median(each["single"])
    case = f"share of {num_keys} keys present above which a check is cheaper"
    yield Row(BENCH, case, "", share, None, None, None, None)


def all_rows(rounds: int) -> Iterator[Row]:
    """Run every case on a pool of its own."""
    with MooncakePool(segment_bytes=POOL_BYTES) as pool:
        sides = Sides(pool)
        try:
            for value_bytes, num_keys, judged in CASES:
                num_rounds = rounds if judged else max(1, rounds // 2)
                yield from transfer_rows(sides, value_bytes, num_keys, num_rounds, judged=judged)
            yield from present_rows(sides, 128, 2 * rounds)
        finally:
            sides.close()


def main() -> None:
    """Run every case and write build/bench/mooncake_transfer.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=24)
    options = parser.parse_args()
    try:
        mooncake_module()
        rows = list(all_rows(options.rounds))
    except StoreOpenError as error:
        rows = [left_out(BENCH, str(error))]
    print(f"written: {report(BENCH, rows)}")


if __name__ == "__main__":
    main()
