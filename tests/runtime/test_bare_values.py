"""Values without tags: what is stored is the payload, and a value of its length is believed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.runtime.tags import TAG_BYTES
from kvtide.runtime.values import BARE, TAGGED
from kvtide.stores.base import Status
from tests.runtime_harness import Rank

TARGETS = list(range(20, 28))


def saved_rank(**options: Any) -> tuple[Rank, list[bytes]]:
    """A rank that stored eight chunks of request ``a`` without tags, and their bytes."""
    rank = Rank(values=BARE, **options)
    contents = rank.fill("a", range(1, 9))
    rank.step(rank.store_job("a", 0, 32, range(1, 9)))
    return rank, contents


def test_a_stored_value_is_the_payload_and_nothing_else() -> None:
    """Also where a payload fills its pages, and where groups differ."""
    rank = Rank(groups=[(4, 100), (8, 4096)], values=BARE)
    first, second = rank.fill("a", [1, 2]), rank.fill("a", [3], 1)
    rank.step(rank.store_job("a", 0, 8, [1, 2], [3]))
    assert [rank.scripted.values[rank.key("a", chunk)] for chunk in range(2)] == first
    assert [rank.scripted.values[rank.key("a", 0, 1)]] == second
    assert rank.report.counters["saved_bytes"] == 2 * 100 + 4096


@pytest.mark.parametrize("load_staging_bytes", [16 * 4096, 3 * 4096])
def test_what_was_stored_is_loaded(load_staging_bytes: int) -> None:
    """In one part or in several."""
    rank, contents = saved_rank(load_staging_bytes=load_staging_bytes)
    rank.step(rank.load_job("a", 0, 32, TARGETS))
    assert [rank.blocks.content(0, block) for block in TARGETS] == contents
    assert (rank.finished, rank.failed) == (["a"], [])
    rank.worker.check_idle()


def test_a_value_of_the_right_length_is_believed() -> None:
    """Nothing tells that its bytes changed: that is what sharing with untagged values costs."""
    rank, contents = saved_rank()
    rank.scripted.values[rank.key("a", 3)] = bytes(100)
    rank.step(rank.load_job("a", 0, 32, TARGETS))
    loaded = [rank.blocks.content(0, block) for block in TARGETS]
    assert loaded == [*contents[:3], bytes(100), *contents[4:]]
    assert (rank.finished, rank.failed) == (["a"], [])
    assert "bad_values" not in +rank.report.counters


@pytest.mark.parametrize("size", [0, 99, 101, 100 + TAG_BYTES])
def test_a_value_of_another_length_is_a_miss_and_is_removed(size: int) -> None:
    """Whoever wrote it, it is no block of this engine; saved again, it loads."""
    rank, contents = saved_rank()
    rank.scripted.values[rank.key("a", 3)] = bytes(size)
    before = [rank.blocks.content(0, block) for block in TARGETS[3:]]
    rank.step(rank.load_job("a", 0, 32, TARGETS))
    assert (rank.finished, rank.failed) == (["a"], ["a"])
    assert rank.report.failed_loads == {"a": 12}
    assert [rank.blocks.content(0, block) for block in TARGETS[3:]] == before
    assert rank.key("a", 3) not in rank.scripted.values
    rank.step(rank.store_job("a", 0, 32, range(1, 9)))
    rank.step(rank.load_job("a", 0, 32, TARGETS, request_id="again"))
    assert [rank.blocks.content(0, block) for block in TARGETS] == contents
    assert rank.failed == ["a"]


def test_a_value_that_is_gone_is_a_miss() -> None:
    """The load fails at its token; what is promised again ends before it."""
    rank, _ = saved_rank()
    del rank.scripted.values[rank.key("a", 5)]
    rank.step(rank.load_job("a", 0, 32, TARGETS))
    assert rank.report.failed_loads == {"a": 20}
    assert rank.report.counters["missing_chunks"] == 1
    assert rank.failed == ["a"]


def test_a_phantom_is_removed_and_where_it_stays_not_promised_again() -> None:
    """A key that exists without a value to get, as after a lost node of a pool."""
    rank, _ = saved_rank()
    phantom = rank.key("a", 2)
    rank.scripted.hooks["get"] = lambda keys: [
        Status.FAILED if key == phantom else Status.OK for key in keys
    ]
    rank.scripted.hooks["remove"] = lambda keys: [Status.FAILED for _ in keys]
    rank.step(rank.load_job("a", 0, 32, TARGETS))
    assert rank.scripted.keys_of("remove") == [phantom]
    assert rank.report.bad_keys == {phantom}


@given(st.integers(1, 20_000))
def test_a_row_has_room_for_the_value_and_ends_with_a_page(payload_bytes: int) -> None:
    """Of either format."""
    for values in (BARE, TAGGED):
        row = values.row_bytes(payload_bytes)
        assert row % 4096 == 0
        assert 0 <= row - values.value_bytes(payload_bytes) < 4096
    assert (
        BARE.value_bytes(payload_bytes) == payload_bytes == TAGGED.value_bytes(payload_bytes) - 32
    )


def test_sealing_writes_behind_the_payload_or_not_at_all() -> None:
    """A bare row is left as it is."""
    row = np.full(200, 7, dtype=np.uint8)
    BARE.seal(row, "key", 100)
    assert (row == 7).all()
    TAGGED.seal(row, "key", 100)
    assert (row[:100] == 7).all()
    assert (row[132:] == 7).all()
    assert TAGGED.is_whole(row[:132], "key", 100)
    assert not TAGGED.is_whole(row[:132], "other", 100)
