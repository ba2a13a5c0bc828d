import random

from hypergpu.units import Bytes, Microseconds, Milliseconds
from netsim.link import Direction, Link, LinkCourse
from netsim.link.course import Variation
from netsim.world.agenda import Agenda
from netsim.world.node_link import CoordinatorLine, NodeLink, Way

FAST = Direction(delay_us=Microseconds(10_000), bits_per_s=100_000_000)
LINK = Link(up=FAST, down=FAST)


def test_a_cut_at_the_end_of_a_transfer_tells_of_it_once() -> None:
    agenda = Agenda()
    course = LinkCourse(LINK, Variation(), key="1/link/a")
    link = NodeLink(agenda, course, random.Random(1), CoordinatorLine(agenda, LINK))
    told: list[str] = []

    def first(_took_ms: int) -> None:
        told.append("first")
        link.cut()

    link.move(Way.UP, Bytes(1000), 0, first)
    link.move(Way.UP, Bytes(1000), 0, lambda _took_ms: told.append("second"))
    agenda.run(lambda: False, Milliseconds(3_600_000))
    assert told == ["first", "second"]


def test_a_cut_ends_a_transfer_at_once() -> None:
    agenda = Agenda()
    course = LinkCourse(LINK, Variation(), key="1/link/a")
    link = NodeLink(agenda, course, random.Random(1), CoordinatorLine(agenda, LINK))
    took: list[int] = []
    link.move(Way.UP, Bytes(100_000_000), 0, took.append)
    agenda.after(50, link.cut)
    agenda.run(lambda: False, Milliseconds(3_600_000))
    assert took == [50]
