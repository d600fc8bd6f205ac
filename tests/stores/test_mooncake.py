"""The Mooncake store keeps the contract on a real master and owner, whatever becomes of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import settings

from kvtide.stores import Store, open_store
from kvtide.testing import StoreMachine, StoreTests
from kvtide.testing.mooncake import MooncakePool
from kvtide.testing.store_tests import SMALL_BYTES
from tests.stores.mooncake_pools import (
    LEASE_MS,
    SMALLEST_POOL_BYTES,
    PatientStore,
    RawClient,
    url_of,
)


@pytest.fixture(scope="module", autouse=True)
def pools() -> Iterator[None]:
    """Two pools for all tests of this file, each with a client that reaches past kvtide."""
    with (
        MooncakePool(segment_bytes=64 << 20, lease_ms=LEASE_MS) as ample,
        MooncakePool(
            segment_bytes=SMALLEST_POOL_BYTES,
            lease_ms=LEASE_MS,
            master_flags={"eviction_high_watermark_ratio": "1.0"},  # not before it is full
        ) as small,
    ):
        _Pools.ample, _Pools.small = ample, small
        _Pools.raw = RawClient(ample)
        _Pools.raw_small = RawClient(small)
        yield
        _Pools.raw.close()
        _Pools.raw_small.close()


class _Pools:
    ample: ClassVar[MooncakePool]
    small: ClassVar[MooncakePool]
    raw: ClassVar[RawClient]
    raw_small: ClassVar[RawClient]


def open_ample() -> Store:
    """An empty store of 64 MiB."""
    _Pools.raw.clear()
    return PatientStore(open_store(url_of(_Pools.ample)))


def open_small(free_bytes: int) -> Store:
    """A store with room for ``free_bytes``."""
    _Pools.raw_small.clear(taken_bytes=SMALLEST_POOL_BYTES - free_bytes)
    return PatientStore(open_store(url_of(_Pools.small)))


class TestMooncakeStore(StoreTests):
    """The laws."""

    can_be_lost = True
    holds_empty_values = False
    reads_in_place = True
    evicts_at_will = True
    settles_in_s = 10.0

    def open(self, directory: Path) -> Store:
        """An empty store of ample size."""
        return open_ample()

    def open_small(self, directory: Path) -> Store:
        """An empty store that is soon full."""
        return open_small(SMALL_BYTES)

    def raw_put(self, store: Store, key: str, value: bytes) -> None:
        """Write past the store's methods."""
        _Pools.raw.put(key, value)

    def raw_get(self, store: Store, key: str) -> bytes | None:
        """Read past the store's methods."""
        return _Pools.raw.get(key)

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        """An empty store; whatever was done to its master is undone after the test."""
        store = self.open(tmp_path)
        yield store
        store.close()
        if self._is_lost:
            self._is_lost = False
            _Pools.ample.start_master()

    _is_lost = False

    def lose(self, store: Store) -> None:
        """Kill the master."""
        self._is_lost = True
        _Pools.ample.kill_master()

    def obstructed(self, store: Store) -> AbstractContextManager[object]:
        """Stop the master: connections stay open, and nothing is answered."""
        return _paused()


@contextmanager
def _paused() -> Iterator[None]:
    _Pools.ample.pause_master()
    try:
        yield
    finally:
        _Pools.ample.resume_master()


class RoomyMachine(StoreMachine):
    """Histories in which nothing may vanish."""

    holds_empty_values = False
    reads_in_place = True

    def open(self) -> Store:
        """An empty store of ample size."""
        return open_ample()


class TightMachine(RoomyMachine):
    """Histories in which values are evicted."""

    may_evict = True

    def open(self) -> Store:
        """An empty store that is soon full."""
        return open_small(256 << 10)


TestRoomyHistories = RoomyMachine.TestCase
TestRoomyHistories.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
TestTightHistories = TightMachine.TestCase
TestTightHistories.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
