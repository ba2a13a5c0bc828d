import random

from hypergpu.units import Bytes, Microseconds, Milliseconds
from netsim.link import Link, LinkCourse, LinkDirection, Variation
from netsim.virtual.agenda import Agenda
from netsim.virtual.node_link import CoordinatorLine, NodeLink, TransferWay

FAST = LinkDirection(delay_us=Microseconds(10_000), bits_per_s=100_000_000)
LINK = Link(up=FAST, down=FAST)


def test_a_cut_at_the_end_of_a_transfer_tells_of_it_once() -> None:
    agenda = Agenda()
    course = LinkCourse(LINK, Variation(), key="1/link/a")
    link = NodeLink(agenda, course, random.Random(1), CoordinatorLine(agenda, LINK))
    deliver: list[str] = []

    def first(_took_ms: int) -> None:
        deliver.append("first")
        link.cut()

    link.move(TransferWay.UP, Bytes(1000), first, wait_ms=0)
    link.move(TransferWay.UP, Bytes(1000), lambda _took_ms: deliver.append("second"), wait_ms=0)
    agenda.run(lambda: False, Milliseconds(3_600_000))
    assert deliver == ["first", "second"]


def test_a_cut_ends_a_transfer_at_once() -> None:
    agenda = Agenda()
    course = LinkCourse(LINK, Variation(), key="1/link/a")
    link = NodeLink(agenda, course, random.Random(1), CoordinatorLine(agenda, LINK))
    took: list[int] = []
    link.move(TransferWay.UP, Bytes(100_000_000), took.append, wait_ms=0)
    agenda.after(50, link.cut)
    agenda.run(lambda: False, Milliseconds(3_600_000))
    assert took == [50]


def bad_link() -> NodeLink:
    agenda = Agenda()
    lossy = LinkDirection(
        delay_us=Microseconds(50_000), bits_per_s=100_000_000, loss=0.02, burst_packets=4.0
    )
    course = LinkCourse(Link(up=lossy, down=FAST), Variation(), key="1/link/a")
    return NodeLink(agenda, course, random.Random(1), CoordinatorLine(agenda, LINK))


def test_probe_trains_lose_what_the_link_loses_in_bursts_as_long() -> None:
    link, dice = bad_link(), random.Random(2)
    seen = [link.train(dice, 200) for _ in range(500)]
    lost, bursts = (sum(column) for column in zip(*seen, strict=True))
    assert 0.016 < lost / 100_000 < 0.024
    assert 3.5 < lost / bursts < 4.5


def test_a_probe_takes_a_round_trip() -> None:
    assert bad_link().round_trip_us(random.Random(2)) == 80_000  # the coordinator is 10 ms away


def test_several_connections_carry_more_over_a_line_that_loses() -> None:
    size = Bytes(4_000_000)
    one, eight = (bad_link().transfer_ms(TransferWay.UP, size, lines) for lines in (1, 8))
    assert eight < one / 3


def test_several_connections_carry_no_more_than_the_line_does() -> None:
    agenda = Agenda()
    course = LinkCourse(LINK, Variation(), key="1/link/a")
    link = NodeLink(agenda, course, random.Random(1), CoordinatorLine(agenda, LINK))
    assert link.transfer_ms(TransferWay.UP, Bytes(25_000_000), 8) >= 2_000
