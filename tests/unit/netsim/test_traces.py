"""Traces are read exactly, refused with the line that is wrong, and played in a loop."""

import pytest

from hypergpu.units import Microseconds
from netsim.link import (
    STALLED_BITS_PER_S,
    TRACE_BYTES_MAX,
    Link,
    LinkCourse,
    LinkDirection,
    Variation,
    csv_trace,
    mahimahi_trace,
)
from netsim.link.error import NetsimError

WAY = LinkDirection(delay_us=Microseconds(20_000), bits_per_s=1_000_000)
LINK = Link(up=WAY, down=WAY)


def test_mahimahi_bins_keep_the_volume() -> None:
    raw = b"0\n10\n10\n99\n250\n300\n340\n"
    trace = mahimahi_trace(raw, "t.up", way="up")
    rates = [row.up_bits_per_s for row in trace.rows]
    # 4 chances of 12,000 bits in the first 100 ms, none in the second; the last bin has 40 ms.
    assert rates == [480_000, STALLED_BITS_PER_S, 120_000, 600_000]
    assert trace.period_us == 340_000
    assert trace.rows[0].down_bits_per_s is None


def test_trace_begins_again_after_its_period() -> None:
    trace = csv_trace(b"time_s,up_mbit_s\n0,1\n1,2\n", "t.csv")
    assert trace.period_us == 2_000_000
    assert trace.row_at(2_500_000) == trace.row_at(500_000)
    assert [trace.next_change_us(at) for at in (0, 1_500_000, 2_000_000)] == [
        1_000_000,
        2_000_000,
        3_000_000,
    ]


def test_csv_sets_what_it_names_and_leaves_the_rest() -> None:
    raw = b"time_s, down_mbit_s, delay_ms, loss_percent, burst_packets\n0, 8, 30, 2, 4\n\n1, 0,,,\n"
    course = LinkCourse(LINK, Variation(), key="x", traces=(csv_trace(raw, "t.csv"),))
    first, second = (link for _, link in course.changes(2_000_000))
    assert (first.down.bits_per_s, first.up.bits_per_s) == (8_000_000, 1_000_000)
    assert (first.up.delay_us, first.up.loss, first.up.burst_packets) == (30_000, 0.02, 4)
    assert second.down.bits_per_s == STALLED_BITS_PER_S
    assert second.up == WAY


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "t.csv:1|does not begin|columns"),
        (b"time_s,up_kbit_s\n0,1\n", "t.csv:1: the columns"),
        (b"up_mbit_s\n1\n", "t.csv:1: the columns"),
        (b"time_s,up_mbit_s\n0,1\n1,fast\n", 't.csv:3: up_mbit_s is "fast"'),
        (b"time_s,up_mbit_s\n0,-1\n", 't.csv:2: up_mbit_s is "-1"'),
        (b"time_s,loss_percent\n0,120\n", "t.csv:2: loss_percent"),
        (b"time_s,up_mbit_s\n0,1,2\n", "t.csv:2: 3 cells under 2 columns"),
        (b"time_s,up_mbit_s\n,1\n", "t.csv:2: time_s is empty"),
        (b"time_s,up_mbit_s\n1,1\n", "does not begin at time_s 0"),
        (b"time_s,up_mbit_s\n0,1\n0,2\n", "row 2 is not after row 1"),
        (b"time_s\n\xff\n", "is no text"),
        (b"x" * (TRACE_BYTES_MAX + 1), "bytes, more than"),
    ],
)
def test_wrong_table_is_refused_with_its_line(raw: bytes, said: str) -> None:
    with pytest.raises(NetsimError, match=said):
        csv_trace(raw, "t.csv")


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"0\nfive\n", 't.up:2: "five" is no millisecond'),
        (b"5\n4\n", "row 2 is not after row 1"),
        (b"0\n0\n", "holds no time above 0"),
        (b"0\n9999999999\n", "lasts 9999999999 ms. Fix: end it by 100000000 ms"),
        (b"", "holds no time above 0"),
    ],
)
def test_wrong_packet_trace_is_refused_with_its_line(raw: bytes, said: str) -> None:
    with pytest.raises(NetsimError, match=said):
        mahimahi_trace(raw, "t.up", way="up")
