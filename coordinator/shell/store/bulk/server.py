"""A bulk process: takes and serves ranges for whoever holds a ticket, until its stdin is closed."""

import asyncio
import os
import socket
import ssl
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import structlog
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler

from coordinator.shell.store.blobs.store import blob_path, open_locked
from coordinator.shell.store.bulk.messages import (
    BulkStart,
    BytesServed,
    Certificates,
    CloseUpload,
    FromProcess,
    ToProcess,
    UpdateAnswered,
    UpdateLetIn,
    UploadClosed,
)
from coordinator.shell.store.bulk.receiving import UploadReceiver
from coordinator.shell.store.bulk.tickets import Claims, claims_in
from coordinator.shell.store.bulk.update_requests import UpdateRequests
from hypergpu.clock import monotonic_ms
from hypergpu.crypto import is_node_id
from hypergpu.frames import frame, next_frame
from hypergpu.ids import Digest, JobId
from hypergpu.part_file import Span
from hypergpu.units import Bytes
from hypergpu.wire.update_requests import NODE_HEADER, OFFER_BYTES_MAX, UPDATE_PATH

log = structlog.get_logger()

Say = Callable[[FromProcess], None]

_FIRST_REQUEST_S = 8.0
"""A connection without a request that has a good ticket is closed after so long."""
STRANGERS_MAX = 1024
"""Connections without such a request; with one more the oldest is closed."""
_IDLE_S = 120.0
"""A round is seldom further from the next: connections are kept for so long between requests."""
_COPY_BYTES = 512 << 10
_LINGER_S = 1.0
"""Time for which bytes after a refusal are read, so that the refusal is seen."""
_REASON_LENGTH_MAX = 200
_BUFFER_BYTES = 256 << 10
"""Most bytes of a connection that wait in memory, twice."""


_HEADER_LINE_BYTES = 4 * OFFER_BYTES_MAX // 3 + 512
"""Longest line of a header: an offer with the largest other line of ours behind it."""
_HEADER_LINES_MAX = 16
"""A header takes 64 kB at most; ours have a dozen lines."""


_OPTIONS: dict[str, Any] = {
    "max_headers": _HEADER_LINES_MAX,
    "max_field_size": _HEADER_LINE_BYTES,
    "max_line_size": _HEADER_LINE_BYTES,
    "access_log": None,
    # Bytes are counted and written as they come.
    "auto_decompress": False,
    "keepalive_timeout": _IDLE_S,
    "lingering_time": _LINGER_S,
    "read_bufsize": _BUFFER_BYTES,
}


class _Connection(RequestHandler):
    """One connection, which may be refused before its handshake is over."""

    is_refused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin, or end at once."""
        super().connection_made(transport)
        if self.is_refused and isinstance(transport, asyncio.WriteTransport):
            transport.abort()

    def log_exception(self, *args: Any, **details: Any) -> None:
        """Log a request that the server could not answer: a stranger's fault in one line."""
        error = details.get("exc_info")
        if isinstance(error, HttpProcessingError):
            peer = self.transport.get_extra_info("peername") if self.transport else None
            host = peer[0] if peer else ""
            why = (error.message.splitlines() or [""])[0][:_REASON_LENGTH_MAX]
            log.info("a request that is no HTTP was refused", peer=host, why=why)
        elif isinstance(error, ConnectionError):
            log.info("a caller went away in the middle of an answer")
        else:
            log.error("a request broke", exc_info=error)


class BulkServer:
    """Serves one listening socket."""

    def __init__(self, start: BulkStart, say: Say) -> None:
        """``say`` tells the coordinator something."""
        self._say = say
        self._secret = start.secret
        self._folder = Path(start.blobs)
        self._uploads = UploadReceiver(Path(start.uploads), say)
        self._updates = UpdateRequests(self._uploads, say)
        self._is_plaintext = start.certificates is None
        self._context = None if start.certificates is None else tls_context(start.certificates)
        self._socket = socket.socket(fileno=start.listener)
        self._server = web.Server(self._answer)
        self._strangers: dict[object, _Connection] = {}
        """Connections that showed no good ticket, the oldest first."""

    async def open(self) -> None:
        """Take connections from now on."""
        loop = asyncio.get_running_loop()
        handshake_s = None if self._context is None else _FIRST_REQUEST_S
        await loop.create_server(
            self._begin_connection,
            sock=self._socket,
            ssl=self._context,
            ssl_handshake_timeout=handshake_s,
            backlog=socket.SOMAXCONN,
        )

    def hear(self, message: CloseUpload | UpdateLetIn | UpdateAnswered) -> None:
        """Hear the coordinator: end what is sent to an upload, or take an answer."""
        if not isinstance(message, CloseUpload):
            self._updates.take(message)
            return
        self._uploads.close(message.name)
        self._say(UploadClosed(message.number))

    def _begin_connection(self) -> RequestHandler:
        handler = _Connection(self._server, loop=asyncio.get_running_loop(), **_OPTIONS)
        if len(self._strangers) >= STRANGERS_MAX:
            self._close_stranger(next(iter(self._strangers)))
        self._strangers[handler] = handler
        asyncio.get_running_loop().call_later(_FIRST_REQUEST_S, self._close_stranger, handler)
        return handler

    def _close_stranger(self, connection: object) -> None:
        if (handler := self._strangers.pop(connection, None)) is not None:
            handler.is_refused = True
            handler.force_close()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if (request.method, request.path) == ("PUT", UPDATE_PATH):
            return await self._answer_update(request)
        header = request.headers.get("Authorization", "")
        claims = claims_in(header, self._secret, monotonic_ms())
        if claims is None or not self._is_bearer(request, claims):
            return web.Response(status=403, text="no ticket for this, or not any more")
        self._strangers.pop(request.protocol, None)
        if claims.method == "PUT":
            return await self._uploads.receive(request, claims)
        span = asked_span(request)
        if span is None or span.end > claims.size_bytes:
            text = f"name a range within bytes 0 to {claims.size_bytes}"
            return web.Response(status=416, text=text)
        return await self._send(request, claims, span)

    async def _answer_update(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a node, which the authority's certificate names; the coordinator judges it."""
        node = request.headers.get(NODE_HEADER, "")
        if not self._is_plaintext:
            node = _certificate_name(request)
        if not is_node_id(node):
            return web.Response(status=403, text="updates come from nodes, with their certificate")
        self._strangers.pop(request.protocol, None)
        return await self._updates.receive(request, node)

    def _is_bearer(self, request: web.BaseRequest, claims: Claims) -> bool:
        if (request.method, request.path) != (claims.method, f"/{claims.name}"):
            return False
        if self._is_plaintext or claims.bearer is None:
            return True
        return _certificate_name(request) == claims.bearer

    async def _send(
        self, request: web.BaseRequest, claims: Claims, span: Span
    ) -> web.StreamResponse:
        path = blob_path(self._folder, Digest(claims.name))
        file = open_locked(path)
        if file is None:
            return web.Response(status=404, text="it was just collected")
        if self._is_plaintext:
            return _BlobResponse(path, file, partial(self._report_served, claims.purpose))
        with file:
            response = await _send_encrypted(request, file.fileno(), span)
        self._report_served(claims.purpose, span.end - span.start)
        return response

    def _report_served(self, purpose: str, size_bytes: int) -> None:
        """Tell of bytes that went to a node for a purpose, if there is one."""
        if purpose and size_bytes:
            self._say(BytesServed(JobId(purpose), Bytes(size_bytes)))


async def _send_encrypted(
    request: web.BaseRequest, descriptor: int, span: Span
) -> web.StreamResponse:
    """Send a range through this process, which encrypts it."""
    response = web.StreamResponse(status=206)
    response.content_length = span.end - span.start
    await response.prepare(request)
    offset = span.start
    while offset < span.end:
        size_bytes = min(_COPY_BYTES, span.end - offset)
        piece = await asyncio.to_thread(os.pread, descriptor, size_bytes, offset)
        await response.write(piece)
        offset += len(piece)
    await response.write_eof()
    return response


class _BlobResponse(web.FileResponse):
    """A range of a blob, which nobody writes over until it is sent. The system copies it."""

    def __init__(self, path: Path, locked: BinaryIO, report: Callable[[int], None]) -> None:
        super().__init__(path)
        self._locked = locked
        self._report = report

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Send it. The server calls this, once."""
        with self._locked:
            try:
                writer = await super().prepare(request)
            except TimeoutError as error:
                raise ConnectionAbortedError("the node takes nothing") from error
        self._report(self.content_length or 0)
        return writer


def asked_span(request: web.BaseRequest) -> Span | None:
    """The range that a request asks for; None: it names none with both ends."""
    try:
        byte_range = request.http_range
        span = Span(byte_range.start, byte_range.stop)
        return span if 0 <= span.start < span.end else None
    except (ValueError, TypeError):
        return None


def _certificate_name(request: web.BaseRequest) -> str:
    """Common name of the client's certificate."""
    subject = (request.get_extra_info("peercert") or {}).get("subject", ())
    return next((value for part in subject for key, value in part if key == "commonName"), "")


def tls_context(certificates: Certificates) -> ssl.SSLContext:
    """A server's context that asks clients for a certificate; users have none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_OPTIONAL
    context.load_verify_locations(cadata=certificates.client_authority.decode())
    # The library reads keys from files only; this one is never on a disk.
    with os.fdopen(os.memfd_create("identity"), "wb") as file:
        file.write(certificates.key + certificates.chain)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context


async def _open_stdout() -> Say:
    """Tell the coordinator by frames on stdout. A coordinator that reads nothing holds up nobody:
    what it has not read waits in memory, which is little for each request.
    """
    loop = asyncio.get_running_loop()
    pipe, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, sys.stdout.buffer)
    return lambda message: pipe.write(frame(msgspec.msgpack.encode(message)))


async def serve() -> None:
    """Serve as the coordinator tells on stdin, until it closes that or dies."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer
    )
    say = await _open_stdout()
    server: BulkServer | None = None
    while (payload := await next_frame(reader)) is not None:
        message = msgspec.msgpack.decode(payload, type=ToProcess)
        if isinstance(message, BulkStart):
            server = BulkServer(message, say)
            await server.open()
        elif server is not None:
            server.hear(message)
