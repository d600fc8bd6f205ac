"""A load ends once, and counts as whole only where every byte was proven."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvtide.core.topology import ParallelSizes, Split, Topology
from kvtide.errors import StoreLostError
from kvtide.runtime import threads
from kvtide.runtime.service import KEYS_PER_BURST
from kvtide.runtime.values import TaggedValues
from kvtide.stores.base import Status
from kvtide.stores.memory import MemoryStore
from kvtide.stores.memory_buffer import ByteArray
from kvtide.testing import Fault, FaultKind, FaultyStore
from tests.runtime_harness import WAIT_S, Hang, Rank


def saved_rank(num_chunks: int = 8, **options: Any) -> tuple[Rank, list[bytes]]:
    """A rank that stored ``num_chunks`` chunks of request ``a``, and their bytes."""
    rank = Rank(**options)
    blocks = list(range(1, num_chunks + 1))
    contents = rank.fill("a", blocks)
    rank.step(rank.store_job("a", 0, 4 * num_chunks, blocks))
    assert rank.report.counters["saved_bytes"] > 0
    return rank, contents


TARGETS = list(range(20, 28))


def spoil(rank: Rank, chunk: int, position: int = 5) -> None:
    """Flip a byte of a stored chunk."""
    key = rank.key("a", chunk)
    value = bytearray(rank.scripted.values[key])
    value[position] ^= 1
    rank.scripted.values[key] = bytes(value)


def test_a_load_larger_than_staging_goes_in_parts() -> None:
    """Values pass through staging part by part; all arrive."""
    rank, contents = saved_rank(load_staging_bytes=3 * 4096)
    rank.step(rank.load_job("a", 0, 32, TARGETS))
    assert [len(keys) for method, keys in rank.scripted.calls if method == "get"] == [3, 3, 2]
    assert [rank.blocks.content(0, block) for block in TARGETS] == contents
    assert (rank.finished, rank.failed) == (["a"], [])
    assert rank.report.counters["loaded_bytes"] == 800


def answer(status: Status, chunk: int) -> Callable[[Rank], None]:
    """Let ``get`` answer ``status`` for one chunk."""

    def arrange(rank: Rank) -> None:
        key = rank.key("a", chunk)
        rank.scripted.hooks["get"] = lambda keys: [
            status if asked == key else Status.OK for asked in keys
        ]

    return arrange


def evict(rank: Rank) -> None:
    """Let chunk 4 vanish between promise and read."""
    del rank.scripted.values[rank.key("a", 4)]


def short_answer(rank: Rank) -> None:
    """Answer fewer statuses than keys in the second part."""
    rank.scripted.hooks["get"] = lambda keys: (
        [Status.OK] * (len(keys) - 1) if rank.key("a", 3) in keys else None
    )


def throw(error: BaseException) -> Callable[[Rank], None]:
    """Raise in the second part."""

    def arrange(rank: Rank) -> None:
        def hook(keys: Sequence[str]) -> None:
            if rank.key("a", 3) in keys:
                raise error

        rank.scripted.hooks["get"] = hook

    return arrange


@pytest.mark.parametrize(
    "arrange, token, is_lost",
    [
        (answer(Status.FAILED, 4), 16, False),
        (answer(Status.MISSING, 4), 16, False),
        (answer(Status.NO_SPACE, 4), 16, False),
        (evict, 16, False),
        (lambda rank: spoil(rank, 4), 16, False),
        (lambda rank: spoil(rank, 4, -1), 16, False),
        (short_answer, 12, False),
        (throw(RuntimeError("bug")), 12, False),
        (throw(StoreLostError("gone")), 12, True),
        (lambda rank: rank.worker.bad_keys.add([rank.key("a", 4)]), 16, False),
    ],
)
def test_every_fault_fails_the_load_at_the_first_unproven_chunk(
    arrange: Callable[[Rank], None], token: int, is_lost: bool
) -> None:
    """Nothing never fetched, or fetched and not proven, is trusted; one report, then idle."""
    rank, _ = saved_rank(load_staging_bytes=3 * 4096)
    arrange(rank)
    rank.step(rank.load_job("a", 0, 32, TARGETS))
    assert (rank.finished, rank.failed) == (["a"], ["a"])
    assert rank.report.failed_loads == {"a": token}
    assert rank.report.lost_loads == ({"a"} if is_lost else set())
    # The part in which the fault happened is not written at all.
    assert [ids for _, ids in rank.blocks.writes] == [(20, 21, 22)]
    rank.worker.check_idle()
    rank.scripted.hooks.clear()
    rank.step(rank.load_job("a", 0, 12, TARGETS[:3], request_id="after"))
    assert rank.finished == ["a", "after"]
    assert rank.failed == ["a"]


@pytest.mark.parametrize(
    "kind", [FaultKind.FAILED, FaultKind.VANISHED, FaultKind.SHORT, FaultKind.FLIPPED]
)
def test_whatever_a_store_answers_wrong_bytes_are_never_loaded(kind: FaultKind) -> None:
    """Faults of the public test store: answered OK or not, the load fails at the chunk."""
    faulty = FaultyStore(MemoryStore())
    rank = Rank(store=faulty)
    rank.fill("a", [1, 2, 3])
    rank.step(rank.store_job("a", 0, 12, [1, 2, 3]))
    faulty.script = (Fault(kind, "get", keys=lambda key: key == rank.key("a", 1)),)
    rank.step(rank.load_job("a", 0, 12, [20, 21, 22]))
    assert faulty.injected[kind] == 1
    assert rank.report.failed_loads == {"a": 4}
    assert rank.blocks.writes == []
    rank.worker.close()


def test_a_null_target_fails_the_load_at_its_chunk() -> None:
    """A chunk without a block to put it in cannot be loaded; what precedes it is proven."""
    rank, _ = saved_rank()
    rank.step(rank.load_job("a", 0, 32, [20, 21, 0, 23, 24, 25, 26, 27]))
    assert (rank.finished, rank.failed) == (["a"], ["a"])
    assert rank.report.failed_loads == {"a": 8}
    assert rank.scripted.keys_of("get") == [rank.key("a", 0), rank.key("a", 1)]


def test_a_value_larger_than_staging_fails_the_load() -> None:
    """It is reported, not skipped and not waited for."""
    rank = Rank(groups=[(4, 100), (4, 9000)], load_staging_bytes=2 * 4096)
    rank.step(rank.store_job("a", 0, 4, [1], [2]))
    rank.step(rank.load_job("a", 0, 4, [20], [21]))
    assert rank.report.failed_loads == {"a": 0}
    assert (rank.finished, rank.failed) == (["a"], ["a"])


def test_an_unknown_prefix_fails_the_load() -> None:
    """A plan that never arrived costs a recompute, not a crash."""
    rank = Rank()
    rank.step(rank.load_job("a", 8, 16, [20, 21], prefix_id=7))
    assert (rank.finished, rank.failed) == (["a"], ["a"])
    assert rank.report.failed_loads == {"a": 8}
    rank.worker.check_idle()


def test_a_load_without_chunks_is_whole() -> None:
    """Nothing to do is reported like anything else."""
    rank = Rank()
    rank.step(rank.load_job("a", 8, 8, []))
    assert (rank.finished, rank.failed) == (["a"], [])


def test_a_copy_that_fails_fails_the_load() -> None:
    """What may be half written is not trusted."""
    rank, _ = saved_rank()

    def broken(*_args: object) -> None:
        raise RuntimeError("device lost")

    rank.blocks.write = broken  # type: ignore[method-assign]
    rank.step(rank.load_job("a", 0, 32, TARGETS))
    assert rank.report.failed_loads == {"a": 0}
    assert (rank.finished, rank.failed) == (["a"], ["a"])
    rank.worker.check_idle()


def test_groups_load_in_token_order() -> None:
    """A fault late in one group leaves what precedes it proven in the others."""
    rank = Rank(groups=[(4, 100), (8, 200)], load_staging_bytes=4 * 4096)
    first = rank.fill("a", [1, 2, 3, 4])
    second = rank.fill("a", [5, 6], 1)
    rank.step(rank.store_job("a", 0, 16, [1, 2, 3, 4], [5, 6]))
    rank.step(rank.load_job("a", 0, 16, [20, 21, 22, 23], [24, 25]))
    assert [rank.blocks.content(0, block) for block in (20, 21, 22, 23)] == first
    assert [rank.blocks.content(1, block) for block in (24, 25)] == second
    del rank.scripted.values[rank.key("a", 1, 1)]
    rank.step(rank.load_job("a", 0, 16, [20, 21, 22, 23], [24, 25], request_id="b"))
    assert rank.report.failed_loads == {"b": 8}


def test_a_sparse_group_loads_from_its_own_first_chunk() -> None:
    """A window needs only its last chunks; their hashes name them whatever precedes."""
    rank = Rank(groups=[(4, 100), (4, 50)])
    rank.fill("a", [1, 2, 3])
    (last,) = rank.fill("a", [6], 1)
    rank.step(rank.store_job("a", 0, 12, [1, 2, 3], [0, 0, 6]))
    rank.step(rank.load_job("a", 0, 12, [20, 21, 22], [23], first_chunks=[0, 2]))
    assert (rank.finished, rank.failed) == (["a"], [])
    assert rank.blocks.content(1, 23) == last


TWO_SHARDS = Topology(ParallelSizes(), (Split(2),)).role(0)


def test_a_block_is_filled_from_all_its_parts() -> None:
    """Two values for each chunk, which lie one behind the other in its block."""
    rank, contents = saved_rank(role=TWO_SHARDS, load_staging_bytes=6 * 4096)
    assert len(contents[0]) == 200
    rank.step(rank.load_job("a", 0, 32, TARGETS))
    assert [len(keys) for method, keys in rank.scripted.calls if method == "get"] == [6, 6, 4]
    assert [rank.blocks.content(0, block) for block in TARGETS] == contents
    assert rank.report.counters["loaded_chunks"] == 16
    assert rank.report.counters["loaded_bytes"] == 1600


@pytest.mark.parametrize("number", [0, 1])
def test_a_chunk_is_not_loaded_without_one_of_its_parts(number: int) -> None:
    """The load fails at that chunk; the other part alone is of no use."""
    rank, _ = saved_rank(role=TWO_SHARDS)
    before = [rank.blocks.content(0, block) for block in TARGETS]
    del rank.scripted.values[rank.key("a", 4, number=number)]
    rank.step(rank.load_job("a", 0, 32, TARGETS))
    assert rank.report.failed_loads == {"a": 16}
    assert [rank.blocks.content(0, block) for block in TARGETS] == before


def test_a_chunk_whose_parts_exceed_staging_fails_the_load() -> None:
    """They pass through it together."""
    rank, _ = saved_rank(role=TWO_SHARDS, load_staging_bytes=4096)
    rank.step(rank.load_job("a", 0, 32, TARGETS))
    assert rank.report.failed_loads == {"a": 0}


def test_nothing_is_asked_of_a_group_that_the_rank_has_nothing_of() -> None:
    """A pipeline stage without layers of it."""
    topology = Topology(ParallelSizes(pp_size=2), (Split(1, stages=(1,)), Split(1)))
    rank = Rank(groups=[(4, 100), (4, 50)], role=topology.role(0))
    contents = rank.fill("a", [1, 2], 1)
    rank.step(rank.store_job("a", 0, 8, [1, 2], [1, 2]))
    rank.step(rank.load_job("a", 0, 8, [20, 21], [22, 23]))
    assert (rank.finished, rank.failed) == (["a"], [])
    assert [rank.blocks.content(1, block) for block in (22, 23)] == contents
    assert {group_id for group_id, _ in rank.blocks.reads + rank.blocks.writes} == {1}
    keys = {rank.key("a", chunk, 1) for chunk in range(2)}
    assert {key for _, asked in rank.scripted.calls for key in asked} == keys


def test_ranks_that_read_the_same_values_begin_with_different_ones() -> None:
    """So the copies of a part are not all read from one place at the same time; all arrive."""
    topology = Topology(ParallelSizes(tp_size=4), (Split(1),))
    firsts = []
    writer, contents = saved_rank()
    for number in range(4):
        rank = Rank(role=topology.role(number))
        rank.scripted.values = dict(writer.scripted.values)
        rank.step(rank.load_job("a", 0, 32, TARGETS))
        asked = rank.scripted.keys_of("get")
        assert set(asked) == set(writer.scripted.values)
        firsts.append(asked[0])
        assert [rank.blocks.content(0, block) for block in TARGETS] == contents
    assert firsts == [writer.key("a", chunk) for chunk in (0, 2, 4, 6)]


def test_a_rotated_answer_still_fails_the_load_at_the_first_missing_chunk() -> None:
    """Whichever value a rank begins with."""
    topology = Topology(ParallelSizes(tp_size=4), (Split(1),))
    writer, _ = saved_rank()
    for number in range(4):
        rank = Rank(role=topology.role(number))
        rank.scripted.values = dict(writer.scripted.values)
        for chunk in (3, 5):
            del rank.scripted.values[rank.key("a", chunk)]
        rank.step(rank.load_job("a", 0, 32, TARGETS))
        assert rank.report.failed_loads == {"a": 12}


def test_a_wrong_value_is_removed_and_may_be_stored_again() -> None:
    """Once removed, its key is as good as any: nothing is reported bad."""
    rank, contents = saved_rank()
    spoil(rank, 2)
    spoil(rank, 5)
    rank.step(rank.load_job("a", 0, 32, TARGETS))
    assert rank.report.counters["bad_values"] == 2
    assert rank.report.bad_keys == set()
    assert len(rank.worker.bad_keys) == 0
    assert rank.report.failed_loads == {"a": 8}
    rank.fill("a", list(range(1, 9)))
    rank.step(rank.store_job("a", 0, 32, list(range(1, 9))))
    rank.step(rank.load_job("a", 0, 32, TARGETS, request_id="b"))
    assert rank.failed == ["a"]
    assert [rank.blocks.content(0, block) for block in TARGETS] == contents


@pytest.mark.parametrize("fault", ["failed", "raises", "short"])
def test_a_wrong_value_that_cannot_be_removed_is_reported_and_not_asked_again(fault: str) -> None:
    """The scheduler must not promise it again, and the worker does not fetch it again."""
    rank, _ = saved_rank()
    spoil(rank, 2)

    def hook(keys: Sequence[str]) -> Any:
        if fault == "raises":
            raise StoreLostError("gone")
        return [Status.FAILED] * len(keys) if fault == "failed" else []

    rank.scripted.hooks["remove"] = hook
    rank.step(rank.load_job("a", 0, 32, TARGETS))
    assert rank.report.bad_keys == {rank.key("a", 2)}
    rank.scripted.calls.clear()
    rank.step(rank.load_job("a", 0, 32, TARGETS, request_id="b"))
    assert rank.report.failed_loads == {"a": 8, "b": 8}
    assert rank.key("a", 2) not in rank.scripted.keys_of("get")


def hanging_load(rank: Rank) -> Hang:
    """Start a load that hangs in the store, and let its deadline pass."""
    hang = Hang()
    rank.scripted.hooks["get"] = hang
    rank.step(rank.load_job("a", 0, 32, TARGETS), run=False)
    assert hang.entered.wait(WAIT_S)
    rank.clock.now_s += 20.0
    rank.collect()
    return hang


def saved_threaded_rank() -> Rank:
    """A rank with threads that stored eight chunks of request ``a``."""
    rank = Rank(threaded=True)
    rank.fill("a", list(range(1, 9)))
    job = rank.store_job("a", 0, 32, list(range(1, 9)))
    rank.step(job, run=False)
    rank.collect_until(lambda: rank.ends(job) == ["stored"])
    return rank


def test_late_bytes_never_land_in_reused_blocks() -> None:
    """A load that expired is over: when its get returns, the blocks are someone else's."""
    rank = saved_threaded_rank()
    hang = hanging_load(rank)
    assert (rank.finished, rank.failed) == (["a"], ["a"])
    assert rank.report.failed_loads == {"a": 0}
    assert rank.report.lost_loads == {"a"}
    theirs = rank.fill("someone else", TARGETS)
    hang.released.set()
    rank.scripted.hooks.clear()
    after = rank.load_job("a", 0, 4, [30], request_id="after")
    rank.collect_until(lambda: not rank.worker._ledger.is_receiver_stuck)
    rank.step(after, run=False)
    rank.collect_until(lambda: "after" in rank.finished)
    assert [rank.blocks.content(0, block) for block in TARGETS] == theirs
    assert rank.blocks.writes == [(0, (30,))]
    rank.worker.close()
    rank.worker.check_idle()


def test_while_the_receiver_is_stuck_new_loads_fail_at_once() -> None:
    """Requests do not queue behind a call that hangs: they recompute."""
    rank = saved_threaded_rank()
    hang = hanging_load(rank)
    rank.step(rank.load_job("a", 8, 16, [30, 31], request_id="b"), run=False)
    assert rank.finished == ["a", "b"]
    assert rank.report.failed_loads == {"a": 0, "b": 8}
    assert rank.report.lost_loads == {"a", "b"}
    hang.released.set()
    rank.worker.close()


def test_queued_loads_expire_behind_one_that_hangs() -> None:
    """Waiting counts towards the deadline."""
    rank = saved_threaded_rank()
    hang = Hang()
    rank.scripted.hooks["get"] = hang
    rank.step(rank.load_job("a", 0, 4, [30]), run=False)
    rank.step(rank.load_job("a", 0, 4, [31], request_id="b"), run=False)
    assert hang.entered.wait(WAIT_S)
    rank.collect(rank.clock.now_s + 20.0)
    assert rank.failed == ["a", "b"]
    assert rank.worker.usage()["to_load"] == 0
    hang.released.set()
    rank.worker.close()
    assert rank.blocks.writes == []


def test_a_load_is_not_ended_while_blocks_are_written() -> None:
    """The engine gets the blocks back after the copy, not under it."""
    rank = saved_threaded_rank()
    writing, go_on = threading.Event(), threading.Event()
    write = rank.blocks.write

    def slow_write(*args: Any) -> None:
        writing.set()
        assert go_on.wait(WAIT_S)
        write(*args)

    rank.blocks.write = slow_write  # type: ignore[method-assign]
    rank.step(rank.load_job("a", 0, 32, TARGETS), run=False)
    assert writing.wait(WAIT_S)
    rank.collect(rank.clock.now_s + 100.0)
    assert rank.finished == []
    go_on.set()
    rank.collect_until(lambda: rank.finished == ["a"])
    assert rank.failed == []
    rank.worker.close()


def test_the_load_queue_is_bounded() -> None:
    """Loads beyond the bound fail at once, and are not blamed on the store."""
    rank, _ = saved_rank(max_queued_loads=1)
    rank.step(
        rank.load_job("a", 0, 4, [20]),
        rank.load_job("a", 4, 8, [21], request_id="b"),
    )
    assert sorted(rank.finished) == ["a", "b"]
    assert rank.failed == ["b"]
    assert rank.report.lost_loads == set()


def test_a_load_writes_only_after_what_the_engine_had_issued_on_its_blocks() -> None:
    """A device that still zeroes the blocks it gave away must not overwrite what was loaded."""
    rank, contents = saved_rank()
    zeros = bytes(len(contents[0]))
    for block in TARGETS:
        rank.blocks.issue(0, block, zeros)
    job = rank.load_job("a", 0, 32, TARGETS)
    loading = threading.Thread(target=rank.step, args=(job,))
    loading.start()
    try:
        while rank.blocks.num_waiting == 0:
            assert loading.is_alive(), "the load did not wait for the engine's work"
        assert rank.finished == []
    finally:
        rank.blocks.complete()
        loading.join(WAIT_S)
    assert [rank.blocks.content(0, block) for block in TARGETS] == contents
    assert (rank.finished, rank.failed) == (["a"], [])


@pytest.mark.parametrize("status", [Status.MISSING, Status.FAILED])
def test_a_value_that_exists_but_cannot_be_had_is_removed(status: Status) -> None:
    """Else every request with its prefix pays a failed load, and nobody writes it anew."""
    rank, _ = saved_rank()
    answer(status, 3)(rank)
    rank.step(rank.load_job("a", 0, 32, TARGETS))
    assert rank.failed == ["a"]
    assert rank.report.failed_loads == {"a": 12}
    assert rank.key("a", 3) not in rank.scripted.values
    assert rank.key("a", 4) in rank.scripted.values, "only the one at which the load stopped"
    assert rank.report.bad_keys == set()


def test_a_panic_of_a_native_store_client_ends_no_thread() -> None:
    """It derives from ``BaseException``; the next load is served by the same thread."""

    class PanicError(BaseException):
        """As Rust bindings raise it."""

    rank, contents = saved_rank()
    throw(PanicError("at the store"))(rank)
    rank.step(rank.load_job("a", 0, 32, TARGETS))
    assert rank.failed == ["a"]
    rank.scripted.hooks.clear()
    rank.step(rank.load_job("a", 0, 32, TARGETS, request_id="again"))
    assert [rank.blocks.content(0, block) for block in TARGETS] == contents


def test_few_values_are_verified_between_two_chances_for_the_engine_to_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """I8: each costs some microseconds of Python, and a part may have hundreds."""
    num_chunks = 2 * KEYS_PER_BURST + 5
    how = {"num_blocks": 300, "staging_bytes": 300 * 4096, "load_staging_bytes": 300 * 4096}
    rank, _ = saved_rank(num_chunks, **how)
    bursts = [0]
    monkeypatch.setattr(threads, "let_others_run", lambda: bursts.append(0))
    is_whole = TaggedValues.is_whole

    def counted(values: TaggedValues, value: ByteArray, key: str, payload_bytes: int) -> bool:
        bursts[-1] += 1
        return is_whole(values, value, key, payload_bytes)

    monkeypatch.setattr(TaggedValues, "is_whole", counted)
    rank.step(rank.load_job("a", 0, 4 * num_chunks, list(range(150, 150 + num_chunks))))
    assert (rank.finished, rank.failed) == (["a"], [])
    assert sum(bursts) == num_chunks
    assert max(bursts) <= KEYS_PER_BURST


def test_of_two_keys_known_to_be_bad_the_first_ends_the_load() -> None:
    """Nothing at or behind it is fetched."""
    rank, _ = saved_rank()
    rank.worker.bad_keys.add([rank.key("a", 5), rank.key("a", 2)])
    rank.step(rank.load_job("a", 0, 32, TARGETS))
    assert rank.report.failed_loads == {"a": 8}
    assert rank.scripted.keys_of("get") == [rank.key("a", chunk) for chunk in (0, 1)]


def test_of_values_that_cannot_be_had_only_the_first_is_removed() -> None:
    """A store that fails for a moment must not lose all that was asked of it."""
    rank, _ = saved_rank()
    rank.scripted.hooks["get"] = lambda keys: [Status.FAILED] * len(keys)
    rank.step(rank.load_job("a", 0, 32, TARGETS))
    assert rank.scripted.keys_of("remove") == [rank.key("a", 0)]
