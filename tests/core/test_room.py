"""Room: what has loaded and waits must not keep each other from being computed."""

from kvtide.core.coordinator import Coordinator
from kvtide.core.groups import FullAttention, Mamba, SlidingWindow
from kvtide.core.room import Room

HYBRID = Coordinator((FullAttention(16), SlidingWindow(16, window=33), Mamba(16)), 16)


def test_all_that_wait_can_get_what_they_want_at_once() -> None:
    """160 tokens want 11 blocks of attention, 6 of the window with a step of 32, 4 of states."""
    room = Room(HYBRID, num_blocks=43, max_step_tokens=32)
    assert HYBRID.blocks_to_compute(160, 32) == 11 + 6 + 4
    room.enter("a", 160)
    assert room.num_wanted_blocks == 21
    assert room.is_enough_for(160)
    assert not room.is_enough_for(176)
    room.leave("a")
    assert room.num_wanted_blocks == 0
    room.leave("a")


def test_a_single_request_always_has_room() -> None:
    """The engine admitted it, so it fits; else nothing would ever load."""
    assert Room(HYBRID, num_blocks=2, max_step_tokens=32).is_enough_for(1 << 20)


def test_of_full_attention_alone_the_engine_itself_takes_care() -> None:
    """It knows what such requests still need."""
    room = Room(Coordinator((FullAttention(16),), 16), num_blocks=2, max_step_tokens=32)
    room.enter("a", 160)
    assert room.is_enough_for(160)
