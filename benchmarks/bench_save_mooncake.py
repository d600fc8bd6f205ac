"""What a saved key costs the engine's process on a real Mooncake pool, beside vLLM's connector.

    python benchmarks/bench_save_mooncake.py [--rounds 9]

The workers of ``bench_save_path.py``, but with Mooncake's client over TCP behind each: so the copy
of a value's 32 segments is in both figures, kvtide's to staging and the client's to its sockets.
CPU time is that of the whole process, the client's own threads included.
"""

from __future__ import annotations

import argparse
import pickle
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

from bench_save_path import Workload
from measuring import Row, left_out, report, times_less

from kvtide.core.batch import Batch
from kvtide.errors import StoreOpenError
from kvtide.stores import Status, Store, open_store
from kvtide.stores.mooncake_package import mooncake_module
from kvtide.stores.wrappers import WrapperStore
from kvtide.testing.mooncake import MooncakePool

BENCH = "save_mooncake"
CONTEXT = 8 << 10
STEP_TOKENS = 512
"""A call of more than 63 values of 32 segments fails, and the peer puts a step's in one."""
NUM_REQUESTS = 64
POOL_BYTES = 2 << 30
_IDLE_LIMIT_S = 60.0


class RenamingStore(WrapperStore):
    """A store in which every round has names of its own (``names``), and what it has stored."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.names = ""
        self.num_put = 0

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Ask for this round's."""
        return super().exists([f"{self.names}/{key}" for key in keys])

    def put(self, batch: Batch) -> list[Status]:
        """Put under this round's names."""
        keys = [f"{self.names}/{key}" for key in batch.keys]
        statuses = super().put(Batch(keys, batch.addresses, batch.sizes, batch.order))
        self.num_put += statuses.count(Status.OK)
        return statuses


def rows_of(num_rounds: int) -> Iterator[Row]:
    """Let both workers save the same requests in turns."""
    from native_client import WatchedClient, native_client
    from vllm_engine import HeldEngine, kv_caches
    from worker_halves import InTreeWorker, KVTideWorker

    num_blocks = NUM_REQUESTS * 64 + (5 << 10)
    engine = HeldEngine(CONTEXT, num_blocks)
    workloads = {
        f"prefill at {CONTEXT >> 10}k": Workload.prefill(engine, STEP_TOKENS),
        "one request that decodes": Workload.decode(engine, 16),
        f"{NUM_REQUESTS} requests that decode": Workload.decode(
            HeldEngine(512, num_blocks, NUM_REQUESTS), 8
        ),
    }
    caches = kv_caches(num_blocks)
    with ExitStack() as stack:
        pools = [stack.enter_context(MooncakePool(segment_bytes=POOL_BYTES)) for _ in range(2)]
        store = RenamingStore(open_store(pools[0].url))
        native, how = native_client(f"{pools[1].host}:{pools[1].port}", caches)
        client = WatchedClient(native)
        stores = {"kvtide": store, "peer": client}
        workers = {
            "kvtide": KVTideWorker(caches, store=store),
            "peer": InTreeWorker(caches, client=client, how=how),
        }
        us: dict[tuple[str, str], list[float]] = {}
        for round_id in range(num_rounds):
            for what, workload in workloads.items():
                for side, worker in workers.items():
                    stores[side].names = f"{round_id}, {what}"
                    num_put = stores[side].num_put
                    spent = process_cpu_s(worker, workload, side)
                    if stores[side].num_put - num_put != workload.num_keys:
                        raise RuntimeError(f"{side} did not save everything")
                    us.setdefault((what, side), []).append(1e6 * spent / workload.num_keys)
        workers["kvtide"].close()
        native.close()
    for what, at_least in zip(workloads, (3, 5, 5), strict=True):
        case = f"c. worker on Mooncake, a key of {what}"
        yield times_less(BENCH, case, "us", us[what, "kvtide"], us[what, "peer"], at_least)


def process_cpu_s(worker: Any, workload: Workload, side: str) -> float:
    """Let a worker save all steps, one after the other; return the process's CPU seconds."""
    worker.begin(workload.request_ids, workload.first_token)
    steps = [pickle.loads(blob) for blob in workload.pickled[side]]  # noqa: S301 - made here
    start_s = time.process_time()
    for metadata in steps:
        worker.take(metadata)
        give_up_s = time.monotonic() + _IDLE_LIMIT_S
        while not worker.is_idle():
            if time.monotonic() > give_up_s:
                raise RuntimeError(f"{side}: jobs never end")
            time.sleep(0.001)
        worker.report()
    return time.process_time() - start_s


def main() -> None:
    """Measure, or say why not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    rows = [left_out(BENCH, "vLLM is not installed")]
    if find_spec("vllm") is not None:
        try:
            mooncake_module()
            rows = list(rows_of(options.rounds))
        except StoreOpenError as error:
            rows = [left_out(BENCH, str(error))]
    report(BENCH, rows)


if __name__ == "__main__":
    main()
