"""The embedded store: real bulk processes over a folder of blobs."""

import asyncio
import signal
import socket
import ssl
import zlib
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import aiohttp
import msgspec
import psutil
import pytest
from yarl import URL

from benchmarks.ours.warm import changed_environment
from coordinator.shell.nodes.identity.authority import Authority
from coordinator.shell.store.blobs.store import BlobStore
from coordinator.shell.store.blobs.upload_store import UploadStore, upload_name
from coordinator.shell.store.blobs.writing import Space
from coordinator.shell.store.bulk.embedded import EmbeddedStore
from coordinator.shell.store.bulk.messages import BytesReceived, BytesServed, Certificates
from coordinator.shell.store.bulk.server import STRANGERS_MAX
from coordinator.shell.store.bulk.tickets import Claims, authorization, claims_in
from gpu_node.shell.folder.state import StatePaths, certificate_request_pem, tls_key_pem
from hypergpu.blobs import BlobRef
from hypergpu.clock import unix_s
from hypergpu.digests import digest_of
from hypergpu.ids import JobId, NodeId
from hypergpu.line_limits import PIECE_BYTES, StallTimeout
from hypergpu.part_file import Span
from hypergpu.units import Bytes, Milliseconds
from hypergpu.v1 import tensor_pb2
from hypergpu.wire.authority import TLS_NAME
from hypergpu.wire.bulk import BulkClient, client_context
from hypergpu.wire.bulk_ranges import BulkBrokenError
from tests.node_client import get_range, put_range
from tests.warm_workers import warm_variables

NODE = NodeId("0x" + "a1" * 20)
OTHER = NodeId("0x" + "b2" * 20)
CONTENT = bytes(range(256)) * 4096
SECRET = bytes(32)
UPDATE = CONTENT[::-1]
FRESH = BlobRef(digest_of(UPDATE), Bytes(len(UPDATE)))
NAME = upload_name("an update", owner="a node")


def patience() -> StallTimeout:
    return StallTimeout(PIECE_BYTES, Milliseconds(20_000))


class StoreKit:
    """A store that serves one blob, and what it says that it served."""

    def __init__(self, folder: Path) -> None:
        self.blobs = BlobStore(folder, Space(folder, 0))
        self.blob = self.blobs.put(CONTENT)
        self.served: asyncio.Queue[tuple[JobId, Bytes]] = asyncio.Queue()
        self.received: asyncio.Queue[BytesReceived] = asyncio.Queue()
        self.uploads = UploadStore(folder, self.blobs, self.blobs.space)
        self.store = EmbeddedStore(folder, self.uploads, self._hear)

    def _hear(self, moved: BytesServed | BytesReceived) -> None:
        if isinstance(moved, BytesServed):
            self.served.put_nowait((moved.purpose, moved.size_bytes))
        else:
            self.received.put_nowait(moved)

    async def upload(self, node: NodeId | None = NODE) -> tensor_pb2.TicketRange:
        """A good ticket for what is missing of the upload."""
        upload = self.uploads.open(NAME, FRESH)
        return (await self.store.upload_ticket(node, upload)).ranges[0]

    def missing(self) -> list[tuple[int, int]]:
        return [(start, end) for start, end in self.uploads.open(NAME, FRESH).missing]

    async def ticket(self) -> tensor_pb2.TicketRange:
        """A good ticket's only range."""
        return (await self.store.ticket(NODE, self.blob, "job-000000000001")).ranges[0]


@asynccontextmanager
async def serve_store(
    folder: Path, certificates: Certificates | None = None, *, is_forked: bool = True
) -> AsyncIterator[StoreKit]:
    """Serve on loopback, by forks of a process that has their imports; signals reach others."""
    kit = StoreKit(folder)
    await kit.store.bind("127.0.0.1", 0, certificates)
    with changed_environment(warm_variables() if is_forked else {}):
        store_task = asyncio.create_task(kit.store.run())
        try:
            yield kit
        finally:
            store_task.cancel()
            await asyncio.wait([store_task])


@pytest.fixture
async def kit(tmp_path: Path) -> AsyncIterator[StoreKit]:
    async with serve_store(tmp_path) as store_kit:
        yield store_kit


@pytest.fixture
async def unforked_kit(tmp_path: Path) -> AsyncIterator[StoreKit]:
    """A store whose processes a test signals or measures."""
    async with serve_store(tmp_path, is_forked=False) as store_kit:
        yield store_kit


async def test_ranges_of_a_blob_are_served_and_counted(kit: StoreKit) -> None:
    for start, end in ((0, len(CONTENT)), (17, 18), (300_000, 900_001)):
        assert await get_range(await kit.ticket(), start, end) == (206, CONTENT[start:end])
        assert await kit.served.get() == ("job-000000000001", end - start)


async def test_ranges_follow_each_other_over_one_connection(kit: StoreKit) -> None:
    ticket = await kit.ticket()
    reader, writer = await asyncio.open_connection("127.0.0.1", kit.store.port)
    for start, end in ((0, 5), (300_000, 700_000), (17, 18)):
        head = f"GET /{kit.blob.digest} HTTP/1.1\r\nHost: x\r\nRange: bytes={start}-{end - 1}\r\n"
        header_lines = f"Authorization: {ticket.headers['Authorization']}\r\n\r\n"
        writer.write((head + header_lines).encode())
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 206")
        assert await reader.readexactly(end - start) == CONTENT[start:end]
    writer.close()


@pytest.mark.parametrize(
    ("start", "end"),
    [(5, 5), (5, 4), (0, len(CONTENT) + 1), (len(CONTENT), len(CONTENT) + 9), (1 << 70, 1 << 71)],
)
async def test_a_range_outside_is_refused(kit: StoreKit, start: int, end: int) -> None:
    status, _ = await get_range(await kit.ticket(), start, end)
    assert status == 416


async def test_a_ticket_is_for_one_blob_and_one_method(kit: StoreKit) -> None:
    other = await kit.ticket()
    other.url = other.url.replace(kit.blob.digest, kit.blobs.put(b"other").digest)
    assert (await get_range(other, 0, 1))[0] == 403
    assert (await get_range(await kit.ticket(), 0, 1, "PUT"))[0] == 403
    none = tensor_pb2.TicketRange(url=(await kit.ticket()).url)
    assert (await get_range(none, 0, 1))[0] == 403


def test_a_ticket_that_is_altered_forged_or_too_old_says_nothing() -> None:
    claims = Claims(
        method="GET",
        name=digest_of(CONTENT),
        size_bytes=Bytes(9),
        bearer=NODE,
        purpose="",
        expires_ms=Milliseconds(1000),
    )
    good = authorization(claims, SECRET)
    assert claims_in(good, SECRET, Milliseconds(999)) == claims
    assert claims_in(good, SECRET, Milliseconds(1000)) is None
    assert claims_in(good, b"x" * 32, Milliseconds(0)) is None
    altered_header = authorization(msgspec.structs.replace(claims, bearer=OTHER), b"x" * 32)
    for bad in (
        altered_header,
        good[:-4],
        good + "A" * 2000,
        good.replace("Ticket ", "Ticket é"),
        "",
    ):
        assert claims_in(bad, SECRET, Milliseconds(0)) is None


async def test_a_blob_that_was_collected_is_no_longer_served(kit: StoreKit) -> None:
    collected_blob = kit.blobs.put(b"gone", keep_s=-1)
    ticket = (await kit.store.ticket(NODE, collected_blob, "")).ranges[0]
    kit.blobs.collect(frozenset())
    assert (await get_range(ticket, 0, 4))[0] == 404


async def test_a_blob_is_not_written_over_while_it_is_sent(tmp_path: Path) -> None:
    async with serve_store(tmp_path) as kit:
        large = kit.blobs.put(bytes(64 << 20), keep_s=-1)
        ticket = (await kit.store.ticket(NODE, large, "")).ranges[0]
        client = BulkClient("127.0.0.1", None)
        async with client.open(ticket, Span(0, large.size_bytes), patience()) as pieces:
            left_bytes = large.size_bytes - len(await anext(pieces))
            kit.blobs.collect(frozenset())
            assert not kit.blobs.reuse(tmp_path / "reused", large.size_bytes)
            async for piece in pieces:
                left_bytes -= len(piece)
            assert not left_bytes
        await client.close()
        again = kit.blobs.put(bytes(64 << 20), keep_s=-1)
        kit.blobs.collect(frozenset())
        assert kit.blobs.reuse(tmp_path / "reused", again.size_bytes)


async def test_a_killed_process_is_started_again_and_loses_nothing(unforked_kit: StoreKit) -> None:
    ticket = await unforked_kit.ticket()
    assert (await get_range(ticket, 0, 4))[0] == 206
    for process in tuple(unforked_kit.store.processes):
        process.kill()
        await process.wait()
    # Whoever dials while none runs waits in the backlog of the port.
    assert await get_range(ticket, 0, 4) == (206, CONTENT[:4])


async def test_a_connection_that_shows_no_ticket_is_closed(kit: StoreKit) -> None:
    connections = [await asyncio.open_connection("127.0.0.1", kit.store.port) for _ in range(20)]
    connections[0][1].write(b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: ")
    async with asyncio.timeout(120):
        for reader, writer in connections:
            await reader.read()
            writer.close()


async def test_only_the_node_of_a_ticket_may_show_it(tmp_path: Path) -> None:
    authority = Authority.open(tmp_path / "identity", unix_s())
    identity = authority.server_identity(["127.0.0.1"], unix_s())
    certificates = Certificates(identity.chain_pem, identity.private_key_pem, authority.pem)
    async with serve_store(tmp_path, certificates) as kit:
        for node, is_served in ((NODE, True), (OTHER, False)):
            client = _client(tmp_path / node, authority, node)
            response = client.open(await kit.ticket(), Span(0, len(CONTENT)), patience())
            if is_served:
                async with response as pieces:
                    assert b"".join([piece async for piece in pieces]) == CONTENT
            else:
                with pytest.raises(BulkBrokenError, match="403"):
                    await response.__aenter__()
            await client.close()
        user = BulkClient("127.0.0.1", partial(client_context, authority.pem.decode("ascii")))
        with pytest.raises(BulkBrokenError, match="403"):
            await user.open(await kit.ticket(), Span(0, 1), patience()).__aenter__()
        ticket = await kit.store.ticket(None, kit.blob)
        async with user.open(ticket.ranges[0], Span(0, 5), patience()) as pieces:
            assert b"".join([piece async for piece in pieces]) == CONTENT[:5]
        await user.close()


def _client(folder: Path, authority: Authority, node: NodeId) -> BulkClient:
    """A node's client with a certificate of its own."""
    paths = StatePaths(folder)
    paths.authority.parent.mkdir(parents=True, exist_ok=True)
    tls_key_pem(paths)
    certificate = authority.issue(node, certificate_request_pem(paths, node), unix_s())
    paths.certificate.write_bytes(certificate.pem)
    context = client_context(authority.pem.decode("ascii"))
    context.load_cert_chain(paths.certificate, paths.tls_key)
    return BulkClient("127.0.0.1", lambda: context)


async def test_ranges_are_received_in_any_order_and_counted(kit: StoreKit) -> None:
    ticket = await kit.upload()
    spans = [(700_000, len(UPDATE)), (0, 10), (10, 700_001)]
    for start, end in spans:
        assert await put_range(ticket, start, UPDATE[start:end]) == (204, "")
    assert kit.missing() == []
    sizes: dict[int, int] = {}
    while not kit.received.empty():
        each = kit.received.get_nowait()
        sizes[each.request] = sizes.get(each.request, 0) + each.size_bytes
        assert each.sender == NODE
    assert sorted(sizes.values()) == sorted(end - start for start, end in spans)
    sealed_path = kit.uploads.seal(NAME, FRESH)
    await kit.store.close_upload(NAME)
    kit.uploads.finish(sealed_path, FRESH)
    assert kit.blobs.find(FRESH.digest) == FRESH


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Content-Range": "bytes 0-9"},
        {"Content-Range": f"bytes 0-{len(UPDATE)}/*"},
        {"Content-Range": "bytes 9-0/*"},
        {"Content-Range": "bytes 0-10/*"},
        {"Content-Range": "bytes -1-8/*"},
        {"Content-Range": f"bytes {1 << 70}-{1 << 71}/*"},
    ],
)
async def test_a_range_that_is_not_sent_as_it_is_named_is_refused(
    kit: StoreKit, headers: dict[str, str]
) -> None:
    ticket = await kit.upload()
    url = URL(ticket.url).with_host("127.0.0.1")
    async with (
        aiohttp.ClientSession() as session,
        session.put(url, data=bytes(10), headers={**ticket.headers, **headers}) as response,
    ):
        assert response.status == 416
    assert kit.missing() == [(0, len(UPDATE))]


async def test_a_compressed_body_is_taken_as_the_bytes_it_is(kit: StoreKit) -> None:
    ticket, body = await kit.upload(), zlib.compress(bytes(len(UPDATE)))
    url = URL(ticket.url).with_host("127.0.0.1")
    span = {"Content-Range": f"bytes 0-{len(body) - 1}/*", "Content-Encoding": "deflate"}
    async with (
        aiohttp.ClientSession() as session,
        session.put(url, data=body, headers={**ticket.headers, **span}, compress=False) as response,
    ):
        assert response.status == 204
    assert kit.missing() == [(len(body), len(UPDATE))]


async def test_what_came_before_a_break_need_not_come_again(kit: StoreKit) -> None:
    ticket = await kit.upload()
    reader, writer = await asyncio.open_connection("127.0.0.1", kit.store.port)
    head = f"PUT {URL(ticket.url).path} HTTP/1.1\r\nHost: x\r\n"
    header_lines = f"Authorization: {ticket.headers['Authorization']}\r\n"
    span = f"Content-Range: bytes 5-{len(UPDATE) - 1}/*\r\nContent-Length: {len(UPDATE) - 5}\r\n"
    writer.write(f"{head}{header_lines}{span}\r\n".encode() + UPDATE[5:300_000])
    counted_bytes = int((await kit.received.get()).size_bytes)
    assert counted_bytes > 0
    writer.close()
    while not (message := await kit.received.get()).is_last:
        counted_bytes += message.size_bytes
    counted_bytes += message.size_bytes
    assert kit.missing() == [(0, 5), (5 + counted_bytes, len(UPDATE))]
    await reader.read()


async def test_an_upload_that_is_sealed_or_forgotten_is_written_by_nobody(kit: StoreKit) -> None:
    ticket = await kit.upload()
    kit.uploads.forget(kit.uploads.owned_uploads(), keeps=())
    assert (await put_range(ticket, 0, UPDATE))[0] == 404
    ticket = await kit.upload()
    assert (await put_range(ticket, 0, UPDATE))[0] == 204
    kit.uploads.seal(NAME, FRESH)
    await kit.store.close_upload(NAME)
    assert (await put_range(ticket, 0, bytes(len(UPDATE))))[0] == 404


async def test_a_process_that_dies_has_closed_its_uploads(unforked_kit: StoreKit) -> None:
    assert (await put_range(await unforked_kit.upload(), 0, UPDATE))[0] == 204
    for process in tuple(unforked_kit.store.processes):
        process.send_signal(signal.SIGSTOP)
    close_task = asyncio.create_task(unforked_kit.store.close_upload(NAME))
    for process in tuple(unforked_kit.store.processes):
        process.kill()
    await close_task
    assert unforked_kit.missing() == []


async def test_a_process_that_does_not_answer_has_closed_its_uploads_by_its_end(
    unforked_kit: StoreKit,
) -> None:
    assert (await put_range(await unforked_kit.upload(), 0, UPDATE))[0] == 204
    stopped_processes = tuple(unforked_kit.store.processes)
    for process in stopped_processes:
        process.send_signal(signal.SIGSTOP)
    await unforked_kit.store.close_upload(NAME)
    assert [await process.wait() for process in stopped_processes] == [-signal.SIGKILL] * len(
        stopped_processes
    )


async def test_who_is_refused_before_the_handshake_is_over_is_closed_after_it(
    tmp_path: Path,
) -> None:
    authority = Authority.open(tmp_path / "identity", unix_s())
    identity = authority.server_identity(["127.0.0.1"], unix_s())
    certificates = Certificates(identity.chain_pem, identity.private_key_pem, authority.pem)
    context = client_context(authority.pem.decode("ascii"))

    def finish_handshake(opened: socket.socket) -> bytes:
        opened.settimeout(120)
        with context.wrap_socket(opened, server_hostname=TLS_NAME) as secure_socket:
            return secure_socket.recv(1)

    async with serve_store(tmp_path, certificates) as kit:
        with ExitStack() as connections:
            plain_sockets = [
                connections.enter_context(socket.create_connection(("127.0.0.1", kit.store.port)))
                for _ in range(STRANGERS_MAX + 5)
            ]
            for refused_socket in plain_sockets[:5]:
                with suppress(ConnectionError, ssl.SSLEOFError):
                    assert await asyncio.to_thread(finish_handshake, refused_socket) == b""


@pytest.mark.full
async def test_who_reads_nothing_is_hung_up_on(unforked_kit: StoreKit) -> None:
    large = unforked_kit.blobs.put(bytes(64 << 20))
    ticket = (await unforked_kit.store.ticket(NODE, large)).ranges[0]
    url = URL(ticket.url)
    with socket.create_connection(("127.0.0.1", unforked_kit.store.port)) as link:
        head = f"GET {url.path} HTTP/1.1\r\nHost: x\r\nRange: bytes=0-{large.size_bytes - 1}\r\n"
        link.sendall(f"{head}Authorization: {ticket.headers['Authorization']}\r\n\r\n".encode())
        assert await asyncio.to_thread(link.recv, 1)
        # Its limit is 40 s; the system looks now and then.
        while any(
            each.status == psutil.CONN_ESTABLISHED
            for process in unforked_kit.store.processes
            for each in psutil.Process(process.pid).net_connections()
        ):
            await asyncio.to_thread(unforked_kit.blobs.size, large.digest)
