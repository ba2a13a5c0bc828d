"""A machine that sends or fetches, spawned by `benchmarks.bulk`: a line on stdout when it is ready,
another when it has moved everything after a line came on stdin.
"""

import asyncio
import socket
import ssl
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec
from yarl import URL

from hypergpu.line_limits import PIECE_BYTES, StallTimeout
from hypergpu.part_file import Span
from hypergpu.process import raise_descriptor_limit
from hypergpu.units import Milliseconds
from hypergpu.v1 import tensor_pb2
from hypergpu.wire.bulk import BulkClient, client_context
from hypergpu.wire.bulk_ranges import FileRange

STEP_BYTES = 1 << 20
_TIMEOUT_MS = Milliseconds(60_000)


class TlsPaths(msgspec.Struct, frozen=True):
    """A client's certificate, its key, and the CA."""

    authority: str
    certificate: str
    key: str


class BulkWork(msgspec.Struct, frozen=True):
    """What to move, how often. First line on stdin."""

    kind: str
    """``put`` or ``get`` by HTTP, ``stall``, ``raw`` over a socket, ``gloo``."""
    path: str
    """File to send; of gloo the file at which the two meet."""
    size_bytes: int
    times: int
    url: str = ""
    authorization: str = ""
    port: int = 0
    tls: TlsPaths | None = None


async def move_by_http(work: BulkWork, context: ssl.SSLContext | None) -> None:
    """Send or fetch the whole again and again, over one connection."""
    if context is not None and work.tls is not None:
        context.load_cert_chain(work.tls.certificate, work.tls.key)
    client = BulkClient("127.0.0.1", None if context is None else lambda: context)
    ticket_range = tensor_pb2.TicketRange(
        url=work.url, end=work.size_bytes, headers={"Authorization": work.authorization}
    )
    stall = StallTimeout(PIECE_BYTES, _TIMEOUT_MS)
    await asyncio.to_thread(wait_for_start)
    for _ in range(work.times):
        if work.kind == "put":
            source = FileRange(Path(work.path), Span(0, work.size_bytes))
            await client.send(ticket_range, source, stall, lambda _: None)
            continue
        async with client.open(ticket_range, Span(0, work.size_bytes), stall) as pieces:
            async for _piece in pieces:
                pass
    await client.close()


async def stall(work: BulkWork) -> None:
    """Begin many requests that send nothing, again and again; say how long the first ones lived."""
    raise_descriptor_limit()
    url = URL(work.url)
    head = (
        f"PUT {url.path} HTTP/1.1\r\nHost: x\r\nContent-Length: {work.size_bytes}\r\n"
        f"Authorization: {work.authorization}\r\n"
        f"Content-Range: bytes 0-{work.size_bytes - 1}/*\r\n\r\n"
    )

    async def begin() -> float:
        reader, writer = await asyncio.open_connection("127.0.0.1", url.port)
        writer.write(head.encode())
        began_s = time.monotonic()
        with suppress(ConnectionError):
            await reader.read()
        writer.close()
        return time.monotonic() - began_s

    await asyncio.to_thread(wait_for_start)
    while True:
        lives_s = await asyncio.gather(*(begin() for _ in range(work.times)))
        sys.stdout.write(f"{max(lives_s)}\n")
        sys.stdout.flush()


def send_raw(work: BulkWork) -> None:
    """Send a file's bytes over a socket, from memory; a byte comes back for each time."""
    content = memoryview(Path(work.path).read_bytes())
    plain = socket.create_connection(("127.0.0.1", work.port))
    link = plain
    if work.tls is not None:
        context = client_context(Path(work.tls.authority).read_text())
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        link = context.wrap_socket(plain)
    wait_for_start()
    for _ in range(work.times):
        for start in range(0, work.size_bytes, STEP_BYTES):
            link.sendall(content[start : start + STEP_BYTES])
        link.recv(1)
    link.close()


def send_gloo(work: BulkWork) -> None:
    """Send a tensor to the other process of a group of two."""
    import torch
    from torch import distributed

    distributed.init_process_group("gloo", f"file://{work.path}", rank=1, world_size=2)
    tensor = torch.ones(work.size_bytes // 4)
    distributed.barrier()
    wait_for_start()
    for _ in range(work.times):
        distributed.send(tensor, 0)
    distributed.barrier()
    distributed.destroy_process_group()


def wait_for_start() -> None:
    """Say that all is prepared, and wait for the word."""
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()


def main() -> None:
    """Do what the first line says."""
    work = msgspec.json.decode(sys.stdin.readline(), type=BulkWork)
    if work.kind == "stall":
        asyncio.run(stall(work))
    elif work.kind in {"put", "get"}:
        context = None if work.tls is None else client_context(Path(work.tls.authority).read_text())
        asyncio.run(move_by_http(work, context))
    else:
        {"raw": send_raw, "gloo": send_gloo}[work.kind](work)
    sys.stdout.write("done\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
