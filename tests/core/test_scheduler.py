"""The scheduler side: only what is new is saved, within budgets, and every job's pins come back."""

import pickle
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from kvtide.core.admission import AdmissionLimits
from kvtide.core.agenda import MAX_STEP_JOBS
from kvtide.core.back_off import Delays
from kvtide.core.chunks import ChunkedTokenDatabase
from kvtide.core.coordinator import Coordinator
from kvtide.core.groups import ChunkedLocal, FullAttention, Group, Mamba, SlidingWindow
from kvtide.core.jobs import (
    BoundaryJob,
    BoundaryPut,
    JobEnd,
    JobReport,
    JoinedJob,
    SaveJob,
    StepPlan,
    StoreJob,
    unpack_ints,
)
from kvtide.core.keys import KeyMetadata
from kvtide.core.save_limits import SaveLimits, SavePolicy
from kvtide.core.scheduler import UNKNOWN_PREFIX_ID, PoolScheduler, StepEvents
from kvtide.core.topology import WHOLE
from kvtide.core.transfer import HandOff, Scheduled
from kvtide.testing.lookups import ManualLookups
from kvtide.testing.requests import RecordingRequest, fake_hashes

BLOCK = 16
COORDINATOR = Coordinator((FullAttention(BLOCK),), BLOCK)
DATABASE = ChunkedTokenDatabase.for_group(
    KeyMetadata("ns", WHOLE, 0), block_size=BLOCK, hash_block_size=BLOCK
)


class Bench:
    """A scheduler over a store that is a set of keys, with a clock the test moves."""

    def __init__(
        self,
        *,
        max_pinned_blocks: int = 1 << 20,
        max_job_tokens: int = 1 << 20,
        max_open_tokens: int = 1 << 20,
        prefill: bool = True,
        decode: bool = False,
        num_ranks: int = 1,
        decode_job_tokens: int = 0,
        coordinator: Coordinator = COORDINATOR,
        **admission: Any,
    ) -> None:
        self.present: set[str] = set()
        self.now_s = 0.0
        self.lookups = ManualLookups(coordinator, self.exists)
        self.scheduler = PoolScheduler(
            coordinator,
            self.lookups,
            limits=SaveLimits(
                max_pinned_blocks,
                max_job_tokens,
                max_open_tokens,
                Delays(1.0, 4.0),
                decode_job_tokens,
            ),
            admission=AdmissionLimits(delays=Delays(1.0, 4.0), **admission),
            saves=SavePolicy(prefill=prefill, decode=decode),
            num_ranks=num_ranks,
        )
        self.pinned: Counter[int] = Counter()

    def exists(self, keys: Sequence[str]) -> list[bool]:
        return [key in self.present for key in keys]

    def arrive(self, view: RecordingRequest, namespace: str | None = "ns", **how: bool) -> None:
        self.scheduler.on_new_request(view, namespace, self.now_s, **how)

    def step(self, *scheduled: Scheduled, preempted: Sequence[RecordingRequest] = ()) -> StepPlan:
        outcome = self.scheduler.step(StepEvents(preempted, scheduled), self.now_s)
        self.pinned.update(outcome.pin_block_ids)
        self.scheduler.check_integrity()
        return outcome.plan

    def report(self, report: JobReport) -> list[int]:
        unpinned = self.scheduler.on_report(report, self.now_s)
        self.pinned.subtract(unpinned)
        self.pinned += Counter()
        assert self.pinned.total() == self.scheduler.num_pinned_blocks
        self.scheduler.check_integrity()
        return unpinned

    def end(self, jobs: Iterable[StoreJob], end: JobEnd = JobEnd.STORED) -> list[int]:
        report = JobReport()
        for job in jobs:
            report.end(job.job_id, end)
            if end is JobEnd.STORED:
                hashes = list(job.hashes)
                self.present.update(DATABASE.key_for(value) for value in hashes)
        return self.report(report)


def request(num_tokens: int, request_id: str = "r", **how: Any) -> RecordingRequest:
    """A request whose every full block is hashed."""
    return RecordingRequest(
        request_id, num_tokens=num_tokens, hashes=fake_hashes(num_tokens // BLOCK), **how
    )


def prefill(view: RecordingRequest, computed: int, scheduled: int, *, first: bool) -> Scheduled:
    """One prefill step."""
    return Scheduled(view, computed, scheduled, first)


def ranges(plan: StepPlan) -> list[tuple[int, int]]:
    """The token ranges of a plan's store jobs."""
    return ranges_of(*plan.stores)


def ranges_of(*jobs: SaveJob) -> list[tuple[int, int]]:
    """The token ranges of store jobs."""
    assert all(isinstance(job, StoreJob) for job in jobs)
    return [(job.start_token, job.end_token) for job in jobs]


# ------------------------------------------------------------------ only what is new


def test_each_step_of_a_chunked_prefill_saves_what_it_made_certain() -> None:
    """Steps of 100 tokens in blocks of 16: ranges join, and touch only their own entries."""
    bench, view = Bench(), request(350)
    bench.arrive(view)
    view.hash_reads.clear()
    plans = [
        bench.step(prefill(view, computed, 100, first=computed == 0))
        for computed in (0, 100, 200, 300)
    ]
    assert [ranges(plan) for plan in plans] == [
        [(0, 96)],
        [(96, 192)],
        [(192, 288)],
        [(288, 336)],
    ]
    assert view.hash_reads == [range(6), range(6, 12), range(12, 18), range(18, 21)]
    assert view.block_reads == [(0, 0, 6), (0, 6, 12), (0, 12, 18), (0, 18, 21)]


def test_a_step_touches_nothing_below_the_scheduled_offset_at_any_context() -> None:
    """128k tokens in steps of 2,048: each step reads 128 hashes and 128 table entries."""
    bench, view = Bench(), request(131072)
    bench.arrive(view)
    view.list_reads.clear()
    for step in range(64):
        view.hash_reads.clear()
        view.block_reads.clear()
        bench.step(prefill(view, step * 2048, 2048, first=step == 0))
        assert view.hash_reads == [range(step * 128, (step + 1) * 128)]
        assert not view.list_reads
        assert view.block_reads == [(0, step * 128, (step + 1) * 128)]


def test_the_metadata_of_a_step_does_not_grow_with_the_context() -> None:
    """A 2,048-token step pickles to as many bytes at 128k as at 2k."""
    bench, view = Bench(), request(131072)
    bench.arrive(view)
    sizes = [
        len(pickle.dumps(bench.step(prefill(view, step * 2048, 2048, first=step == 0))))
        for step in range(64)
    ]
    assert max(sizes[1:]) <= 1.1 * min(sizes[1:])
    assert sizes[-1] <= 1.1 * sizes[0]


def test_only_accepted_tokens_are_certain() -> None:
    """30 tokens, then 1 + 3 drafts of which one is accepted: chunk 2 waits for 32 tokens."""
    for accepted in range(4):
        bench = Bench(decode=True)
        view = RecordingRequest(num_tokens=30, hashes=fake_hashes(1), tables=[[1, 2, 3]])
        bench.arrive(view)
        assert ranges(bench.step(Scheduled(view, 0, 30, is_admission=True))) == [(0, 16)]
        plan = bench.step(Scheduled(view, 30, 4, is_admission=False))
        assert ranges(plan) == [], "34 tokens are scheduled, but none of the drafts is hashed"
        view.num_tokens = 31 + accepted
        view.block_hashes = fake_hashes(view.num_tokens // BLOCK)
        plan = bench.step(Scheduled(view, view.num_tokens - 1, 4, is_admission=False))
        assert ranges(plan) == ([(16, 32)] if view.num_tokens >= 32 else [])


def test_the_first_job_starts_where_the_engine_starts_to_compute() -> None:
    """What was held or loaded is in the store already."""
    bench, view = Bench(), request(160)
    bench.arrive(view)
    assert ranges(bench.step(prefill(view, 64, 96, first=True))) == [(64, 160)]


def test_decode_is_saved_only_if_asked_for() -> None:
    """Decode begins at the length the request had when it was admitted."""
    for decode, expected in ((False, [(0, 32)]), (True, [(0, 32), (32, 48)])):
        bench, view = Bench(decode=decode), request(40)
        bench.arrive(view)
        seen = ranges(bench.step(prefill(view, 0, 40, first=True)))
        for num_tokens in range(41, 50):
            view.num_tokens = num_tokens
            view.block_hashes = fake_hashes(num_tokens // BLOCK)
            view.tables = [[1, 2, 3, 4]]
            seen += ranges(bench.step(Scheduled(view, num_tokens - 1, 1, is_admission=False)))
        assert seen == expected


def decoding(bench: Bench, *request_ids: str, namespace: str = "ns") -> list[Scheduled]:
    """Prompts of 31 tokens, saved up to 16, in the step that completes their second block."""
    steps = []
    for request_id in request_ids:
        view = request(32, request_id)
        view.num_tokens = 31
        bench.arrive(view, namespace)
        bench.step(prefill(view, 16, 0, first=True))
        view.num_tokens = 32
        steps.append(prefill(view, 31, 1, first=False))
    return steps


def test_requests_that_complete_a_block_in_one_step_share_a_job() -> None:
    """It has a chunk of each; when it has ended nothing more is due."""
    bench = Bench(decode=True)
    steps = decoding(bench, "a", "b", "c")
    plan = bench.step(*steps)
    [job] = plan.stores
    assert isinstance(job, JoinedJob)
    assert list(unpack_ints(job.chunks[0])) == [1, 1, 1]
    assert list(unpack_ints(job.block_ids[0])) == [2, 2, 2]
    assert list(job.hashes) == [fake_hashes(2)[1]] * 3
    assert bench.scheduler.counters["store_jobs"] == bench.scheduler.num_open_jobs == 1
    assert bench.pinned == {2: 3}
    bench.end([job])
    assert not bench.pinned
    assert not bench.step(*steps).stores


def test_a_shared_job_that_fails_is_everybodys_and_each_tries_again_alone() -> None:
    """From its own saved offset, after a while: what fails again fails nobody else with it."""
    bench = Bench(decode=True)
    steps = decoding(bench, "a", "b")
    [job] = bench.step(*steps).stores
    bench.end([job], JobEnd.FAILED)
    assert not bench.step(*steps).stores
    bench.now_s += 1.0
    first, second = bench.step(*steps).stores
    assert ranges_of(first, second) == [(16, 32), (16, 32)]
    bench.end([first], JobEnd.FAILED)
    bench.end([second])
    bench.now_s += 4.0
    [third] = bench.step(*steps).stores
    assert ranges_of(third) == [(16, 32)]
    bench.end([third])
    assert not bench.step(*steps).stores


def test_after_a_shared_failure_each_is_looked_at_in_its_next_step() -> None:
    """And nothing of it counts as a boundary that was lost."""
    bench = Bench(decode=True)
    [job] = bench.step(*decoding(bench, "a", "b")).stores
    assert not any(bench.scheduler.is_due(request_id, 33) for request_id in "ab")
    bench.end([job], JobEnd.FAILED)
    assert all(bench.scheduler.is_due(request_id, 33) for request_id in "ab")
    assert not bench.scheduler.counters["lost_boundaries"]


def test_requests_whose_retry_succeeded_share_jobs_again() -> None:
    """Only the next job after a failure is alone."""
    bench = Bench(decode=True)
    steps = decoding(bench, "a", "b")
    bench.end(bench.step(*steps).stores, JobEnd.FAILED)
    bench.now_s += 1.0
    bench.end(bench.step(*steps).stores)
    views = [request(48, request_id) for request_id in "ab"]
    [job] = bench.step(*(prefill(view, 47, 1, first=False) for view in views)).stores
    assert isinstance(job, JoinedJob)


def test_a_step_in_which_many_requests_complete_a_block_leaves_some_to_the_next() -> None:
    """None is forgotten, and none is saved twice."""
    bench = Bench(decode=True)
    steps = decoding(bench, *map(str, range(2 * MAX_STEP_JOBS + 5)))
    saved = [len(bench.step(*steps).stores[0].hashes) for _ in range(3)]
    assert saved == [MAX_STEP_JOBS, MAX_STEP_JOBS, 5]
    assert not bench.step(*steps).stores


def test_a_prefill_does_not_wait_for_requests_that_decode() -> None:
    """It may be over with its step, and nothing of it saved."""
    bench = Bench(decode=True)
    steps = decoding(bench, *map(str, range(MAX_STEP_JOBS + 1)))
    view = request(64, "long")
    bench.arrive(view)
    plan = bench.step(*steps, prefill(view, 0, 64, first=True))
    [job] = plan.stores
    assert isinstance(job, JoinedJob)
    assert len(job.hashes) == MAX_STEP_JOBS + 4


def test_a_request_that_ended_meanwhile_takes_no_part_in_a_shared_failure() -> None:
    """Its blocks come back, and the other one tries again."""
    bench = Bench(decode=True)
    steps = decoding(bench, "a", "b")
    [job] = bench.step(*steps).stores
    bench.scheduler.on_finished("a")
    assert bench.end([job], JobEnd.FAILED) == [2, 2]
    bench.now_s += 1.0
    [again] = bench.step(*steps).stores
    assert isinstance(again, StoreJob)


# ------------------------------------------------------------------ decodes, in portions


def decode_to(bench: Bench, view: RecordingRequest, num_tokens: int) -> list[tuple[int, int]]:
    """Decode a request token by token to a length; return what its steps save."""
    saved = []
    while view.num_tokens < num_tokens:
        computed = view.num_tokens
        view.num_tokens += 1
        view.block_hashes = fake_hashes(view.num_tokens // BLOCK)
        num_blocks = view.num_tokens // BLOCK + 1
        view.tables = [list(range(1, num_blocks + 1)) for _ in view.tables]
        if bench.scheduler.is_due(view.request_id, view.num_tokens):
            saved += ranges(bench.step(prefill(view, computed, 1, first=False)))
    return saved


def decoder(bench: Bench, num_tokens: int) -> RecordingRequest:
    """A request whose prompt is computed and saved."""
    view = request(num_tokens)
    view.tables = [view.tables[0] for _ in bench.scheduler.coordinator.groups]
    bench.arrive(view)
    plan = bench.step(prefill(view, 0, num_tokens, first=True))
    assert ranges(plan) == [(0, num_tokens // BLOCK * BLOCK)]
    bench.end(plan.stores)
    return view


def test_decodes_are_saved_in_portions() -> None:
    """With the token that completes one, and prompts at once, up to their last whole block."""
    bench = Bench(decode=True, decode_job_tokens=40)
    view = decoder(bench, 40)
    assert decode_to(bench, view, 63) == []
    assert decode_to(bench, view, 64) == [(32, 64)]
    assert decode_to(bench, view, 130) == [(64, 96), (96, 128)]


def test_a_request_that_ends_saves_what_was_put_off() -> None:
    """Its blocks are pinned at once; the job goes out, joined, with the next step's."""
    bench = Bench(decode=True, decode_job_tokens=160)
    view = decoder(bench, 32)
    assert decode_to(bench, view, 100) == []
    scheduler = bench.scheduler
    assert scheduler.on_finishing(view, (), 100, 0.0) == [3, 4, 5, 6]
    scheduler.on_finished("r")
    [job] = scheduler.step(StepEvents(), 0.0).plan.stores
    assert ranges_of(job) == [(32, 96)]
    assert bench.end([job]) == [6, 5, 4, 3]


def test_a_retry_does_not_wait_for_a_portion() -> None:
    """What failed at the end of the prompt is due as soon as its back-off is over."""
    bench, view = Bench(decode=True, decode_job_tokens=160), request(32)
    bench.arrive(view)
    bench.end(bench.step(prefill(view, 0, 32, first=True)).stores, JobEnd.FAILED)
    assert decode_to(bench, view, 40) == []
    bench.now_s += 1.0
    assert decode_to(bench, view, 41) == [(0, 32)]
    assert decode_to(bench, view, 100) == []


@pytest.mark.parametrize(
    "group, num_tokens",
    [
        (FullAttention(BLOCK), 64),
        (SlidingWindow(BLOCK, 66), 32),
        (SlidingWindow(BLOCK, 40), 16),
        (ChunkedLocal(BLOCK, 64), 16),
        (Mamba(BLOCK), 16),
        (FullAttention(BLOCK, proof_tokens=BLOCK), 16),
    ],
)
def test_a_portion_is_what_the_engine_keeps_twice_over(group: Group, num_tokens: int) -> None:
    """What it frees, hands off or still has to prove is saved as it comes."""
    bench = Bench(
        decode=True,
        decode_job_tokens=64,
        coordinator=Coordinator((FullAttention(BLOCK), group), BLOCK),
    )
    view = decoder(bench, 32)
    [(start, end), *_] = decode_to(bench, view, 97)
    assert (start, end) == (32, 32 + num_tokens)


def test_after_a_preemption_saving_goes_on_where_it_was() -> None:
    """The engine may hold what had been put off; the pool is asked for what was saved."""
    bench = Bench(decode=True, decode_job_tokens=160)
    view = decoder(bench, 32)
    assert decode_to(bench, view, 100) == []
    view.local_hit_tokens = 96
    bench.step(preempted=[view])
    assert bench.scheduler.match(view, 96, 0.0) == 0
    plan = bench.step(prefill(view, 96, 4, first=True))
    assert ranges(plan) == [(32, 96)]
    assert not bench.scheduler.counters["repairs"]


def test_a_consumer_that_is_preempted_leaves_no_hole_in_what_it_decodes() -> None:
    """Everything behind a hole would be out of reach."""
    bench = Bench(prefill=False, decode=True, decode_job_tokens=160)
    view = request(32)
    bench.arrive(view)
    assert not bench.step(prefill(view, 0, 32, first=True)).stores
    assert decode_to(bench, view, 100) == []
    view.num_prompt_tokens = 32
    view.local_hit_tokens = 96
    bench.step(preempted=[view])
    assert bench.scheduler.match(view, 96, 0.0) == 0
    assert ranges(bench.step(prefill(view, 96, 4, first=True))) == [(32, 96)]


def test_requests_that_end_together_are_saved_to_their_ends() -> None:
    """Their jobs go out, several as one, as far as staging has room; the rest follow."""
    bench = Bench(decode=True, decode_job_tokens=160, max_open_tokens=160)
    views = {}
    for request_id in "abcde":
        view = views[request_id] = request(32, request_id)
        bench.arrive(view)
        bench.end(bench.step(prefill(view, 0, 32, first=True)).stores)
        assert decode_to(bench, view, 96) == []
    for request_id, view in views.items():
        bench.pinned.update(bench.scheduler.on_finishing(view, (), 96, 0.0))
        bench.scheduler.on_finished(request_id)
    sizes = []
    while bench.scheduler.has_pins:
        [job] = bench.step().stores
        sizes.append(len(list(job.hashes)))
        bench.end([job])
    assert sizes == [8, 8, 4]
    assert not bench.scheduler.counters["given_up_tokens"]


def test_where_nothing_is_saved_an_end_saves_nothing_and_nothing_is_remembered() -> None:
    """Whatever the engine says of it."""
    bench, view = Bench(prefill=False), request(32)
    bench.arrive(view)
    bench.step(prefill(view, 0, 32, first=True))
    assert bench.scheduler.on_finishing(view, [HandOff(0, 9, 32)], 32, 0.0) == []
    both, view = Bench(decode=True), request(40)
    both.arrive(view)
    both.step(prefill(view, 0, 40, first=True))
    assert not both.scheduler.is_due("r", 40)
    both.scheduler.on_finished("r")
    assert both.scheduler.is_due("r", 40), "nothing is left of it"


def test_jobs_under_different_names_are_not_shared() -> None:
    """A job has one key prefix."""
    bench = Bench(decode=True)
    steps = decoding(bench, "a", "b") + decoding(bench, "c", namespace="adapter")
    shared, alone = bench.step(*steps).stores
    assert isinstance(shared, JoinedJob)
    assert isinstance(alone, StoreJob)
    assert shared.prefix_id != alone.prefix_id


def test_a_shared_job_is_cut_to_what_staging_takes_of_one() -> None:
    """Five blocks, at most two in a job."""
    bench = Bench(decode=True, max_job_tokens=2 * BLOCK)
    jobs = bench.step(*decoding(bench, "a", "b", "c", "d", "e")).stores
    assert [len(list(job.hashes)) for job in jobs] == [2, 2, 1]


def test_a_resumed_request_saves_what_it_generated_before_as_prefill() -> None:
    """After a preemption the length at admission is the new border."""
    bench, view = Bench(), request(40)
    bench.arrive(view)
    bench.step(prefill(view, 0, 40, first=True))
    view.num_tokens = 70
    view.block_hashes = fake_hashes(4)
    view.tables = [[5, 6, 7, 8, 9]]
    assert ranges(bench.step(preempted=[view])) == []
    assert ranges(bench.step(prefill(view, 0, 70, first=True))) == [(0, 64)]


def test_a_consumer_saves_no_prefill() -> None:
    """With decode saving it starts with the chunk in which its prompt ends."""
    bench, view = Bench(prefill=False), request(80)
    bench.arrive(view)
    assert ranges(bench.step(prefill(view, 0, 80, first=True))) == []
    bench, view = Bench(prefill=False, decode=True), request(40)
    bench.arrive(view)
    assert ranges(bench.step(prefill(view, 0, 40, first=True))) == []
    view.num_tokens = 49
    view.block_hashes = fake_hashes(3)
    view.tables = [[1, 2, 3, 4]]
    assert ranges(bench.step(Scheduled(view, 48, 1, is_admission=False))) == [(32, 48)]


def test_a_request_without_a_namespace_neither_saves_nor_loads() -> None:
    """An adapter without a content digest could be any adapter."""
    bench, view = Bench(), request(64)
    bench.present = {DATABASE.key_for(value) for value in view.block_hashes}
    bench.arrive(view, namespace=None)
    assert bench.scheduler.match(view, 0, 0.0) == 0
    assert not bench.step(prefill(view, 0, 64, first=True))


def test_requests_the_pool_never_met_are_left_alone() -> None:
    """They arrived before the pool knew how to name keys."""
    bench, view = Bench(), request(64)
    assert bench.scheduler.match(view, 0, 0.0) == 0
    assert not bench.step(prefill(view, 0, 64, first=True))
    bench.scheduler.on_allocated(view, 0)
    bench.scheduler.on_finished("r")


# ------------------------------------------------------------------ pins and budgets


def test_a_job_is_cut_to_the_pin_budget_and_the_rest_follows() -> None:
    """Ten blocks with a budget of four: on any later step, not only at a boundary."""
    bench, view = Bench(max_pinned_blocks=4), request(160)
    bench.arrive(view)
    plans = [bench.step(prefill(view, 0, 160, first=True))]
    assert ranges(plans[0]) == [(0, 64)]
    assert not bench.step(Scheduled(view, 160, 1, is_admission=False)), "the budget is used up"
    assert bench.end(plans[0].stores) == [4, 3, 2, 1]
    assert ranges(bench.step(Scheduled(view, 160, 1, is_admission=False))) == [(64, 128)]


def test_a_budget_below_one_block_still_lets_one_job_through() -> None:
    """An engine whose cache holds just one small request saves too, block by block."""
    bench, view = Bench(max_pinned_blocks=0), request(48)
    bench.arrive(view)
    plan = bench.step(prefill(view, 0, 48, first=True))
    assert ranges(plan) == [(0, 16)]
    assert not bench.step(Scheduled(view, 48, 1, is_admission=False))
    bench.end(plan.stores)
    assert ranges(bench.step(Scheduled(view, 48, 1, is_admission=False))) == [(16, 32)]


def test_a_job_fits_into_staging_memory() -> None:
    """Larger ranges are cut into several jobs, as many as staging holds together."""
    bench, view = Bench(max_job_tokens=40, max_open_tokens=70), request(96)
    bench.arrive(view)
    first = bench.step(prefill(view, 0, 96, first=True))
    assert ranges(first) == [(0, 32), (32, 64)]
    assert not bench.step(Scheduled(view, 96, 1, is_admission=False))
    bench.end(first.stores)
    assert ranges(bench.step(Scheduled(view, 96, 1, is_admission=False))) == [(64, 96)]


def test_a_request_with_nothing_to_save_is_not_due() -> None:
    """Of a thousand requests that decode a step need not look at those inside a block."""
    for decode, due_at in ((True, 48), (False, None)):
        bench, view = Bench(decode=decode), request(40)
        bench.arrive(view)
        assert bench.scheduler.is_due("r", 1), "nothing is known yet"
        bench.step(prefill(view, 0, 40, first=True))
        due = [n for n in range(41, 200) if bench.scheduler.is_due("r", n)]
        assert (due[0] if due else None) == due_at


def test_a_request_whose_job_failed_is_due_again() -> None:
    """What was given up for saved has to be saved once more."""
    bench, view = Bench(), request(40)
    bench.arrive(view)
    jobs = bench.step(prefill(view, 0, 40, first=True)).stores
    assert not bench.scheduler.is_due("r", 41)
    bench.end(jobs, JobEnd.FAILED)
    bench.now_s = 1.0
    assert bench.scheduler.is_due("r", 41)
    assert ranges(bench.step(Scheduled(view, 40, 1, is_admission=False))) == [(0, 32)]


def test_the_next_turn_of_a_session_saves_what_lies_between() -> None:
    """What was decoded in the last turn is prompt now; without it later chunks are unreachable."""
    bench, view = Bench(), request(64)
    bench.arrive(view)
    bench.end(bench.step(prefill(view, 0, 64, first=True)).stores)
    view.num_tokens = 160
    view.block_hashes = fake_hashes(10)
    view.tables = [list(range(1, 11))]
    assert ranges(bench.step(prefill(view, 96, 64, first=True))) == [(64, 160)]


def test_pins_end_when_every_rank_has_staged() -> None:
    """Not before, and the end report releases nothing twice."""
    bench, view = Bench(num_ranks=2), request(32)
    bench.arrive(view)
    [job] = bench.step(prefill(view, 0, 32, first=True)).stores
    assert bench.scheduler.has_pins
    assert bench.report(JobReport(staged=Counter({job.job_id: 1}))) == []
    assert bench.report(JobReport(staged=Counter({job.job_id: 1}))) == [2, 1]
    assert not bench.scheduler.has_pins
    assert bench.end([job]) == []
    assert bench.scheduler.num_open_jobs == 1
    assert bench.end([job]) == []
    assert bench.scheduler.num_open_jobs == 0
    assert bench.end([job]) == [], "a report about a job nobody knows changes nothing"


def test_what_one_rank_has_made_whole_all_ranks_are_told_with_the_next_step() -> None:
    """One reads what another puts. What is bad they are not told: it may be the reader's fault."""
    bench = Bench(num_ranks=2)
    bench.report(JobReport(bad_keys={"a", "b"}, mended_keys={"c", "b"}))
    assert bench.step() == StepPlan(mended_keys=("c",))
    assert not bench.step()
    bench.report(JobReport(mended_keys={"a"}))
    assert bench.step().mended_keys == ("a",)
    alone = Bench()
    alone.report(JobReport(mended_keys={"c"}))
    assert not alone.step(), "the one rank knows"


def test_an_end_report_alone_releases_the_pins() -> None:
    """A job that was refused was never staged."""
    bench, view = Bench(), request(32)
    bench.arrive(view)
    [job] = bench.step(prefill(view, 0, 32, first=True)).stores
    assert bench.end([job], JobEnd.REFUSED) == [2, 1]


def test_freed_blocks_are_skipped_and_counted() -> None:
    """A null entry is neither pinned nor a source."""
    bench, view = Bench(), request(48, tables=[[0, 0, 7]])
    bench.arrive(view)
    [job] = bench.step(prefill(view, 0, 48, first=True)).stores
    assert bench.pinned == Counter([7])
    assert list(unpack_ints(job.block_ids[0])) == [0, 0, 7]
    assert bench.scheduler.counters["skipped_null_chunks"] == 2


# ------------------------------------------------------------------ failures


def test_a_failed_job_is_tried_again_from_the_saved_offset_after_a_while() -> None:
    """The offset moves only over what every rank has stored."""
    bench, view = Bench(), request(96)
    bench.arrive(view)
    first = bench.step(prefill(view, 0, 32, first=True)).stores
    second = bench.step(prefill(view, 32, 32, first=False)).stores
    third = bench.step(prefill(view, 64, 32, first=False)).stores
    bench.end(third)
    bench.end(second, JobEnd.FAILED)
    assert not bench.step(Scheduled(view, 96, 1, is_admission=False)), "one job is still open"
    bench.end(first)
    assert not bench.step(Scheduled(view, 96, 1, is_admission=False)), "back-off"
    bench.now_s = 1.0
    assert ranges(bench.step(Scheduled(view, 96, 1, is_admission=False))) == [(32, 96)]


def test_a_refused_job_makes_only_its_own_request_wait() -> None:
    """Nothing is wrong with the store: others go on."""
    bench = Bench()
    one, other = request(32, "one"), request(32, "other")
    for view in (one, other):
        bench.arrive(view)
    bench.end(bench.step(prefill(one, 0, 32, first=True)).stores, JobEnd.REFUSED)
    assert ranges(bench.step(prefill(other, 0, 32, first=True))) == [(0, 32)]


@pytest.mark.parametrize("end", [JobEnd.NO_SPACE, JobEnd.LOST])
def test_no_space_or_a_lost_store_makes_the_whole_pool_wait(end: JobEnd) -> None:
    """Then one job at a time asks whether it is over, until one succeeds."""
    bench = Bench()
    views = [request(64, f"r{i}") for i in range(4)]
    for view in views:
        bench.arrive(view)
    bench.end(bench.step(prefill(views[0], 0, 32, first=True)).stores, end)
    assert not bench.step(prefill(views[1], 0, 32, first=True))
    bench.now_s = 1.0
    probe = bench.step(prefill(views[1], 32, 32, first=False), prefill(views[2], 0, 32, first=True))
    assert ranges(probe) == [(0, 64)]
    bench.end(probe.stores, end)
    bench.now_s = 2.9
    assert not bench.step(prefill(views[2], 32, 32, first=False))
    bench.now_s = 3.0
    probe = bench.step(prefill(views[2], 32, 32, first=False))
    bench.end(probe.stores)
    plan = bench.step(
        *(Scheduled(view, 64, 1, is_admission=view is views[3]) for view in (*views[:2], views[3]))
    )
    assert len(plan.stores) == 2, "back-off is over for requests whose own wait is over"


def test_reports_about_an_earlier_life_change_only_their_own_pins() -> None:
    """A preempted request resumes as another life; its first job ends late."""
    bench, view = Bench(), request(64)
    bench.arrive(view)
    old = bench.step(prefill(view, 0, 64, first=True)).stores
    bench.step(preempted=[view])
    new = bench.step(prefill(view, 0, 32, first=True)).stores
    assert ranges(StepPlan(stores=new)) == [(0, 32)]
    assert bench.end(old, JobEnd.FAILED) == [4, 3, 2, 1]
    assert ranges(bench.step(prefill(view, 32, 32, first=False))) == [(32, 64)]


def test_a_reused_request_id_does_not_inherit_anything() -> None:
    """A finishes, another A arrives, and A's late report finds only its own pins."""
    bench, view = Bench(), request(64)
    bench.arrive(view)
    old = bench.step(prefill(view, 0, 64, first=True)).stores
    bench.scheduler.on_finished("r")
    again = request(64)
    bench.arrive(again)
    assert ranges(bench.step(prefill(again, 0, 32, first=True))) == [(0, 32)]
    bench.end(old)
    assert ranges(bench.step(prefill(again, 32, 32, first=False))) == [(32, 64)]
    assert repr(bench.scheduler) == (
        "<PoolScheduler [1 requests: 1 running | 2 jobs, 4 blocks pinned]>"
    )


def test_a_finished_requests_pins_come_back_with_its_report() -> None:
    """The engine need not wait for the store: the job holds its own references."""
    bench, view = Bench(), request(32)
    bench.arrive(view)
    jobs = bench.step(prefill(view, 0, 32, first=True)).stores
    bench.scheduler.on_finished("r")
    assert bench.scheduler.has_pins
    bench.end(jobs)
    assert not bench.scheduler.has_pins


def test_a_request_resumed_as_a_new_one_starts_anew() -> None:
    """Under the V2 runner a resumed request comes as new, sometimes without a notice."""
    bench, view = Bench(), request(64)
    bench.arrive(view)
    bench.step(prefill(view, 0, 64, first=True))
    assert ranges(bench.step(prefill(view, 0, 64, first=True))) == [(0, 64)]


# ------------------------------------------------------------------ loads


def loaded(bench: Bench, view: RecordingRequest, *, computed: int = 0) -> int:
    """Let the engine take all that is promised, and return it."""
    num_tokens = bench.scheduler.match(view, computed, bench.now_s)
    assert num_tokens
    bench.scheduler.on_allocated(view, num_tokens)
    return num_tokens


def stored(bench: Bench, view: RecordingRequest) -> None:
    """Put all of a request's chunks into the store."""
    bench.present.update(DATABASE.key_for(value) for value in view.block_hashes)


def test_a_hit_becomes_one_load_of_what_was_granted() -> None:
    """The load job carries only the range beyond what the engine holds."""
    bench, view = Bench(), request(81)
    stored(bench, view)
    bench.arrive(view)
    assert bench.scheduler.match(view, 16, 0.0) == 64
    bench.scheduler.on_allocated(view, 32)
    [load] = bench.step().loads
    assert (load.start_token, load.end_token) == (16, 48)
    assert list(unpack_ints(load.block_ids[0])) == [2, 3]
    bench.scheduler.on_load_finished("r")
    assert bench.scheduler.counters["loaded_tokens"] == 32
    bench.scheduler.on_allocated(view, 0)
    plan = bench.step(prefill(view, 48, 33, first=True))
    assert ranges(plan) == [(48, 80)]


def test_a_prefix_travels_with_the_first_plan_that_uses_it() -> None:
    """And with no later one."""
    bench, view = Bench(), request(64)
    bench.arrive(view)
    assert bench.step(prefill(view, 0, 32, first=True)).prefixes == {0: "ns"}
    assert bench.step(prefill(view, 32, 32, first=False)).prefixes == {}


def test_tokens_that_were_granted_but_never_promised_fail_on_every_rank() -> None:
    """The engine waits for a report in any case."""
    bench, view = Bench(), request(64)
    bench.arrive(view)
    bench.scheduler.on_allocated(view, 32)
    [load] = bench.step().loads
    assert load.prefix_id == UNKNOWN_PREFIX_ID
    assert load.request_id == "r"
    bench.report(JobReport(failed_loads={"r": 0}))
    bench.scheduler.on_load_finished("r")
    assert bench.scheduler.counters["refused_loads"] == 1


def test_loads_that_always_fail_cost_a_request_two_loads_at_most() -> None:
    """The second answer ends before the chunk that failed, and there is no third."""
    bench, view = Bench(), request(161)
    stored(bench, view)
    bench.arrive(view)
    assert loaded(bench, view) == 160
    bench.step()
    bench.report(JobReport(failed_loads={"r": 150}))
    bench.scheduler.on_load_finished("r")
    assert loaded(bench, view) == 144
    bench.step()
    bench.report(JobReport(failed_loads={"r": 128}))
    bench.scheduler.on_load_finished("r")
    assert bench.scheduler.match(view, 0, 0.0) == 0
    assert bench.scheduler.counters["loaded_tokens"] == 0
    assert bench.scheduler.counters["failed_loads"] == 2


def test_a_store_that_did_not_answer_a_load_is_left_alone_for_a_while() -> None:
    """All requests compute meanwhile."""
    bench, view, other = Bench(), request(33), request(33, "other")
    stored(bench, view)
    bench.arrive(view)
    bench.arrive(other)
    loaded(bench, view)
    bench.step()
    bench.report(JobReport(failed_loads={"r": 0}, lost_loads={"r"}))
    assert bench.scheduler.match(other, 0, 0.5) == 0
    assert bench.scheduler.match(other, 0, 1.0) == 32


def test_an_aborted_load_is_cancelled() -> None:
    """The engine holds the blocks until every rank has reported; it cannot pause before that."""
    bench, view = Bench(), request(33)
    stored(bench, view)
    bench.arrive(view)
    loaded(bench, view)
    [load] = bench.step().loads
    bench.scheduler.on_finished("r")
    plan = bench.step()
    assert plan.cancelled_loads == (load.job_id,)
    assert plan
    assert bench.step().cancelled_loads == ()
    bench.report(JobReport(failed_loads={"r": 0}))
    bench.scheduler.on_load_finished("r")
    assert bench.scheduler.counters["failed_loads"] == 0


def test_a_load_that_ends_after_an_abort_gives_its_budget_back() -> None:
    """The report is still due, and changes nothing else."""
    bench, view = Bench(max_loads=1), request(33)
    stored(bench, view)
    bench.arrive(view)
    loaded(bench, view)
    bench.step()
    bench.scheduler.on_finished("r")
    other = request(33, "other")
    bench.arrive(other)
    assert bench.scheduler.match(other, 0, 0.0) == 0
    bench.report(JobReport(failed_loads={"r": 0}))
    bench.scheduler.on_load_finished("r")
    assert bench.scheduler.match(other, 0, 0.0) == 32


def test_a_request_that_must_not_read_is_not_looked_up() -> None:
    """Prompt logprobs need every token computed; its KV cache is saved all the same."""
    bench, view = Bench(), request(64)
    stored(bench, view)
    bench.arrive(view, may_load=False)
    assert bench.scheduler.match(view, 0, 0.0) == 0
    assert bench.lookups.asked == []
    assert ranges(bench.step(prefill(view, 0, 64, first=True))) == [(0, 64)]


def test_a_preempted_request_is_looked_up_at_once() -> None:
    """It has no second arrival; its own saved chunks are a hit."""
    bench, view = Bench(), request(65)
    bench.arrive(view)
    bench.end(bench.step(prefill(view, 0, 65, first=True)).stores)
    bench.step(preempted=[view])
    assert bench.scheduler.counters["lookups"] == 2
    assert bench.scheduler.match(view, 0, 0.0) == 64


def test_the_engine_may_ask_for_a_preempted_request_before_it_says_so() -> None:
    """A load promised in that very step must survive the notice that follows."""
    bench, view = Bench(), request(65)
    bench.arrive(view)
    bench.end(bench.step(prefill(view, 0, 65, first=True)).stores)
    assert loaded(bench, view) == 64
    [load] = bench.step(preempted=[view]).loads
    bench.scheduler.on_load_finished("r")
    assert load.end_token == 64
    assert bench.scheduler.counters["loaded_tokens"] == 64


def test_what_the_store_lost_below_the_local_hit_is_repaired() -> None:
    """The head was evicted in the store; this engine holds it and saves it again, cut to budget."""
    bench, view = Bench(max_pinned_blocks=3), request(97, local_hit_tokens=64)
    stored(bench, view)
    bench.present.discard(DATABASE.key_for(view.block_hashes[0]))
    bench.arrive(view)
    assert bench.scheduler.match(view, 64, 0.0) == 32
    bench.scheduler.on_allocated(view, 32)
    bench.step()
    bench.scheduler.on_load_finished("r")
    assert ranges(bench.step(prefill(view, 96, 1, first=True))) == [(0, 48)]
    assert bench.scheduler.counters["repairs"] == 1


# ------------------------------------------------------------------ reset


def test_after_a_reset_nothing_computed_before_is_saved_under_the_new_name() -> None:
    """A running request waits for its next admission; a waiting one moves along at once."""
    bench = Bench()
    running, waiting = request(64, "running"), request(64, "waiting")
    bench.arrive(running)
    bench.arrive(waiting)
    bench.step(prefill(running, 0, 32, first=True))
    bench.scheduler.reset(lambda _: "new")
    assert not bench.step(prefill(running, 32, 32, first=False))
    plan = bench.step(prefill(waiting, 0, 64, first=True))
    assert plan.prefixes == {1: "new"}
    assert [job.prefix_id for job in plan.stores] == [1]
    bench.step(preempted=[running])
    plan = bench.step(prefill(running, 0, 64, first=True))
    assert [job.prefix_id for job in plan.stores] == [1]
    bench.scheduler.reset(lambda _: None)
    assert not bench.step(prefill(running, 64, 1, first=False))


def test_a_second_reset_before_the_next_admission_counts_too() -> None:
    """The name of the first reset stands for weights that are gone by then."""
    bench, running = Bench(), request(64)
    bench.arrive(running)
    bench.step(prefill(running, 0, 32, first=True))
    bench.scheduler.reset(lambda _: "second")
    bench.scheduler.reset(lambda _: "third")
    bench.step(preempted=[running])
    plan = bench.step(prefill(running, 0, 64, first=True))
    assert list(plan.prefixes.values())[-1] == "third"
    assert [job.prefix_id for job in plan.stores] == [2]


@pytest.mark.parametrize("num_resets", [1, 2])
def test_what_was_loaded_before_a_reset_is_never_built_upon_under_the_new_name(
    num_resets: int,
) -> None:
    """A request that waits to be scheduled after its load holds KV cache of the old weights."""
    bench, view = Bench(), request(65)
    stored(bench, request(32))
    bench.arrive(view)
    loaded(bench, view)
    bench.step()
    bench.scheduler.on_load_finished("r")
    for number in range(num_resets):
        bench.scheduler.reset(lambda _, number=number: f"new-{number}")
    assert not bench.step(prefill(view, 32, 33, first=True))


def test_a_load_that_fails_after_a_reset_lets_the_request_move_along() -> None:
    """It starts over, under the weights that the new name stands for."""
    bench, view = Bench(), request(64)
    stored(bench, view)
    bench.arrive(view)
    loaded(bench, view)
    bench.step()
    bench.scheduler.reset(lambda _: "new")
    bench.report(JobReport(failed_loads={"r": 0}))
    bench.scheduler.on_load_finished("r")
    assert bench.step(prefill(view, 0, 64, first=True)).prefixes == {1: "new"}


def test_a_load_counts_as_failed_from_the_earliest_token_of_any_rank() -> None:
    """Ranks report in different steps; until the last has, the load keeps its budget."""
    bench, view = Bench(num_ranks=2, max_loads=1), request(161)
    stored(bench, view)
    bench.arrive(view)
    loaded(bench, view)
    bench.step()
    bench.report(JobReport(failed_loads={"r": 128}))
    other = request(33, "other")
    bench.arrive(other)
    assert bench.scheduler.match(other, 0, 0.0) == 0
    bench.report(JobReport(failed_loads={"r": 32}))
    bench.scheduler.on_load_finished("r")
    assert bench.scheduler.match(other, 0, 0.0) == 32
    assert bench.scheduler.match(view, 0, 0.0) == 32
    assert bench.scheduler.counters["failed_loads"] == 1


# ------------------------------------------------------------------ states of a request that ends


def state_bench() -> tuple[PoolScheduler, RecordingRequest]:
    """A scheduler of a model with states, and a request that is computing."""
    coordinator = Coordinator((FullAttention(BLOCK), Mamba(BLOCK)), BLOCK)
    scheduler = PoolScheduler(
        coordinator,
        ManualLookups(coordinator, lambda keys: [False] * len(keys)),
        limits=SaveLimits(100, 1 << 20),
    )
    view = request(40, tables=[[1, 2, 3], [0, 0, 9]])
    scheduler.on_new_request(view, "ns", 0.0)
    scheduler.step(StepEvents((), [Scheduled(view, 0, 20, True)]), 0.0)
    return scheduler, view


def test_a_state_left_by_a_request_that_ends_goes_out_with_the_next_step() -> None:
    """Its block is pinned at once: the engine is about to free it."""
    scheduler, view = state_bench()
    assert scheduler.on_finishing(view, [HandOff(1, 9, 32)], 32, 0.0) == [9]
    assert scheduler.num_pinned_blocks == 2
    scheduler.on_finished("r")
    (job,) = scheduler.step(StepEvents(), 0.0).plan.stores
    assert isinstance(job, BoundaryJob)
    assert job.puts == (BoundaryPut(1, 1, 32, 9),)
    assert not scheduler.step(StepEvents(), 0.0).plan.stores
    report = JobReport()
    report.end(job.job_id, JobEnd.STORED)
    assert scheduler.on_report(report, 0.0) == [9]


def test_a_request_without_a_name_leaves_no_state() -> None:
    """Unknown, or one that neither saves nor loads."""
    scheduler, view = state_bench()
    scheduler.reset(lambda _: "other")
    assert scheduler.on_finishing(view, [HandOff(1, 9, 32)], 32, 0.0) == []
    scheduler.on_finished("r")
    assert scheduler.on_finishing(view, [HandOff(1, 9, 32)], 32, 0.0) == []


def test_a_states_job_is_emitted_before_what_is_saved_by_offset() -> None:
    """An offer holds for its step only, and the budget may end in it."""
    scheduler, view = state_bench()
    events = StepEvents((), [Scheduled(view, 20, 20, False)], {"r": [HandOff(1, 9, 32)]})
    first, second = scheduler.step(events, 0.0).plan.stores
    assert isinstance(first, BoundaryJob)
    assert isinstance(second, StoreJob)
    assert (second.start_token, second.end_token) == (16, 32)


@pytest.mark.parametrize("how", [{"namespace": None}, {"may_load": False}])
def test_a_preempted_request_that_must_not_load_is_not_looked_up(how: dict[str, Any]) -> None:
    """It computes again what it had."""
    bench, view = Bench(), request(64)
    bench.arrive(view, **how)
    bench.step(prefill(view, 0, 64, first=True))
    bench.step(preempted=[view])
    assert bench.scheduler.counters["lookups"] == 0


def test_where_requests_that_begin_alike_part_a_boundary_is_kept() -> None:
    """Full attention of 32 tokens is stored, no window of them: the next request leaves those."""
    groups = (FullAttention(BLOCK), SlidingWindow(BLOCK, window=20))
    coordinator = Coordinator(groups, BLOCK, retention_interval=0)
    full = coordinator.databases("ns")[0][0]
    hashes = fake_hashes(8)
    present = {full.key_for(value) for value in hashes[:2]}
    lookups = ManualLookups(coordinator, lambda keys: [key in present for key in keys])
    scheduler = PoolScheduler(coordinator, lookups, limits=SaveLimits(100, 1 << 20))
    view = RecordingRequest(num_tokens=130, hashes=hashes, tables=[list(range(1, 9))] * 2)
    scheduler.on_new_request(view, "ns", 0.0)
    assert scheduler.match(view, 0, 0.0) == 0
    assert scheduler.shared_token("r") == 2 * BLOCK
    assert scheduler.shared_token("nobody") == 0
    admitted = Scheduled(view, 0, 130, is_admission=True)
    [job] = scheduler.step(StepEvents((), [admitted]), 0.0).plan.stores
    assert isinstance(job, StoreJob)
    stored = [chunk for chunk, block in enumerate(unpack_ints(job.block_ids[1])) if block]
    assert stored == [0, 1, 6, 7]  # the last 19 tokens before 32, and before 128


def test_the_engine_may_know_such_a_place_itself() -> None:
    """What its own cache shows counts as much."""
    groups = (FullAttention(BLOCK), SlidingWindow(BLOCK, window=20))
    coordinator = Coordinator(groups, BLOCK, retention_interval=0)
    lookups = ManualLookups(coordinator, lambda keys: [False] * len(keys))
    scheduler = PoolScheduler(coordinator, lookups, limits=SaveLimits(100, 1 << 20))
    tables = [list(range(1, 9))] * 2
    view = RecordingRequest(num_tokens=130, hashes=fake_hashes(8), tables=tables)
    view.shared_token = 4 * BLOCK + 3
    scheduler.on_new_request(view, "ns", 0.0)
    [job] = scheduler.step(
        StepEvents((), [Scheduled(view, 0, 130, is_admission=True)]), 0.0
    ).plan.stores
    assert isinstance(job, StoreJob)
    assert job.first_chunks == (0, 2)
    assert list(unpack_ints(job.block_ids[1])) == [3, 4, 0, 0, 7, 8]
