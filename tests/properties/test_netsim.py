"""Whatever is drawn: links keep order and stay possible, a proxied stream arrives whole."""

import random
from functools import partial
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.core.network.tcp import CongestionControl
from hypergpu.units import Microseconds, Milliseconds
from netsim.link import (
    Episodes,
    Link,
    LinkCourse,
    LinkDirection,
    RateShape,
    Shape,
    Variation,
    WanderingDelay,
)
from netsim.proxy.stream import StreamEnd
from tests.unit.netsim.one_stream import OneStream, direction

times = st.lists(st.integers(0, 100_000_000), min_size=2, max_size=60)
directions = st.builds(
    LinkDirection,
    delay_us=st.integers(100_000, 300_000),
    jitter_us=st.integers(0, 100_000),
    jitter_memory_ms=st.integers(50, 2000),
    loss=st.floats(0, 0.45),
    burst_packets=st.floats(1, 50),
    bits_per_s=st.integers(0, 10**9),
)
episodes = st.builds(
    Episodes,
    every_ms=st.integers(1001, 30_000),
    least_ms=st.integers(1, 500),
    most_ms=st.integers(500, 1000),
    is_regular=st.booleans(),
    is_stalled=st.booleans(),
    loss_factor=st.floats(0, 100),
    delay_ms=st.floats(0, 100),
)
variations = st.builds(
    Variation,
    rate=st.builds(
        RateShape,
        every_ms=st.integers(1, 10_000),
        variation=st.floats(0, 3),
        correlation=st.floats(0, 0.9),
        evening=st.floats(0, 1),
    ),
    episodes=st.lists(episodes, max_size=3).map(tuple),
    delay_step_ms=st.floats(0, 400),
)


@settings(max_examples=50)
@given(directions, st.integers(0, 2**32), st.lists(st.integers(0, 3_000_000), min_size=2))
def test_no_packet_overtakes_another_by_jitter(
    direction: LinkDirection, seed: int, gaps_us: list[int]
) -> None:
    wander = WanderingDelay(direction, key=str(seed))
    now_us, arrived_us = 0, 0
    for gap_us in gaps_us:
        now_us += gap_us
        delay_us = wander.at(now_us)
        assert delay_us >= 0
        assert now_us + delay_us >= arrived_us
        arrived_us = now_us + delay_us


@settings(max_examples=25)
@given(directions, times)
def test_delay_at_a_moment_does_not_depend_on_what_was_asked_before(
    direction: LinkDirection, asked_us: list[int]
) -> None:
    wander = WanderingDelay(direction, key="same")
    delays_us = [wander.at(now_us) for now_us in asked_us]
    assert delays_us == [WanderingDelay(direction, key="same").at(now_us) for now_us in asked_us]


@settings(max_examples=25)
@given(directions, directions, variations, times)
def test_course_at_a_moment_does_not_depend_on_what_was_asked_before(
    up: LinkDirection, down: LinkDirection, variation: Variation, asked_us: list[int]
) -> None:
    link = Link(up=up, down=down)
    course = LinkCourse(Shape(link=link, variation=variation), key="same")
    states = [course.at(now_us) for now_us in asked_us]
    assert states == [
        LinkCourse(Shape(link=link, variation=variation), key="same").at(now_us)
        for now_us in asked_us
    ]


@settings(max_examples=25)
@given(directions, variations, times)
def test_link_is_the_one_of_the_last_change(
    direction: LinkDirection, variation: Variation, asked_us: list[int]
) -> None:
    course = LinkCourse(
        Shape(link=Link(up=direction, down=direction), variation=variation), key="k"
    )
    for now_us in asked_us:
        later_us = course.next_change_us(now_us)
        assert later_us > now_us
        assert course.at(now_us) == course.at(min(later_us - 1, now_us + 10**9))


def test_same_numbers_on_every_machine() -> None:
    """A change here changes every seeded world: say so in the log."""
    direction = LinkDirection(
        delay_us=Microseconds(30_000), jitter_us=Microseconds(4_000), bits_per_s=10_000_000
    )
    wander = WanderingDelay(direction, key="1/jitter/attic")
    assert [wander.at(second * 1_000_000) for second in range(4)] == [27849, 26682, 25204, 22975]
    shape = RateShape(variation=0.5, correlation=0.8, every_ms=Milliseconds(1000))
    course = LinkCourse(
        Shape(link=Link(up=direction, down=direction), variation=Variation(rate=shape)),
        key="1/attic",
    )
    rates = [link.up.bits_per_s for _, link in course.changes(4_000_000)]
    assert rates == [10879899, 14465620, 12113686, 11965735]


LOSSES = st.sampled_from([0.0, 0.001, 0.02, 0.3])
RATES = st.sampled_from([0.0, 0.3, 5.0, 80.0])
WRITES = st.lists(
    st.tuples(st.integers(0, 3_000_000), st.integers(1, 100_000)), min_size=1, max_size=12
)
OUTAGES = st.lists(
    st.tuples(st.integers(0, 3_000_000), st.integers(1, 2_000_000), st.booleans()), max_size=3
)


@given(
    writes=WRITES,
    outages=OUTAGES,
    loss=LOSSES,
    rate=RATES,
    control=st.sampled_from(list(CongestionControl)),
    seed=st.integers(0, 1000),
)
def test_every_byte_arrives_once_and_in_order_whatever_the_link_does(
    writes: list[tuple[int, int]],
    outages: list[tuple[int, int, bool]],
    *,
    loss: float,
    rate: float,
    control: CongestionControl,
    seed: int,
) -> None:
    one = OneStream(direction(20, rate, loss=loss), control=control, seed=seed)
    dice = random.Random(seed)
    sent_bytes = bytearray()
    one.stream.open()

    def write(payload: bytes) -> None:
        sent_bytes.extend(payload)
        one.write(payload)

    for at_us, size_bytes in sorted(writes):
        payload = dice.randbytes(size_bytes)
        one.clock.at(at_us, partial(write, payload))
    for from_us, lasting_us, is_cut in outages:
        begin_outage(one, from_us, from_us + lasting_us, is_cut=is_cut)
    one.clock.run()
    one.stream.end()
    one.clock.run()
    assert one.arrived == sent_bytes
    assert one.marks == [StreamEnd.END]
    assert all(earlier[0] <= later[0] for earlier, later in pairwise(one.arrivals))


def begin_outage(one: OneStream, from_us: int, until_us: int, *, is_cut: bool) -> None:
    """A cut, or a standstill; outages may overlap."""
    bottleneck = one.there.hops[0]

    def begin() -> None:
        if is_cut:
            one.there.is_cut = one.back.is_cut = True
        else:
            bottleneck.stop()

    def end() -> None:
        if is_cut:
            one.there.is_cut = one.back.is_cut = False
            one.stream.resume_after_cut()
        else:
            bottleneck.resume()

    one.clock.at(from_us, begin)
    one.clock.at(until_us, end)
