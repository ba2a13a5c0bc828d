"""The profiles, with their sources. `docs/netsim/README.md` shows this table, kept alike by a test.

Round-trip figures are halved between the two ways; the jitter of a round trip is that of one way
times the root of two. Loss is that of each way. Bursts and queues are choices of engineering: no
published table gives them by kind of access.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType

from hypergpu.units import Microseconds, Milliseconds
from netsim.link import Direction, Episodes, Link, RateShape, Variation
from netsim.network.profiles.entry import Profile


def _link(
    rtt_ms: float,
    jitter_ms: float,
    *,
    loss_percent: float,
    burst_packets: float = 1,
    mbit_s: tuple[float, float],
    queue_ms: int = 100,
) -> Link:
    """``mbit_s`` is down and up, as providers name them."""
    up, down = (
        Direction(
            delay_us=Microseconds(round(rtt_ms * 500)),
            jitter_us=Microseconds(round(jitter_ms * 1000 / math.sqrt(2))),
            loss=loss_percent / 100,
            burst_packets=burst_packets,
            bits_per_s=round(rate * 1e6),
            queue_ms=Milliseconds(queue_ms),
        )
        for rate in reversed(mbit_s)
    )
    return Link(up=up, down=down)


def _spells(every_s: float, least_s: float, most_s: float) -> Episodes:
    """Gaps: nothing passes."""
    return Episodes(
        every_ms=Milliseconds(round(every_s * 1000)),
        least_ms=Milliseconds(round(least_s * 1000)),
        most_ms=Milliseconds(round(most_s * 1000)),
        is_stalled=True,
    )


_WIRED = (
    Profile(
        name="lan",
        link=_link(0.5, 0.05, loss_percent=0, mbit_s=(1000, 1000), queue_ms=50),
        source="a gigabit switch",
    ),
    Profile(
        name="cloud-near",
        link=_link(35, 0.3, loss_percent=0.001, mbit_s=(1000, 1000), queue_ms=20),
        churn="spot",
        source="IBM Cloud VPC documentation, May 2024: Dallas to Washington 32 ms, Toronto 34 ms",
    ),
    Profile(
        name="cloud-atlantic",
        link=_link(85, 0.5, loss_percent=0.01, burst_packets=2, mbit_s=(500, 500), queue_ms=20),
        churn="spot",
        source="IBM Cloud VPC documentation: Washington to London 75 ms, to Frankfurt 94 ms",
    ),
    Profile(
        name="cloud-antipodal",
        link=_link(285, 1, loss_percent=0.02, burst_packets=2, mbit_s=(300, 300), queue_ms=30),
        churn="spot",
        source="IBM Cloud VPC documentation: London to Sydney 284 ms, Tokyo to Sao Paulo 285 ms",
    ),
    Profile(
        name="home-fibre",
        link=_link(50, 1, loss_percent=0.02, burst_packets=2, mbit_s=(300, 100), queue_ms=40),
        churn="c4",
        source="GPON's first hop 1.5 ms, and the path",
    ),
    Profile(
        name="home-cable",
        link=_link(60, 4, loss_percent=0.1, burst_packets=3, mbit_s=(200, 15), queue_ms=200),
        variation=Variation(rate=RateShape(evening=0.7)),
        churn="c1",
        source="DOCSIS' first hop 7.5 ms, and the path",
    ),
    Profile(
        name="home-dsl",
        link=_link(80, 6, loss_percent=0.2, burst_packets=3, mbit_s=(20, 2), queue_ms=400),
        churn="c2",
        source="ADSL's first hop 19 ms, and the path",
    ),
)

_WIRELESS = (
    Profile(
        name="wifi-bad",
        link=_link(60, 15, loss_percent=2, burst_packets=4, mbit_s=(40, 15)),
        variation=Variation(
            rate=RateShape(variation=0.4, correlation=0.8),
            episodes=(
                Episodes(
                    every_ms=Milliseconds(10_000),
                    least_ms=Milliseconds(100),
                    most_ms=Milliseconds(400),
                    delay_us=Microseconds(100_000),
                ),
            ),
        ),
        churn="c5",
        source="a choice of engineering: a crowded channel with spikes of 100 ms",
    ),
    Profile(
        name="lte-moving",
        link=_link(110, 20, loss_percent=0.2, burst_packets=8, mbit_s=(12.8, 5.5), queue_ms=500),
        variation=Variation(
            rate=RateShape(variation=0.78, correlation=0.82), episodes=(_spells(20, 0.5, 4),)
        ),
        churn="c6",
        source="Mahimahi's LTE drives (Winstein et al., NSDI 2013): T-Mobile down, Verizon up",
    ),
    Profile(
        name="5g-moving",
        link=_link(70, 8, loss_percent=0.1, burst_packets=8, mbit_s=(80, 25), queue_ms=250),
        variation=Variation(
            rate=RateShape(variation=0.6, correlation=0.8), episodes=(_spells(60, 0.3, 1.5),)
        ),
        churn="c6",
        source="BIPT's drives in Belgium, 80 and 25 Mbit/s; one-way delays of a German 5G NSA"
        " network (Rohde & Schwarz, 2022) and the path; its variation is a choice",
    ),
    Profile(
        name="3g-moving",
        link=_link(200, 50, loss_percent=0.5, burst_packets=8, mbit_s=(2.0, 0.94), queue_ms=1000),
        variation=Variation(
            rate=RateShape(variation=0.78, correlation=0.90), episodes=(_spells(12, 0.5, 6),)
        ),
        churn="c3",
        source="Mahimahi's UMTS drive (Winstein et al., NSDI 2013)",
    ),
    Profile(
        name="starlink",
        link=_link(90, 8, loss_percent=0.7, burst_packets=10, mbit_s=(150, 15), queue_ms=60),
        variation=Variation(
            rate=RateShape(every_ms=Milliseconds(15_000), variation=0.3),
            episodes=(
                Episodes(
                    every_ms=Milliseconds(15_000),
                    least_ms=Milliseconds(500),
                    most_ms=Milliseconds(500),
                    is_regular=True,
                    loss_factor=20,
                ),
                _spells(120, 1.5, 2.5),
            ),
            delay_step_us=Microseconds(8_000),
        ),
        churn="c2",
        source="Mohan et al., WWW 2024 (new paths each 15 s); UCLouvain at APNIC, 2022",
    ),
    Profile(
        name="geo-sat",
        link=_link(620, 15, loss_percent=0.3, burst_packets=3, mbit_s=(50, 3), queue_ms=500),
        churn="c2",
        source="two hops of 36,000 km are 480 ms; the rest is a choice",
    ),
)

_STEPS = Variation(rate=RateShape(every_ms=Milliseconds(10_000), factors=(1, 0.5, 0.1, 0.75)))
_STRESS = "a choice: as bad as a link can be that still trains"
_GRADES = "one of four grades that compare algorithms: independent losses, nothing varies"

_OWN = (
    Profile(
        name="stress",
        link=_link(300, 30, loss_percent=5, mbit_s=(20, 10), queue_ms=200),
        variation=_STEPS,
        churn="stress",
        source=_STRESS,
    ),
    Profile(
        name="stress-bursts",
        link=_link(300, 30, loss_percent=5, burst_packets=8, mbit_s=(20, 10), queue_ms=200),
        variation=_STEPS,
        churn="stress",
        source=_STRESS,
    ),
    Profile(
        name="A",
        link=_link(50, 0, loss_percent=0, mbit_s=(1000, 1000)),
        source=_GRADES,
    ),
    Profile(
        name="B",
        link=_link(100, 0, loss_percent=0.5, mbit_s=(200, 100)),
        source=_GRADES,
    ),
    Profile(
        name="C",
        link=_link(150, 0, loss_percent=1, mbit_s=(50, 20)),
        source=_GRADES,
    ),
    Profile(
        name="D",
        link=_link(300, 0, loss_percent=5, mbit_s=(20, 20)),
        source=_GRADES,
    ),
)

PROFILES: Mapping[str, Profile] = MappingProxyType(
    {entry.name: entry for entry in (*_WIRED, *_WIRELESS, *_OWN)}
)
"""By name, from the best wire to the worst radio, then our own."""
