"""Measures an open link between a node and the coordinator, whichever backend runs it.

Both ends are programs, which are started, waited for and always ended.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from enum import StrEnum
from typing import TypeVar

import msgspec

from hypergpu.units import Microseconds
from netsim.link import Way
from netsim.link.error import NetsimError
from netsim.measure.arrivals import NS_PER_S, Arrivals
from netsim.measure.ends import StreamBins, TripTimes
from netsim.measure.lateness import ALWAYS_VALID, Lateness, LatenessVerdict

Command = Callable[[Sequence[str]], list[str]]
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

    at_sender: Command = list
    at_receiver: Command = list
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
        added, self._judged = lateness.since(self._judged), lateness
        return added.verdict()

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
    given = msgspec.json.encode({"address": host, "port": port, **arguments}).decode()
    return [sys.executable, "-m", "netsim.measure", end, given]


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
    return await asyncio.wait_for(process.stdout.readline(), limit_s)
