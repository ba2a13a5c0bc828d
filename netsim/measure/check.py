"""Compares a link's configured and measured behaviour, over any backend."""

import statistics

import msgspec

from hypergpu.units import Microseconds
from netsim.link import Link, LinkDirection, Way
from netsim.measure.arrivals import HEADER_BYTES, Arrivals, percentile
from netsim.measure.probe import BackendClaim, ProbedLink

PROBE_BYTES = 64
LEAST_GAP_US = 250
MOST_PROBES = 20_000
# A flood that only just exceeds the rate does not fill the queue again after its sender waited.
OFFERED = 1.3
FLOODS_MOST_BITS_PER_S = 400_000_000


class LinkReading(msgspec.Struct, frozen=True, kw_only=True):
    """One number of a link."""

    name: str
    """With its unit last."""
    configured: float
    measured: float

    @property
    def error(self) -> float:
        """Measured minus configured, in the reading's unit."""
        return self.measured - self.configured

    @property
    def ratio(self) -> float:
        """Measured over configured, less one; 0 where nothing is configured."""
        return self.error / self.configured if self.configured else 0.0


async def check_link(
    network: ProbedLink, link: Link, claims: frozenset[BackendClaim], *, for_s: float = 5.0
) -> list[LinkReading]:
    """Measure both ways of a link that nothing changes meanwhile.

    Args:
        network: Where the link is open.
        link: Its configured numbers.
        claims: What the backend claims; the rest is not measured.
        for_s: How long each of up to five measurements may send.
    """
    readings = [await round_trip(network, link, for_s=for_s)]
    directions: list[tuple[Way, LinkDirection]] = [("up", link.up), ("down", link.down)]
    for way, direction in directions:
        if BackendClaim.LOSS in claims:
            arrivals = await probe_direction(network, way, link, for_s)
            readings += probe_readings(way, direction, arrivals)
        if BackendClaim.RATE in claims and 0 < direction.bits_per_s <= FLOODS_MOST_BITS_PER_S:
            offered = round(direction.bits_per_s * OFFERED)
            arrivals = await network.flood(way, bits_per_s=offered, for_s=for_s)
            readings.append(rate_reading(way, direction, arrivals))
    return readings


async def round_trip(network: ProbedLink, link: Link, *, for_s: float) -> LinkReading:
    """Measure the median RTT of small probes over TCP, which every backend carries."""
    gap_us = Microseconds(20_000 + link.rtt_us)
    count = max(round(for_s * 1e6 / gap_us), 10)
    trips = await network.round_trips(count=count, gap_us=gap_us)
    configured_us = link.rtt_us + sending_us(link.up) + sending_us(link.down)
    measured_ms = statistics.median(trips.trips_ns) / 1e6 if trips.trips_ns else 0.0
    return LinkReading(name="rtt_ms", configured=configured_us / 1000, measured=measured_ms)


async def probe_direction(network: ProbedLink, way: Way, link: Link, for_s: float) -> Arrivals:
    """Send as many small datagrams as half of the link carries in the time."""
    direction = link.up if way == "up" else link.down
    gap_us = Microseconds(max(LEAST_GAP_US, round(2 * sending_us(direction))))
    count = min(MOST_PROBES, round(for_s * 1e6 / gap_us))
    return await network.probes(way, count=count, gap_us=gap_us, payload_bytes=PROBE_BYTES)


def probe_readings(way: Way, direction: LinkDirection, arrivals: Arrivals) -> list[LinkReading]:
    """Return delay, jitter, loss and bursts of one direction from evenly paced probes."""
    delays_ms = arrivals.delays_ms() or [0.0]
    configured_ms = (direction.delay_us + sending_us(direction)) / 1000
    pairs = [
        ("delay_ms", configured_ms, statistics.fmean(delays_ms)),
        ("jitter_ms", direction.jitter_us / 1000, statistics.pstdev(delays_ms)),
        ("loss_percent", direction.loss * 100, arrivals.loss() * 100),
    ]
    if not direction.jitter_us:
        pairs.append(("delay_p99_ms", configured_ms, percentile(delays_ms, 0.99)))
    if direction.loss:
        pairs.append(("burst_packets", direction.burst_packets, arrivals.burst_packets()))
    return [
        LinkReading(name=f"{way}_{name}", configured=configured, measured=m)
        for name, configured, m in pairs
    ]


def rate_reading(way: Way, direction: LinkDirection, arrivals: Arrivals) -> LinkReading:
    """Return the rate of one direction from a flood that exceeded it, if the sender was able to."""
    return LinkReading(
        name=f"{way}_mbit_s",
        configured=direction.bits_per_s / 1e6,
        measured=(arrivals.saturated_bits_per_s() or arrivals.bits_per_s()) / 1e6,
    )


def sending_us(direction: LinkDirection) -> float:
    """Return how long the bottleneck takes to send one probe."""
    bits = (PROBE_BYTES + HEADER_BYTES) * 8
    return bits * 1e6 / direction.bits_per_s if direction.bits_per_s else 0.0
