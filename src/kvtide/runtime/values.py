"""Value formats: what a stored value has beside its payload, and how a value is judged."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from kvtide.runtime.slab import page_padded
from kvtide.runtime.tags import TAG_BYTES, verify, write_tag
from kvtide.stores.memory_buffer import ByteArray


class ValueFormat(ABC):
    """How a payload becomes a value. ``overhead_bytes`` is what a value has behind its payload."""

    overhead_bytes: ClassVar[int]

    @abstractmethod
    def seal(self, row: ByteArray, key: str, payload_bytes: int) -> None:
        """Make a value for ``key`` of ``row[:payload_bytes]``: write what goes behind it."""

    def seal_rows(self, rows: ByteArray, keys: Sequence[str], payload_bytes: int) -> None:
        """Make the values for ``keys`` of ``rows``, of shape ``(len(keys), row_bytes)``."""
        if self.overhead_bytes:
            for row, key in zip(rows, keys, strict=True):
                self.seal(row, key, payload_bytes)

    @abstractmethod
    def is_whole(self, value: ByteArray, key: str, payload_bytes: int) -> bool:
        """Tell whether ``value``, which has the right length, is what was stored under ``key``."""

    def value_bytes(self, payload_bytes: int) -> int:
        """Return the length of a value."""
        return payload_bytes + self.overhead_bytes

    def row_bytes(self, payload_bytes: int) -> int:
        """Return what a value takes of a slab: whole pages."""
        return page_padded(self.value_bytes(payload_bytes))


class TaggedValues(ValueFormat):
    """A tag behind the payload proves it: kvtide's own format."""

    overhead_bytes = TAG_BYTES

    def seal(self, row: ByteArray, key: str, payload_bytes: int) -> None:
        """Write the tag."""
        write_tag(row, key, payload_bytes)

    def is_whole(self, value: ByteArray, key: str, payload_bytes: int) -> bool:
        """Verify the tag."""
        return verify(value, key, payload_bytes)


class BareValues(ValueFormat):
    """The payload alone, as vLLM's in-tree connector stores it: its length is all that is known."""

    overhead_bytes = 0

    def seal(self, row: ByteArray, key: str, payload_bytes: int) -> None:
        """Leave the payload as it is."""

    def is_whole(
        self,
        value: ByteArray,  # noqa: ARG002
        key: str,  # noqa: ARG002
        payload_bytes: int,  # noqa: ARG002
    ) -> bool:
        """Believe it: the store gives no value of another length."""
        return True


TAGGED = TaggedValues()
BARE = BareValues()
