"""Lookups off the scheduling thread: many requests' questions in one store call a round.

The scheduling thread submits and takes; it never waits for the store. What the store does not
answer in time is a miss.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from kvtide.core.chunks import ChunkedTokenDatabase
from kvtide.core.keys import HashesCutError
from kvtide.core.lookup import LookupHit, LookupQuery, Questions, lookup
from kvtide.core.search import Boundaries
from kvtide.runtime.bad_keys import BadKeys
from kvtide.runtime.logs import FaultLog
from kvtide.runtime.service import let_others_run
from kvtide.runtime.store_counters import counters_of
from kvtide.stores.base import Store

MAX_PENDING = 4096
"""Lookups submitted and not taken yet; beyond, a lookup is a miss at once."""
LIMIT_TIMEOUTS = 10
"""A lookup that goes on finding something may take this many times its timeout, and no longer."""
MAX_ROUND_KEYS = 2048
"""Keys of one ``exists`` call; one lookup's batch is never split."""


@dataclass(eq=False, slots=True)
class _Entry:
    """One lookup: ``keys`` are what it waits for, ``hit`` its answer once there is one.

    ``found_s`` is when the store last had some of its keys: ``deadline_s`` then moves on, but not
    past ``limit_s``.
    """

    query: LookupQuery
    namespace: str
    deadline_s: float
    limit_s: float
    questions: Questions | None = None
    keys: Sequence[str] = ()
    hit: LookupHit | None = None
    is_cancelled: bool = False
    found_s: float | None = None


def miss(query: LookupQuery) -> LookupHit:
    """Return the answer where nothing is known: no hit, and nothing to repair."""
    return LookupHit(query.start_token, query.start_token)


class LookupExecutor:
    """Runs lookups against a store on one daemon thread; no method raises or waits for the store.

    ``databases_for(namespace)`` returns per group one database per rank whose part a hit needs.
    The executor owns ``store`` and closes it. ``bad_keys`` (shared with whoever reads the workers'
    reports) count as absent.
    """

    def __init__(
        self,
        store: Store,
        boundaries: Boundaries,
        databases_for: Callable[[str], Sequence[Sequence[ChunkedTokenDatabase]]],
        timeout_s: float,
        max_bad_keys: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        threaded: bool = True,
    ) -> None:
        self.bad_keys = BadKeys(max_bad_keys, clock)
        self._store = store
        self._boundaries = boundaries
        self._databases_for = databases_for
        self._timeout_s = timeout_s
        self._clock = clock
        self._threaded = threaded
        self._faults = FaultLog(logging.getLogger("kvtide.runtime"))
        self._lock = threading.Lock()
        self._ready = threading.Condition(self._lock)
        self._entries: dict[int, _Entry] = {}
        self._active: list[_Entry] = []
        self._counters: Counter[str] = Counter()
        self._call_since_s: float | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    # -------------------------------------------------------------- on the scheduling thread

    def submit(self, ticket: int, query: LookupQuery, namespace: str) -> None:
        """Begin a lookup under ``ticket``, replacing one of the same ticket."""
        now_s = self._clock()
        timeout_s = self._timeout_s
        entry = _Entry(query, namespace, now_s + timeout_s, now_s + LIMIT_TIMEOUTS * timeout_s)
        with self._lock:
            self._drop(ticket)
            num_pending = max(len(self._entries), len(self._active))
            if num_pending >= MAX_PENDING or not self._may_begin(now_s):
                entry.hit = miss(query)
                self._counters["lookups_refused"] += 1
            else:
                self._active.append(entry)
                self._ready.notify_all()
            self._entries[ticket] = entry
            if len(self._entries) > 2 * MAX_PENDING:  # answers that nobody ever took
                self._drop(next(iter(self._entries)))

    def take(self, ticket: int) -> LookupHit | None:
        """Return the answer and forget the ticket; ``None`` while there is none yet.

        After ``timeout_s`` in which nothing was found the answer is a miss. An unknown ticket is a
        miss from token 0.
        """
        now_s = self._clock()
        with self._lock:
            entry = self._entries.get(ticket)
            if entry is None:
                return LookupHit(0, 0)
            hit = entry.hit
            if hit is None and now_s >= entry.deadline_s:
                hit = miss(entry.query)
                self._counters["lookups_timed_out"] += 1
            if hit is not None:
                self._drop(ticket)
            return hit

    def last_found_s(self, ticket: int) -> float | None:
        """Return when the store last had some of a lookup's keys; ``None`` if it has not."""
        with self._lock:
            entry = self._entries.get(ticket)
            return None if entry is None else entry.found_s

    def cancel(self, ticket: int) -> None:
        """Forget a lookup whose answer nobody wants any more; harmless if there is none."""
        with self._lock:
            self._drop(ticket)

    def take_counters(self) -> Counter[str]:
        """Return what was counted since the last call, by the store too."""
        counted = counters_of(self._store)
        if self._counters:  # seldom: not worth a lock in every step
            with self._lock:
                taken, self._counters = self._counters, Counter()
            counted.update(taken)
        return counted

    def close(self, timeout_s: float = 1.0) -> None:
        """End the thread and close the store; a call that hangs is abandoned, its store open."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._active.clear()
            self._ready.notify_all()
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
            if thread.is_alive():
                return
        try:
            self._store.close()
        except Exception:  # noqa: BLE001 - logged there; closing happens on the way out
            self._faults.exception("closing the store failed")

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "open"
        return f"<LookupExecutor {state} entries={len(self._entries)} active={len(self._active)}>"

    def _drop(self, ticket: int) -> None:
        entry = self._entries.pop(ticket, None)
        if entry is not None:
            entry.is_cancelled = True

    def _may_begin(self, now_s: float) -> bool:
        """Tell whether a lookup has a chance: open, a thread, and no call that hangs."""
        since_s = self._call_since_s
        if self._is_closed or (since_s is not None and now_s - since_s >= self._timeout_s):
            return False
        if self._thread is None and self._threaded:
            thread = threading.Thread(target=self._run, name="kvtide-lookup", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the process may have no more threads
                return False
            self._thread = thread
        return True

    # ------------------------------------------------------------------- on the lookup thread

    def _run(self) -> None:
        while True:
            with self._lock:
                self._ready.wait_for(lambda: self._active or self._is_closed)
                if self._is_closed:
                    return
            try:
                self.run_round()
            except BaseException:  # noqa: BLE001 - logged there; the thread must outlive anything
                self._faults.exception("a round of lookups failed")

    def run_pending(self) -> None:
        """Carry every lookup to its end in the caller's thread (with ``threaded=False``)."""
        while self._active and not self._is_closed:
            self.run_round()

    def run_round(self) -> None:
        """Ask the store once, for as many lookups as fit, and carry each of them one step on."""
        entries = self._take_round()
        try:
            answers = self._ask(entries)
        except BaseException:  # noqa: BLE001 - a panic of a native client is no Exception
            self._faults.exception("looking up failed")  # and a miss
            self._count("lookup_errors", len(entries))
            for entry in entries:
                self._answer(entry, miss(entry.query))
            return
        for number, (entry, present) in enumerate(zip(entries, answers, strict=True)):
            if number:
                let_others_run()
            self._step(entry, present)
        if self._active:
            let_others_run()

    def _take_round(self) -> list[_Entry]:
        """Return the lookups of this round, each with keys to ask; the rest waits in turn."""
        with self._lock:
            waiting, self._active = self._active, []
        taken: list[_Entry] = []
        num_keys = num_begun = 0
        for index, entry in enumerate(waiting):
            if entry.is_cancelled:
                continue
            if entry.questions is None:
                if num_begun:
                    let_others_run()
                num_begun += 1
                self._step(entry, ())
                if entry.hit is not None:
                    continue
            num_keys += len(entry.keys)
            if taken and num_keys > MAX_ROUND_KEYS:
                with self._lock:
                    self._active = waiting[index:] + self._active
                break
            taken.append(entry)
        return taken

    def _ask(self, entries: Sequence[_Entry]) -> list[Sequence[bool]]:
        """Return the answers of each lookup; what several of them ask for is asked once."""
        if len(entries) == 1:  # never asks twice for a key
            return [self._present(entries[0].keys)]
        keys = list(dict.fromkeys(chain.from_iterable(entry.keys for entry in entries)))
        answers = dict(zip(keys, self._present(keys), strict=True))
        return [[answers[key] for key in entry.keys] for entry in entries]

    def _present(self, keys: Sequence[str]) -> Sequence[bool]:
        # What is bad is not asked for: asking may lease it, and what is leased cannot be removed.
        bad = self.bad_keys.among(keys)
        if bad:
            good = [key for key in keys if key not in bad]
            answers = dict(zip(good, self._exists(good), strict=True))
            return [answers.get(key, False) for key in keys]
        return self._exists(keys)

    def _exists(self, keys: Sequence[str]) -> Sequence[bool]:
        if not keys:
            return ()
        self._call_since_s = self._clock()
        try:
            present = self._store.exists(keys)
        finally:
            self._call_since_s = None
        if len(present) != len(keys):
            raise ValueError(f"{len(present)} answers to {len(keys)} keys")
        self._count("looked_up_keys", len(keys))
        return present

    def _step(self, entry: _Entry, present: Sequence[bool]) -> None:
        """Send a lookup its answers (begin it, if it has not begun): more keys, or its hit."""
        try:
            if entry.questions is None:
                entry.questions = lookup(
                    entry.query,
                    self._boundaries,
                    self._databases_for(entry.namespace),
                )
                entry.keys = next(entry.questions)
            else:
                if any(present):
                    entry.found_s = now_s = self._clock()
                    entry.deadline_s = min(now_s + self._timeout_s, entry.limit_s)
                entry.keys = entry.questions.send(present)
                with self._lock:
                    if not entry.is_cancelled and not self._is_closed:
                        self._active.append(entry)
        except StopIteration as stop:
            self._answer(entry, stop.value)
        except HashesCutError:
            self._answer(entry, miss(entry.query))  # the request is another one by now
        except Exception:  # noqa: BLE001 - logged there; a query that makes no sense is a miss
            self._faults.exception("a lookup could not be made")
            self._count("lookup_errors", 1)
            self._answer(entry, miss(entry.query))

    def _answer(self, entry: _Entry, hit: LookupHit) -> None:
        with self._lock:
            entry.hit = hit
            entry.questions = None
            entry.keys = ()

    def _count(self, name: str, amount: int) -> None:
        with self._lock:
            self._counters[name] += amount
