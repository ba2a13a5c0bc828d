"""Links that several tests plan."""

from hypergpu.units import Microseconds, Milliseconds
from netsim.link.link import CongestionControl, Direction, Link

MBIT = 1_000_000


def way(delay_ms: float = 0, mbit_s: float = 0, **others: float) -> Direction:
    return Direction(
        delay_us=Microseconds(round(delay_ms * 1000)),
        bits_per_s=round(mbit_s * MBIT),
        queue_ms=Milliseconds(100),
        **others,  # type: ignore[arg-type]
    )


PERFECT = Link(up=way(), down=way())
RATE_ONLY = Link(up=way(mbit_s=5), down=way(mbit_s=20))
FAR = Link(up=way(50, 5, loss=0.01, burst_packets=4), down=way(50, 20, jitter_us=3000))
SMALL = {
    "near": RATE_ONLY,
    "far": Link(up=FAR.up, down=FAR.down, congestion_control=CongestionControl.BBR),
}
MIDDLE = Link(up=way(mbit_s=100), down=way(mbit_s=100))
