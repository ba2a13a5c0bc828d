"""The tunnel's part of the fidelity table: delay, loss, rate, traces, TCP, throughput, start-up."""

import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from benchmarks.ours.fidelity.figures import Figures, Found, Judged, Repeats, Row
from hypergpu.units import Microseconds
from netsim.link import Link, LinkDirection, LinkTrace, Shape, TraceRow
from netsim.measure.arrivals import NS_PER_S, Arrivals, percentile
from netsim.tunnel.tunnel import Tunnel

MBIT = 1_000_000
DELAYS_MS = (10, 25, 50, 150)
LOSSES = ((0.0, 1.0), (0.001, 1.0), (0.01, 1.0), (0.05, 1.0), (0.02, 4.0), (0.04, 2.0), (0.05, 8.0))
RATES_MBIT_S = (1, 5, 20, 100, 200)
TRACE_MBIT_S = (1, 5, 20, 2, 10, 4, 16, 8, 3, 12)
# netsim's reference with the kernel's own netem (6.1, virtual clock) at RTT 100 ms, 20 Mbit/s, 1 %.
TCP_MBIT_S = {"cubic": 1.73, "bbr": 18.2}


class Probe:
    """One node's tunnel while it is measured, and the rows that came of it."""

    def __init__(self, tunnel: Tunnel) -> None:
        self.tunnel = tunnel
        self.network = tunnel.probe("node")
        self.rows: list[Row] = []
        self.repeats = Repeats()

    async def measured(
        self, link: Link | Shape, measure: Callable[[int], Awaitable[Found]]
    ) -> Judged[Found]:
        """Measure a link, again when the router was late, three times at most.

        Args:
            link: What the node's link is meanwhile.
            measure: Is told when the link was set, in nanoseconds of the monotonic clock.
        """
        return await self.repeats.measured(lambda: self._once(link, measure))

    async def _once(
        self, link: Link | Shape, measure: Callable[[int], Awaitable[Found]]
    ) -> Judged[Found]:
        set_ns = await self.tunnel.set_link("node", link)
        before = (await self.tunnel.statistics()).lateness
        found = await measure(set_ns)
        after = (await self.tunnel.statistics()).lateness
        return Judged(found, after.since(before).is_valid)

    def add(self, row: Row, *, is_valid: bool) -> None:
        """Take a row; say so when it does not count."""
        self.rows.append(self.repeats.judged(row, is_valid=is_valid))


def both(delay_ms: float = 0, mbit_s: float = 0, *, loss: float = 0, burst: float = 1) -> Link:
    """Return a link that is the same both ways."""
    way = LinkDirection(
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
        probe = Probe(tunnel)
        metrics.update(await _delays(probe, scale))
        metrics.update(await _losses(probe, scale))
        metrics.update(await _rates(probe, scale))
        metrics["tunnel_trace_error"] = await _trace(probe, TRACE_MBIT_S[: 5 if is_quick else 10])
        metrics.update(await _tcp(probe, scale))
        metrics.update(await _throughput(probe, scale))
    up_s = metrics["namespaces_50_s"] = await _namespaces(50)
    error = "below" if up_s < 2 else "ABOVE"
    probe.add(_row("tunnel: 50 namespaces up, s", 2.0, up_s, error), is_valid=True)
    metrics["tunnel_invalid_rows"] = float(len(probe.repeats.invalid))
    notes = [
        "Tunnel: one-way UDP probes by one clock; every packet through one Python process.",
        "TCP: asked is the kernel's netem under a virtual clock. One run each; loss both ways.",
    ]
    return Figures(rows=probe.rows, metrics=metrics, notes=[*notes, *probe.repeats.notes()])


def _row(what: str, asked: float, measured: float, error: str) -> Row:
    return (what, f"{asked:g}", f"{measured:.4g}", error)


async def _delays(probe: Probe, scale: float) -> dict[str, float]:
    means, tails = [0.0], [0.0]
    for delay_ms in DELAYS_MS:

        async def probes(_: int) -> list[float]:
            count = round(2000 * scale)
            arrivals = await probe.network.probes("up", count=count, gap_us=Microseconds(3000))
            return arrivals.delays_ms()

        delays_ms, is_valid = await probe.measured(both(delay_ms), probes)
        mean_ms, tail_ms = statistics.fmean(delays_ms), percentile(delays_ms, 0.99)
        if is_valid:
            means.append(mean_ms - delay_ms)
            tails.append(tail_ms - delay_ms)
        error = f"{mean_ms - delay_ms:+.2f} ms, p99 {tail_ms - delay_ms:+.2f}"
        row = _row("tunnel: one-way delay, ms", delay_ms, mean_ms, error)
        probe.add(row, is_valid=is_valid)
    return {"tunnel_delay_error_ms": max(means), "tunnel_delay_p99_error_ms": max(tails)}


async def _losses(probe: Probe, scale: float) -> dict[str, float]:
    points, bursts = [0.0], [0.0]
    for loss, burst in LOSSES:

        async def probes(_: int) -> Arrivals:
            count = round(20_000 * max(scale, 0.5))
            return await probe.network.probes("up", count=count, gap_us=Microseconds(200))

        link = both(1, loss=loss, burst=burst)
        arrivals, is_valid = await probe.measured(link, probes)
        # What is lost does not depend on when.
        points.append(100 * abs(arrivals.loss() - loss))
        error = f"{100 * (arrivals.loss() - loss):+.2f} points"
        if loss:
            error += f", burst {arrivals.burst_packets():.2f}"
        if burst > 1:
            bursts.append(abs(arrivals.burst_packets() / burst - 1))
        what = f"tunnel: loss, %, in bursts of {burst:g}"
        row = _row(what, 100 * loss, 100 * arrivals.loss(), error)
        probe.add(row, is_valid=is_valid)
    return {"tunnel_loss_error_points": max(points), "tunnel_burst_error": max(bursts)}


async def _rates(probe: Probe, scale: float) -> dict[str, float]:
    errors = [0.0]
    for rate in RATES_MBIT_S:

        async def flood(_: int, *, offered: int = round(1.4 * rate * MBIT)) -> Arrivals:
            return await probe.network.flood("up", bits_per_s=offered, for_s=max(6 * scale, 2))

        arrivals, is_valid = await probe.measured(both(1, rate), flood)
        measured = arrivals.saturated_bits_per_s() / MBIT
        # On a busy machine the sender may offer less than the rate, which says nothing about it.
        is_valid = is_valid and measured > 0
        if is_valid:
            errors.append(abs(measured / rate - 1))
        row = _row("tunnel: rate, Mbit/s", rate, measured, f"{measured / rate - 1:+.2%}")
        probe.add(row, is_valid=is_valid)
    return {"tunnel_rate_error": max(errors)}


async def _trace(probe: Probe, rates_mbit_s: Sequence[int]) -> float:
    rows = tuple(
        TraceRow(at_us=Microseconds(second * 1_000_000), up_bits_per_s=rate * MBIT)
        for second, rate in enumerate(rates_mbit_s)
    )
    trace = LinkTrace(rows, Microseconds(len(rows) * 1_000_000))
    shape = Shape(link=both(1, 10), traces=(trace,))

    async def flood(set_ns: int) -> list[float]:
        offered = round(1.3 * max(rates_mbit_s) * MBIT)
        arrivals = await probe.network.flood("up", bits_per_s=offered, for_s=2.0 * len(rows))
        # The sender starts within the first pass; the second is flooded from end to end.
        begun_ns = set_ns + shape.link.up.delay_us * 1000 + len(rows) * NS_PER_S
        starts_ns = [begun_ns + second * NS_PER_S for second in range(len(rows))]
        return [
            abs(arrivals.bits_per_s_between(start_ns, start_ns + NS_PER_S) / MBIT / rate - 1)
            for start_ns, rate in zip(starts_ns, rates_mbit_s, strict=True)
        ]

    errors, is_valid = await probe.measured(shape, flood)
    asked = f"{statistics.fmean(rates_mbit_s):g} mean"
    error = f"per second {max(errors):.1%} at most"
    what = "tunnel: trace of 1 s steps, Mbit/s"
    probe.add((what, asked, f"{statistics.fmean(errors):.2%} off", error), is_valid=is_valid)
    return max(errors)


async def _tcp(probe: Probe, scale: float) -> dict[str, float]:
    metrics = {}
    for control, reference in TCP_MBIT_S.items():
        measured, is_valid = await _streamed(probe, both(50, 20, loss=0.01), control, 40 * scale)
        metrics[f"tunnel_{control}_mbit_s"] = measured.mbit_s
        what = f"tunnel: {control} at RTT 100, 1 %, Mbit/s"
        error = f"x{measured.mbit_s / reference:.2f}"
        probe.add(_row(what, reference, measured.mbit_s, error), is_valid=is_valid)
    return metrics


async def _throughput(probe: Probe, scale: float) -> dict[str, float]:
    best = per_core = 0.0
    for control in ("cubic", "bbr"):
        measured, is_valid = await _streamed(probe, both(), control, max(8 * scale, 3))
        best = max(best, measured.mbit_s)
        per_core = max(per_core, measured.mbit_per_cpu_s)
        error = f"{measured.mbit_per_cpu_s:,.0f} a CPU second"
        what = f"tunnel: one stream of {control}, Mbit/s"
        probe.add(_row(what, 1000, measured.mbit_s, error), is_valid=is_valid)
    return {"tunnel_mbit_s": best, "tunnel_mbit_per_cpu_s": per_core}


class Streamed(NamedTuple):
    """One TCP connection's goodput, over time and over the router's CPU time."""

    mbit_s: float
    mbit_per_cpu_s: float


async def _streamed(probe: Probe, link: Link, control: str, for_s: float) -> Judged[Streamed]:
    async def stream(_: int) -> Streamed:
        cpu_us = (await probe.tunnel.statistics()).cpu_us
        arrived = await probe.network.stream("up", for_s=for_s, congestion_control=control)
        spent_us = (await probe.tunnel.statistics()).cpu_us - cpu_us
        bits = sum(arrived.bytes_in_bin) * 8
        taken_s = max((arrived.ended_ns - arrived.started_ns) / NS_PER_S, for_s)
        return Streamed(bits / taken_s / MBIT, bits / max(spent_us, 1))

    return await probe.measured(link, stream)


async def _namespaces(count: int) -> float:
    started_s = time.monotonic()
    async with Tunnel({f"node-{number}": both() for number in range(count)}):
        return time.monotonic() - started_s
