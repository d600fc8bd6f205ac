"""What the benchmarks of many ranks share: names of a chunk's parts, memory, and two stores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from tempfile import TemporaryDirectory

from kvtide.core.batch import Batch
from kvtide.core.chunks import ChunkedTokenDatabase
from kvtide.core.coordinator import Coordinator
from kvtide.core.groups import FullAttention
from kvtide.core.keys import CacheIdentity, namespace_for
from kvtide.core.topology import ParallelSizes, Topology
from kvtide.stores import Status, Store, open_store
from kvtide.stores.memory_buffer import ByteArray, aligned_buffer, region_of

BLOCK = 16
COORDINATOR = Coordinator((FullAttention(BLOCK),), BLOCK)
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - a folder is made there
BUFFER_BYTES = 64 << 20

Databases = Sequence[Sequence[ChunkedTokenDatabase]]


def databases_of(tp_size: int) -> Databases:
    """Return the databases of a chunk's parts: a lookup of kvtide asks for all of them."""
    topology = Topology.undivided(1, ParallelSizes(tp_size))
    namespace = namespace_for("", CacheIdentity({}, None))
    return COORDINATOR.databases(namespace, topology.all_parts())


def marker_databases() -> Databases:
    """Return the database of markers: one key per chunk, whatever the ranks."""
    return COORDINATOR.databases(namespace_for("marker", CacheIdentity({}, None)))


@dataclass(frozen=True, slots=True)
class Values:
    """Registered memory that values are put from and read into, one place after another."""

    first_address: int
    value_bytes: int

    @classmethod
    def of(cls, store: Store, value_bytes: int) -> Values:
        """Announce the memory to a store: all values share it, what is in them does not matter."""
        buffer = _memory()
        store.register(region_of(buffer))
        return cls(int(buffer.ctypes.data), value_bytes)

    def batch(self, keys: Sequence[str], first_chunk: int = 0) -> Batch:
        """Return a batch of one-segment values; ``first_chunk`` is the first key's index."""
        num_places = BUFFER_BYTES // self.value_bytes
        addresses = [
            [self.first_address + (first_chunk + index) % num_places * self.value_bytes]
            for index in range(len(keys))
        ]
        order = range(first_chunk, first_chunk + len(keys))
        return Batch(keys, addresses, [[self.value_bytes]] * len(keys), order)


@cache
def _memory() -> ByteArray:
    return aligned_buffer(BUFFER_BYTES)


def expect_ok(statuses: Sequence[Status]) -> None:
    """Stop the benchmark if it measures failures."""
    assert set(statuses) <= {Status.OK}, statuses


@contextmanager
def local_store(pool_bytes: int) -> Iterator[Store]:
    """Give a local store of its own in shared memory."""
    with TemporaryDirectory(prefix="kvtide-bench-", dir=SHARED_MEMORY) as folder:
        store = open_store(f"local://{folder}?size={pool_bytes}")
        try:
            yield store
        finally:
            store.close()
