"""Runs inside the guest: measures a link from a node to the coordinator with nothing but sockets.

It stands alone, since the guest has no other file of ours. ``serve`` answers in the coordinator's
namespace. ``ask`` measures from a node's and prints one line: ``measured``, the node's name and
``key=value`` pairs of integers, times in microseconds of the guest's clock.
"""

import select
import socket
import struct
import sys
import time
from pathlib import Path

PORT = 7000
ECHO, PROBE = b"E", b"P"
DOWNLOAD, UPLOAD, REPORT = b"D", b"U", b"R"
MIB = 1 << 20
UPLOAD_BYTES = MIB
ECHOES = 50
ECHO_GAP_S = 0.05
PROBE_GAP_S = 0.001
PROBE_BYTES = 200
QUIET_S = 3.0
REQUEST = struct.Struct("!cI")
STAMP = struct.Struct("!cIQ")
CHUNK_BYTES = 1 << 16


def now_us() -> int:
    """Return the guest's clock, which all of its namespaces share."""
    return time.monotonic_ns() // 1000


def serve(address: str, ready: str) -> None:
    """Answer for ever. The file ``ready`` appears when questions may come."""
    listener = socket.create_server((address, PORT), backlog=16)
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.bind((address, PORT))
    delays_us: dict[int, int] = {}
    Path(ready).touch()
    while True:
        for source in select.select([datagrams, listener], [], [])[0]:
            if source is listener:
                answer(listener.accept()[0], delays_us)
                continue
            packet, sender = datagrams.recvfrom(2048)
            kind, number, sent_us = STAMP.unpack_from(packet)
            if kind == ECHO:
                datagrams.sendto(packet, sender)
            else:
                delays_us.setdefault(number, now_us() - sent_us)


def answer(connection: socket.socket, delays_us: dict[int, int]) -> None:
    """Serve one request on its own connection."""
    with connection:
        kind, count = REQUEST.unpack(received(connection, REQUEST.size))
        if kind == DOWNLOAD:
            connection.sendall(bytes(count))
            connection.recv(1)
        elif kind == UPLOAD:
            drain(connection, count)
            connection.sendall(b"!")
        else:
            # What was never received has the delay zero, which nothing real has.
            connection.sendall(
                struct.pack(f"!{count}Q", *(delays_us.get(i, 0) for i in range(count)))
            )
            delays_us.clear()


def ask(name: str, address: str, probes: int, downloads: str) -> None:
    """Measure and print.

    Args:
        name: Whose link this is.
        address: The coordinator's.
        probes: How many numbered packets are sent up.
        downloads: Sizes in MiB, with commas; each has its own connection.
    """
    results = {**echo(address), **probe(address, probes)}
    for number, size in enumerate(downloads.split(",")):
        results[f"down{number}_us"] = download_us(address, int(size) * MIB)
    results["up0_us"] = upload_us(address, UPLOAD_BYTES)
    print("measured", name, *(f"{key}={value}" for key, value in results.items()), flush=True)  # noqa: T201


def echo(address: str) -> dict[str, int]:
    """Measure the round trip, one datagram at a time."""
    times_us = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        datagrams.connect((address, PORT))
        datagrams.settimeout(QUIET_S)
        for number in range(ECHOES):
            sent_us = now_us()
            datagrams.send(STAMP.pack(ECHO, number, sent_us))
            try:
                while STAMP.unpack(datagrams.recv(2048))[1] != number:
                    pass
                times_us.append(now_us() - sent_us)
            except TimeoutError:
                continue
            time.sleep(ECHO_GAP_S)
    times_us.sort()
    return {
        "rtt_us": sum(times_us) // max(1, len(times_us)),
        "rtt_median_us": times_us[len(times_us) // 2] if times_us else 0,
        "rtt_p99_us": times_us[len(times_us) * 99 // 100] if times_us else 0,
        "echoes": len(times_us),
    }


def probe(address: str, probes: int) -> dict[str, int]:
    """Measure one way's delay, loss and the bursts of the loss."""
    padding = bytes(PROBE_BYTES - STAMP.size)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        datagrams.connect((address, PORT))
        for number in range(probes):
            datagrams.send(STAMP.pack(PROBE, number, now_us()) + padding)
            time.sleep(PROBE_GAP_S)
    time.sleep(QUIET_S)
    with socket.create_connection((address, PORT)) as connection:
        connection.sendall(REQUEST.pack(REPORT, probes))
        delays_us = struct.unpack(f"!{probes}Q", received(connection, 8 * probes))
    arrived = [delay for delay in delays_us if delay]
    mean_us = sum(arrived) // max(1, len(arrived))
    variance = sum((delay - mean_us) ** 2 for delay in arrived) // max(1, len(arrived))
    bursts = sum(
        1 for i, delay in enumerate(delays_us) if not delay and (i == 0 or delays_us[i - 1])
    )
    return {
        "sent": probes,
        "lost": probes - len(arrived),
        "bursts": bursts,
        "delay_us": mean_us,
        "deviation_us": int(variance**0.5),
    }


def download_us(address: str, count: int) -> int:
    """Return the time from the request on a fresh connection to the last byte."""
    with socket.create_connection((address, PORT)) as connection:
        begun_us = now_us()
        connection.sendall(REQUEST.pack(DOWNLOAD, count))
        drain(connection, count)
        taken_us = now_us() - begun_us
        connection.sendall(b"!")
    return taken_us


def upload_us(address: str, count: int) -> int:
    """Return the time from the first byte on a fresh connection to the word that all arrived."""
    with socket.create_connection((address, PORT)) as connection:
        begun_us = now_us()
        connection.sendall(REQUEST.pack(UPLOAD, count))
        connection.sendall(bytes(count))
        received(connection, 1)
        return now_us() - begun_us


def drain(connection: socket.socket, count: int) -> None:
    """Receive and forget."""
    buffer = bytearray(CHUNK_BYTES)
    while count > 0:
        got = connection.recv_into(buffer, min(count, CHUNK_BYTES))
        if not got:
            raise ConnectionError(f"{count} bytes short")
        count -= got


def received(connection: socket.socket, count: int) -> bytes:
    """Receive exactly so many bytes."""
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(count - len(parts), CHUNK_BYTES))
        if not part:
            raise ConnectionError(f"{count - len(parts)} bytes short")
        parts += part
    return bytes(parts)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], sys.argv[3])
    else:
        ask(sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
