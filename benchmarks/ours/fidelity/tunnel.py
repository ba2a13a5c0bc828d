"""The tunnel's part of the fidelity table: delay, loss, rate, traces, TCP, throughput, start-up."""

import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from benchmarks.ours.fidelity.figures import (
    MBIT,
    BackendFigures,
    Found,
    Measurement,
    symmetric_link,
)
from hypergpu.units import Microseconds
from netsim.link import Link, LinkTrace, Shape, TraceRow
from netsim.measure.arrivals import NS_PER_S, Arrivals, percentile
from netsim.tunnel.tunnel import Tunnel

DELAYS_MS = (10, 25, 50, 150)
LOSSES = ((0.0, 1.0), (0.001, 1.0), (0.01, 1.0), (0.05, 1.0), (0.02, 4.0), (0.04, 2.0), (0.05, 8.0))
RATES_MBIT_S = (1, 5, 20, 100, 200)
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
        await _rates(figures, scale)
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


async def _rates(figures: TunnelFigures, scale: float) -> None:
    errors = [0.0]
    for rate in RATES_MBIT_S:

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
