"""Measures an open link over any backend, and compares that with what was configured."""

import asyncio
import statistics
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from enum import StrEnum
from typing import TypeVar

import msgspec

from hypergpu.units import Microseconds
from netsim.link import Link, LinkDirection, NetsimError, Way
from netsim.measure.ends import HEADER_BYTES, NS_PER_S, Arrivals, StreamBins, TripTimes, percentile
from netsim.measure.lateness import ALWAYS_VALID, Lateness, LatenessVerdict

_CommandAtEnd = Callable[[Sequence[str]], list[str]]
"""Turns a command into one that runs at an end of the path."""
_Result = TypeVar("_Result")

_START_S = 30.0
_GRACE_S = 30.0
"""What a measurement may take beyond its own length: queues that drain, a loaded machine."""
_LINE_BYTES_MAX = 1 << 27
_UDP_HEADER_BYTES = 28


class BackendClaim(StrEnum):
    """A property that a backend emulates faithfully. It is tested for each claim it makes."""

    DELAY = "delay"
    JITTER = "jitter"
    LOSS = "loss"
    """Datagrams are dropped, in bursts."""
    RATE = "rate"
    TRACE = "trace"
    REORDERING = "reordering"
    DUPLICATION = "duplication"
    CONGESTION = "congestion"
    """The hosts' real congestion control meets the loss."""


class ProbePath(msgspec.Struct, frozen=True, kw_only=True):
    """From a sender to a receiver. Both ends read the same machine's clock."""

    at_sender: _CommandAtEnd = list
    at_receiver: _CommandAtEnd = list
    receiver: tuple[str, int]
    """Address on which the receiver listens."""
    target: tuple[str, int]
    """Address to which the sender sends: a proxy's own where there is one."""


class ProbedLink:
    """A link from a node up to the coordinator and down again, open for measuring.

    Args:
        paths: The path up and the path down.
        lateness: The backend's lateness so far; None: it cannot be late.
    """

    def __init__(
        self,
        paths: Mapping[Way, ProbePath],
        lateness: Callable[[], Awaitable[Lateness | None]],
    ) -> None:
        self._paths = paths
        self._lateness = lateness
        self._judged = Lateness()

    async def verdict(self) -> LatenessVerdict:
        """Judge whether the backend kept its times since the last verdict."""
        lateness = await self._lateness()
        if lateness is None:
            return ALWAYS_VALID
        recent_lateness, self._judged = lateness.since(self._judged), lateness
        return recent_lateness.verdict()

    async def probes(
        self, way: Way, *, count: int, gap_us: Microseconds, payload_bytes: int = 64
    ) -> Arrivals:
        """Send numbered datagrams at an even pace."""
        return await self._arrivals(
            way, count=count, gap_ns=gap_us * 1000, payload_bytes=payload_bytes
        )

    async def flood(
        self, way: Way, *, bits_per_s: int, for_s: float, packet_bytes: int = 1500
    ) -> Arrivals:
        """Offer a rate in packets of one size, headers included."""
        gap_ns = packet_bytes * 8 * NS_PER_S // bits_per_s
        payload_bytes = packet_bytes - _UDP_HEADER_BYTES
        count = round(for_s * NS_PER_S / gap_ns)
        return await self._arrivals(way, count=count, gap_ns=gap_ns, payload_bytes=payload_bytes)

    async def round_trips(self, *, count: int, gap_us: Microseconds) -> TripTimes:
        """Let the coordinator echo small probes of the node over TCP."""
        path, limit_s = self._paths["up"], count * gap_us / 1e6 + _GRACE_S
        async with _receiving(path, "echo"):
            arguments = {"count": count, "gap_ns": gap_us * 1000}
            return await _send(path, "round_trips", arguments, limit_s, TripTimes)

    async def stream(self, way: Way, *, for_s: float, congestion_control: str = "") -> StreamBins:
        """Fill one TCP connection."""
        path = self._paths[way]
        arguments = {"for_s": for_s, "congestion_control": congestion_control}
        async with _receiving(path, "receive_stream") as receiver:
            await _send(path, "send_stream", arguments, for_s + _GRACE_S, object)
            return await _answer(receiver, _GRACE_S, StreamBins)

    async def _arrivals(self, way: Way, *, count: int, gap_ns: int, payload_bytes: int) -> Arrivals:
        path, limit_s = self._paths[way], count * gap_ns / NS_PER_S + _GRACE_S
        arguments = {"count": count, "gap_ns": gap_ns, "payload_bytes": payload_bytes}
        async with _receiving(path, "collect") as receiver:
            await _send(path, "probe", arguments, limit_s, object)
            return await _answer(receiver, _GRACE_S, Arrivals)


def _program(end: str, address: tuple[str, int], arguments: Mapping[str, object]) -> list[str]:
    host, port = address
    arguments_json = msgspec.json.encode({"address": host, "port": port, **arguments}).decode()
    return [sys.executable, "-m", "netsim.measure", end, arguments_json]


async def _send(
    path: ProbePath,
    end: str,
    arguments: Mapping[str, object],
    limit_s: float,
    kind: type[_Result],
) -> _Result:
    async with _running(path.at_sender(_program(end, path.target, arguments))) as process:
        return await _answer(process, limit_s, kind)


@asynccontextmanager
async def _receiving(path: ProbePath, end: str) -> AsyncIterator[asyncio.subprocess.Process]:
    async with _running(path.at_receiver(_program(end, path.receiver, {}))) as receiver:
        if await _read_line(receiver, _START_S) != b"ready\n":
            what = f"the measuring end could not listen at {path.receiver}"
            raise NetsimError(what, "read its messages on standard error; is the port taken?")
        yield receiver


@asynccontextmanager
async def _running(command: Sequence[str]) -> AsyncIterator[asyncio.subprocess.Process]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, limit=_LINE_BYTES_MAX)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _answer(
    process: asyncio.subprocess.Process, limit_s: float, kind: type[_Result]
) -> _Result:
    line = await _read_line(process, limit_s)
    if not line:
        what = "a measuring end ended without a result"
        raise NetsimError(what, "read its messages on standard error")
    return msgspec.json.decode(line, type=kind)


async def _read_line(process: asyncio.subprocess.Process, limit_s: float) -> bytes:
    assert process.stdout is not None  # noqa: S101 - a pipe was asked for
    async with asyncio.timeout(limit_s):
        return await process.stdout.readline()


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
            offered_bits_per_s = round(direction.bits_per_s * OFFERED)
            arrivals = await network.flood(way, bits_per_s=offered_bits_per_s, for_s=for_s)
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
        LinkReading(name=f"{way}_{name}", configured=configured_value, measured=m)
        for name, configured_value, m in pairs
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
