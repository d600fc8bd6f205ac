"""Admission: what the engine is told when it asks how much can be loaded."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvtide.core.admission import Admission, AdmissionLimits, Granted
from kvtide.core.back_off import Delays
from kvtide.core.chunks import ChunkedTokenDatabase
from kvtide.core.coordinator import Coordinator
from kvtide.core.groups import FullAttention, Mamba
from kvtide.core.keys import KeyMetadata
from kvtide.core.requests import RequestTracker
from kvtide.core.topology import WHOLE
from kvtide.testing.lookups import ManualLookups
from kvtide.testing.requests import RecordingRequest, fake_hashes

COORDINATOR = Coordinator((FullAttention(16),), 16)
DATABASE = ChunkedTokenDatabase.for_group(
    KeyMetadata("ns", WHOLE, 0), block_size=16, hash_block_size=16
)
HASHES = fake_hashes(20)


class House:
    """An admission over a store that holds the first ``stored`` chunks of one prompt."""

    def __init__(
        self,
        stored: int,
        *,
        immediate: bool = True,
        num_tokens: int = 20 * 16 + 1,
        local: int = 0,
        coordinator: Coordinator = COORDINATOR,
        **limits: Any,
    ) -> None:
        self.present = {DATABASE.key_for(value) for value in HASHES[:stored]}
        self.lookups = ManualLookups(coordinator, self.exists, immediate=immediate)
        self.counters: Counter[str] = Counter()
        self.admission = Admission(
            coordinator, self.lookups, AdmissionLimits(**limits), self.counters
        )
        self.view = RecordingRequest(
            num_tokens=num_tokens, hashes=HASHES[: num_tokens // 16], local_hit_tokens=local
        )
        self.tracker = RequestTracker("r", 0, num_tokens)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        return [key in self.present for key in keys]

    def arrive(self, *, sentinels: bool = False) -> None:
        self.admission.inquire(self.view, self.tracker, "ns", 0.0, sentinels=sentinels)

    def match(self, num_computed: int = 0, now_s: float = 0.0) -> int | None:
        return self.admission.match(self.view, self.tracker, "ns", num_computed, now_s)


def test_a_hit_is_counted_from_what_the_engine_holds() -> None:
    """Ten chunks stored, three held: seven to load."""
    house = House(10)
    house.arrive()
    assert house.match(48) == 7 * 16
    assert house.match(160) == 0
    assert house.match(320) == 0


def test_asking_again_changes_nothing() -> None:
    """The engine repeats the question while allocation fails; one lookup answers all of them."""
    house = House(10)
    house.arrive()
    assert [house.match(16) for _ in range(5)] == [9 * 16] * 5
    assert house.counters["lookups"] == 1


def test_a_request_nobody_announced_is_looked_up_when_the_engine_asks() -> None:
    """Not every release and path announces a request."""
    house = House(4)
    assert house.match(0) == 64


def test_an_unfinished_lookup_is_waited_for_a_bounded_time() -> None:
    """After that it is a miss; an answer that comes while the request still queues is used."""
    house = House(10, immediate=False, lookup_wait_s=0.05)
    house.arrive()
    assert house.match(now_s=1.0) is None
    assert house.match(now_s=1.04) is None
    assert house.match(now_s=1.05) == 0
    assert house.match(now_s=1.06) == 0
    assert house.counters["lookup_waits_expired"] == 1
    house.lookups.answer_all()
    assert house.match(now_s=1.07) == 160


def test_a_lookup_that_goes_on_finding_something_is_waited_for() -> None:
    """A long prefix on many ranks takes its time; once nothing more is found, so does waiting."""
    house = House(10, immediate=False, lookup_wait_s=0.05)
    house.arrive()
    [ticket] = house.lookups.submitted
    assert house.match(now_s=1.0) is None
    for found_s in (1.04, 1.08, 1.12):
        house.lookups.found_s[ticket] = found_s
        assert house.match(now_s=found_s + 0.04) is None
    assert house.match(now_s=1.18) == 0
    assert house.counters["lookup_waits_expired"] == 1
    house.lookups.answer_all()
    assert house.match(now_s=1.2) == 160


def test_a_guess_that_was_too_high_costs_one_lookup_of_the_gap() -> None:
    """The engine seemed to hold 8 chunks and holds 3: only chunks 3 to 8 are asked in addition."""
    house = House(12, local=128)
    house.arrive()
    assert house.match(48) is None
    assert house.match(48) == (12 - 3) * 16
    asked = [len(keys) for keys in house.lookups.asked]
    assert asked == [12, 5]


def test_a_gap_with_a_hole_ends_the_hit_there() -> None:
    """What the first lookup found behind the hole is of no use."""
    house = House(12, local=128)
    house.present.discard(DATABASE.key_for(HASHES[5]))
    house.arrive()
    assert house.match(48) is None
    assert house.match(48) == 2 * 16


def test_a_local_hit_that_keeps_shrinking_is_looked_up_from_zero_once() -> None:
    """A preempted request loses its blocks one by one: there is no third gap."""
    house = House(12, local=128)
    house.arrive()
    assert house.match(112) is None
    assert house.match(96) is None
    assert house.match(96) == 6 * 16
    assert house.match(48) == 9 * 16
    assert house.match(0) == 12 * 16
    assert house.counters["lookups"] == 3


def test_a_missing_end_of_what_the_engine_holds_asks_for_a_repair() -> None:
    """The store lost the head that this engine never reads there; others need it."""
    house = House(12, local=64)
    house.present.discard(DATABASE.key_for(HASHES[0]))
    house.arrive(sentinels=True)
    assert house.match(64) == 8 * 16
    assert house.tracker.repair
    whole = House(12, local=64)
    whole.arrive(sentinels=True)
    assert whole.match(64) == 8 * 16
    assert not whole.tracker.repair


def test_the_last_token_is_always_computed() -> None:
    """A prompt of exactly 20 stored chunks loads 19."""
    house = House(20, num_tokens=320)
    house.arrive()
    assert house.match() == 19 * 16


def test_after_a_failed_load_the_answer_ends_before_the_chunk_that_failed() -> None:
    """After the second the answer is 0: no request costs more than two loads."""
    house = House(12)
    house.tracker.load_limit_token = 100
    house.tracker.num_failed_loads = 1
    assert house.match() == 96
    house.tracker.num_failed_loads = 2
    assert house.match() == 0


def test_a_promise_the_engine_does_not_take_up_is_withdrawn_for_one_question() -> None:
    """It may refuse a load for ever that it could compute: asked without one, it can go on."""
    house = House(12, grant_wait_s=5.0)
    assert [house.match(now_s=now_s) for now_s in (0.0, 4.9, 5.0, 5.1, 10.0, 10.2)] == [
        *(192, 192, 0, 192, 192, 0)
    ]
    assert house.counters["promises_withdrawn"] == 2


def test_after_a_failed_load_a_promise_is_made_once() -> None:
    """VLLM counts the failed load against the request: the second may never be admitted."""
    house = House(12)
    house.tracker.load_limit_token = 100
    house.tracker.num_failed_loads = 1
    assert [house.match() for _ in range(2)] == [96, 0]
    assert house.admission.granted("r", 0) is None


def test_budgets_act_before_a_hit_is_promised() -> None:
    """Too many loads: a miss. Too many tokens: a shorter hit."""
    house = House(12, max_loads=1, max_load_tokens=100)
    assert house.match() == 96
    house.admission.load_started(other(), 40)
    assert house.match() == 0
    assert house.admission.load_ended("other") == 40
    assert house.admission.load_ended("other") == 0
    assert house.match() == 96


def test_a_hit_shorter_than_worth_the_load_is_not_loaded() -> None:
    """Recomputing a few tokens is faster."""
    assert House(3, min_load_tokens=64).match() == 0
    assert House(4, min_load_tokens=64).match() == 64


def test_loads_are_suspended_after_one_timed_out_and_resume() -> None:
    """Each suspension is longer, until a load succeeds."""
    house = House(4, grant_wait_s=100.0, delays=Delays(1.0, 8.0))
    for now_s, until_s in ((0.0, 1.0), (1.0, 3.0)):
        house.admission.suspend(now_s)
        assert house.match(now_s=until_s - 0.1) == 0
        assert house.match(now_s=until_s) == 64
    house.admission.resume()
    house.admission.suspend(5.0)
    assert house.match(now_s=6.0) == 64


def test_a_result_expires() -> None:
    """A request that waits for long is looked up anew: the store forgets."""
    house = House(4, result_ttl_s=10.0, grant_wait_s=100.0)
    assert house.match(now_s=0.0) == 64
    house.present.clear()
    assert house.match(now_s=9.0) == 64
    assert house.match(now_s=10.0) == 0


def test_what_counts_is_what_the_engine_grants() -> None:
    """It may be less than was promised, and it ends the lookup."""
    house = House(12)
    assert house.match(32) == 160
    assert house.admission.granted("r", 64) == (32, 96, ())
    assert house.admission.num_inquiries == 0
    assert house.admission.granted("r", 64) is None
    assert house.match(32) == 160
    assert house.admission.granted("r", 0) is None


def test_a_request_that_is_dropped_cancels_its_lookup() -> None:
    """An abort between lookup and allocation leaves nothing behind."""
    house = House(12, immediate=False)
    house.arrive()
    house.admission.drop("r")
    assert house.lookups.submitted == {}
    assert house.admission.num_inquiries == house.admission.num_loads == 0
    assert repr(house.admission) == "<Admission [0 inquiries, 0 loads]>"


# ------------------------------------------------------------------ hits that cannot be shortened

STATES = Coordinator((FullAttention(16), Mamba(16)), 16)


def states_at(house: House, *boundaries: int) -> None:
    """Let the store hold the states after so many tokens."""
    database = STATES.databases("ns")[1][0]
    house.present |= {database.key_for(HASHES[token // 16 - 1]) for token in boundaries}


def test_a_budget_below_the_hit_asks_for_the_best_hit_below_it() -> None:
    """With a state at 64 and at 160, a hit of 160 that is cut to 100 tokens is one of 64."""
    house = House(12, coordinator=STATES, max_load_tokens=100)
    states_at(house, 64, 160)
    house.arrive()
    assert house.match() is None
    assert house.match() == 64
    assert house.admission.granted("r", 64) == (0, 64, ())
    assert house.counters["lookups"] == 2


def test_a_budget_that_shrinks_again_is_a_miss_for_now() -> None:
    """One more lookup for a bound, not one for each: the next question may be answered."""
    house = House(12, coordinator=STATES, max_load_tokens=100)
    states_at(house, 64, 160)
    house.arrive()
    assert house.match() is None
    house.admission.load_started(other(), 50)
    assert house.match() == 0
    assert house.admission.granted("r", 0) is None


def other(num_tokens: int = 200) -> RecordingRequest:
    """Another request."""
    return RecordingRequest("other", num_tokens=num_tokens)


def test_a_load_leaves_some_request_room_to_be_computed() -> None:
    """The other wants 18 blocks to its end, this one 26, and one is the null block."""
    for num_blocks, expected in ((45, 160), (44, 0)):
        house = House(12, coordinator=STATES, num_blocks=num_blocks, max_step_tokens=64)
        states_at(house, 160)
        house.arrive()
        assert house.match() == 160
        house.admission.load_started(other(), 160, Granted(0, 160, ()))
        assert house.admission.room.num_wanted_blocks == 18
        assert house.match() == expected
        house.admission.load_ended("other")
        assert house.match() == expected
        house.admission.room.leave("other")
        assert house.match() == 160


def test_full_attention_alone_is_not_held_back() -> None:
    """The engine counts right what such requests still need."""
    house = House(10, num_blocks=1)
    house.arrive()
    house.admission.load_started(other(), 160, Granted(0, 160, ()))
    assert house.match() == 160


def test_no_budget_at_all_is_a_miss_without_a_lookup() -> None:
    """There is no boundary to look for."""
    house = House(12, coordinator=STATES, max_load_tokens=100)
    states_at(house, 160)
    house.arrive()
    house.admission.load_started(other(), 95)
    assert house.match() == 0
    assert house.counters["lookups"] == 1


def test_a_second_lookup_is_waited_for_anew_where_the_first_found_something() -> None:
    """Of a bound, and of a gap after a first lookup that took long but was finding."""
    house = House(12, coordinator=STATES, immediate=False, max_load_tokens=100, lookup_wait_s=1.0)
    states_at(house, 160)
    house.arrive()
    assert house.match(now_s=0.0) is None
    house.lookups.answer_all()
    assert house.match(now_s=0.9) is None
    assert house.match(now_s=1.8) is None
    assert house.match(now_s=2.0) == 0

    house = House(10, immediate=False, local=64, lookup_wait_s=1.0)
    house.arrive()
    [ticket] = house.lookups.submitted
    assert house.match(64, now_s=0.0) is None
    house.lookups.found_s[ticket] = 1.5
    house.lookups.answer_all()
    assert house.match(0, now_s=2.0) is None, "the engine has lost what it held"
    house.lookups.answer_all()
    assert house.match(0, now_s=2.1) == 160


def test_a_second_lookup_goes_on_with_the_wait_of_a_first_that_found_nothing() -> None:
    """The engine is put off for ``lookup_wait_s`` in all."""
    house = House(4, immediate=False, local=64, lookup_wait_s=1.0)
    house.arrive()
    assert house.match(64, now_s=0.0) is None
    house.lookups.answer_all()
    assert house.match(0, now_s=0.9) is None
    assert house.match(0, now_s=1.1) == 0
