"""Clients of the page's feed in a process of their own: some read all, some never read.

Says a line when all are there, then reads until its stdin ends, and says what each reader got.
"""

import asyncio
import socket
import sys
from urllib.parse import urlsplit

import msgspec
import websockets


class ClientsReport(msgspec.Struct):
    """What the readers got."""

    readers: int
    received_bytes: int
    """Sum over all readers, without their first snapshot."""


class ReaderTotals:
    """Counts over all readers."""

    def __init__(self) -> None:
        self.received_bytes = 0
        self.started = 0

    async def read(self, address: str, headers: dict[str, str]) -> None:
        """Follow the feed until cancelled."""
        options = {"additional_headers": headers, "max_size": None, "proxy": None}
        async with websockets.connect(address, **options) as connection:  # type: ignore[arg-type]
            await connection.recv(decode=False)
            await connection.recv(decode=False)
            self.started += 1
            async for frame in connection:
                self.received_bytes += len(frame)


def silent_socket(address: str, headers: dict[str, str]) -> socket.socket:
    """A connection that asks for the feed and never reads it."""
    parts = urlsplit(address)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((parts.hostname, parts.port))
    lines = [
        *("GET /feed HTTP/1.1", f"Host: {parts.netloc}"),
        *(f"{name}: {value}" for name, value in headers.items()),
        *("Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13"),
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    ]
    client.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
    return client


async def run_clients(address: str, token: str, readers: int, silent: int) -> ClientsReport:
    """Run the clients until stdin ends."""
    headers = {"Authorization": f"Bearer {token}"}
    totals = ReaderTotals()
    tasks = [asyncio.create_task(totals.read(address, headers)) for _ in range(readers)]
    sockets = [await asyncio.to_thread(silent_socket, address, headers) for _ in range(silent)]
    while totals.started < readers:  # noqa: ASYNC110 - looked at a few times, once
        await asyncio.sleep(0.05)
    totals.received_bytes = 0
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.readline)
    report = ClientsReport(readers, totals.received_bytes)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for each in sockets:
        each.close()
    return report


def main() -> None:
    """Run as a program."""
    address, token, readers, silent = sys.argv[1:]
    report = asyncio.run(run_clients(address, token, int(readers), int(silent)))
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n")


if __name__ == "__main__":
    main()
