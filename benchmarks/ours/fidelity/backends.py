"""The backends' parts of the fidelity table: configured and measured delay, loss and rate."""

import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import msgspec

from benchmarks.ours.cluster import BenchmarkError
from hypergpu.units import Microseconds
from netsim.emulation.namespaces import COORDINATOR
from netsim.link import CongestionControl, Link, LinkDirection, LinkTrace, Shape, TraceRow
from netsim.link.link import NetsimError
from netsim.measure.ends import NS_PER_S, Arrivals, percentile
from netsim.measure.probe import ProbedLink
from netsim.proxy.process import (
    LOOPBACK,
    Forward,
    ProxiedNode,
    ProxyPlan,
    ProxyProcess,
    probed_proxy,
)
from netsim.tunnel.tunnel import Tunnel, require_tunnel

MBIT = 1_000_000
TRIES = 3
Found = TypeVar("Found")
Row = tuple[str, str, str, str]
"""Figure, configured, measured, error."""


class Measurement(NamedTuple, Generic[Found]):
    """A measured value, and whether the backend kept its times meanwhile."""

    found: Found
    is_valid: bool


class BackendFigures:
    """Rows for people and metrics for checks. A row that does not count says so."""

    def __init__(self, backend: str, *notes: str) -> None:
        self.rows: list[Row] = []
        self.metrics: dict[str, float] = {}
        self.repeats = 0
        self._backend = backend
        self._notes = notes
        self._invalid: list[str] = []

    async def measure(
        self, measure: Callable[[], Awaitable[Measurement[Found]]]
    ) -> Measurement[Found]:
        """Measure until the result is valid, three times at most."""
        for _ in range(TRIES - 1):
            measurement = await measure()
            if measurement.is_valid:
                return measurement
            self.repeats += 1
        return await measure()

    def add(
        self, name: str, configured: float, measured: float, error: str, *, valid: bool
    ) -> None:
        """Add a row."""
        name = f"{self._backend}: {name}"
        if not valid:
            self._invalid.append(name)
            name = f"{name} (INVALID)"
        self.rows.append((name, f"{configured:.4g}", f"{measured:.4g}", error))

    def finish(self) -> None:
        """Count the invalid rows among the metrics."""
        self.metrics[f"{self._backend}_invalid_rows"] = float(len(self._invalid))

    def notes(self) -> list[str]:
        """Return the notes for the reader of the table."""
        notes = list(self._notes)
        if self.repeats:
            notes.append(f"The {self._backend} was late: measured again {self.repeats} times.")
        if self._invalid:
            notes.append(f"Still late or too slow; these do not count: {', '.join(self._invalid)}")
        return notes


def symmetric_link(
    delay_ms: float = 0,
    mbit_s: float = 0,
    control: CongestionControl = CongestionControl.CUBIC,
    *,
    loss: float = 0,
    burst: float = 1,
) -> Link:
    """Return a link that is the same both ways."""
    way = LinkDirection(
        delay_us=Microseconds(round(delay_ms * 1000)),
        bits_per_s=round(mbit_s * MBIT),
        loss=loss,
        burst_packets=burst,
    )
    return Link(up=way, down=way, congestion_control=control)


DELAYS_MS = (10, 25, 50, 150)
LOSSES = ((0.0, 1.0), (0.001, 1.0), (0.01, 1.0), (0.05, 1.0), (0.02, 4.0), (0.04, 2.0), (0.05, 8.0))
TUNNEL_RATES_MBIT_S = (1, 5, 20, 100, 200)
TRACE_MBIT_S = (1, 5, 20, 2, 10, 4, 16, 8, 3, 12)
# netsim's reference with the kernel's own netem (6.1, virtual clock) at RTT 100 ms, 20 Mbit/s, 1 %.
TCP_MBIT_S = {"cubic": 1.73, "bbr": 18.2}


class TunnelFigures(BackendFigures):
    """The figures of one node's tunnel while it is measured."""

    def __init__(self, tunnel: Tunnel) -> None:
        super().__init__(
            "tunnel",
            "Tunnel: one-way UDP probes by one clock; every packet through one Python process.",
            "TCP: asked is the kernel's netem under a virtual clock. One run each; loss both ways.",
        )
        self.tunnel = tunnel
        self.network = tunnel.probe("node")

    async def measure_link(
        self, link: Link | Shape, measure: Callable[[int], Awaitable[Found]]
    ) -> Measurement[Found]:
        """Measure a link, again when the router was late, three times at most.

        Args:
            link: The node's link meanwhile.
            measure: Is told when the link was set, in nanoseconds of the monotonic clock.
        """

        async def once() -> Measurement[Found]:
            set_ns = await self.tunnel.set_link("node", link)
            before = (await self.tunnel.statistics()).lateness
            found = await measure(set_ns)
            after = (await self.tunnel.statistics()).lateness
            return Measurement(found, after.since(before).is_valid)

        return await self.measure(once)


async def tunnel_figures(is_quick: bool) -> BackendFigures:
    """Measure everything, on one node and a coordinator that is as near as can be."""
    scale = 0.25 if is_quick else 1.0
    async with Tunnel({"node": symmetric_link()}, symmetric_link(), seed=1) as tunnel:
        figures = TunnelFigures(tunnel)
        await _delays(figures, scale)
        await _losses(figures, scale)
        await _tunnel_rates(figures, scale)
        await _trace(figures, TRACE_MBIT_S[: 5 if is_quick else 10])
        await _tcp(figures, scale)
        await _throughput(figures, scale)
    started_s = time.monotonic()
    async with Tunnel({f"node-{number}": symmetric_link() for number in range(50)}):
        up_s = figures.metrics["namespaces_50_s"] = time.monotonic() - started_s
    error = "below" if up_s < 2 else "ABOVE"
    figures.add("50 namespaces up, s", 2.0, up_s, error, valid=True)
    figures.finish()
    return figures


async def _delays(figures: TunnelFigures, scale: float) -> None:
    means, tails = [0.0], [0.0]
    for delay_ms in DELAYS_MS:

        async def probes(_: int) -> list[float]:
            count = round(2000 * scale)
            arrivals = await figures.network.probes("up", count=count, gap_us=Microseconds(3000))
            return arrivals.delays_ms()

        delays_ms, is_valid = await figures.measure_link(symmetric_link(delay_ms), probes)
        mean_ms, tail_ms = statistics.fmean(delays_ms), percentile(delays_ms, 0.99)
        if is_valid:
            means.append(mean_ms - delay_ms)
            tails.append(tail_ms - delay_ms)
        error = f"{mean_ms - delay_ms:+.2f} ms, p99 {tail_ms - delay_ms:+.2f}"
        figures.add("one-way delay, ms", delay_ms, mean_ms, error, valid=is_valid)
    figures.metrics["tunnel_delay_error_ms"] = max(means)
    figures.metrics["tunnel_delay_p99_error_ms"] = max(tails)


async def _losses(figures: TunnelFigures, scale: float) -> None:
    points, bursts = [0.0], [0.0]
    for loss, burst in LOSSES:

        async def probes(_: int) -> Arrivals:
            count = round(20_000 * max(scale, 0.5))
            return await figures.network.probes("up", count=count, gap_us=Microseconds(200))

        link = symmetric_link(1, loss=loss, burst=burst)
        arrivals, is_valid = await figures.measure_link(link, probes)
        # What is lost does not depend on when.
        points.append(100 * abs(arrivals.loss() - loss))
        error = f"{100 * (arrivals.loss() - loss):+.2f} points"
        if loss:
            error += f", burst {arrivals.burst_packets():.2f}"
        if burst > 1:
            bursts.append(abs(arrivals.burst_packets() / burst - 1))
        name = f"loss, %, in bursts of {burst:g}"
        figures.add(name, 100 * loss, 100 * arrivals.loss(), error, valid=is_valid)
    figures.metrics["tunnel_loss_error_points"] = max(points)
    figures.metrics["tunnel_burst_error"] = max(bursts)


async def _tunnel_rates(figures: TunnelFigures, scale: float) -> None:
    errors = [0.0]
    for rate in TUNNEL_RATES_MBIT_S:

        async def flood(_: int, *, offered: int = round(1.4 * rate * MBIT)) -> Arrivals:
            return await figures.network.flood("up", bits_per_s=offered, for_s=max(6 * scale, 2))

        arrivals, is_valid = await figures.measure_link(symmetric_link(1, rate), flood)
        measured = arrivals.saturated_bits_per_s() / MBIT
        # On a busy machine the sender may offer less than the rate, which says nothing about it.
        is_valid = is_valid and measured > 0
        if is_valid:
            errors.append(abs(measured / rate - 1))
        figures.add("rate, Mbit/s", rate, measured, f"{measured / rate - 1:+.2%}", valid=is_valid)
    figures.metrics["tunnel_rate_error"] = max(errors)


async def _trace(figures: TunnelFigures, rates_mbit_s: Sequence[int]) -> None:
    rows = tuple(
        TraceRow(at_us=Microseconds(second * 1_000_000), up_bits_per_s=rate * MBIT)
        for second, rate in enumerate(rates_mbit_s)
    )
    trace = LinkTrace(rows, Microseconds(len(rows) * 1_000_000))
    shape = Shape(link=symmetric_link(1, 10), traces=(trace,))

    async def flood(set_ns: int) -> list[float]:
        offered = round(1.3 * max(rates_mbit_s) * MBIT)
        arrivals = await figures.network.flood("up", bits_per_s=offered, for_s=2.0 * len(rows))
        # The sender starts within the first pass; the second is flooded from end to end.
        begun_ns = set_ns + shape.link.up.delay_us * 1000 + len(rows) * NS_PER_S
        starts_ns = [begun_ns + second * NS_PER_S for second in range(len(rows))]
        return [
            abs(arrivals.bits_per_s_between(start_ns, start_ns + NS_PER_S) / MBIT / rate - 1)
            for start_ns, rate in zip(starts_ns, rates_mbit_s, strict=True)
        ]

    errors, is_valid = await figures.measure_link(shape, flood)
    mean_mbit_s, mean_error = statistics.fmean(rates_mbit_s), statistics.fmean(errors)
    error = f"{mean_error:.2%} on average, {max(errors):.1%} at most"
    name = "trace of 1 s steps, mean Mbit/s"
    figures.add(name, mean_mbit_s, mean_mbit_s * (1 + mean_error), error, valid=is_valid)
    figures.metrics["tunnel_trace_error"] = max(errors)


async def _tcp(figures: TunnelFigures, scale: float) -> None:
    lossy = symmetric_link(50, 20, loss=0.01)
    for control, reference in TCP_MBIT_S.items():
        measured, is_valid = await _stream(figures, lossy, control, 40 * scale)
        figures.metrics[f"tunnel_{control}_mbit_s"] = measured.mbit_s
        name = f"{control} at RTT 100, 1 %, Mbit/s"
        error = f"x{measured.mbit_s / reference:.2f}"
        figures.add(name, reference, measured.mbit_s, error, valid=is_valid)


async def _throughput(figures: TunnelFigures, scale: float) -> None:
    best = per_core = 0.0
    for control in ("cubic", "bbr"):
        measured, is_valid = await _stream(figures, symmetric_link(), control, max(8 * scale, 3))
        best = max(best, measured.mbit_s)
        per_core = max(per_core, measured.mbit_per_cpu_s)
        error = f"{measured.mbit_per_cpu_s:,.0f} a CPU second"
        name = f"one stream of {control}, Mbit/s"
        figures.add(name, 1000, measured.mbit_s, error, valid=is_valid)
    figures.metrics["tunnel_mbit_s"] = best
    figures.metrics["tunnel_mbit_per_cpu_s"] = per_core


class StreamGoodput(NamedTuple):
    """One TCP connection's goodput, over time and over the router's CPU time."""

    mbit_s: float
    mbit_per_cpu_s: float


async def _stream(
    figures: TunnelFigures, link: Link, control: str, for_s: float
) -> Measurement[StreamGoodput]:
    async def stream(_: int) -> StreamGoodput:
        cpu_us = (await figures.tunnel.statistics()).cpu_us
        arrived = await figures.network.stream("up", for_s=for_s, congestion_control=control)
        spent_us = (await figures.tunnel.statistics()).cpu_us - cpu_us
        bits = sum(arrived.bytes_in_bin) * 8
        taken_s = max((arrived.ended_ns - arrived.started_ns) / NS_PER_S, for_s)
        return StreamGoodput(bits / taken_s / MBIT, bits / max(spent_us, 1))

    return await figures.measure_link(link, stream)


MIB = 1 << 20
WIRE_BYTES_A_BYTE = 1500 / 1448
RTTS_MS = (10, 50, 100, 300)
RUNS = 3
PROXY_RATES_MBIT_S = (1, 20, 100, 500)
PROGRAM = [sys.executable, "-m", "benchmarks.ours.fidelity.transfers"]
BBR = CongestionControl.BBR


class LinkTransfers(msgspec.Struct, frozen=True):
    """gRPC over one link."""

    name: str
    link: Link
    sizes_mib: tuple[int, ...]


TRANSFERS = (
    LinkTransfers("RTT 100", symmetric_link(50), (4, 100)),
    LinkTransfers("RTT 100, BBR", symmetric_link(50, 0, BBR), (4,)),
    LinkTransfers("RTT 100, 20 Mbit/s", symmetric_link(50, 20), (4, 100)),
    LinkTransfers("RTT 50, 100 Mbit/s", symmetric_link(25, 100), (4, 100)),
    LinkTransfers("RTT 100, 1 %", symmetric_link(50, loss=0.01), (4,)),
    LinkTransfers("RTT 100, 1 %, BBR", symmetric_link(50, 0, BBR, loss=0.01), (4,)),
)


async def proxy_figures(is_quick: bool) -> BackendFigures:
    """Measure everything; the comparison needs a machine that can build a tunnel."""
    runs = 1 if is_quick else RUNS
    transfers = f"gRPC: medians of {runs} of each. With losses times are heavy-tailed."
    try:
        require_tunnel()
    except NetsimError as refused:
        runs, transfers = 0, f"No gRPC transfers beside the tunnel: {refused.detail}."
    figures = BackendFigures(
        "proxy", "Proxy: TCP round trips; rates over one stream, headers counted.", transfers
    )
    await _round_trips(figures, count=15 if is_quick else 40)
    await _proxy_rates(figures, for_s=3.0 if is_quick else 8.0)
    if runs:
        await _transfers(figures, TRANSFERS[:2] if is_quick else TRANSFERS, runs=runs)
    figures.finish()
    return figures


async def _round_trips(figures: BackendFigures, count: int) -> None:
    errors_ms = [0.0]
    for rtt_ms in RTTS_MS:

        async def median_ms(*, rtt_ms: int = rtt_ms) -> Measurement[float]:
            async with _open_proxy(symmetric_link(rtt_ms / 2)) as network:
                gap_us = Microseconds(1000 * rtt_ms + 20_000)
                trips = await network.round_trips(count=count, gap_us=gap_us)
                is_valid = (await network.verdict()).is_valid
            # The first one waits for the handshake.
            return Measurement(statistics.median(trips.trips_ns[1:]) / 1e6, is_valid)

        found_ms, is_valid = await figures.measure(median_ms)
        if is_valid:
            errors_ms.append(abs(found_ms - rtt_ms))
        error = f"{found_ms - rtt_ms:+.2f} ms"
        figures.add("RTT, ms", rtt_ms, found_ms, error, valid=is_valid)
    figures.metrics["proxy_rtt_error_ms"] = max(errors_ms)


async def _proxy_rates(figures: BackendFigures, for_s: float) -> None:
    errors = [0.0]
    for rate in PROXY_RATES_MBIT_S:

        async def steady_rate(*, rate: int = rate) -> Measurement[float]:
            async with _open_proxy(symmetric_link(5, rate)) as network:
                arrived = await network.stream("up", for_s=for_s)
                is_valid = (await network.verdict()).is_valid
            # Without the first second, in which the window grows, and the last tenth, a part.
            steady = arrived.bytes_in_bin[10:-1]
            return Measurement(sum(steady) * 80 * WIRE_BYTES_A_BYTE / MBIT / len(steady), is_valid)

        found, is_valid = await figures.measure(steady_rate)
        if is_valid:
            errors.append(abs(found / rate - 1))
        figures.add("rate, Mbit/s", rate, found, f"{found / rate - 1:+.2%}", valid=is_valid)
    figures.metrics["proxy_rate_error"] = max(errors)


async def _transfers(
    figures: BackendFigures, chosen: Sequence[LinkTransfers], *, runs: int
) -> None:
    errors = [0.0]
    lossy = [0.0]
    for each in chosen:
        backends = [partial(_pull_over_tunnel, each), partial(_pull_over_proxy, each)]
        real, modelled = [[await figures.measure(pull) for _ in range(runs)] for pull in backends]
        is_valid = all(measurement.is_valid for measurement in (*real, *modelled))
        for place, size_mib in enumerate(each.sizes_mib):
            expected_s, seconds = (
                statistics.median(measurement.found[place] for measurement in measurements)
                for measurements in (real, modelled)
            )
            error = seconds / expected_s - 1
            if is_valid:
                (lossy if each.link.down.loss else errors).append(abs(error))
            name = f"gRPC {size_mib} MiB, {each.name}, s (asked: tunnel)"
            figures.add(name, expected_s, seconds, f"{error:+.1%}", valid=is_valid)
    figures.metrics["proxy_transfer_error"] = max(errors)
    figures.metrics["proxy_lossy_transfer_error"] = max(lossy)


async def _pull_over_proxy(transfers: LinkTransfers) -> Measurement[list[float]]:
    async with _serving([], f"{LOOPBACK}:0") as port:
        node = ProxiedNode(
            name="node", shape=Shape(link=transfers.link), forwards=(Forward(target_port=port),)
        )
        plan = ProxyPlan(nodes=(node,), coordinator=symmetric_link())
        async with ProxyProcess(plan) as proxies:
            host, dialled = proxies.address("node")
            seconds = await _pull([], f"{host}:{dialled}", transfers)
            return Measurement(seconds, (await proxies.statistics()).lateness.is_valid)


async def _pull_over_tunnel(transfers: LinkTransfers) -> Measurement[list[float]]:
    async with Tunnel({"node": transfers.link}, symmetric_link()) as tunnel:
        coordinator, node = tunnel.host(COORDINATOR), tunnel.host("node")
        async with _serving(coordinator.command([]), "0.0.0.0:0") as port:
            address = f"{coordinator.address}:{port}"
            seconds = await _pull(node.command([]), address, transfers)
            return Measurement(seconds, (await tunnel.statistics()).lateness.is_valid)


@asynccontextmanager
async def _serving(prefix: Sequence[str], address: str) -> AsyncIterator[int]:
    pipe = asyncio.subprocess.PIPE
    command = (*prefix, *PROGRAM, "serve", address)
    child = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    if child.stdin is None or child.stdout is None:
        raise AssertionError("the child was started with pipes")
    try:
        yield int(await child.stdout.readline())
    finally:
        child.stdin.close()
        await child.wait()


async def _pull(prefix: Sequence[str], address: str, transfers: LinkTransfers) -> list[float]:
    sizes = [str(size_mib * MIB) for size_mib in transfers.sizes_mib]
    command = (*prefix, *PROGRAM, "pull", address, *sizes)
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    out, _ = await child.communicate()
    if child.returncode:
        raise BenchmarkError(f"a transfer over {transfers.name} failed")
    return msgspec.json.decode(out, type=list[float])


@asynccontextmanager
async def _open_proxy(link: Link) -> AsyncIterator[ProbedLink]:
    async with probed_proxy(Shape(link=link), coordinator=symmetric_link()) as network:
        yield network
