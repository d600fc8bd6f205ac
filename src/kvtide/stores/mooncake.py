"""A pool across machines: Mooncake's distributed store behind the store contract."""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence

from kvtide.core.batch import Batch
from kvtide.core.layout import Region
from kvtide.errors import StoreLostError, StoreOpenError
from kvtide.stores import mooncake_codes as codes
from kvtide.stores.base import Status, Store
from kvtide.stores.circuit import CircuitBreaker
from kvtide.stores.mooncake_client import connect
from kvtide.stores.mooncake_settings import MooncakeSettings, read_settings
from kvtide.stores.mooncake_transfer import MAX_PER_CALL, MooncakeTransfer
from kvtide.stores.regions import RegionSet
from kvtide.stores.running_calls import RunningCalls
from kvtide.stores.url import StoreUrl

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 10.0
_PROBE_END_S = 1.0
_EXIT_TIMEOUT_S = 2.0
_NO_ANSWER = "its master does not answer"

_open_stores: weakref.WeakSet[MooncakeStore] = weakref.WeakSet()


class MooncakeStore(Store):
    """A client of the pool that ``settings`` name.

    The pool is shared and outlives this process, but for the segment that the process itself may
    give to it. Removing a leased key is FAILED until its lease ends. A value without bytes is
    FAILED: Mooncake holds none.

    A master that does not answer is a lost store: from then on every call raises
    :class:`~kvtide.errors.StoreLostError` at once, until the master is found again.

    Raises:
        StoreOpenError: the pool cannot be reached; the message says what to change.
    """

    def __init__(self, settings: MooncakeSettings) -> None:
        self._name = f"the Mooncake pool at {settings.master}"
        self._tenant = settings.tenant
        self._has_warned = False
        self._client = connect(settings)
        self._call = RunningCalls(self._name, lambda: None, ())
        self._breaker = CircuitBreaker(self._name, self._client.is_answered)
        self._transfer = MooncakeTransfer(
            self._client, self._ask, gathers=settings.protocol == "tcp"
        )
        self._regions = RegionSet()
        self._register_lock = threading.Lock()
        self._counter_lock = threading.Lock()
        self._counters: Counter[str] = Counter()
        _open_stores.add(self)

    @property
    def checks_before_put(self) -> bool:
        """False: a put of a present key moves nothing, and to ask would lease it."""
        return False

    def register(self, region: Region) -> None:
        """See :meth:`Store.register`.

        Raises:
            StoreOpenError: Mooncake refuses the memory.
        """
        with self._call, self._register_lock:
            # Mooncake refuses memory that overlaps what it knows already.
            for gap in self._regions.gaps_in(region):
                if not self._client.register(gap):
                    raise StoreOpenError(
                        f"Mooncake refuses to register {gap.num_bytes} bytes at {gap.address:#x}:"
                        " its line above tells why (for RDMA, most often the limit on locked"
                        " memory: ulimit -l)"
                    )
                self._regions.add(gap)
            self._regions.add(region)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """See :meth:`Store.exists`; each key that is present is leased."""
        answers = self._ask_in_parts(keys, self._client.exists)
        return [code == codes.PRESENT for code in answers]

    def put(self, batch: Batch) -> list[Status]:
        """See :meth:`Store.put`."""
        with self._call:
            self._regions.check(batch)
            answers = self._transfer.put(batch)
        return [codes.status_of_put(code) for code in answers]

    def get(self, batch: Batch) -> list[Status]:
        """See :meth:`Store.get`; each key that is present is leased."""
        with self._call:
            self._regions.check(batch)
            answers = self._transfer.get(batch)
        return [
            codes.status_of_get(code, batch.value_bytes(index))
            for index, code in enumerate(answers)
        ]

    def remove(self, keys: Sequence[str]) -> list[Status]:
        """See :meth:`Store.remove`."""
        answers = self._ask_in_parts(keys, self._client.remove)
        return [codes.status_of_remove(code) for code in answers]

    def take_counters(self) -> Counter[str]:
        """See :meth:`Store.take_counters`."""
        taken = self._breaker.take_counters()
        if self._counters:  # seldom: not worth a lock in every step
            with self._counter_lock:
                counted, self._counters = self._counters, Counter()
            taken.update(counted)
        return taken

    def close(self) -> None:
        """End the connection; the pool and what is in it stay."""
        self.end(_CLOSE_TIMEOUT_S)

    def end(self, timeout_s: float) -> None:
        """Close, and wait for running calls no longer than ``timeout_s``."""
        _open_stores.discard(self)
        # First, so that a call which finds the pool lost during the close begins no probing.
        is_probing_over = self._breaker.close(_PROBE_END_S)
        # A native call after the close would crash the process: rather leave the client open.
        if self._call.stop(timeout_s) and is_probing_over:
            self._client.close()

    def _ask_in_parts(
        self, keys: Sequence[str], call: Callable[[Sequence[str]], list[int]]
    ) -> list[int]:
        answers: list[int] = []
        with self._call:
            for first in range(0, len(keys), MAX_PER_CALL):
                part = keys[first : first + MAX_PER_CALL]
                answers += self._ask(len(part), lambda part=part: call(part))  # type: ignore[misc]
        return answers

    def _ask(self, num_keys: int, call: Callable[[], list[int]]) -> list[int]:
        """Make a native call for ``num_keys`` keys, and return its codes.

        Raises:
            StoreLostError: the master is gone, or does not answer for any key.
        """
        self._breaker.require_closed()
        answers = call()
        if len(answers) != num_keys or codes.LOST.intersection(answers):
            self._breaker.trip(_NO_ANSWER)
            if len(answers) != num_keys or codes.LOST.issuperset(answers):
                raise StoreLostError(f"{self._name} is lost: {_NO_ANSWER}")
        failed = Counter(code for code in answers if code < 0)
        if failed:
            self._note(failed)
        return answers

    def _note(self, failed: Counter[int]) -> None:
        with self._counter_lock:
            self._counters["failed_transfers"] += failed[codes.TRANSFER_FAILED]
            self._counters["refused_by_lease"] += failed[codes.LEASED]
            self._counters["expired_leases"] += failed[codes.LEASE_EXPIRED]
        if failed[codes.UNKNOWN_TENANT] and not self._has_warned:
            self._has_warned = True
            logger.error(
                "%s knows no tenant %r, so nothing is saved or found there: add it to the master's"
                " tenants, or correct the tenant in the store URL",
                self._name,
                self._tenant,
            )


@atexit.register
def _end_at_exit() -> None:
    """Let no thread be in a native call when Python ends: that would abort the process."""
    for store in list(_open_stores):
        store.end(_EXIT_TIMEOUT_S)


def open_mooncake(url: StoreUrl) -> MooncakeStore:
    """Open ``mooncake://HOST:PORT?...``, or what the file of ``MOONCAKE_CONFIG_PATH`` says.

    Raises:
        ConfigError: every fault of the URL.
        StoreOpenError: the pool cannot be reached.
    """
    return MooncakeStore(read_settings(url))
