from hypergpu.units import Microseconds, Milliseconds
from netsim.link import Link, LinkDirection, LinkTrace, Shape, TraceRow
from netsim.link.shape import SHORTEST_QUEUE_BYTES, mean_bits_per_s


def link(bits_per_s: int, queue_ms: int = 100) -> Link:
    way = LinkDirection(
        delay_us=Microseconds(0), bits_per_s=bits_per_s, queue_ms=Milliseconds(queue_ms)
    )
    return Link(up=way, down=way)


def test_a_queue_holds_what_its_rate_sends_in_its_milliseconds() -> None:
    assert Shape(link=link(12_000_000)).room_bytes("up") == 150_000


def test_a_queue_holds_two_packets_however_slow_the_link() -> None:
    assert Shape(link=link(1000)).room_bytes("down") == SHORTEST_QUEUE_BYTES


def test_a_queue_under_a_trace_is_sized_by_the_mean_of_the_trace_and_not_by_its_gaps() -> None:
    rows = (
        TraceRow(at_us=Microseconds(0), up_bits_per_s=12_000_000),
        TraceRow(at_us=Microseconds(3_000_000), up_bits_per_s=4_000_000),
    )
    trace = LinkTrace(rows, Microseconds(4_000_000))
    assert mean_bits_per_s(trace, "up") == 10_000_000
    shape = Shape(link=link(1_000_000), traces=(trace,))
    assert shape.room_bytes("up") == 125_000
    assert shape.room_bytes("down") == 12_500
