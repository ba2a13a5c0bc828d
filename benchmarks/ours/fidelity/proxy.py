"""The proxy's part of the fidelity table: round trips, rates, gRPC beside the tunnel's."""

import asyncio
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import msgspec

from benchmarks.ours.cluster import BenchmarkError
from benchmarks.ours.fidelity.figures import MBIT, BackendFigures, Measurement, symmetric_link
from hypergpu.units import Microseconds
from netsim.emulation.namespaces import COORDINATOR
from netsim.link import CongestionControl, Link, Shape
from netsim.link.error import NetsimError
from netsim.measure.probe import ProbedLink
from netsim.proxy.messages import LOOPBACK, Forward, ProxiedNode, ProxyPlan
from netsim.proxy.process import ProxyProcess, probed_proxy
from netsim.tunnel.device import require_tunnel
from netsim.tunnel.tunnel import Tunnel

MIB = 1 << 20
WIRE_BYTES_A_BYTE = 1500 / 1448
RTTS_MS = (10, 50, 100, 300)
RUNS = 3
RATES_MBIT_S = (1, 20, 100, 500)
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
    await _rates(figures, for_s=3.0 if is_quick else 8.0)
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


async def _rates(figures: BackendFigures, for_s: float) -> None:
    errors = [0.0]
    for rate in RATES_MBIT_S:

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
