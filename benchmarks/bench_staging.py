"""What staging a chunk costs beside asking the store for it, and numpy's copies beside torch's.

    python benchmarks/bench_staging.py [--path /dev/shm/kvtide-bench] [--rounds 30]

The first table is about the order of a save: copy a chunk and then ask whether the store has it, or
ask first. The second compares the two libraries on one thread, where torch is installed.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from measuring import Row, alternate, report

from kvtide.core.batch import Batch
from kvtide.runtime.slab import page_padded
from kvtide.runtime.tags import TAG_BYTES, write_tag
from kvtide.stores import open_store
from kvtide.stores.memory_buffer import aligned_buffer, region_of

KIB = 1 << 10
CHUNKS = 128
BLOCKS = 512
DEFAULT_PATH = Path("/dev/shm/kvtide-bench")  # noqa: S108 - removed before and after


def names(mark: str) -> list[str]:
    """Return as many keys as a job has chunks."""
    return [
        f"kvtide:{'f' * 32}@pp:0@shard:0@dcp:0@group:0@{mark}{number:062x}"
        for number in range(CHUNKS)
    ]


def order_rows(path: Path, payload: int, rounds: int) -> Iterator[Row]:
    """Time what a save of 128 chunks consists of: copying, tags, ``exists`` and ``put``."""
    blocks = np.random.default_rng(1).integers(0, 255, (BLOCKS, payload), dtype=np.uint8)
    row_bytes = page_padded(payload + TAG_BYTES)
    buffer = aligned_buffer(CHUNKS * row_bytes)
    rows = buffer.reshape(CHUNKS, row_bytes)
    chosen = np.random.default_rng(2).permutation(BLOCKS)[:CHUNKS]
    present = names("aa")
    address = int(buffer.ctypes.data)
    places = [[address + number * row_bytes] for number in range(CHUNKS)]
    sizes = [[payload + TAG_BYTES]] * CHUNKS
    shutil.rmtree(path, ignore_errors=True)
    store = open_store(f"local://{path}?size={4 * CHUNKS * row_bytes + (32 << 20)}")
    try:
        store.register(region_of(buffer))
        store.put(Batch(present, places, sizes))
        fresh = names("bb")

        def copy() -> None:
            for block, row in zip(chosen, rows, strict=True):
                row[:payload] = blocks[block]

        def tag() -> None:
            for row, key in zip(rows, present, strict=True):
                write_tag(row, key, payload)

        def put() -> None:
            store.put(Batch(fresh, places, sizes))

        def remove() -> None:
            store.remove(fresh)

        calls: dict[str, Callable[[], object]] = {
            "copy": copy,
            "tags": tag,
            "exists": lambda: store.exists(present),
            "put": put,
            "remove": remove,
        }
        medians = alternate(calls, rounds)
    finally:
        store.close()
        shutil.rmtree(path, ignore_errors=True)
    for what in ("copy", "tags", "exists", "put"):
        case = f"{what}, {CHUNKS} chunks of {payload // KIB} KiB"
        milliseconds = medians[what] * 1e3
        peer = (medians["copy"] + medians["tags"]) * 1e3 if what == "exists" else None
        ratio = milliseconds / peer if peer else None
        yield Row("staging", case, "ms", milliseconds, peer, ratio, None, None)


def library_rows(layers: int, layer_bytes: int, rounds: int) -> Iterator[Row]:
    """Compare copies of 128 blocks, whose layers lie apart, through numpy and through torch."""
    import torch

    from kvtide.engines.vllm.rows import HostRows, Layer, Run, TorchRows
    from kvtide.engines.vllm.segments import find_segment

    torch.set_num_threads(1)
    cache = torch.randint(0, 255, (layers, BLOCKS, layer_bytes), dtype=torch.uint8)
    run: Run | None = None
    for tensor in cache:
        start = tensor.storage_offset()
        segment = find_segment(
            tensor.shape, tensor.stride(), start=start, item_bytes=1, num_blocks=BLOCKS
        )
        run = Run(tensor, segment) if run is None else run.joined(Layer(tensor, segment, ""))
        assert run is not None
    by_numpy, by_torch = HostRows(run), TorchRows(run)
    rows = torch.zeros(CHUNKS, layers * layer_bytes, dtype=torch.uint8)
    ids = torch.randperm(BLOCKS)[:CHUNKS]
    calls: dict[str, Callable[[], object]] = {
        "numpy read": lambda: by_numpy.read(ids.numpy(), rows.numpy()),
        "torch read": lambda: by_torch.read(ids, rows),
        "numpy write": lambda: by_numpy.write(ids.numpy(), rows.numpy()),
        "torch write": lambda: by_torch.write(ids, rows),
    }
    medians = alternate(calls, rounds)
    total = CHUNKS * layers * layer_bytes
    for what in ("read", "write"):
        speed = total / medians[f"numpy {what}"] / 1e9
        peer = total / medians[f"torch {what}"] / 1e9
        case = f"numpy {what}, {layers} layers of {layer_bytes // KIB} KiB"
        yield Row("staging", case, "GB/s", speed, peer, speed / peer, None, None)


def main() -> None:
    """Run every case and write build/bench/staging.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", type=Path, default=DEFAULT_PATH)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    rows: list[Row] = []
    for payload in (64 * KIB, 512 * KIB):
        rows += order_rows(options.path, payload, options.rounds)
    if find_spec("torch") is not None:
        for layers, layer_bytes in ((32, 4 * KIB), (32, 64 * KIB)):
            rows += library_rows(layers, layer_bytes, options.rounds)
    print(f"written: {report('staging', rows)}")


if __name__ == "__main__":
    main()
