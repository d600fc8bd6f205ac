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
        self._run("exists")
        answers = super().exists(keys)
        self._run("exists")
        return answers

    def put(self, batch: Batch) -> list[Status]:
        """See :meth:`Store.put`."""
        self._run("put")
        statuses = super().put(batch)
        self._run("put")
        return statuses

    def get(self, batch: Batch) -> list[Status]:
        """See :meth:`Store.get`."""
        self._run("get")
        statuses = super().get(batch)
        self._run("get")
        return statuses

    def _run(self, method: str) -> None:
        interrupt, self.interrupt = self.interrupt, None
        if interrupt is not None:
            try:
                interrupt(method)
            finally:
                if self.interrupt is None:
                    self.interrupt = interrupt
