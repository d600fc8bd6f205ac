"""The pools that tests give to their engines: a local one each, or a Mooncake one for all."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from kvtide.testing.mooncake import MooncakePool
from tests.stores.mooncake_pools import RawClient

MOONCAKE_BYTES = 256 << 20

ON_EACH_STORE = pytest.mark.parametrize("pool_url", ["local", "mooncake"], indirect=True)
"""Runs a test that has the fixture ``pool_url`` on a pool of each kind."""


class SharedMooncake:
    """A real master and owner, emptied for each test that asks for a pool."""

    def __init__(self, pool: MooncakePool, raw: RawClient) -> None:
        self._pool = pool
        self._raw = raw

    @property
    def metrics_address(self) -> str:
        """Where the master answers, but not as one."""
        return f"{self._pool.host}:{self._pool.metrics_port}"

    def emptied(self) -> str:
        """Return the pool's URL; it holds nothing now."""
        self._raw.clear()
        return self._pool.url


@contextmanager
def shared_mooncake() -> Iterator[SharedMooncake]:
    """Start the two, for as long as a ``with`` lasts."""
    with (
        MooncakePool(segment_bytes=MOONCAKE_BYTES) as pool,
        closing(RawClient(pool)) as raw,
    ):
        yield SharedMooncake(pool, raw)


@contextmanager
def local_pool(size: str = "64MiB") -> Iterator[str]:
    """Give the URL of an empty local pool, which goes away afterwards."""
    with tempfile.TemporaryDirectory(prefix="kvtide-test-", dir="/dev/shm") as folder:
        yield f"local://{folder}/pool?size={size}"


@contextmanager
def pool_of(kind: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """Give the URL of an empty pool of a kind: ``local`` or ``mooncake``."""
    if kind == "mooncake":
        yield request.getfixturevalue("mooncake").emptied()
    else:
        with local_pool() as url:
            yield url
