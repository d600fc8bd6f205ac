"""The engine's paged KV memory on this rank, as the runtime sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvtide.core.layout import StoreLayout
from kvtide.stores.memory_buffer import ByteArray


class Fence(Protocol):
    """A mark in the engine's work: everything issued before it."""

    def wait(self) -> None:
        """Block until the marked work is done; called on the staging thread."""


class BlockMemory(Protocol):
    """What an engine implements so that its blocks can be stored and loaded.

    ``read`` and ``write`` are called from kvtide's threads, at the same time but never for the
    same blocks; they block until the copy is done and should release the interpreter lock for it.
    """

    @property
    def layout(self) -> StoreLayout:
        """What one block of each group holds on this rank."""

    def record(self) -> Fence:
        """Mark the work issued so far; called on the engine's thread, so it must be cheap."""

    def adopt(self, buffer: ByteArray) -> None:
        """Learn of a staging buffer (1-D bytes) before its first use, for instance to pin it."""

    def read(self, group_id: int, block_ids: Sequence[int], out: ByteArray) -> None:
        """Copy blocks to the rows of ``out``, of shape ``(num_rows, row_bytes)``.

        A block takes ``values_per_block`` rows, one for each part. Fills ``out[:, :payload_bytes]``
        of the group; the rest of a row is not touched.
        """

    def write(self, group_id: int, block_ids: Sequence[int], data: ByteArray) -> None:
        """Copy the rows of ``data``, shaped as in :meth:`read`, to blocks; done when it returns."""
