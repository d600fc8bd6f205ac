"""Why a hit with a draft model is not vLLM's: the causes, told apart by code."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from kvtide.core.coordinator import Coordinator
from kvtide.core.groups import Group, SlidingWindow
from tests.engines.vllm.differential_cases import Case
from tests.engines.vllm.differential_oracle import Oracle


class Cause(Enum):
    """What makes the two hits differ; the value is what ``docs/eagle.md`` calls it."""

    SINGLE_GROUP = "a single group is given no tokens beyond the hit to match"
    SHORT_RUN = "a run from token 0, shorter than the window, is trimmed twice"
    PROVEN_ELSEWHERE = "a boundary is taken though its proof is absent"


class Held:
    """What a store holds, and whether that is enough to resume somewhere."""

    def __init__(self, case: Case, groups: Sequence[Group], present: set[tuple[int, int]]) -> None:
        self.case = case
        self.groups = groups
        self.present = present

    def to_resume(self, boundary: int) -> list[bool]:
        """Return per group whether all that ``boundary`` requires is there."""
        return [
            self._has(number, group.required(boundary), boundary)
            for number, group in enumerate(self.groups)
        ]

    def to_match(self, boundary: int) -> list[bool]:
        """Return per group whether all that ``boundary`` requires is there, and its proof."""
        return [
            self._has(number, group.matched(boundary), boundary + group.proof_tokens)
            for number, group in enumerate(self.groups)
        ]

    def _has(self, number: int, chunks: range, end_token: int) -> bool:
        group, unit = self.groups[number], self.case.hash_block_size
        if end_token > self.case.num_hashes * unit:
            return False
        for chunk in chunks:
            end = (chunk + 1) * group.block_size
            names = {end // unit - 1}
            if end > end_token:  # any hash of the chunk from there on names it
                last = 1 if group.is_state else min(end // unit, self.case.num_hashes)
                names = set(range(end_token // unit - 1, max(last, end_token // unit)))
            if not any((number, name) in self.present for name in names):
                return False
        return True


def classify(
    oracle: Oracle, coordinator: Coordinator, held: Held, hits: tuple[int, int]
) -> Cause | None:
    """Return why kvtide's hit, the first of ``hits``, is not vLLM's; ``None``: nobody knows."""
    kvtide, vllm = hits
    if vllm > kvtide:
        has_all = all(held.to_resume(vllm))
        return Cause.PROVEN_ELSEWHERE if has_all and not all(held.to_match(vllm)) else None
    groups = coordinator.groups
    if len(groups) == 1 and kvtide + groups[0].proof_tokens > held.case.num_tokens - 1:
        return Cause.SINGLE_GROUP
    for number, group in enumerate(groups):
        if not isinstance(group, SlidingWindow) or not group.proof_tokens:
            continue
        end_token = kvtide + group.proof_tokens
        is_short = group.required(end_token).start == 0
        if is_short and oracle.window_hit(number, end_token, held.present) < kvtide:
            return Cause.SHORT_RUN
    return None
