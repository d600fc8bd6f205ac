"""What a connector in this process has saved and loaded so far, told from its own parts.

:func:`counts_of` looks into vLLM's two halves of a connector, kvtide's or the in-tree one.
"""

from __future__ import annotations

from typing import Any, Protocol

from native_client import WatchedClient


class Counts(Protocol):
    """What a connector did since it was made."""

    def num_saved(self) -> int:
        """Return how many chunks it has put into its store."""

    def num_loaded(self) -> int:
        """Return how many tokens it has loaded, where it counts them."""

    def is_saving(self) -> bool:
        """Tell whether something is still on its way to the store, or its report to the engine."""


def counts_of(scheduler_half: Any, worker_half: Any) -> Counts:
    """Return the counts of a connector; of none, for an engine without one."""
    if scheduler_half is None:
        return NoCounts()
    if hasattr(worker_half, "connector_worker"):
        return InTreeCounts(worker_half.connector_worker.kv_send_thread)
    return KVTideCounts(scheduler_half._scheduler_side)  # noqa: SLF001 - before its telemetry


class NoCounts:
    """Of an engine without a connector."""

    def num_saved(self) -> int:
        """See :class:`Counts`."""
        return 0

    def num_loaded(self) -> int:
        """See :class:`Counts`."""
        return 0

    def is_saving(self) -> bool:
        """See :class:`Counts`."""
        return False


class KVTideCounts:
    """kvtide's counters; the workers' arrive with the steps."""

    def __init__(self, scheduler_side: Any) -> None:
        self._side = scheduler_side

    def num_saved(self) -> int:
        """See :class:`Counts`."""
        return self._read("saved_chunks")

    def num_loaded(self) -> int:
        """See :class:`Counts`."""
        return self._read("loaded_tokens")

    def is_saving(self) -> bool:
        """See :class:`Counts`."""
        return self._read("jobs_open") > 0

    def _read(self, counter: str) -> int:
        return int(self._side._counters_and_gauges().get(counter, 0))  # noqa: SLF001


class InTreeCounts:
    """The keys that vLLM's sending thread put, counted where it calls Mooncake's client."""

    def __init__(self, sending_thread: Any) -> None:
        self._thread = sending_thread
        self._client = sending_thread.store = WatchedClient(sending_thread.store)

    def num_saved(self) -> int:
        """See :class:`Counts`."""
        return self._client.num_put

    def num_loaded(self) -> int:
        """Return 0: it counts no tokens."""
        return 0

    def is_saving(self) -> bool:
        """See :class:`Counts`."""
        return self._thread.request_queue.unfinished_tasks > 0
