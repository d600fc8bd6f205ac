"""A stand-in for an engine's paged KV memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np

from kvtide.core.layout import GroupLayout, StoreLayout
from kvtide.stores.memory_buffer import ByteArray


def byte_layout(
    *groups: tuple[int, int], values_per_block: Sequence[int] | None = None
) -> StoreLayout:
    """Return a layout from ``(block_size, payload_bytes)`` pairs, one layer a group.

    ``values_per_block`` has one number per group; by default a block is one value.
    """
    counts = values_per_block if values_per_block is not None else [1] * len(groups)
    return StoreLayout(
        tuple(
            GroupLayout(size, (num,), "bytes", count)
            for (size, num), count in zip(groups, counts, strict=True)
        )
    )


class FakeFence:
    """Waits for the work that a :class:`FakeBlocks` had been given when it was recorded."""

    def __init__(self, blocks: FakeBlocks, num_issued: int) -> None:
        self._blocks = blocks
        self._num_issued = num_issued

    def wait(self) -> None:
        """Block until that work is done."""
        self._blocks.wait_done(self._num_issued)


class FakeBlocks:
    """Blocks in host memory that behave like a device's: work is issued first and done later.

    ``data[group_id]`` has a row of bytes per block; ``values[group_id]`` are the same bytes by
    block and value, of shape ``(num_blocks, values_per_block, payload_bytes)``. ``reads`` and
    ``writes`` list ``(group_id, block_ids)`` of every copy. ``adopted`` are the staging buffers;
    ``num_waiting`` counts the fences that somebody waits for.
    """

    def __init__(self, layout: StoreLayout, num_blocks: int) -> None:
        self._layout = layout
        shapes = [(num_blocks, g.values_per_block, g.payload_bytes) for g in layout.groups]
        self.values: list[ByteArray] = [np.zeros(shape, dtype=np.uint8) for shape in shapes]
        self.data: list[ByteArray] = [
            values.reshape(num_blocks, count * num_bytes)
            for values, (_, count, num_bytes) in zip(self.values, shapes, strict=True)
        ]
        self.reads: list[tuple[int, tuple[int, ...]]] = []
        self.writes: list[tuple[int, tuple[int, ...]]] = []
        self.adopted: list[ByteArray] = []
        self.num_waiting = 0
        self._done = threading.Condition()
        self._issued: list[tuple[int, int, int, bytes]] = []
        self._num_done = 0

    @property
    def layout(self) -> StoreLayout:
        """The layout it was made with."""
        return self._layout

    # ---------------------------------------------------------------------- the engine's side

    def fill(self, group_id: int, block_id: int, seed: int) -> bytes:
        """Write bytes that depend on ``seed`` to a block at once, and return them."""
        rng = np.random.default_rng(seed)
        self.data[group_id][block_id] = rng.integers(
            0, 256, self.data[group_id].shape[1], dtype=np.uint8
        )
        return self.content(group_id, block_id)

    def content(self, group_id: int, block_id: int) -> bytes:
        """Return what a block holds now."""
        return bytes(self.data[group_id][block_id])

    def issue(self, group_id: int, block_id: int, content: bytes, number: int = 0) -> None:
        """Issue the write of a block's value ``number``, done only by :meth:`complete`.

        Later fences wait for it.
        """
        with self._done:
            self._issued.append((group_id, block_id, number, content))

    def complete(self) -> None:
        """Do all work that was issued."""
        with self._done:
            for group_id, block_id, number, content in self._issued[self._num_done :]:
                self.values[group_id][block_id, number] = np.frombuffer(content, dtype=np.uint8)
            self._num_done = len(self._issued)
            self._done.notify_all()

    def wait_done(self, num_issued: int, timeout_s: float = 30.0) -> None:
        """Block until the first ``num_issued`` writes are done.

        Raises:
            TimeoutError: nobody completed them; a test should not hang.
        """
        with self._done:
            self.num_waiting += 1
            is_done = self._done.wait_for(lambda: self._num_done >= num_issued, timeout_s)
            self.num_waiting -= 1
            if not is_done:
                raise TimeoutError("the work before the fence was never completed")

    # ------------------------------------------------------------------------ the pool's side

    def record(self) -> FakeFence:
        """Mark the work issued so far."""
        with self._done:
            return FakeFence(self, len(self._issued))

    def adopt(self, buffer: ByteArray) -> None:
        """Remember a staging buffer."""
        self.adopted.append(buffer)

    def read(self, group_id: int, block_ids: Sequence[int], out: ByteArray) -> None:
        """Copy blocks to the rows of ``out``, a row for each value of a block."""
        self.reads.append((group_id, tuple(block_ids)))
        # Row by row: copies of plain slices let other threads run, as a device's copies do.
        for row, value in zip(out, self._values(group_id, block_ids), strict=True):
            row[: len(value)] = value

    def write(self, group_id: int, block_ids: Sequence[int], data: ByteArray) -> None:
        """Copy the rows of ``data`` to blocks."""
        self.writes.append((group_id, tuple(block_ids)))
        for row, value in zip(data, self._values(group_id, block_ids), strict=True):
            value[:] = row[: len(value)]

    def _values(self, group_id: int, block_ids: Sequence[int]) -> Iterator[ByteArray]:
        """Yield the values of blocks, in order."""
        for block_id in block_ids:
            yield from self.values[group_id][block_id]
