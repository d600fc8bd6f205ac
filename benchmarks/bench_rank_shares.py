"""What each of eight ranks writes of a prompt of 131,072 tokens where several hold the same bytes.

    python benchmarks/bench_rank_shares.py [--tokens 131072]

Each rank is kvtide's worker on memory of its own; all of them put into one store, which counts.
Together they have to write one copy (the ``peer``), and nobody more than a tenth above another.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from measuring import Row, report

from kvtide.core.batch import Batch
from kvtide.core.jobs import StepPlan, StoreJob, pack_ints
from kvtide.core.keys import BlockHashes
from kvtide.core.topology import ParallelSizes, Split, Topology
from kvtide.runtime.limits import WorkerLimits
from kvtide.runtime.prefixes import PrefixDatabases
from kvtide.runtime.tags import TAG_BYTES
from kvtide.runtime.worker import PoolWorker
from kvtide.stores import Status, Store, open_store
from kvtide.stores.wrappers import WrapperStore
from kvtide.testing.blocks import FakeBlocks, byte_layout
from kvtide.testing.requests import fake_hashes

BENCH = "rank_shares"
BLOCK = 16
TP_SIZE = 8
PAYLOAD_BYTES = 128
JOB_TOKENS = 2048
STEP_CHUNKS = JOB_TOKENS // BLOCK
SHARE_GOAL = 1.1


@dataclass(frozen=True, slots=True)
class Model:
    """A model by the shards of each of its groups: as many as there are different heads."""

    name: str
    num_shards: tuple[int, ...]

    @property
    def topology(self) -> Topology:
        """The ranks and what they hold."""
        return Topology(ParallelSizes(TP_SIZE), tuple(Split(num) for num in self.num_shards))


MODELS = (
    Model("MLA", (1,)),
    Model("2 KV heads", (2,)),
    Model("3 groups, 1, 2 and 4 KV heads", (1, 2, 4)),
)


class CountingStore(WrapperStore):
    """Counts the bytes of one rank's puts; the store behind it is everybody's."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.put_bytes = 0

    def put(self, batch: Batch) -> list[Status]:
        """Put, and count."""
        self.put_bytes += batch.total_bytes
        return self.inner.put(batch)

    def close(self) -> None:
        """Leave the store to the others."""


def written_bytes(model: Model, num_tokens: int) -> list[int]:
    """Return what each rank puts of one prompt, saved in jobs of ``JOB_TOKENS``."""
    topology, num_groups = model.topology, len(model.num_shards)
    hashes = fake_hashes(num_tokens // BLOCK)
    shared = open_store("memory://?size=1GiB")
    written: list[int] = []
    for rank in range(TP_SIZE):
        role, store = topology.role(rank), CountingStore(shared)
        worker = PoolWorker(
            FakeBlocks(byte_layout(*((BLOCK, PAYLOAD_BYTES),) * num_groups), STEP_CHUNKS + 1),
            store,
            PrefixDatabases([BLOCK] * num_groups, BLOCK, role.parts),
            limits=WorkerLimits(staging_bytes=4 << 20, load_staging_bytes=1 << 20),
            role=role,
            threaded=False,
        )
        worker.take_over(StepPlan(prefixes={0: "bench"}))
        for job in jobs(hashes, num_groups):
            worker.take_over(StepPlan(stores=(job,)))
            worker.fence()
            worker.run_pending()
        report_ = worker.take_report()
        assert report_ is not None
        ends = {end for counts in report_.ended.values() for end in counts}
        assert all(end.is_success for end in ends), ends
        worker.check_idle()
        worker.close()
        written.append(store.put_bytes)
    shared.close()
    return written


def jobs(hashes: Sequence[bytes], num_groups: int) -> Iterator[StoreJob]:
    """Yield the jobs of a prompt, each from the same blocks: what is in them does not matter."""
    block_ids = pack_ints(range(1, STEP_CHUNKS + 1))
    for job_id, first in enumerate(range(0, len(hashes), STEP_CHUNKS)):
        yield StoreJob(
            job_id,
            0,
            first * BLOCK,
            (first + STEP_CHUNKS) * BLOCK,
            BlockHashes.pack(hashes[first : first + STEP_CHUNKS], first=first),
            (first,) * num_groups,
            (block_ids,) * num_groups,
        )


def rows(model: Model, num_tokens: int) -> Iterator[Row]:
    """Compare all that ranks write with one copy, and the largest share with the smallest."""
    written = written_bytes(model, num_tokens)
    one_copy = sum(model.num_shards) * num_tokens // BLOCK * (PAYLOAD_BYTES + TAG_BYTES)
    case, total = f"{model.name}, TP {TP_SIZE}", sum(written)
    ratio = total / one_copy
    yield Row(
        BENCH, f"{case}: bytes written", "B", total, one_copy, ratio, "== 1", total == one_copy
    )
    most, least = max(written), min(written)
    share = most / least
    yield Row(
        BENCH,
        f"{case}: largest share, by smallest",
        "B",
        most,
        least,
        share,
        f"<= {SHARE_GOAL}",
        share <= SHARE_GOAL,
    )


def main() -> None:
    """Count for each model and write build/bench/rank_shares.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=128 << 10)
    options = parser.parse_args()
    found = [row for model in MODELS for row in rows(model, options.tokens)]
    print(f"written: {report(BENCH, found)}")


if __name__ == "__main__":
    main()
