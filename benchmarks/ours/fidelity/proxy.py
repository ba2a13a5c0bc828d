"""The proxy's part of the fidelity table: round trips, rates, gRPC beside the tunnel's."""

import asyncio
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import msgspec

from benchmarks.ours.cluster import BenchmarkError
from benchmarks.ours.fidelity.figures import Figures, Judged, Repeats, Row
from benchmarks.ours.fidelity.transfers import Pulled
from hypergpu.units import Microseconds, Milliseconds
from netsim.emulation.namespaces import COORDINATOR
from netsim.link import CongestionControl, Link, LinkDirection, Shape
from netsim.link.error import NetsimError
from netsim.measure.probe import ProbedLink
from netsim.proxy.messages import LOOPBACK, Forward, ProxiedNode, ProxyPlan
from netsim.proxy.process import ProxyProcess, probed_proxy
from netsim.tunnel.device import require_tunnel
from netsim.tunnel.tunnel import Tunnel

MBIT = 1_000_000
MIB = 1 << 20
ON_THE_WIRE = 1500 / 1448
RTTS_MS = (10, 50, 100, 300)
RUNS = 3
RATES_MBIT_S = (1, 20, 100, 500)
PROGRAM = [sys.executable, "-m", "benchmarks.ours.fidelity.transfers"]


class LinkTransfers(msgspec.Struct, frozen=True, kw_only=True):
    """gRPC over one link."""

    name: str
    link: Link
    sizes_mib: tuple[int, ...]


def both(
    delay_ms: float = 0,
    mbit_s: float = 0,
    control: CongestionControl = CongestionControl.CUBIC,
    *,
    loss: float = 0,
) -> Link:
    """Return a link that is the same both ways."""
    way = LinkDirection(
        delay_us=Microseconds(round(delay_ms * 1000)),
        bits_per_s=round(mbit_s * MBIT),
        queue_ms=Milliseconds(100),
        loss=loss,
    )
    return Link(up=way, down=way, congestion_control=control)


TRANSFERS = (
    LinkTransfers(name="RTT 100", link=both(50), sizes_mib=(4, 100)),
    LinkTransfers(name="RTT 100, BBR", link=both(50, 0, CongestionControl.BBR), sizes_mib=(4,)),
    LinkTransfers(name="RTT 100, 20 Mbit/s", link=both(50, 20), sizes_mib=(4, 100)),
    LinkTransfers(name="RTT 50, 100 Mbit/s", link=both(25, 100), sizes_mib=(4, 100)),
    LinkTransfers(name="RTT 100, 1 %", link=both(50, loss=0.01), sizes_mib=(4,)),
    LinkTransfers(
        name="RTT 100, 1 %, BBR",
        link=both(50, 0, CongestionControl.BBR, loss=0.01),
        sizes_mib=(4,),
    ),
)


async def proxy_figures(is_quick: bool) -> Figures:
    """Measure everything; the comparison needs a machine that can build a tunnel."""
    rows: list[Row] = []
    repeats = Repeats()
    metrics = {
        "proxy_rtt_error_ms": await _round_trips(rows, repeats, count=15 if is_quick else 40),
        "proxy_rate_error": await _rates(rows, repeats, for_s=3.0 if is_quick else 8.0),
    }
    notes = ["Proxy: TCP round trips; rates over one stream, headers counted."]
    try:
        require_tunnel()
    except NetsimError as refused:
        notes.append(f"No gRPC transfers beside the tunnel: {refused.detail}.")
    else:
        runs = 1 if is_quick else RUNS
        chosen = TRANSFERS[:2] if is_quick else TRANSFERS
        metrics |= await _transfers(rows, repeats, chosen, runs=runs)
        notes.append(f"gRPC: medians of {runs} of each. With losses times are heavy-tailed.")
    metrics["proxy_invalid_rows"] = float(len(repeats.invalid))
    return Figures(rows=rows, metrics=metrics, notes=[*notes, *repeats.notes()])


async def _round_trips(rows: list[Row], repeats: Repeats, count: int) -> float:
    errors_ms = [0.0]
    for rtt_ms in RTTS_MS:

        async def trips(*, rtt_ms: int = rtt_ms) -> Judged[float]:
            async with _network(both(rtt_ms / 2)) as network:
                gap_us = Microseconds(1000 * rtt_ms + 20_000)
                trips = await network.round_trips(count=count, gap_us=gap_us)
                is_valid = (await network.verdict()).is_valid
            # The first one waits for the handshake.
            return Judged(statistics.median(trips.trips_ns[1:]) / 1e6, is_valid)

        middle_ms, is_valid = await repeats.measured(trips)
        if is_valid:
            errors_ms.append(abs(middle_ms - rtt_ms))
        row = _row("proxy: RTT, ms", rtt_ms, middle_ms, f"{middle_ms - rtt_ms:+.2f} ms")
        rows.append(repeats.judged(row, is_valid=is_valid))
    return max(errors_ms)


async def _rates(rows: list[Row], repeats: Repeats, for_s: float) -> float:
    errors = [0.0]
    for rate in RATES_MBIT_S:

        async def carried(*, rate: int = rate) -> Judged[float]:
            async with _network(both(5, rate)) as network:
                arrived = await network.stream("up", for_s=for_s)
                is_valid = (await network.verdict()).is_valid
            # Without the first second, in which the window grows, and the last tenth, a part.
            steady = arrived.bytes_in_bin[10:-1]
            return Judged(sum(steady) * 80 * ON_THE_WIRE / MBIT / len(steady), is_valid)

        probed_proxy, is_valid = await repeats.measured(carried)
        if is_valid:
            errors.append(abs(probed_proxy / rate - 1))
        row = _row("proxy: rate, Mbit/s", rate, probed_proxy, f"{probed_proxy / rate - 1:+.2%}")
        rows.append(repeats.judged(row, is_valid=is_valid))
    return max(errors)


async def _transfers(
    rows: list[Row], repeats: Repeats, chosen: Sequence[LinkTransfers], *, runs: int
) -> dict[str, float]:
    errors = [0.0]
    lossy = [0.0]
    for each in chosen:
        again = [partial(_through_tunnel, each), partial(_through_proxy, each)]
        real, modelled = [[await repeats.measured(run) for _ in range(runs)] for run in again]
        is_valid = all(probed_proxy.is_valid for probed_proxy in (*real, *modelled))
        for place, size_mib in enumerate(each.sizes_mib):
            expected_s, seconds = (
                statistics.median(probed_proxy.found.pull_s[place] for probed_proxy in measurements)
                for measurements in (real, modelled)
            )
            error = seconds / expected_s - 1
            if is_valid:
                (lossy if each.link.down.loss else errors).append(abs(error))
            what = f"proxy: gRPC {size_mib} MiB, {each.name}, s (asked: tunnel)"
            row = _row(what, expected_s, seconds, f"{error:+.1%}")
            rows.append(repeats.judged(row, is_valid=is_valid))
    return {"proxy_transfer_error": max(errors), "proxy_lossy_transfer_error": max(lossy)}


async def _through_proxy(asked: LinkTransfers) -> Judged[Pulled]:
    async with _serving([], f"{LOOPBACK}:0") as port:
        node = ProxiedNode(
            name="node", shape=Shape(link=asked.link), forwards=(Forward(target_port=port),)
        )
        async with ProxyProcess(ProxyPlan(nodes=(node,), coordinator=both())) as proxies:
            host, dialled = proxies.address("node")
            pulled = await _pulled([], f"{host}:{dialled}", asked)
            return Judged(pulled, (await proxies.statistics()).lateness.is_valid)


async def _through_tunnel(asked: LinkTransfers) -> Judged[Pulled]:
    async with Tunnel({"node": asked.link}, both()) as tunnel:
        inside = tunnel.host(COORDINATOR).command([])
        async with _serving(inside, "0.0.0.0:0") as port:
            address = f"{tunnel.host(COORDINATOR).address}:{port}"
            pulled = await _pulled(tunnel.host("node").command([]), address, asked)
            return Judged(pulled, (await tunnel.statistics()).lateness.is_valid)


@asynccontextmanager
async def _serving(before: Sequence[str], address: str) -> AsyncIterator[int]:
    pipe = asyncio.subprocess.PIPE
    command = (*before, *PROGRAM, "serve", address)
    child = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    if child.stdin is None or child.stdout is None:
        raise AssertionError("the child was started with pipes")
    try:
        yield int(await child.stdout.readline())
    finally:
        child.stdin.close()
        await child.wait()


async def _pulled(before: Sequence[str], address: str, asked: LinkTransfers) -> Pulled:
    sizes = [str(size_mib * MIB) for size_mib in asked.sizes_mib]
    command = (*before, *PROGRAM, "pull", address, *sizes)
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    out, _ = await child.communicate()
    if child.returncode:
        raise BenchmarkError(f"a transfer over {asked.name} failed")
    return msgspec.json.decode(out, type=Pulled)


@asynccontextmanager
async def _network(link: Link) -> AsyncIterator[ProbedLink]:
    async with probed_proxy(Shape(link=link), coordinator=both()) as network:
        yield network


def _row(what: str, asked: float, got: float, error: str) -> Row:
    return (what, f"{asked:.4g}", f"{got:.4g}", error)
