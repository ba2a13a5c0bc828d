"""The two ends of each measurement, as programs, and the delays, losses and rates from arrivals.

Receivers say ``ready`` when they can be reached, so that nobody has to wait and hope.
"""

import math
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import msgspec

NS_PER_S = 10**9
# IPv4 and UDP, which a bottleneck carries too.
HEADER_BYTES = 28
# A probe that took so much longer than the quickest stood in a queue.
WAITED_MS = 10.0


class Arrivals(msgspec.Struct, frozen=True, kw_only=True):
    """Probes of one size that came out of a path, in order of arrival, times by one clock."""

    offered: int
    """Probes sent, numbered from 0."""
    payload_bytes: int
    numbers: Sequence[int]
    sent_ns: Sequence[int]
    received_ns: Sequence[int]

    def delays_ms(self) -> list[float]:
        """Return the one-way delay of each arrival."""
        pairs = zip(self.sent_ns, self.received_ns, strict=True)
        return [(received_ns - sent_ns) / 1e6 for sent_ns, received_ns in pairs]

    def loss(self) -> float:
        """Return the share of probes that never came."""
        return 1 - len(set(self.numbers)) / self.offered

    def burst_packets(self) -> float:
        """Return the mean number of neighbours that were lost together; 0 when none was lost."""
        return mean_run(set(self.numbers), self.offered)

    def bits_per_s(self) -> float:
        """Return the rate at which they came, headers included; 0 for fewer than two."""
        if len(self.numbers) < 2:
            return 0.0
        taken_ns = self.received_ns[-1] - self.received_ns[0]
        return (len(self.numbers) - 1) * self._bits() * NS_PER_S / max(taken_ns, 1)

    def saturated_bits_per_s(self) -> float:
        """Return the rate while probes waited at the bottleneck, headers included; 0 if none did.

        A sender that had to wait for a core leaves the bottleneck idle, which is not its rate.
        """
        delays_ms = self.delays_ms()
        waited_ms = min(delays_ms, default=0.0) + WAITED_MS
        taken_ns = packets = 0
        for place in range(1, len(delays_ms)):
            if delays_ms[place] > waited_ms:
                packets += 1
                taken_ns += self.received_ns[place] - self.received_ns[place - 1]
        return packets * self._bits() * NS_PER_S / taken_ns if taken_ns > 0 else 0.0

    def _bits(self) -> int:
        return (self.payload_bytes + HEADER_BYTES) * 8


def mean_run(present: set[int], count: int) -> float:
    """Return the mean length of the runs of numbers below ``count`` that are not present."""
    runs = missing_count = 0
    was_present = True
    for number in range(count):
        is_present = number in present
        missing_count += not is_present
        runs += was_present and not is_present
        was_present = is_present
    return missing_count / runs if runs else 0.0


def percentile(values: Sequence[float], share: float) -> float:
    """Return the least value that a share in (0, 1] of the values does not exceed."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]


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
STALL_TIMEOUT_S = 10.0


class StreamBins(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a received stream, in tenths of a second since the first one."""

    bytes_in_bin: list[int]
    started_ns: int
    ended_ns: int


class TripTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Times there and back, in order of sending, without those that were lost."""

    trips_ns: list[int]


def collect(address: str, port: int) -> Arrivals:
    """Receive probes until the sender says how many there were, or none came for a while."""
    numbers: list[int] = []
    sent_ns: list[int] = []
    received_ns: list[int] = []
    offered_packets = payload_bytes = 0
    with _datagrams(address, port) as receiver:
        receiver.settimeout(STALL_TIMEOUT_S)
        ready_ns = time.monotonic_ns()
        announce_ready()
        raise_priority()
        with suppress(TimeoutError):
            while True:
                datagram = receiver.recv(2048)
                now_ns = time.monotonic_ns()
                number, stamp = HEADER.unpack_from(datagram)
                if stamp < ready_ns:
                    continue  # It is late, from an earlier measurement over a long line.
                if number == END:
                    offered_packets = OFFERED.unpack_from(datagram, HEADER.size)[0]
                    break
                numbers.append(number)
                sent_ns.append(stamp)
                received_ns.append(now_ns)
                payload_bytes = len(datagram)
    return Arrivals(
        offered=offered_packets or max(numbers, default=0) + 1,
        payload_bytes=payload_bytes,
        numbers=numbers,
        sent_ns=sent_ns,
        received_ns=received_ns,
    )


def probe(address: str, port: int, *, count: int, gap_ns: int, payload_bytes: int) -> int:
    """Send numbered probes at an even pace, then their number until the receiver has it.

    Returns:
        When the first one was sent.
    """
    padding = bytes(payload_bytes - HEADER.size)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.connect((address, port))
        start_ns = time.monotonic_ns()
        for number in range(count):
            wait_until(start_ns + number * gap_ns)
            sender.send(HEADER.pack(number, time.monotonic_ns()) + padding)
        # A receiver that has it is gone, and the kernel says so.
        with suppress(ConnectionRefusedError):
            for _ in range(END_REPEATS):
                sender.send(HEADER.pack(END, time.monotonic_ns()) + OFFERED.pack(count))
                time.sleep(END_GAP_S)
    return start_ns


def echo(address: str, port: int) -> None:
    """Send back what one TCP connection brings, until it ends."""
    with socket.create_server((address, port)) as listener:
        announce_ready()
        raise_priority()
        stream, _ = listener.accept()
        with stream:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while chunk := stream.recv(2048):
                stream.sendall(chunk)


def round_trips(address: str, port: int, *, count: int, gap_ns: int) -> TripTimes:
    """Send a probe over TCP, wait for its echo, and keep the pace."""
    trips_ns: list[int] = []
    with socket.create_connection((address, port), STALL_TIMEOUT_S) as stream:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raise_priority()
        start_ns = time.monotonic_ns()
        for number in range(count):
            wait_until(start_ns + number * gap_ns)
            sent_ns = time.monotonic_ns()
            stream.send(HEADER.pack(number, sent_ns))
            with suppress(TimeoutError):
                while HEADER.unpack_from(stream.recv(HEADER.size))[0] != number:
                    pass
                trips_ns.append(time.monotonic_ns() - sent_ns)
    return TripTimes(trips_ns=trips_ns)


def receive_stream(address: str, port: int) -> StreamBins:
    """Receive one stream to its end, or until nothing came for a while."""
    bins: list[int] = []
    with socket.create_server((address, port)) as listener:
        listener.settimeout(STALL_TIMEOUT_S)
        announce_ready()
        stream, _ = listener.accept()
    buffer = bytearray(1 << 20)
    started_ns = 0
    # The sender ends with a reset, so that nothing trickles in after its time.
    with stream, suppress(ConnectionResetError, TimeoutError):
        stream.settimeout(STALL_TIMEOUT_S)
        while size := stream.recv_into(buffer):
            started_ns = started_ns or time.monotonic_ns()
            place = (time.monotonic_ns() - started_ns) // BIN_NS
            bins.extend([0] * (place + 1 - len(bins)))
            bins[place] += size
    return StreamBins(bytes_in_bin=bins, started_ns=started_ns, ended_ns=time.monotonic_ns())


def send_stream(address: str, port: int, *, for_s: float, congestion_control: str) -> None:
    """Fill one stream for a while; without a congestion control the route's is used."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as stream:
        stream.connect((address, port))
        if congestion_control:
            # Set before connecting, the route's would take its place.
            name = congestion_control.encode()
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
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


def raise_priority() -> None:
    """Measure what the path does and not how long this process waits for a core."""
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def announce_ready() -> None:
    """Tell the program that started this one that it can be reached."""
    sys.stdout.write("ready\n")
    sys.stdout.flush()


def _datagrams(address: str, port: int) -> socket.socket:
    receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    so_rcvbufforce = 33
    try:
        receiver.setsockopt(socket.SOL_SOCKET, so_rcvbufforce, BUFFER_BYTES)
    except PermissionError:
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    receiver.bind((address, port))
    return receiver


ENDS: Mapping[str, Callable[..., object]] = {
    end.__name__: end for end in (collect, probe, echo, round_trips, receive_stream, send_stream)
}
"""Ends by name."""
