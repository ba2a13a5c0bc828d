"""The links that the reference measures: the corners of what all the others must hold."""

from collections.abc import Iterator

import msgspec

from hypergpu.units import Microseconds, Milliseconds
from netsim.link.link import CongestionControl, Direction, Link

PROBES = 2000
MBIT = 1_000_000
MS = 1000
MIDDLE = Link(
    up=Direction(delay_us=Microseconds(0), bits_per_s=0),
    down=Direction(delay_us=Microseconds(0), bits_per_s=0),
)
"""The coordinator's own link: none, so that each cell has its link to itself."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One link and what is sent over it."""

    name: str
    link: Link
    download_mib: tuple[int, ...]
    """One fresh connection each."""


def cells() -> tuple[Cell, ...]:
    """Return all cells; their names say RTT, rate, loss in percent, burst, jitter and hosts."""
    return tuple(_cells())


def _cells() -> Iterator[Cell]:
    cubic, reno, bbr = CongestionControl.CUBIC, CongestionControl.RENO, CongestionControl.BBR
    for rtt_ms, rate in ((0, 20), (50, 20), (300, 20), (100, 100)):
        yield _cell(rtt_ms, rate, cubic)
    yield _cell(100, 100, bbr)
    for control in (cubic, reno, bbr):
        yield _cell(100, 20, control, loss=0.01)
    for control in (cubic, bbr):
        yield _cell(100, 100, control, loss=0.001)
        yield _cell(100, 100, control, loss=0.01, burst_packets=4)
    yield _cell(100, 100, cubic, loss=0.01, burst_packets=16)
    yield _cell(100, 20, bbr, loss=0.05)
    yield _cell(100, 20, cubic, jitter_us=5 * MS)


def _cell(rtt_ms: int, rate: int, control: CongestionControl, **others: float) -> Cell:
    way = Direction(
        delay_us=Microseconds(rtt_ms * MS // 2),
        bits_per_s=rate * MBIT,
        queue_ms=Milliseconds(100),
        **others,  # type: ignore[arg-type]
    )
    return Cell(
        name="-".join([f"{rtt_ms}ms", f"{rate}m", *_words(way), control.value]),
        link=Link(up=way, down=way, congestion_control=control),
        # Without loss each transfer is like the other.
        download_mib=(4, 4, 4) if way.loss else (4,),
    )


def _words(way: Direction) -> Iterator[str]:
    if way.loss:
        yield f"loss{way.loss * 100:g}"
    if way.burst_packets > 1:
        yield f"burst{way.burst_packets:g}"
    if way.jitter_us:
        yield f"jitter{way.jitter_us // MS}"
