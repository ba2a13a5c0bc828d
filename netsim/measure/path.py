"""Measurements over any path: both ends are started, waited for and always ended."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

import msgspec

from hypergpu.units import Microseconds
from netsim.error import NetsimError
from netsim.measure.programs import Bins, Trips
from netsim.measure.statistics import NS_PER_S, Arrivals

Found = TypeVar("Found")
Command = Callable[[Sequence[str]], list[str]]
"""Turns a command into one that runs at an end of the path."""

START_S = 30.0
# What a measurement may take beyond its own length: queues that drain, a loaded machine.
GRACE_S = 30.0
LONGEST_LINE_BYTES = 1 << 27


class MeasuredPath(msgspec.Struct, frozen=True, kw_only=True):
    """From a sender to a receiver, the same machine's clock at both ends."""

    at_sender: Command
    at_receiver: Command
    receiver: tuple[str, int]
    """Where the receiver listens."""
    target: tuple[str, int]
    """Where the sender sends to; a proxy's own address where there is one."""


def here(arguments: Sequence[str]) -> list[str]:
    """Return the command unchanged: it runs where we do."""
    return list(arguments)


async def arrivals(
    path: MeasuredPath, *, count: int, gap_us: Microseconds, payload_bytes: int = 64
) -> Arrivals:
    """Send numbered UDP probes at an even pace and say what came out."""
    for_s = count * gap_us / 1e6
    async with _receiving(path, "collect") as receiver:
        sending = ["--count", str(count), "--gap-ns", str(gap_us * 1000)]
        sending += ["--payload-bytes", str(payload_bytes)]
        await _run(_sender(path, "probe", *sending), for_s + GRACE_S)
        return await _answer(receiver, Arrivals)


async def flood(
    path: MeasuredPath, *, bits_per_s: int, for_s: float, packet_bytes: int = 1500
) -> Arrivals:
    """Offer a rate in packets of one size, headers included, and say what came out."""
    gap_ns = packet_bytes * 8 * NS_PER_S // bits_per_s
    count = round(for_s * NS_PER_S / gap_ns)
    async with _receiving(path, "collect") as receiver:
        sending = ["--count", str(count), "--gap-ns", str(gap_ns)]
        sending += ["--payload-bytes", str(packet_bytes - 28)]
        await _run(_sender(path, "probe", *sending), for_s + GRACE_S)
        return await _answer(receiver, Arrivals)


async def round_trips(
    path: MeasuredPath, protocol: str, *, count: int, gap_us: Microseconds
) -> Trips:
    """Send probes to an echo and say how long each took, over ``udp`` or ``tcp``."""
    async with _receiving(path, "echo", "--protocol", protocol):
        sending = ["--protocol", protocol, "--count", str(count), "--gap-ns", str(gap_us * 1000)]
        limit_s = count * gap_us / 1e6 + GRACE_S
        line = await _run(_sender(path, "round-trips", *sending), limit_s)
        return msgspec.json.decode(line, type=Trips)


async def stream(path: MeasuredPath, *, for_s: float, congestion_control: str = "") -> Bins:
    """Fill one TCP connection for a while and say what arrived when."""
    async with _receiving(path, "swallow") as receiver:
        sending = ["--for-s", str(for_s), "--congestion-control", congestion_control]
        await _run(_sender(path, "pour", *sending), for_s + GRACE_S)
        return await _answer(receiver, Bins)


def _sender(path: MeasuredPath, end: str, *options: str) -> list[str]:
    address, port = path.target
    return path.at_sender(_program(end, address, port, options))


def _program(end: str, address: str, port: int, options: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "netsim.measure", end, address, str(port), *options]


@asynccontextmanager
async def _receiving(
    path: MeasuredPath, end: str, *options: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    address, port = path.receiver
    command = path.at_receiver(_program(end, address, port, options))
    async with _running(command) as receiver:
        assert receiver.stdout is not None  # noqa: S101 - a pipe was asked for
        heard = await asyncio.wait_for(receiver.stdout.readline(), START_S)
        if heard != b"ready\n":
            what = f"the measuring end could not listen at {address}:{port}"
            raise NetsimError(what, "see its words on standard error; is the port taken?")
        yield receiver


@asynccontextmanager
async def _running(command: Sequence[str]) -> AsyncIterator[asyncio.subprocess.Process]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, limit=LONGEST_LINE_BYTES)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _run(command: Sequence[str], limit_s: float) -> bytes:
    async with _running(command) as process:
        assert process.stdout is not None  # noqa: S101 - a pipe was asked for
        line = await asyncio.wait_for(process.stdout.readline(), limit_s)
        if not line:
            what = f"the measuring end ended without a result: {' '.join(command)}"
            raise NetsimError(what, "see its words on standard error")
        return line


async def _answer(process: asyncio.subprocess.Process, kind: type[Found]) -> Found:
    assert process.stdout is not None  # noqa: S101 - a pipe was asked for
    line = await asyncio.wait_for(process.stdout.readline(), GRACE_S)
    return msgspec.json.decode(line, type=kind)
