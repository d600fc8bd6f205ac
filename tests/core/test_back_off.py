"""Back-off: each failure doubles the wait, a success ends the doubling."""

from kvtide.core.back_off import BackOff, Delays


def test_each_failure_doubles_the_wait_up_to_a_limit() -> None:
    """What stays broken is asked less and less often."""
    back_off = BackOff(Delays(1.0, 3.0))
    now_s, waits = 0.0, []
    for _ in range(4):
        back_off.fail(now_s)
        waits.append(back_off.retry_at_s - now_s)
        now_s = back_off.retry_at_s
    assert waits == [1.0, 2.0, 3.0, 3.0]
    assert back_off.has_failed


def test_failures_of_one_wave_count_once() -> None:
    """Eight jobs that a full store refuses together are one reason to wait, not eight."""
    back_off = BackOff(Delays(1.0, 30.0))
    for _ in range(8):
        back_off.fail(0.5)
    assert back_off.is_waiting(1.4)
    assert not back_off.is_waiting(1.5)


def test_after_a_success_the_next_failure_waits_the_first_delay() -> None:
    """But a wait under way stays: one success among failures is no health."""
    back_off = BackOff(Delays(1.0, 8.0))
    back_off.fail(0.0)
    back_off.fail(1.0)
    back_off.succeed()
    assert not back_off.has_failed
    assert back_off.is_waiting(2.9)
    back_off.fail(10.0)
    assert back_off.retry_at_s == 11.0
