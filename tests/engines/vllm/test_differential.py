"""kvtide decides as vLLM does, on 20,000 random models, prompts and stores.

``make differential`` prints the tallies.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from kvtide.core.chunks import ChunkedTokenDatabase
from kvtide.core.coordinator import Coordinator
from kvtide.core.groups import ChunkedLocal, Group
from tests.engines.vllm.differential_cases import HASHES, Case, GroupCase, Presence, random_case
from tests.engines.vllm.differential_eagle import Cause, Held, classify
from tests.engines.vllm.differential_oracle import Oracle

NUM_CASES = 20_000
DOCS = Path(__file__).parents[3] / "docs"


class Decisions:
    """What kvtide decides in one case, and what it asked of the store for it."""

    def __init__(self, case: Case, coordinator: Coordinator, present: set[tuple[int, int]]) -> None:
        self.case = case
        self.coordinator = coordinator
        hashes = HASHES[: case.num_hashes]
        databases = [
            [ChunkedTokenDatabase(f"{number}", group.block_size, case.hash_block_size)]
            for number, group in enumerate(coordinator.groups)
        ]
        self._keys = {databases[number][0].key_for(hashes[index]) for number, index in present}
        self.asked: list[str] = []
        self.hit = coordinator.find_longest_cache_hit(
            case.num_tokens, hashes, databases, self._exists
        )
        assert len(set(self.asked)) == len(self.asked), f"a key was asked twice: {case}"

    def _exists(self, keys: list[str]) -> list[bool]:
        self.asked += keys
        return [key in self._keys for key in keys]

    def load_mask(self) -> list[list[int]]:
        """Return per group the chunks to load."""
        return [list(chunks) for chunks in self.coordinator.load_mask(self.hit, 0)]

    def store_masks(self) -> list[list[bool]]:
        """Return per group the chunks to store."""
        masks = self.coordinator.store_mask(
            self.case.aligned_token_len, self.case.start_token, self.case.num_prompt_tokens
        )
        return [read(mask, chunks) for mask, chunks in zip(masks, saved(self.case), strict=True)]


def saved(case: Case) -> list[range]:
    """Return per group the chunks that the store mask is about."""
    return [
        range(case.start_token // group.block_size, case.aligned_token_len // group.block_size)
        for group in case.groups
    ]


def read(mask: list[bool] | None, chunks: range) -> list[bool]:
    """Return a mask in full: ``None`` means all."""
    return [True] * len(chunks) if mask is None else mask


def draw(number: int, *, use_eagle: bool) -> tuple[Case, Oracle, set[tuple[int, int]]]:
    """Return the case of this number, vLLM's classes for it, and what the store holds."""
    rng = random.Random(f"{'eagle' if use_eagle else 'plain'} {number}")
    case = random_case(rng, use_eagle=use_eagle)
    oracle = Oracle(case)
    present = Presence(case, rng, uses_partial_hits=oracle.uses_partial_hits).random()
    return case, oracle, present


def show(title: str, tally: Counter[str]) -> None:
    """Print a tally: what ``make differential`` is for."""
    lines = [f"  {count:6} {what}" for what, count in sorted(tally.items())]
    print(f"\n{title}", *lines, sep="\n")  # noqa: T201 - what it is for


# ----------------------------------------------------------------------- without a draft model


def test_hits_and_masks_are_those_of_vllm() -> None:
    """Hit length, load masks and store masks of every kind of group, without a draft model."""
    tally: Counter[str] = Counter()
    for number in range(NUM_CASES):
        case, oracle, present = draw(number, use_eagle=False)
        kvtide = Decisions(case, oracle.coordinator(), present)
        assert (oracle.hit(present), oracle.store_hit(present)) == (kvtide.hit, kvtide.hit), case
        tally["hits"] += 1
        tally["hits above 0"] += kvtide.hit > 0
        tally["hits inside a block"] += kvtide.hit % case.lcm_block_size > 0
        if kvtide.hit:
            assert kvtide.load_mask() == oracle.load_mask(kvtide.hit), case
            tally["load masks"] += 1
        compare_store_masks(case, oracle, kvtide, tally)
    show("without a draft model, all equal:", tally)
    assert tally["hits"] == NUM_CASES
    assert min(tally.values()) > NUM_CASES / 50


def compare_store_masks(case: Case, oracle: Oracle, kvtide: Decisions, tally: Counter[str]) -> None:
    """Check the store masks of all groups, and count them by kind of group."""
    theirs = oracle.store_mask(case.aligned_token_len, case.start_token, case.num_prompt_tokens)
    for number, (chunks, mine, their) in enumerate(
        zip(saved(case), kvtide.store_masks(), theirs, strict=True)
    ):
        group = kvtide.coordinator.groups[number]
        what, expected = expected_mask(case, group, chunks, read(their, chunks))
        assert mine == expected, f"{group}: {case}"
        tally[f"store masks, {case.groups[number].kind}{what}"] += 1


def expected_mask(
    case: Case, group: Group, chunks: range, mask: list[bool]
) -> tuple[str, list[bool]]:
    """Return what is special about a group, and the mask that kvtide must have, given vLLM's.

    Of states, vLLM keeps every block where retention is dense, though a boundary to save lies at a
    multiple of all block sizes: kvtide keeps those. Of local attention it keeps what some boundary
    requires.
    """
    unit = case.lcm_block_size
    if isinstance(group, ChunkedLocal):
        return " (what a boundary requires)", [is_required(group, chunk, unit) for chunk in chunks]
    if group.is_state and group.block_size < unit:
        ends = [(chunk + 1) * group.block_size for chunk in chunks]
        at_multiples = [keep and end % unit == 0 for end, keep in zip(ends, mask, strict=True)]
        return " smaller than the LCM (at its multiples)", at_multiples
    return "", mask


def is_required(group: ChunkedLocal, chunk: int, unit: int) -> bool:
    """Tell whether some boundary, a multiple of ``unit`` tokens, requires the chunk."""
    last = group.last_requiring(chunk)
    assert last is not None
    return any(chunk in group.required(boundary) for boundary in range(unit, last + 1, unit))


@pytest.mark.parametrize("retention_interval", [None, 0, 256, 4096])
@pytest.mark.parametrize("num_tokens", [256, 4096, 131_072 + 100])
def test_masks_of_a_model_like_deepseek_v4(num_tokens: int, retention_interval: int | None) -> None:
    """Five block sizes, of which one holds all tokens and the others windows."""
    windows = ((64, 128), (64, 512), (4, 16), (8, 64))
    groups = (GroupCase("mla", 256), *(GroupCase("window mla", *sizes) for sizes in windows))
    case = Case(groups, 4, num_tokens, retention_interval, num_prompt_tokens=num_tokens)
    oracle = Oracle(case)
    tally: Counter[str] = Counter()
    compare_store_masks(case, oracle, Decisions(case, oracle.coordinator(), set()), tally)
    assert tally == {"store masks, mla": 1, "store masks, window mla": 4}


def test_states_between_the_multiples_of_all_block_sizes_are_not_stored() -> None:
    """At 16 and 48, where vLLM keeps states too, no hit can lie: attention has blocks of 32."""
    groups = (GroupCase("state", 16), GroupCase("window", 32, 65))
    case = Case(groups, 16, 64)
    oracle = Oracle(case)
    assert not oracle.uses_partial_hits
    assert Decisions(case, oracle.coordinator(), set()).store_masks()[0] == [False, True] * 2
    assert oracle.store_mask(64, 0, None)[0] is None


def test_local_attention_stores_no_chunk_that_no_boundary_requires() -> None:
    """The last block of each attention chunk: behind it, a new attention chunk begins."""
    case = Case((GroupCase("full", 16), GroupCase("local", 16, 64)), 16, 128, 0)
    oracle = Oracle(case)
    assert (
        Decisions(case, oracle.coordinator(), set()).store_masks()[1]
        == [True, True, True, False] * 2
    )
    assert oracle.store_mask(128, 0, 128)[1] is None


def test_groups_of_one_spec_may_name_a_cut_chunk_differently() -> None:
    """Each group's tail has a name of its own; vLLM looks groups of one spec up under one name."""
    groups = (GroupCase("full", 64), GroupCase("full", 64), GroupCase("state", 64))
    case = Case(groups, 16, 64)
    oracle = Oracle(case)
    assert oracle.uses_partial_hits
    present = {(0, 2), (1, 1), (2, 1)}
    assert Decisions(case, oracle.coordinator(), present).hit == 32
    assert oracle.hit(present) == 0


# -------------------------------------------------------------------------- with a draft model


def test_with_a_draft_model_every_other_hit_has_a_known_cause() -> None:
    """Each hit has all it requires and its proof; where vLLM's is another one, it is known why."""
    tally: Counter[str] = Counter()
    for number in range(NUM_CASES):
        case, oracle, present = draw(number, use_eagle=True)
        coordinator = oracle.coordinator()
        kvtide = Decisions(case, coordinator, present)
        held = Held(case, coordinator.groups, present)
        theirs = oracle.hit(present)
        assert not kvtide.hit or all(held.to_match(kvtide.hit)), case
        assert kvtide.load_mask() == oracle.load_mask(kvtide.hit), case
        tally["hits above 0"] += kvtide.hit > 0
        if kvtide.hit == theirs:
            tally["hits equal"] += 1
            continue
        cause = classify(oracle, coordinator, held, (kvtide.hit, theirs))
        assert cause is not None, f"hit {kvtide.hit}, vLLM {theirs}: {case} {sorted(present)}"
        who = "kvtide" if kvtide.hit > theirs else "vLLM"
        tally[f"{who} finds more: {cause.value}"] += 1
    show("with a draft model:", tally)
    page = (DOCS / "eagle.md").read_text(encoding="utf-8")
    assert f" {tally['hits equal']:,} hits are equal" in page
    for cause in Cause:
        [(who, count)] = [
            (what.partition(" ")[0], count) for what, count in tally.items() if cause.value in what
        ]
        assert f"| {cause.value} | {who} | {count} |" in page


def hits(case: Case, present: set[tuple[int, int]]) -> tuple[int, int, Cause | None]:
    """Return kvtide's hit and vLLM's, and why they differ."""
    oracle = Oracle(case)
    coordinator = oracle.coordinator()
    kvtide, vllm = Decisions(case, coordinator, present).hit, oracle.hit(present)
    held = Held(case, coordinator.groups, present)
    return kvtide, vllm, classify(oracle, coordinator, held, (kvtide, vllm))


def test_an_aligned_prompt_of_a_single_group_keeps_its_last_block() -> None:
    """Two blocks, both stored: the second proves the first. vLLM matches 31 tokens and drops 16."""
    case = Case((GroupCase("full", 16),), 16, 32, use_eagle=True)
    assert hits(case, {(0, 0), (0, 1)}) == (16, 0, Cause.SINGLE_GROUP)


def test_a_run_from_token_0_is_not_trimmed_twice() -> None:
    """Three blocks of a window of 80 tokens: two are a boundary of 32, the third its proof.

    vLLM trims the run of three to the boundary, drops one as the proof, and trims again.
    """
    groups = (GroupCase("window", 16, 80, is_eagle=True), GroupCase("full", 32, is_eagle=True))
    case = Case(groups, 16, 70, use_eagle=True)
    present = {(0, 0), (0, 1), (0, 2), (1, 1), (1, 3)}
    assert hits(case, present) == (32, 0, Cause.SHORT_RUN)


def test_a_boundary_needs_its_own_proof() -> None:
    """The first window is proven at 4, so vLLM does not ask for its proof when 1 is left."""
    groups = (GroupCase("window", 1, 2, is_eagle=True), GroupCase("window", 1, 3, is_eagle=True))
    case = Case(groups, 1, 6, use_eagle=True)
    present = {(0, 0), (0, 3), (0, 4), (1, 0), (1, 1)}
    assert hits(case, present) == (0, 1, Cause.PROVEN_ELSEWHERE)


def test_with_a_draft_model_store_masks_differ_in_block_0_alone() -> None:
    """Block 0 of a window would be the proof of boundary 0, which nobody resumes at."""
    tally: Counter[str] = Counter()
    for number in range(NUM_CASES):
        case, oracle, _ = draw(number, use_eagle=True)
        kvtide = Decisions(case, oracle.coordinator(), set())
        theirs = oracle.store_mask(case.aligned_token_len, case.start_token, case.num_prompt_tokens)
        for group, chunks, mine, their in zip(
            kvtide.coordinator.groups, saved(case), kvtide.store_masks(), theirs, strict=True
        ):
            _, expected = expected_mask(case, group, chunks, read(their, chunks))
            if mine != expected:
                assert group.proof_tokens, case
                assert chunks.start == 0, case
                assert [False, *expected[1:]] == mine, f"{group}: {case}"
                assert not any(0 in group.matched(n) for n in kept(case, oracle)), case
            tally["store masks equal" if mine == expected else "all but block 0 of a window"] += 1
    show("store masks with a draft model:", tally)
    other, equal = tally["all but block 0 of a window"], tally["store masks equal"]
    page = (DOCS / "eagle.md").read_text(encoding="utf-8")
    assert f" {other:,} of {other + equal:,} masks differ in that block" in page


def kept(case: Case, oracle: Oracle) -> list[int]:
    """Return the boundaries that retention keeps in the beginning of the case's prompt."""
    retention = oracle.coordinator()._retention
    last = 16 * case.lcm_block_size
    regular = range(retention.step, last, retention.step) if retention.step else ()
    return [*regular, *retention.replayed(case.num_prompt_tokens, has_proof=True)]
