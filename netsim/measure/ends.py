"""The two ends of each measurement, as programs that can run in different network namespaces.

Receivers say ``ready`` when they can be reached, so that nobody has to wait and hope.
"""

import os
import socket
import struct
import sys
import time
from contextlib import suppress

import msgspec

from netsim.measure.arrivals import NS_PER_S, Arrivals

HEADER = struct.Struct("!QQ")
"""Every probe's number and the instant at which it was sent."""
END = (1 << 64) - 1
"""The number of the datagrams that say how many probes there were."""
OFFERED = struct.Struct("!Q")
"""Follows the header of those: the count."""
END_REPEATS = 20
END_GAP_S = 0.02
BUFFER_BYTES = 32 << 20
CHUNK = bytes(256 << 10)
BIN_NS = 100_000_000
SPIN_NS = 150_000


class Bins(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream brought, in tenths of a second since the first byte."""

    bytes_in_bin: list[int]
    started_ns: int
    ended_ns: int


class Trips(msgspec.Struct, frozen=True, kw_only=True):
    """Times there and back, in order of sending, without those that were lost."""

    sent: int
    trips_ns: list[int]


def collect(address: str, port: int, stall_timeout_s: float) -> Arrivals:
    """Receive probes until the sender says how many there were, or none came for a while."""
    numbers: list[int] = []
    sent_ns: list[int] = []
    received_ns: list[int] = []
    offered = payload_bytes = 0
    with _datagrams(address, port) as listening:
        listening.settimeout(stall_timeout_s)
        ready_ns = time.monotonic_ns()
        ready()
        go_first()
        with suppress(TimeoutError):
            while True:
                datagram = listening.recv(2048)
                now_ns = time.monotonic_ns()
                number, stamp = HEADER.unpack_from(datagram)
                if stamp < ready_ns:
                    continue  # Of a measurement before: it was still under way on a long line.
                if number == END:
                    offered = OFFERED.unpack_from(datagram, HEADER.size)[0]
                    break
                numbers.append(number)
                sent_ns.append(stamp)
                received_ns.append(now_ns)
                payload_bytes = len(datagram)
    return Arrivals(
        offered=offered or max(numbers, default=0) + 1,
        payload_bytes=payload_bytes,
        numbers=numbers,
        sent_ns=sent_ns,
        received_ns=received_ns,
    )


def probe(address: str, port: int, *, count: int, gap_ns: int, payload_bytes: int) -> int:
    """Send numbered probes at an even pace, then their number until somebody has heard it.

    Returns:
        When the first one was sent.
    """
    padding = bytes(payload_bytes - HEADER.size)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sending:
        sending.connect((address, port))
        start_ns = time.monotonic_ns()
        for number in range(count):
            wait_until(start_ns + number * gap_ns)
            sending.send(HEADER.pack(number, time.monotonic_ns()) + padding)
        # Whoever has heard it is gone, and the kernel says so.
        with suppress(ConnectionRefusedError):
            for _ in range(END_REPEATS):
                sending.send(HEADER.pack(END, time.monotonic_ns()) + OFFERED.pack(count))
                time.sleep(END_GAP_S)
    return start_ns


def echo(address: str, port: int, protocol: str) -> None:
    """Send back what comes, until standard input closes."""
    if protocol == "udp":
        with _datagrams(address, port) as listening:
            ready()
            go_first()
            while True:
                datagram, sender = listening.recvfrom(2048)
                listening.sendto(datagram, sender)
    with socket.create_server((address, port)) as listening:
        ready()
        go_first()
        stream, _ = listening.accept()
        with stream:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while heard := stream.recv(2048):
                stream.sendall(heard)


def round_trips(
    address: str, port: int, protocol: str, *, count: int, gap_ns: int, stall_timeout_s: float
) -> Trips:
    """Send a probe, wait for it, and keep the pace; a lost datagram costs the stall timeout."""
    kind = socket.SOCK_DGRAM if protocol == "udp" else socket.SOCK_STREAM
    trips_ns: list[int] = []
    with socket.socket(socket.AF_INET, kind) as sending:
        sending.settimeout(stall_timeout_s)
        sending.connect((address, port))
        if protocol == "tcp":
            sending.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        go_first()
        start_ns = time.monotonic_ns()
        for number in range(count):
            wait_until(start_ns + number * gap_ns)
            sent_ns = time.monotonic_ns()
            sending.send(HEADER.pack(number, sent_ns))
            with suppress(TimeoutError):
                while HEADER.unpack_from(sending.recv(HEADER.size))[0] != number:
                    pass
                trips_ns.append(time.monotonic_ns() - sent_ns)
    return Trips(sent=count, trips_ns=trips_ns)


def swallow(address: str, port: int, stall_timeout_s: float) -> Bins:
    """Take one stream to its end, or until nothing came for a while."""
    bins: list[int] = []
    with socket.create_server((address, port)) as listening:
        listening.settimeout(stall_timeout_s)
        ready()
        stream, _ = listening.accept()
    room = bytearray(1 << 20)
    started_ns = 0
    # The sender ends with a reset, so that nothing trickles in after its time.
    with stream, suppress(ConnectionResetError, TimeoutError):
        stream.settimeout(stall_timeout_s)
        while size := stream.recv_into(room):
            started_ns = started_ns or time.monotonic_ns()
            place = (time.monotonic_ns() - started_ns) // BIN_NS
            bins.extend([0] * (place + 1 - len(bins)))
            bins[place] += size
    return Bins(bytes_in_bin=bins, started_ns=started_ns, ended_ns=time.monotonic_ns())


def pour(address: str, port: int, *, for_s: float, congestion_control: str) -> None:
    """Fill one stream for a while; an empty congestion control is the route's."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as stream:
        stream.connect((address, port))
        if congestion_control:
            # Before the connection is there, the route's would take its place.
            named = congestion_control.encode()
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, named)
        end_ns = time.monotonic_ns() + round(for_s * NS_PER_S)
        stream.settimeout(0.2)
        while time.monotonic_ns() < end_ns:
            with suppress(TimeoutError):
                stream.send(CHUNK)
        # What is still in the buffer would arrive long after the time is up.
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def wait_until(due_ns: int) -> None:
    """Return at an instant, to some microseconds: sleep for most of it, then watch the clock."""
    while (left_ns := due_ns - time.monotonic_ns()) > 0:
        if left_ns > SPIN_NS:
            time.sleep((left_ns - SPIN_NS) / NS_PER_S)


def go_first() -> None:
    """Measure what the path does and not how long this process waits for a core."""
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def ready() -> None:
    """Tell who started this program that it can be reached."""
    sys.stdout.write("ready\n")
    sys.stdout.flush()


def _datagrams(address: str, port: int) -> socket.socket:
    listening = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    so_rcvbufforce = 33
    try:
        listening.setsockopt(socket.SOL_SOCKET, so_rcvbufforce, BUFFER_BYTES)
    except PermissionError:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    listening.bind((address, port))
    return listening
