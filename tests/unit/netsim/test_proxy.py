"""The proxy's streams and hops, on a clock that never waits."""

import msgspec
import pytest

from coordinator.core.network.tcp import CongestionControl
from hypergpu.units import Microseconds, Milliseconds
from netsim.proxy.hops import Hop
from netsim.proxy.stream import UNREAD_BYTES_MAX, UNSENT_BYTES_MAX, StreamEnd
from tests.unit.netsim.one_stream import InstantClock, OneStream, direction, hop

MIB = 1 << 20


def test_a_small_message_takes_the_delay_and_nothing_more() -> None:
    one = OneStream(direction(50))
    one.stream.open()
    for number in range(20):
        one.clock.at(number * 100_000, lambda: one.write(b"x" * 200))
    one.clock.run()
    assert [at for at, _ in one.arrivals] == [number * 100_000 + 50_000 for number in range(20)]


def test_a_transfer_starts_slowly_where_the_round_trip_is_long() -> None:
    # Sent at once 4 MiB would take 50 ms. Real packets: 0.92 to 1.02 s.
    assert 0.9 < OneStream(direction(50)).seconds_for(4 * MIB) < 1.05


def test_a_long_transfer_fills_the_bottleneck() -> None:
    seconds = OneStream(direction(25, 100)).seconds_for(100 * MIB)
    # Slow start leaves the bottleneck idle for 0.3 s.
    assert seconds == pytest.approx(0.3 + 100 * MIB * 8 / 100e6 * 1500 / 1448, rel=0.01)


@pytest.mark.parametrize("mbit_s", [1, 20, 500])
def test_the_rate_counts_headers(mbit_s: int) -> None:
    size_bytes = mbit_s * 1_000_000 // 2  # some four seconds
    seconds = OneStream(direction(1, mbit_s)).seconds_for(size_bytes)
    assert size_bytes * 8 * 1500 / 1448 / seconds == pytest.approx(mbit_s * 1e6, rel=0.02)


def test_loss_slows_cubic_far_more_than_bbr() -> None:
    asked_direction = direction(50, loss=0.01)
    cubic_s = OneStream(asked_direction).seconds_for(4 * MIB)
    bbr_s = OneStream(asked_direction, control=CongestionControl.BBR).seconds_for(4 * MIB)
    assert cubic_s > 8  # real packets: some 21 s
    assert bbr_s < 3  # real packets: some 1.4 s


def test_equal_seeds_give_equal_times() -> None:
    asked_direction = direction(30, 20, loss=0.01)
    runs = [OneStream(asked_direction, seed=seed) for seed in (7, 7, 8)]
    for one in runs:
        one.seconds_for(MIB)
    assert runs[0].arrivals == runs[1].arrivals != runs[2].arrivals


def test_reading_stops_while_the_window_is_full_and_goes_on() -> None:
    one = OneStream(direction(50, 1))
    one.stream.open()
    one.write(bytes(4 * UNSENT_BYTES_MAX))
    assert one.stream.is_full
    one.clock.run()
    assert len(one.arrived) == 4 * UNSENT_BYTES_MAX
    assert not one.stream.is_full


def test_a_receiver_that_does_not_read_stops_the_sender() -> None:
    one = OneStream(direction(5))
    one.is_reading = False
    one.stream.open()
    one.write(bytes(3 * UNREAD_BYTES_MAX))
    one.clock.run()
    assert UNREAD_BYTES_MAX <= len(one.arrived) < UNREAD_BYTES_MAX + MIB
    one.is_reading = True
    one.stream.note_written(len(one.arrived))
    one.clock.run()
    assert len(one.arrived) == 3 * UNREAD_BYTES_MAX


def test_nothing_leaves_before_hands_are_shaken() -> None:
    one = OneStream(direction(50))
    one.write(b"hello")
    one.clock.run(until_us=1_000_000)
    assert one.arrivals == []
    one.stream.open()
    one.clock.run()
    assert one.arrivals == [(1_050_000, 5)]


def test_the_end_arrives_behind_the_last_byte() -> None:
    one = OneStream(direction(50, 1))
    one.stream.open()
    one.write(bytes(100_000))
    one.stream.end()
    one.clock.run()
    assert len(one.arrived) == 100_000
    assert one.marks == [StreamEnd.END]


def test_a_reset_overtakes_what_had_not_left() -> None:
    one = OneStream(direction(50, 1))
    one.stream.open()
    one.stream.feed(bytes(200_000))
    one.stream.reset()
    one.clock.run()
    assert len(one.arrived) < 200_000
    assert one.marks == [StreamEnd.RESET]


def test_what_a_cut_lost_is_sent_again_when_its_timer_rings() -> None:
    one = OneStream(direction(50))
    one.stream.open()
    one.there.is_cut = one.back.is_cut = True
    one.write(b"hello")
    one.clock.run(until_us=1_000_000)
    one.there.is_cut = one.back.is_cut = False
    one.stream.resume_after_cut()
    one.clock.run()
    # Its timer rings after 0.3 s, then after 0.6 and 1.2 more: the third ring meets a healed link.
    assert one.arrivals == [(2_150_000, 5)]


def test_what_was_under_way_when_the_link_was_cut_arrives_after_it_healed() -> None:
    one = OneStream(direction(50, 8))
    one.stream.open()
    one.write(bytes(300_000))
    one.stream.end()

    def cut(is_cut: bool) -> None:  # noqa: FBT001 - what it sets
        one.there.is_cut = one.back.is_cut = is_cut

    one.clock.at(150_000, lambda: cut(True))
    one.clock.run(until_us=3_000_000)
    before = len(one.arrived)
    assert 0 < before < 300_000
    assert all(at < 150_000 for at, _ in one.arrivals)
    cut(False)
    one.stream.resume_after_cut()
    one.clock.run()
    assert len(one.arrived) == 300_000
    assert one.marks == [StreamEnd.END]


def exit_times(through: Hop, clock: InstantClock, sizes: list[int]) -> list[int]:
    """Carry parcels all at once; when each came out."""
    out: list[int] = []
    for size in sizes:
        through.carry(size, lambda: out.append(clock.now_us))
    clock.run()
    return out


def test_a_parcel_takes_its_serialisation_and_the_delay() -> None:
    clock = InstantClock()
    # 1,250 bytes at 1 Mbit/s: 10 ms.
    assert exit_times(hop(direction(50, 1), clock), clock, [1250, 1250]) == [60_000, 70_000]


def test_without_a_rate_only_the_delay_is_left() -> None:
    clock = InstantClock()
    assert exit_times(hop(direction(50), clock), clock, [60_000, 60_000]) == [50_000, 50_000]


def test_fractions_of_a_microsecond_do_not_add_up() -> None:
    clock = InstantClock()
    # 100 bytes at 300 Mbit/s: 2.67 us each.
    out = exit_times(hop(direction(0, 300), clock), clock, [100] * 30_000)
    assert out[-1] == pytest.approx(80_000, abs=1)


def test_the_rate_is_that_of_the_moment_of_service() -> None:
    clock = InstantClock()
    asked_direction = direction(0, 1)
    through = hop(asked_direction, clock)
    faster = msgspec.structs.replace(asked_direction, bits_per_s=10_000_000)
    clock.at(15_000, lambda: through.change(faster, lambda _now_us: 0))
    # The second parcel is half served when the rate grows tenfold: 5 ms become 0.5.
    assert exit_times(through, clock, [1250] * 3) == [10_000, 15_500, 16_500]


def test_a_shorter_delay_lets_nothing_overtake() -> None:
    clock = InstantClock()
    through = hop(direction(50), clock)
    shorter = direction(10)
    out: list[str] = []
    through.carry(100, lambda: out.append("first"))
    through.change(shorter, lambda _now_us: shorter.delay_us)
    through.carry(100, lambda: out.append("second"))
    clock.run()
    assert out == ["first", "second"]


def test_a_full_buffer_has_room_again_when_something_has_left() -> None:
    clock = InstantClock()
    asked_direction = msgspec.structs.replace(direction(0, 8), queue_ms=Milliseconds(10))
    through = hop(asked_direction, clock)  # 10,000 bytes
    for _ in range(5):
        assert through.has_room(2000)
        through.carry(2000, lambda: None)
    assert not through.has_room(2000)
    roomy_at: list[int] = []
    through.when_room(lambda: roomy_at.append(clock.now_us))
    clock.run()
    assert roomy_at == [4000]


def test_a_buffer_does_not_shrink_with_the_rate() -> None:
    clock = InstantClock()
    through = hop(direction(0, 8), clock)
    through.change(direction(0, 0.001), lambda _now_us: 0)
    through.carry(2000, lambda: None)
    assert through.has_room(50_000)


def test_a_link_that_stands_still_loses_nothing() -> None:
    clock = InstantClock()
    for asked_direction in (direction(5, 8), direction(5)):
        through, out = hop(asked_direction, clock), list[int]()
        through.stop()
        for _ in range(3):
            through.carry(1000, lambda out=out: out.append(clock.now_us))  # type: ignore[misc]
        started_us = clock.now_us
        clock.run(until_us=started_us + 500_000)
        assert out == []
        through.resume()
        clock.run()
        assert len(out) == 3
        assert out[0] >= started_us + 500_000


def test_jitter_comes_on_top_at_the_moment_of_leaving() -> None:
    clock = InstantClock()
    through = Hop(direction(0, 1), lambda now_us: 3 * Microseconds(now_us), clock)
    assert exit_times(through, clock, [1250, 1250]) == [40_000, 80_000]
