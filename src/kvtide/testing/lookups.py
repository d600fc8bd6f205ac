"""A stand-in for the lookup executor that answers when the test says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtide.core.coordinator import Coordinator
from kvtide.core.lookup import LookupHit, LookupQuery, drive, lookup
from kvtide.core.topology import Part


class ManualLookups:
    """Implements :class:`kvtide.core.admission.Lookups` on a presence function.

    ``parts`` are what a chunk of each group needs (default: one rank has everything). With
    ``immediate`` a result is there as soon as it is asked for; otherwise only after
    :meth:`answer`. ``asked`` holds every list of keys in order.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        exists: Callable[[Sequence[str]], Sequence[bool]],
        *,
        parts: Sequence[Sequence[Part]] | None = None,
        immediate: bool = True,
    ) -> None:
        self.asked: list[list[str]] = []
        self.immediate = immediate
        self.submitted: dict[int, tuple[LookupQuery, str]] = {}
        self.cancelled: list[int] = []
        self.found_s: dict[int, float] = {}
        """When the lookups under way last found something, for a test to say."""
        self._coordinator = coordinator
        self._exists = exists
        self._parts = parts
        self._answers: dict[int, LookupHit] = {}

    def submit(self, ticket: int, query: LookupQuery, namespace: str) -> None:
        """Start a lookup."""
        self.submitted[ticket] = (query, namespace)
        if self.immediate:
            self.answer(ticket)

    def take(self, ticket: int) -> LookupHit | None:
        """Return the result once, if it is there."""
        return self._answers.pop(ticket, None)

    def last_found_s(self, ticket: int) -> float | None:
        """Return what the test has said."""
        return self.found_s.get(ticket)

    def cancel(self, ticket: int) -> None:
        """Forget a lookup."""
        self.cancelled.append(ticket)
        self.submitted.pop(ticket, None)
        self._answers.pop(ticket, None)

    def answer(self, ticket: int) -> LookupHit:
        """Run the lookup ``ticket`` now."""
        query, namespace = self.submitted.pop(ticket)
        coordinator = self._coordinator
        databases = coordinator.databases(namespace, self._parts)
        probe = lookup(query, coordinator.boundaries, databases)
        self._answers[ticket] = hit = drive(probe, self._ask)
        return hit

    def answer_all(self) -> None:
        """Run every lookup that waits."""
        for ticket in list(self.submitted):
            self.answer(ticket)

    def _ask(self, keys: list[str]) -> Sequence[bool]:
        self.asked.append(keys)
        return self._exists(keys)
