"""The tunnel's part of the fidelity table: delay, loss, rate, traces, TCP, throughput, start-up."""

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.ours.fidelity.figures import Figures, Row
from hypergpu.units import Microseconds
from netsim.link.link import Direction, Link
from netsim.link.trace import Trace, TraceRow
from netsim.measure.network import ProgramNetwork
from netsim.measure.statistics import NS_PER_S, percentile
from netsim.tunnel.lateness import Lateness
from netsim.tunnel.measured import network
from netsim.tunnel.shape import Shape
from netsim.tunnel.tunnel import Tunnel

MBIT = 1_000_000
DELAYS_MS = (10, 25, 50, 150)
LOSSES = ((0.0, 1.0), (0.001, 1.0), (0.01, 1.0), (0.05, 1.0), (0.02, 4.0), (0.04, 2.0), (0.05, 8.0))
RATES_MBIT_S = (1, 5, 20, 100, 200)
TRACE_MBIT_S = (1, 5, 20, 2, 10, 4, 16, 8, 3, 12)
# netsim's reference with the kernel's own netem (6.1, virtual clock) at RTT 100 ms, 20 Mbit/s, 1 %.
TCP_MBIT_S = {"cubic": 1.73, "bbr": 18.2}


class Probe(NamedTuple):
    """One node's tunnel while it is measured."""

    tunnel: Tunnel
    network: ProgramNetwork

    async def becomes(self, link: Link) -> Lateness:
        """Set the link and return what the router was late until then."""
        await self.tunnel.set("node", link)
        return await self.lateness()

    async def lateness(self) -> Lateness:
        """Return what the router was late so far."""
        return (await self.tunnel.statistics()).lateness


class Judged:
    """Collects what was measured, and whether the router kept its times meanwhile."""

    def __init__(self, probe: Probe) -> None:
        self.rows: list[Row] = []
        self.invalid: list[str] = []
        self._probe = probe

    async def add(self, row: Row, before: Lateness) -> None:
        """Take a row; say so when it does not count."""
        lateness = (await self._probe.lateness()).since(before)
        if not lateness.is_valid:
            self.invalid.append(row[0])
            row = (f"{row[0]} (INVALID)", *row[1:])
        self.rows.append(row)


def both(delay_ms: float = 0, mbit_s: float = 0, *, loss: float = 0, burst: float = 1) -> Link:
    """Return a link that is the same both ways."""
    way = Direction(
        delay_us=Microseconds(round(delay_ms * 1000)),
        bits_per_s=round(mbit_s * MBIT),
        loss=loss,
        burst_packets=burst,
    )
    return Link(up=way, down=way)


async def tunnel_figures(is_quick: bool) -> Figures:
    """Measure everything, on one node and a coordinator that is as near as can be."""
    scale = 0.25 if is_quick else 1.0
    metrics: dict[str, float] = {}
    async with Tunnel({"node": both()}, both(), seed=1) as tunnel:
        probe = Probe(tunnel, network(tunnel, "node"))
        judged = Judged(probe)
        metrics.update(await _delays(probe, judged, scale))
        metrics.update(await _losses(probe, judged, scale))
        metrics.update(await _rates(probe, judged, scale))
        metrics.update(await _tcp(probe, judged, scale))
        metrics.update(await _throughput(probe, judged, scale))
    metrics["namespaces_50_s"] = await _namespaces(50)
    judged.rows.append(
        _row("tunnel: 50 namespaces up, s", 2.0, metrics["namespaces_50_s"], "below")
    )
    notes = [
        "Tunnel: one-way UDP probes by one clock; every packet through one Python process.",
        "TCP: asked is the kernel's netem under a virtual clock. One run each; loss both ways.",
    ]
    if judged.invalid:
        notes.append(f"The router was too late, so these do not count: {', '.join(judged.invalid)}")
    metrics["tunnel_invalid_rows"] = float(len(judged.invalid))
    return Figures(rows=judged.rows, metrics=metrics, notes=notes)


def _row(what: str, asked: float, measured: float, error: str) -> Row:
    return (what, f"{asked:g}", f"{measured:.4g}", error)


async def _delays(probe: Probe, judged: Judged, scale: float) -> dict[str, float]:
    means, tails = [], []
    for delay_ms in DELAYS_MS:
        before = await probe.becomes(both(delay_ms))
        count = round(2000 * scale)
        arrivals = await probe.network.probes("up", count=count, gap_us=Microseconds(3000))
        delays_ms = arrivals.delays_ms()
        mean_ms, tail_ms = statistics.fmean(delays_ms), percentile(delays_ms, 0.99)
        means.append(mean_ms - delay_ms)
        tails.append(tail_ms - delay_ms)
        error = f"{means[-1]:+.2f} ms, p99 {tails[-1]:+.2f}"
        await judged.add(_row("tunnel: one-way delay, ms", delay_ms, mean_ms, error), before)
    return {"tunnel_delay_error_ms": max(means), "tunnel_delay_p99_error_ms": max(tails)}


async def _losses(probe: Probe, judged: Judged, scale: float) -> dict[str, float]:
    points, bursts = [0.0], [0.0]
    for loss, burst in LOSSES:
        before = await probe.becomes(both(1, loss=loss, burst=burst))
        count = round(20_000 * max(scale, 0.5))
        arrivals = await probe.network.probes("up", count=count, gap_us=Microseconds(200))
        points.append(100 * abs(arrivals.loss() - loss))
        what = f"tunnel: loss, %, in bursts of {burst:g}"
        error = f"{100 * (arrivals.loss() - loss):+.2f} points"
        if loss:
            error += f", burst {arrivals.burst_packets():.2f}"
        if burst > 1:
            bursts.append(abs(arrivals.burst_packets() / burst - 1))
        await judged.add(_row(what, 100 * loss, 100 * arrivals.loss(), error), before)
    return {"tunnel_loss_error_points": max(points), "tunnel_burst_error": max(bursts)}


async def _rates(probe: Probe, judged: Judged, scale: float) -> dict[str, float]:
    errors = []
    for rate in RATES_MBIT_S:
        before = await probe.becomes(both(1, rate))
        offered = round(1.4 * rate * MBIT)
        arrivals = await probe.network.flood("up", bits_per_s=offered, for_s=max(6 * scale, 2))
        measured = arrivals.saturated_bits_per_s() / MBIT
        errors.append(abs(measured / rate - 1))
        row = _row("tunnel: rate, Mbit/s", rate, measured, f"{measured / rate - 1:+.2%}")
        await judged.add(row, before)
    traced = await _trace(probe, judged, TRACE_MBIT_S[: round(10 * max(scale, 0.5))])
    return {"tunnel_rate_error": max(errors), "tunnel_trace_error": traced}


async def _trace(probe: Probe, judged: Judged, rates_mbit_s: Sequence[int]) -> float:
    rows = tuple(
        TraceRow(at_us=Microseconds(second * 1_000_000), up_bits_per_s=rate * MBIT)
        for second, rate in enumerate(rates_mbit_s)
    )
    period_us = Microseconds(len(rows) * 1_000_000)
    shape = Shape(link=both(1, 10), traces=(Trace(rows, period_us),))
    before = await probe.lateness()
    begun_ns = await probe.tunnel.set("node", shape) + shape.link.up.delay_us * 1000
    arrivals = await probe.network.flood(
        "up", bits_per_s=round(1.3 * max(rates_mbit_s) * MBIT), for_s=2.0 * len(rows)
    )
    # The sender starts within the first pass; the second pass is flooded from end to end.
    errors = []
    for second, rate in enumerate(rates_mbit_s):
        start_ns = begun_ns + (len(rows) + second) * NS_PER_S
        measured = arrivals.bits_per_s_between(start_ns, start_ns + NS_PER_S) / MBIT
        errors.append(abs(measured / rate - 1))
    error = f"per second {max(errors):.1%} at most"
    mean = statistics.fmean(rates_mbit_s)
    measured = statistics.fmean(errors)
    row = ("tunnel: trace of 1 s steps, Mbit/s", f"{mean:g} mean", f"{measured:.2%} off", error)
    await judged.add(row, before)
    return max(errors)


async def _tcp(probe: Probe, judged: Judged, scale: float) -> dict[str, float]:
    metrics = {}
    for control, reference in TCP_MBIT_S.items():
        before = await probe.becomes(both(50, 20, loss=0.01))
        for_s = 40 * scale
        arrived = await probe.network.stream("up", for_s=for_s, congestion_control=control)
        measured = sum(arrived.bytes_in_bin) * 8 / for_s / MBIT
        metrics[f"tunnel_{control}_mbit_s"] = measured
        what = f"tunnel: {control} at RTT 100, 1 %, Mbit/s"
        await judged.add(_row(what, reference, measured, f"x{measured / reference:.2f}"), before)
    return metrics


async def _throughput(probe: Probe, judged: Judged, scale: float) -> dict[str, float]:
    best = per_core = 0.0
    for control in ("cubic", "bbr"):
        before = await probe.becomes(both())
        cpu_us = (await probe.tunnel.statistics()).cpu_us
        for_s = max(8 * scale, 3)
        arrived = await probe.network.stream("up", for_s=for_s, congestion_control=control)
        spent_s = ((await probe.tunnel.statistics()).cpu_us - cpu_us) / 1e6
        bits = sum(arrived.bytes_in_bin) * 8
        seconds = (arrived.ended_ns - arrived.started_ns) / NS_PER_S
        best, per_core = max(best, bits / seconds / MBIT), max(per_core, bits / spent_s / MBIT)
        error = f"{bits / spent_s / MBIT:,.0f} a CPU second"
        what = f"tunnel: one stream of {control}, Mbit/s"
        await judged.add(_row(what, 1000, bits / seconds / MBIT, error), before)
    return {"tunnel_mbit_s": best, "tunnel_mbit_per_cpu_s": per_core}


async def _namespaces(count: int) -> float:
    started_s = time.monotonic()
    async with Tunnel({f"node-{number}": both() for number in range(count)}):
        return time.monotonic() - started_s
