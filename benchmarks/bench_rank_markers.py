"""Whether a marker per chunk, put when all ranks have theirs, would pay on engines of many ranks.

    python benchmarks/bench_rank_markers.py [--rounds 7] [--requests 100] [--seeds 2]

A chunk of a tensor parallel engine has a part per rank, and kvtide's lookup asks for all of them.
With one key per chunk that says "all parts are in" it would ask for that alone. In each row
``kvtide`` is what kvtide does and ``peer`` is what markers would do. Sides take turns, on the local
store and on a Mooncake pool:

* *hit* and *cold miss*: the same lookup, driven over the keys of all parts or over markers;
* *save*: putting the parts of a step of 512 tokens, rank after rank, beside putting its markers;
* *room*: what values take of the store;
* *full store*: how often what a lookup promised was not there to be loaded (``rank_promises``);
* *lookup and load*: what a hit waits for, by the read rate of a rank that was measured here, for
  two sizes of model. Ranks load beside each other, each at that rate.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from itertools import product

from measuring import Row, figure, left_out, report
from rank_costs import (
    BENCH,
    KIB,
    MOST_RANKS,
    TP_SIZES,
    VALUE_BYTES,
    Lookups,
    Transfers,
    room_by_filling,
)
from rank_parts import BLOCK, local_store
from rank_promises import WAYS, Tally, Way, promises

from kvtide.config import PoolConfig
from kvtide.errors import StoreOpenError
from kvtide.runtime.tags import TAG_BYTES
from kvtide.stores import Store, open_store
from kvtide.stores.mooncake_package import mooncake_module
from kvtide.testing.mooncake import MooncakePool

MIB, GIB = 1 << 20, 1 << 30
CONTEXTS = (8 * KIB, 32 * KIB, 128 * KIB)
MODELS = {"8B": 128 * KIB, "70B": 320 * KIB}
"""Bytes per token over all ranks, as Llama 3.1 has them: 8 KV heads, bfloat16."""
POOL_BYTES = 1 << 30
FILLED_BYTES = 512 * MIB
FULL_POOL_BYTES = 256 * MIB
LEASE_MS = 1000
"""Of the full Mooncake pool: with the default of 10 s the few requests would lease all of it."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure."""

    num_rounds: int
    num_requests: int
    num_seeds: int
    contexts: tuple[int, ...] = CONTEXTS


@dataclass(frozen=True, slots=True)
class Measured:
    """What a hit's wait is made of, in seconds and bytes per second."""

    parts_s: float
    markers_s: float
    marker_put_s: float
    get_rate: float


def room_rows(name: str, tag_bytes: float) -> Iterator[Row]:
    """Compare what the parts of a chunk take of a store with what its marker takes."""
    for tp_size in TP_SIZES:
        yield figure(
            BENCH, f"{name}, TP {tp_size}, room", "B/chunk", tp_size * VALUE_BYTES, tag_bytes
        )


def promise_rows(name: str, tallies: Mapping[Way, Tally]) -> Iterator[Row]:
    """Compare what was promised with what was there; ``kvtide`` asks for every rank's part."""
    ours = tallies["every rank"]
    shares: dict[str, Callable[[Tally], float]] = {
        "hits whose load failed": lambda tally: tally.failed_share,
        "promised chunks of failed loads": lambda tally: tally.vain_chunks / tally.promised_chunks,
        "chunks of prompts loaded": lambda tally: tally.usable_chunks / tally.num_chunks,
    }
    for way, what in (("marker", "markers"), ("first rank", "first rank's part alone")):
        theirs = tallies[way]
        case = f"{name}, full store, {what}"
        for text, share in shares.items():
            yield figure(BENCH, f"{case}: {text}", "%", 100 * share(ours), 100 * share(theirs))
        stale = 100 * theirs.num_stale / theirs.num_signs
        yield figure(BENCH, f"{case}: of chunks that lack a part, at the end", "%", stale)


def wait_rows(name: str, found: Measured, num_tokens: int, failed: float) -> Iterator[Row]:
    """Tell what a hit waits for, and what markers change; the share ``failed`` of loads fails."""
    saved_s = found.parts_s - found.markers_s
    paid_after = num_tokens // BLOCK * found.marker_put_s / saved_s
    case = f"{name}, TP {MOST_RANKS}, hit of {num_tokens:,} tokens"
    yield figure(BENCH, f"{case}: hits that pay for putting its markers", "hits", paid_after)
    wait_ms = PoolConfig().lookup_wait_ms
    yield figure(BENCH, f"{case}: beside lookup_wait_ms", "ms", 1e3 * found.parts_s, wait_ms)
    yield figure(BENCH, f"{name}, read rate of a rank", "GiB/s", found.get_rate / GIB)
    for model, token_bytes in MODELS.items():
        rank_bytes = num_tokens * token_bytes / MOST_RANKS
        load_s = rank_bytes / found.get_rate
        ours_s, theirs_s = found.parts_s + load_s, found.markers_s + load_s
        yield figure(BENCH, f"{case}, {model}: lookup and load", "s", ours_s, theirs_s)
        yield figure(BENCH, f"{case}, {model}: saved by markers", "%", 100 * saved_s / ours_s)
        # What comes before the gap is read again, so a load that failed costs itself.
        spent_s = failed * load_s
        text = "saved, beside spent on failed loads"
        yield figure(BENCH, f"{case}, {model}: {text}", "ms", 1e3 * saved_s, 1e3 * spent_s)
        tenth_rate = rank_bytes / (10 * saved_s - found.parts_s)
        text = "read rate at which markers save a tenth"
        yield figure(BENCH, f"{case}, {model}: {text}", "GiB/s", tenth_rate / GIB)


@contextmanager
def mooncake_store(pool_bytes: int) -> Iterator[Store]:
    """Give a full pool's client: leases are short."""
    with (
        MooncakePool(segment_bytes=pool_bytes, lease_ms=LEASE_MS) as pool,
        closing(open_store(pool.url)) as store,
    ):
        yield store


def full_store_tallies(
    full_store: Callable[[int], AbstractContextManager[Store]], effort: Effort
) -> dict[Way, Tally]:
    """Serve the same requests in each way, on a store of its own."""
    tallies = {way: Tally() for way in WAYS}
    for seed, way in product(range(effort.num_seeds), WAYS):
        with full_store(FULL_POOL_BYTES) as store:
            tallies[way].add(promises(store, way, effort.num_requests, seed))
    return tallies


def local_rows(effort: Effort) -> Iterator[Row]:
    """Measure on local stores."""
    name = "local"
    with local_store(POOL_BYTES) as store:
        lookups, transfers = Lookups(store, effort.contexts), Transfers(store)
        lookups.stock()
        yield from lookups.rows(name, effort.num_rounds)
        yield from transfers.save_rows(name, effort.num_rounds)
        found = Measured(
            *lookups.longest_s, transfers.marker_s, transfers.get_rate(effort.num_rounds)
        )
    with local_store(FILLED_BYTES) as store:
        yield from room_rows(name, room_by_filling(store, FILLED_BYTES, TAG_BYTES))
    tallies = full_store_tallies(local_store, effort)
    yield from promise_rows(name, tallies)
    yield from wait_rows(name, found, effort.contexts[-1], tallies["marker"].failed_share)


def mooncake_rows(effort: Effort) -> Iterator[Row]:
    """Measure on Mooncake pools on this machine."""
    name = "Mooncake"
    with MooncakePool(segment_bytes=POOL_BYTES) as pool, closing(open_store(pool.url)) as store:
        lookups, transfers = Lookups(store, effort.contexts), Transfers(store)
        lookups.stock()
        stocked = pool.metrics()
        yield from lookups.rows(name, effort.num_rounds)
        yield from transfers.save_rows(name, effort.num_rounds)
        found = Measured(
            *lookups.longest_s, transfers.marker_s, transfers.get_rate(effort.num_rounds)
        )
    yield from room_rows(name, stocked.used_bytes / stocked.num_keys)
    tallies = full_store_tallies(mooncake_store, effort)
    yield from promise_rows(name, tallies)
    yield from wait_rows(name, found, effort.contexts[-1], tallies["marker"].failed_share)


def main() -> None:
    """Measure on both stores and write build/bench/rank_markers.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=100, help="to each full store")
    parser.add_argument("--seeds", type=int, default=2, help="of the requests to full stores")
    options = parser.parse_args()
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    effort = Effort(options.rounds, options.requests, options.seeds)
    rows = list(local_rows(effort))
    try:
        mooncake_module()
        rows += mooncake_rows(effort)
    except StoreOpenError as error:
        rows.append(left_out(BENCH, str(error)))
    print(f"written: {report(BENCH, rows)}")


if __name__ == "__main__":
    main()
