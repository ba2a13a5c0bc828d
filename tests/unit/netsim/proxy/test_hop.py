import msgspec
import pytest

from hypergpu.units import Microseconds, Milliseconds
from netsim.proxy.hop import Hop
from tests.unit.netsim.proxy.one_stream import InstantClock, direction, hop


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
    asked = direction(0, 1)
    through = hop(asked, clock)
    faster = msgspec.structs.replace(asked, bits_per_s=10_000_000)
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
    asked = msgspec.structs.replace(direction(0, 8), queue_ms=Milliseconds(10))
    through = hop(asked, clock)  # 10,000 bytes
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
    for asked in (direction(5, 8), direction(5)):
        through, out = hop(asked, clock), list[int]()
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
