"""The two sides of the benchmark of a full pool save for real, and say rightly what they stored."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtide.stores import open_store
from kvtide.testing.mooncake import MooncakePool
from tests.stores.mooncake_pools import SMALLEST_POOL_BYTES, RawClient

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(120)]

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def sides() -> Iterator[Any]:
    """The module of both sides, whose peer warns of each refusal."""
    sys.path.insert(0, str(BENCHMARKS))
    logging.disable(logging.WARNING)
    import saving_sides

    yield saving_sides
    logging.disable(logging.NOTSET)
    sys.path.remove(str(BENCHMARKS))


MAKERS: dict[str, Callable[[Any, MooncakePool], Any]] = {
    "kvtide": lambda sides, pool: sides.KVTideSide(open_store(pool.url)),
    "asks-first": lambda sides, pool: sides.KVTideSide(open_store(pool.url), checks=True),
    "in-tree": lambda sides, pool: sides.InTreeSide(f"{pool.host}:{pool.port}"),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=list(MAKERS))
def test_a_side_stores_what_the_engine_computes_and_the_master_agrees(
    sides: Any, make: Callable[[Any, MooncakePool], Any]
) -> None:
    """On a roomy pool: every byte of some prompts, none refused, and half-known ones once."""
    with MooncakePool(segment_bytes=256 << 20) as pool:
        side = make(sides, pool)
        assert sides.drive(side, sides.Engine(step_s=0.05, shared=0.5), seconds=1.0) > 0
        stored = side.stored
        assert stored.num_bytes == pool.metrics().used_bytes
        assert stored.num_bytes // sides.VALUE_BYTES == pool.metrics().num_puts
        assert stored.num_refused == stored.num_failed == side.num_back_offs == 0
        assert side.num_open_jobs == 0
        side.close()


@pytest.mark.parametrize("make", MAKERS.values(), ids=list(MAKERS))
def test_a_side_notes_that_a_full_pool_makes_it_pause(
    sides: Any, make: Callable[[Any, MooncakePool], Any]
) -> None:
    """Of which nothing can be evicted."""
    with MooncakePool(segment_bytes=SMALLEST_POOL_BYTES) as pool:
        other = RawClient(pool)
        other.clear(taken_bytes=SMALLEST_POOL_BYTES)
        side = make(sides, pool)
        assert sides.drive(side, sides.Engine(step_s=0.01), seconds=1.0) == 0
        assert side.stored.num_refused == side.stored.num_tried > 0
        assert side.num_back_offs > 0
        side.close()
        other.close()
