"""Admission: what to answer when the engine asks how much of a request can be loaded.

Theory of operation. A lookup is submitted when a request arrives (or is preempted), from the
local hit the engine is *likely* to have. Its result is a pair ``(known_from, hit)``: everything
in ``[known_from, hit)`` can be loaded. When the engine asks, with what it really holds::

    known_from <= num_computed              answer max(0, hit - num_computed)
    num_computed < known_from, once         look up the gap, answer "not yet"
    ... again (its blocks are vanishing)    look up from 0, once
    a bound below the hit                   look up below the bound, once (see ``may_shorten``)
    no result yet                           answer "not yet", until ``lookup_wait_s`` have passed
                                            and nothing was found for as long

The engine repeats the question while allocation fails, so asking changes nothing: a result ends
when the engine allocates, at finish, or after ``result_ttl_s``. Each "not yet" costs the engine a
step, so there is a deadline after which the answer is a miss.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvtide.core.back_off import BackOff, Delays
from kvtide.core.coordinator import Coordinator
from kvtide.core.keys import HashWindow
from kvtide.core.lookup import LookupHit, LookupQuery
from kvtide.core.requests import RequestTracker
from kvtide.core.room import Room
from kvtide.core.transfer import RequestView

MAX_FAILED_LOADS = 2
"""A request costs no more than this many failed loads: a store may fail at every key."""


class Lookups(Protocol):
    """Where lookups run: somewhere that never blocks the caller. Tickets are the caller's."""

    def submit(self, ticket: int, query: LookupQuery, namespace: str) -> None:
        """Start a lookup."""

    def take(self, ticket: int) -> LookupHit | None:
        """Return the result once, or ``None`` while there is none."""

    def last_found_s(self, ticket: int) -> float | None:
        """Return when a lookup under way last found something; ``None`` if it has not."""

    def cancel(self, ticket: int) -> None:
        """Forget a lookup; unknown tickets are ignored."""


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Times in seconds, sizes in tokens.

    ``grant_wait_s`` is how long a promise may stand without the engine admitting the load.
    ``max_load_tokens`` bounds what is promised or loading at any time over all requests. The engine
    has ``num_blocks`` blocks and computes at most ``max_step_tokens`` in a step.
    """

    lookup_wait_s: float = 0.05
    result_ttl_s: float = 30.0
    grant_wait_s: float = 5.0
    max_loads: int = 64
    max_load_tokens: int = 1 << 40
    num_blocks: int = 1 << 40
    max_step_tokens: int = 1 << 20
    min_load_tokens: int = 0
    delays: Delays = field(default_factory=Delays)


@dataclass(slots=True)
class _Inquiry:
    """One request's lookup, from submission to the engine's allocation."""

    ticket: int | None
    known_from: int
    hit_token: int = 0
    gap_end: int = 0
    """Where the gap that this lookup asks for ends; 0 where it asks for no gap."""
    hit_beyond_gap: int = 0
    """The hit that an earlier lookup found behind the gap."""
    tail_tokens: tuple[int, ...] = ()
    is_bounded: bool = False
    """It was submitted again because a budget forbids the longer hit."""
    num_gaps: int = 0
    wait_until_s: float | None = None
    gave_up: bool = False
    expires_s: float = 0.0
    promised: tuple[int, int] | None = None
    """The last answer: tokens computed by the engine, and the hit."""
    promised_since_s: float | None = None


class Granted(NamedTuple):
    """What the engine allocated of what was promised; ``tail_tokens`` as the lookup has them."""

    num_computed_tokens: int
    hit_token: int
    tail_tokens: tuple[int, ...]


class Admission:
    """Keeps one inquiry per waiting request and answers the engine from it."""

    def __init__(
        self,
        coordinator: Coordinator,
        lookups: Lookups,
        limits: AdmissionLimits,
        counters: Counter[str],
    ) -> None:
        self._coordinator = coordinator
        self._lookups = lookups
        self._limits = limits
        self._counters = counters
        self._inquiries: dict[str, _Inquiry] = {}
        self._next_ticket = 0
        self._loading: dict[str, int] = {}
        self.room = Room(coordinator, limits.num_blocks, limits.max_step_tokens)
        """Left by whoever loaded once it computes, or has given its blocks back."""
        self._back_off = BackOff(limits.delays)

    def __repr__(self) -> str:
        return f"<Admission [{len(self._inquiries)} inquiries, {len(self._loading)} loads]>"

    @property
    def num_inquiries(self) -> int:
        """How many lookups are under way or waiting to be used."""
        return len(self._inquiries)

    @property
    def num_loads(self) -> int:
        """How many loads are under way."""
        return len(self._loading)

    def inquire(
        self,
        view: RequestView,
        tracker: RequestTracker,
        namespace: str,
        now_s: float,
        *,
        sentinels: bool,
    ) -> None:
        """Start looking a request up, from the local hit that the engine is likely to have.

        With ``sentinels`` the lookup also asks for the ends of what the engine holds.
        """
        self.drop(view.request_id)
        start = self._coordinator.aligned(view.local_hit_hint())
        self._submit(view, tracker, namespace, start, now_s, sentinels=sentinels)

    def drop(self, request_id: str) -> None:
        """Forget a request's lookup."""
        inquiry = self._inquiries.pop(request_id, None)
        if inquiry is not None and inquiry.ticket is not None:
            self._lookups.cancel(inquiry.ticket)

    def match(
        self,
        view: RequestView,
        tracker: RequestTracker,
        namespace: str,
        num_computed_tokens: int,
        now_s: float,
    ) -> int | None:
        """Return how many tokens beyond ``num_computed_tokens`` can be loaded; ``None``: not yet.

        A token that the engine must compute is left over, and the answer ends at a boundary.
        """
        if not self._may_load(tracker, now_s):
            return 0
        inquiry = self._inquiries.get(view.request_id)
        if inquiry is None or (inquiry.ticket is None and now_s >= inquiry.expires_s):
            inquiry = self._submit(view, tracker, namespace, num_computed_tokens, now_s)
        if inquiry.ticket is not None and not self._collect(inquiry, tracker):
            return None if self._may_wait(inquiry, now_s) else 0
        if num_computed_tokens < inquiry.known_from:
            self._ask_gap(view, tracker, namespace, inquiry, num_computed_tokens, now_s)
            return None
        if self._was_refused(inquiry, tracker, now_s):
            return 0
        has_hit = inquiry.hit_token > num_computed_tokens
        if has_hit and not self.room.is_enough_for(view.num_tokens):
            inquiry.promised = inquiry.promised_since_s = None
            return 0
        limit = self._limit_token(view, num_computed_tokens)
        if inquiry.hit_token > limit and not self._coordinator.may_shorten:
            return self._ask_below(
                view, tracker, namespace, inquiry, num_computed_tokens, limit, now_s
            )
        return self._promise(inquiry, num_computed_tokens, limit, now_s)

    def granted(self, request_id: str, num_external_tokens: int) -> Granted | None:
        """Return what the engine allocated of what was promised, and forget the inquiry.

        The engine may grant less than was promised, or nothing; what was promised is never used.
        """
        inquiry = self._inquiries.get(request_id)
        promised = inquiry.promised if inquiry is not None else None
        self.drop(request_id)
        if not num_external_tokens or promised is None:
            return None
        num_computed_tokens, promised_token = promised
        hit_token = num_computed_tokens + num_external_tokens
        tails = inquiry.tail_tokens if inquiry and hit_token == promised_token else ()
        return Granted(num_computed_tokens, hit_token, tails)

    def load_started(
        self, view: RequestView, num_tokens: int, granted: Granted | None = None
    ) -> None:
        """Count a load against the budget until :meth:`load_ended`."""
        self._loading[view.request_id] = num_tokens
        if granted is not None:
            self.room.enter(view.request_id, view.num_tokens)

    def load_ended(self, request_id: str) -> int:
        """Give the load's budget back and return its tokens, 0 where it was not counted."""
        return self._loading.pop(request_id, 0)

    def suspend(self, now_s: float) -> None:
        """Answer 0 for a while: the store did not answer a load in time."""
        self._back_off.fail(now_s)
        self._counters["load_suspensions"] += 1

    def resume(self) -> None:
        """Note that a load succeeded: the next suspension starts short again."""
        self._back_off.succeed()

    def _may_load(self, tracker: RequestTracker, now_s: float) -> bool:
        """Judge the budgets, which act here, before anything is promised."""
        if tracker.num_failed_loads >= MAX_FAILED_LOADS:
            return False
        if self._back_off.is_waiting(now_s):
            return False
        return len(self._loading) < self._limits.max_loads

    def _submit(
        self,
        view: RequestView,
        tracker: RequestTracker,
        namespace: str,
        start_token: int,
        now_s: float,
        *,
        sentinels: bool = False,
        end_token: int | None = None,
        instead_of: _Inquiry | None = None,
    ) -> _Inquiry:
        """Begin a lookup; one ``instead_of`` another goes on with the wait that the other began.

        Unless that found something: then the wait begins anew.
        """
        coordinator = self._coordinator
        unit = coordinator.hash_block_size
        end = min(view.num_tokens - 1, view.num_hashes * unit)
        for bound in (end_token, tracker.load_limit_token):
            end = end if bound is None else min(end, bound)
        end = coordinator.last_boundary(max(0, end))
        start_token = min(start_token, end)
        end_hash = min(view.num_hashes, (end + coordinator.max_proof_tokens) // unit)
        first_hash = start_token // unit
        query = LookupQuery(
            start_token,
            end,
            HashWindow(view.hash_list, first=first_hash, end=end_hash),
            self._sentinel_hashes(view, tracker, start_token) if sentinels else (),
        )
        inquiry = _Inquiry(
            None, start_token, start_token, expires_s=now_s + self._limits.result_ttl_s
        )
        if instead_of is not None:
            inquiry.wait_until_s, inquiry.gave_up = instead_of.wait_until_s, instead_of.gave_up
            if instead_of.hit_token > instead_of.known_from and not inquiry.gave_up:
                # What was found, however late, is worth the wait for the rest.
                inquiry.wait_until_s = now_s + self._limits.lookup_wait_s
        self._inquiries[view.request_id] = inquiry
        if start_token < end or query.sentinel_hashes:
            inquiry.ticket = self._next_ticket
            self._next_ticket += 1
            self._counters["lookups"] += 1
            self._lookups.submit(inquiry.ticket, query, namespace)
        return inquiry

    def _sentinel_hashes(
        self, view: RequestView, tracker: RequestTracker, start_token: int
    ) -> tuple[bytes, ...]:
        """Return the hashes of chunk 0 and of the last chunk below the local hit.

        What an earlier life of the request had not saved yet is saved in any case.
        """
        if tracker.saved_token is not None:
            start_token = min(start_token, tracker.saved_token)
        block_size = self._coordinator.sentinel_block_size
        if not start_token or block_size is None:
            return ()
        ratio = block_size // self._coordinator.hash_block_size
        last = start_token // block_size * ratio
        ends = sorted({ratio, last})
        return tuple(view.hashes(end - 1, end)[0] for end in ends if end)

    def _collect(self, inquiry: _Inquiry, tracker: RequestTracker) -> bool:
        """Take the result in, however late it comes; tell whether there is one."""
        assert inquiry.ticket is not None
        hit = self._lookups.take(inquiry.ticket)
        if hit is None:
            return False
        inquiry.ticket = None
        inquiry.known_from = hit.start_token
        inquiry.hit_token = hit.hit_token
        inquiry.tail_tokens = hit.tail_tokens
        if inquiry.gap_end and hit.hit_token >= inquiry.gap_end:
            inquiry.hit_token = max(hit.hit_token, inquiry.hit_beyond_gap)
        tracker.shared_token = hit.shared_token
        tracker.repair = tracker.repair or not hit.sentinels_present
        return True

    def _may_wait(self, inquiry: _Inquiry, now_s: float) -> bool:
        """Tell whether to put the engine off once more; a result may still come while it queues.

        A lookup that goes on finding something is waited for: that it takes long, as for a long
        prefix on many ranks it does, means that much is there.
        """
        assert inquiry.ticket is not None
        if inquiry.wait_until_s is None:
            inquiry.wait_until_s = now_s + self._limits.lookup_wait_s
        until_s = inquiry.wait_until_s
        found_s = self._lookups.last_found_s(inquiry.ticket)
        if found_s is not None:
            until_s = max(until_s, found_s + self._limits.lookup_wait_s)
        if now_s < until_s:
            return True
        if not inquiry.gave_up:
            inquiry.gave_up = True
            self._counters["lookup_waits_expired"] += 1
        return False

    def _ask_gap(
        self,
        view: RequestView,
        tracker: RequestTracker,
        namespace: str,
        inquiry: _Inquiry,
        num_computed_tokens: int,
        now_s: float,
    ) -> None:
        """Look up what lies between the engine's real local hit and the guess.

        A second gap means that the engine is losing blocks while the request waits: then look up
        from 0, so that no third one can follow. Where a hit says nothing of shorter ones, the end
        of the gap may be no boundary to resume at, so all is looked up again.
        """
        start = 0 if inquiry.num_gaps else num_computed_tokens
        gap_end = inquiry.known_from if self._coordinator.may_shorten else None
        replacement = self._submit(
            view, tracker, namespace, start, now_s, end_token=gap_end, instead_of=inquiry
        )
        replacement.num_gaps = inquiry.num_gaps + 1
        if gap_end is not None:
            replacement.gap_end = gap_end
            replacement.hit_beyond_gap = inquiry.hit_token

    def _ask_below(
        self,
        view: RequestView,
        tracker: RequestTracker,
        namespace: str,
        inquiry: _Inquiry,
        num_computed_tokens: int,
        limit_token: int,
        now_s: float,
    ) -> int | None:
        """Look up the best hit that a bound allows; one try, then there is none for now."""
        if inquiry.is_bounded or limit_token <= num_computed_tokens:
            inquiry.promised = inquiry.promised_since_s = None
            return 0
        start = num_computed_tokens
        replacement = self._submit(
            view, tracker, namespace, start, now_s, end_token=limit_token, instead_of=inquiry
        )
        replacement.is_bounded = True
        return None

    def _was_refused(self, inquiry: _Inquiry, tracker: RequestTracker, now_s: float) -> bool:
        """Tell whether to answer 0 this once, because the engine does not admit the load.

        An engine admits a load only with room for all that loads in flight may still need, and
        may go on refusing what it could compute at once: vLLM 0.32 counts a request's own failed
        load against it, for ever where the cache holds one request. So a promise that stands too
        long is taken back for one question, and after a failed load at the first repetition.
        """
        if inquiry.promised_since_s is None:
            return False
        patience_s = 0.0 if tracker.num_failed_loads else self._limits.grant_wait_s
        if now_s - inquiry.promised_since_s < patience_s:
            return False
        inquiry.promised = inquiry.promised_since_s = None
        self._counters["promises_withdrawn"] += 1
        return True

    def _limit_token(self, view: RequestView, num_computed_tokens: int) -> int:
        """Return the last boundary that may be promised: below the end, within the budget."""
        room = self._limits.max_load_tokens - sum(self._loading.values())
        limit = min(view.num_tokens - 1, num_computed_tokens + room)
        return self._coordinator.last_boundary(max(0, limit))

    def _promise(
        self, inquiry: _Inquiry, num_computed_tokens: int, limit_token: int, now_s: float
    ) -> int:
        num_tokens = max(0, min(inquiry.hit_token, limit_token) - num_computed_tokens)
        if num_tokens < max(1, self._limits.min_load_tokens):
            num_tokens = 0
        inquiry.promised = (num_computed_tokens, num_computed_tokens + num_tokens)
        if num_tokens and inquiry.promised_since_s is None:
            inquiry.promised_since_s = now_s
        return num_tokens
