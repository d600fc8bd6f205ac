"""The search for the longest hit: which chunks to ask for, and what the answers mean.

Theory of operation. A chunk is asked for only where its presence can change the answer:

* **Downward-closed groups** (full attention) are probed forward in growing batches up to their
  first gap. That bounds the hit, and a cold miss costs one small batch.
* **Window and state groups** are then asked for what the best boundary matches, the group with the
  fewest chunks first. Where something is missing, the boundary steps down to the next one that does
  not need it. Since the chunks a boundary matches begin no later for an earlier boundary, the
  *first* of them tells most: if it is missing, so is every boundary down to it. So after a failure
  (and at once where no forward probe made a hit likely) only first chunks are asked, of many
  boundaries in one batch: a ladder whose rungs are a whole window apart. One state says nothing of
  another, so its rungs are all the boundaries.

Each key is asked at most once. Where boundaries cut chunks, a cut chunk may be present under any of
its hashes at or after the cut; a state only under exactly its own. Full attention is not asked for
hashes past the best boundary so far and its proof, as in the engine's own search.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple, TypeAlias

from kvtide.core.probes import (
    Ask,
    Boundaries,
    ForwardProbe,
    SearchRange,
    StateProbe,
    WindowProbe,
)

__all__ = ["Ask", "Boundaries", "Found", "Search", "SearchRange", "search"]


class Found(NamedTuple):
    """The answer: the largest boundary that every group can resume at.

    ``tail_tokens`` says per group which hash names the chunk that ends there: the one at that
    token, which lies at or after the hit and inside the chunk. Empty: the one at the hit, for all.
    Nothing is found where ``hit_token`` is the token at which the search started.
    ``shared_token`` is the last boundary that the downward-closed groups allow, where that lies
    beyond the hit because the others lack something; else 0.
    """

    hit_token: int
    tail_tokens: tuple[int, ...] = ()
    shared_token: int = 0


Search: TypeAlias = "Generator[Ask, Sequence[bool], Found]"
_Follower: TypeAlias = WindowProbe | StateProbe


def search(
    boundaries: Boundaries, where: SearchRange, *, covered_token: int | None = None
) -> Search:
    """Yield questions, take one answer per hash block, and return the longest hit.

    ``covered_token`` is how far the downward-closed groups are known to reach, if that is known:
    then they are not asked.
    """
    hit = boundaries.last(where.end_token)
    forward, backward = _probes(boundaries, where)
    for probe in forward:
        if hit <= where.start_token:
            break
        if covered_token is None:
            hit = yield from probe.settle(hit)
        else:
            hit = min(hit, probe.cover(covered_token))
    shared = hit if forward else 0
    for follower in backward:
        follower.is_likely = bool(forward)
    backward.sort(key=lambda probe: len(probe.group.matched(hit)))
    settled = None
    while hit != settled and hit > where.start_token:
        settled = hit
        for follower in backward:
            hit = yield from follower.settle(hit)
    hit = max(hit, where.start_token)
    probes = sorted([*forward, *backward], key=lambda probe: probe.group_id)
    tails = tuple(probe.tail_token(hit) for probe in probes)
    is_cut = any(tail != hit for tail in tails)
    is_found = hit > where.start_token
    return Found(hit, tails if is_cut and is_found else (), shared if shared > hit else 0)


def _probes(
    boundaries: Boundaries, where: SearchRange
) -> tuple[list[ForwardProbe], list[_Follower]]:
    forward: list[ForwardProbe] = []
    backward: list[_Follower] = []
    for group_id, group in enumerate(boundaries.groups):
        if group.is_downward_closed:
            forward.append(ForwardProbe(boundaries, where, group_id, group))
        elif group.is_state:
            backward.append(StateProbe(boundaries, where, group_id, group))
        else:
            backward.append(WindowProbe(boundaries, where, group_id, group))
    return forward, backward
