import random

import pytest

from coordinator.core.transfer.path import CongestionControl, NetworkPath
from coordinator.core.transfer.window import Window
from hypergpu.units import Microseconds

RTT_US = Microseconds(100_000)
CLEAN = NetworkPath(rtt_us=RTT_US)
PACKET = CLEAN.packet_bytes


def never() -> float:
    """Dice that put the next loss as far away as they can."""
    return 1 - 2**-53


def fill(window: Window, now_us: Microseconds) -> Microseconds:
    """Send a whole window; how long it is held back."""
    return window.send(window.window_bytes(now_us), now_us)


def a_round(window: Window, now_us: Microseconds) -> Microseconds:
    """Send a whole window and hear of its arrival; the time after it."""
    fill(window, now_us)
    later = Microseconds(now_us + RTT_US)
    window.acknowledge(window.in_flight_bytes, later)
    return later


def test_a_fresh_window_is_ten_packets_and_grows_by_the_round() -> None:
    window = Window(CLEAN, never)
    assert window.window_bytes(Microseconds(0)) == 10 * PACKET
    later = a_round(window, Microseconds(0))
    assert window.window_bytes(later) == 18 * PACKET


def test_what_left_with_the_mark_does_not_end_the_next_round() -> None:
    window = Window(CLEAN, never)
    fill(window, Microseconds(0))
    window.acknowledge(PACKET, RTT_US)
    assert window.window_bytes(RTT_US) == 18 * PACKET
    # The first window's other packets come back a moment later: still the same round trip.
    window.send(9 * PACKET, RTT_US)
    window.acknowledge(9 * PACKET, RTT_US)
    assert window.window_bytes(RTT_US) == 18 * PACKET


def test_a_window_that_was_not_used_does_not_grow() -> None:
    window = Window(CLEAN, never)
    window.send(PACKET, Microseconds(0))
    window.acknowledge(PACKET, RTT_US)
    assert window.window_bytes(RTT_US) == 10 * PACKET


def test_a_loss_takes_three_tenths_of_a_cubic_window_and_holds_the_bytes_for_a_round_trip() -> None:
    path = NetworkPath(rtt_us=RTT_US, loss=0.2)
    window = Window(path, lambda: 0.5)
    assert fill(window, Microseconds(0)) == RTT_US
    window.acknowledge(window.in_flight_bytes, RTT_US)
    assert window.window_bytes(RTT_US) == 7 * PACKET


def test_losses_leave_the_window_of_bbr_alone() -> None:
    path = NetworkPath(rtt_us=RTT_US, loss=0.05, congestion_control=CongestionControl.BBR)
    window, now_us = Window(path, random.Random(1).random), Microseconds(0)
    for _ in range(40):
        now_us = a_round(window, now_us)
    assert window.window_bytes(now_us) > 100 * PACKET


def test_a_lost_small_message_waits_for_the_timer() -> None:
    window = Window(NetworkPath(rtt_us=RTT_US, loss=0.5), lambda: 0.0)
    assert window.send(100, Microseconds(0)) == 200_000
    assert Window(NetworkPath(rtt_us=Microseconds(3 * RTT_US), loss=0.5), lambda: 0.0).send(
        100, Microseconds(0)
    ) == Microseconds(600_000)


def test_a_window_beyond_the_queue_is_cut_without_a_drawn_loss() -> None:
    path = NetworkPath(rtt_us=RTT_US, bits_per_s=2_000_000, queue_ms=CLEAN.queue_ms)
    window, now_us = Window(path, never), Microseconds(0)
    most = 0
    for _ in range(200):
        now_us = a_round(window, now_us)
        most = max(most, window.window_bytes(now_us))
    assert most <= (path.overflow_packets + 2) * PACKET


def test_an_idle_connection_starts_again_from_ten_packets() -> None:
    window, now_us = Window(CLEAN, never), Microseconds(0)
    for _ in range(5):
        now_us = a_round(window, now_us)
    assert window.window_bytes(now_us) > 10 * PACKET
    assert window.window_bytes(Microseconds(now_us + 10_000_000)) == 10 * PACKET


def test_a_pause_halves_the_window_once_for_each_time_the_timer_could_run_out() -> None:
    window, now_us = Window(CLEAN, never), Microseconds(0)
    for _ in range(5):
        now_us = a_round(window, now_us)
    before = window.window_bytes(now_us)
    # RTT and 200 ms are a timeout; the last bytes left an RTT ago.
    later = Microseconds(now_us - RTT_US + 2 * CLEAN.timeout_us)
    assert window.window_bytes(later) == pytest.approx(before / 4, abs=PACKET)


def test_a_changed_link_keeps_the_window() -> None:
    window = Window(CLEAN, never)
    later = a_round(window, Microseconds(0))
    before = window.window_bytes(later)
    window.change_path(NetworkPath(rtt_us=Microseconds(50_000), loss=0.01))
    assert window.window_bytes(later) == before
    assert window.next_loss_bytes < 2**40


def test_equal_dice_give_equal_losses() -> None:
    path = NetworkPath(rtt_us=RTT_US, loss=0.01)
    holds = []
    for _ in range(2):
        window = Window(path, random.Random("a seed").random)
        holds.append([fill(window, Microseconds(0)) for _ in range(50)])
    assert holds[0] == holds[1]
    assert any(holds[0])
