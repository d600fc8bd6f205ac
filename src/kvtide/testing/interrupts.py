"""A store in whose calls something else happens: interleavings and hangs without threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtide.core.batch import Batch
from kvtide.stores.base import Status, Store
from kvtide.stores.wrappers import WrapperStore


class InterruptedStore(WrapperStore):
    """Calls ``interrupt(method)`` inside a call, before the inner store is asked and after it.

    What the interrupt does happens, for the caller of the store, while its call is under way:
    steps of an engine, or so much time that the call must be given up. Calls from within an
    interrupt are not interrupted.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.interrupt: Callable[[str], None] | None = None

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """See :meth:`Store.exists`."""
        self.interrupt_now("exists")
        answers = super().exists(keys)
        self.interrupt_now("exists")
        return answers

    def put(self, batch: Batch) -> list[Status]:
        """See :meth:`Store.put`."""
        self.interrupt_now("put")
        statuses = super().put(batch)
        self.interrupt_now("put")
        return statuses

    def get(self, batch: Batch) -> list[Status]:
        """See :meth:`Store.get`."""
        self.interrupt_now("get")
        statuses = super().get(batch)
        self.interrupt_now("get")
        return statuses

    def interrupt_now(self, method: str) -> None:
        """Interrupt whatever is under way; also for tests that interrupt more than the store."""
        interrupt, self.interrupt = self.interrupt, None
        if interrupt is not None:
            try:
                interrupt(method)
            finally:
                if self.interrupt is None:
                    self.interrupt = interrupt
