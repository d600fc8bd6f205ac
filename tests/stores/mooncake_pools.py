"""Real Mooncake pools for the tests of stores: one of ample size and one that is soon full."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from kvtide.stores import Status, Store
from kvtide.stores.mooncake_package import mooncake_module
from kvtide.stores.wrappers import WrapperStore
from kvtide.testing.mooncake import MooncakePool

LEASE_MS = 100
SMALLEST_POOL_BYTES = 16 << 20
BALLAST_BYTES = 256 << 10
CALL_TIMEOUT_MS = 2000
OK = 0


def url_of(pool: MooncakePool) -> str:
    """Return the pool's URL with the tests' time limits."""
    return f"{pool.url}?call_timeout_ms={CALL_TIMEOUT_MS}&setup_timeout_ms=5000"


class RawClient:
    """A Mooncake client of its own, past kvtide's store."""

    def __init__(self, pool: MooncakePool) -> None:
        self._native: Any = mooncake_module().MooncakeDistributedStore()
        code = self._native.setup(
            "127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", f"127.0.0.1:{pool.port}"
        )
        assert code == OK

    def put(self, key: str, value: bytes) -> None:
        """Store a value."""
        assert self._native.put(key, value) == OK

    def get(self, key: str) -> bytes | None:
        """Read a value, None where absent."""
        return bytes(self._native.get(key)) if self._native.is_exist(key) == 1 else None

    def clear(self, *, taken_bytes: int = 0) -> None:
        """Remove every key, leased or not, and take so much of the pool that no one can evict.

        16 MiB are the smallest pool that Mooncake makes.
        """
        give_up_s = time.monotonic() + 10
        while self._native.remove_all(True) < OK:  # the master may just have come back
            assert time.monotonic() < give_up_s
            time.sleep(0.05)
        pinned = mooncake_module().ReplicateConfig()
        pinned.with_hard_pin = True
        for number in range(taken_bytes // BALLAST_BYTES):
            assert self._native.put(f"ballast-{number}", bytes(BALLAST_BYTES), pinned) == OK

    def close(self) -> None:
        """End the connection."""
        self._native.close()


class PatientStore(WrapperStore):
    """Removes a key again until its lease has ended: a lease holds for a time, and no longer."""

    def __init__(self, inner: Store, lease_s: float = LEASE_MS / 1000) -> None:
        super().__init__(inner)
        self._patience_s = 10 * lease_s

    def remove(self, keys: Sequence[str]) -> list[Status]:
        statuses = self.inner.remove(keys)
        give_up_s = time.monotonic() + self._patience_s
        while Status.FAILED in statuses and time.monotonic() < give_up_s:
            time.sleep(0.01)
            left = [index for index, status in enumerate(statuses) if status is Status.FAILED]
            for index, status in zip(left, self.inner.remove([keys[i] for i in left]), strict=True):
                statuses[index] = status
        return statuses
