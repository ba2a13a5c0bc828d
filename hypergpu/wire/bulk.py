"""Ranges of blobs by HTTP, for tickets that the coordinator gives."""

import asyncio
import errno
import os
import socket
import ssl
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from yarl import URL

from hypergpu.line_limits import PIECE_BYTES, StallTimeout
from hypergpu.part_file import Span
from hypergpu.v1 import tensor_pb2
from hypergpu.wire.authority import TLS_NAME
from hypergpu.wire.bulk_ranges import (
    BulkAbsentError,
    BulkBrokenError,
    BulkRefusedError,
    FileRange,
)
from hypergpu.wire.update_requests import (
    ANSWER_BYTES_MAX,
    ANSWER_TYPE,
    UPDATE_PATH,
    UpdateAnswer,
    answer_in,
    range_text,
)

_IDLE_S = 110.0
"""Unused for so long, connections are closed, before the store does it: a round is seldom further
from the next.
"""
_BUFFER_BYTES = 512 << 10
"""Most bytes of a connection that wait in memory."""
_UNSENT_BYTES = 128 << 10
"""Most bytes of a connection that wait in the system to be sent for the first time."""
_UNACKNOWLEDGED_MS = 40_000
"""A store that acknowledges nothing for so long is gone."""
_STEP_S = 0.2
_STEP_BYTES_MAX = 4 << 20
_COPY_BYTES = 512 << 10
_HELD_BYTES = 4 << 20
"""Most bytes that a system keeps of a connection until they are acknowledged."""
_TEXT_BYTES_MAX = 200


def client_context(authority: str) -> ssl.SSLContext:
    """TLS that trusts a coordinator's CA alone, given as PEM."""
    return ssl.create_default_context(cadata=authority)


class RateLimit:
    """Spreads bytes over time, those of all connections that share it."""

    def __init__(self, bits_per_s: int = 0) -> None:
        """0: no limit."""
        self._bits_per_s = bits_per_s
        self._free_at_s = 0.0

    @property
    def is_set(self) -> bool:
        """Whether there is a limit."""
        return self._bits_per_s > 0

    async def take(self, size_bytes: int) -> None:
        """Wait until so many bytes more may move."""
        if self.is_set:
            now_s = asyncio.get_running_loop().time()
            begin_s = max(self._free_at_s, now_s)
            self._free_at_s = begin_s + 8 * size_bytes / self._bits_per_s
            await asyncio.sleep(self._free_at_s - now_s)


class BulkRates(NamedTuple):
    """Limits that all transfers of a process share."""

    up: RateLimit = RateLimit()
    down: RateLimit = RateLimit()


class UpdateRequest(NamedTuple):
    """One request of an update, as it goes to a bulk port."""

    port: int
    headers: dict[str, str]
    source: FileRange | None
    """None: it asks what is missing."""
    answer_s: float
    """Time that the answer may take once all is sent."""


class BulkClient:
    """Connections to a coordinator's store, made when they are needed and kept for a while."""

    def __init__(
        self,
        host: str,
        make_context: Callable[[], ssl.SSLContext] | None,
        rates: BulkRates | None = None,
    ) -> None:
        """Dial ``host`` wherever a ticket names the coordinator; without a context in plaintext.

        The context is made before the first transfer: that takes longer than a greeting, and most
        streams of idle nodes end without any.
        """
        self._host = host
        self._rates = rates or BulkRates()
        self._make_context = make_context
        self._context: ssl.SSLContext | None = None
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def open(
        self, ranged: tensor_pb2.TicketRange, span: Span, stall: StallTimeout
    ) -> AsyncIterator[AsyncGenerator[bytes]]:
        """Some bytes of a blob, in pieces as they come.

        Raises:
            BulkBrokenError: The connection broke.
            BulkRefusedError: The store refused them.
            BulkAbsentError: It has something else, or nothing.
            TimeoutError: No answer came in time, or no piece.
        """
        start, end = span
        headers = {**ranged.headers, "Range": f"bytes={start}-{end - 1}"}
        request, limit_s = self._request("GET", ranged, headers), stall.limit_s(end - start)
        try:
            async with asyncio.timeout(limit_s) as timeout, request as response:
                if not _is_range(response, start, end):
                    raise await _refusal(response)
                timeout.reschedule(None)
                yield _limit_stalls(response.content, stall, end - start, self._rates.down)
        except aiohttp.ClientError as error:
            raise _break_error(error) from error

    async def send(
        self,
        ranged: tensor_pb2.TicketRange,
        source: FileRange,
        stall: StallTimeout,
        on_sent: Callable[[int], None],
    ) -> None:
        """Send a range of a file's bytes; they are stored when this returns.

        Args:
            ranged: Of a ticket that holds the range.
            source: What to send.
            stall: How long the transport may take nothing.
            on_sent: Hears of bytes as the transport takes them; they may still be lost.

        Raises:
            BulkBrokenError: The connection broke.
            BulkRefusedError: The store refused the bytes.
            TimeoutError: They got nowhere.
            OSError: The file cannot be read.
        """
        start, end = source.span
        if (await asyncio.to_thread(source.path.stat)).st_size < end:
            raise OSError(errno.EIO, "the file became shorter")
        headers = dict(ranged.headers)
        if not ranged.is_whole:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/*"
        try:
            async with asyncio.timeout(stall.limit_s()) as limit:
                body = _FilePayload(source, stall, limit, on_sent, self._rates.up)
                async with self._request("PUT", ranged, headers, data=body) as response:
                    if not response.ok:
                        raise await _refusal(response)
        except aiohttp.ClientError as error:
            raise _break_error(error) from error

    async def send_update(
        self, request: UpdateRequest, stall: StallTimeout, on_sent: Callable[[int], None]
    ) -> UpdateAnswer:
        """Send some bytes of an update with its offer, or ask what is missing.

        Args:
            request: The request.
            stall: How long the transport may take nothing.
            on_sent: Hears of bytes as the transport takes them; they may still be lost.

        Raises:
            HyperGPUError: The coordinator refused the update, with its reason.
            BulkBrokenError: The connection broke.
            BulkRefusedError: The bulk port does not know this node.
            TimeoutError: The bytes got nowhere, or no answer came.
            OSError: The file cannot be read.
        """
        scheme = "http" if self._make_context is None else "https"
        place = tensor_pb2.TicketRange(url=f"{scheme}://{TLS_NAME}:{request.port}{UPDATE_PATH}")
        headers, source = dict(request.headers), request.source
        try:
            async with asyncio.timeout(stall.limit_s() + request.answer_s) as limit:
                if source is None:
                    put = self._request("PUT", place, headers)
                else:
                    headers["Content-Range"] = range_text(source.span)
                    body = _FilePayload(source, stall, limit, on_sent, self._rates.up)
                    body.answer_s = request.answer_s
                    put = self._request("PUT", place, headers, data=body)
                async with put as response:
                    if response.content_type != ANSWER_TYPE:
                        raise await _refusal(response)
                    if (response.content_length or sys.maxsize) > ANSWER_BYTES_MAX:
                        raise BulkBrokenError("the bulk port's answer is too long")
                    return answer_in(await response.read())
        except aiohttp.ClientError as error:
            raise _break_error(error) from error

    def take_certificate(self, certificate: Path, key: Path) -> None:
        """Dial with a renewed certificate from now on. Reads small files."""
        if self._context is not None:
            self._context.load_cert_chain(certificate, key)

    async def close(self) -> None:
        """Close all connections; what is under way breaks."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _request(
        self, method: str, ranged: tensor_pb2.TicketRange, headers: dict[str, str], **body: Any
    ) -> Any:
        # What is signed must not be written in another way.
        url, session = URL(ranged.url, encoded=True), self._open_session()
        if url.host != TLS_NAME:
            return session.request(method, url, headers=headers, ssl=True, **body)
        server_name = TLS_NAME if url.scheme == "https" else None
        url = url.with_host(self._host)
        return session.request(method, url, headers=headers, server_hostname=server_name, **body)

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0,
                    keepalive_timeout=_IDLE_S,
                    ssl=self._own_context() or True,
                    socket_factory=_open_socket,
                ),
                # Every wait of a transfer has a limit of its own.
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Accept-Encoding": "identity", "Content-Type": "application/octet-stream"},
                auto_decompress=False,
                read_bufsize=_BUFFER_BYTES,
            )
        return self._session

    def _own_context(self) -> ssl.SSLContext | None:
        if self._context is None and self._make_context is not None:
            try:
                self._context = self._make_context()
            except OSError as error:
                raise BulkBrokenError(f"no TLS by this node's files: {error}") from error
        return self._context


def _open_socket(address: Any) -> socket.socket:
    """A socket that soon tells of a store that is gone, and keeps little that is not on its way."""
    family, kind, protocol, *_ = address
    bulk_socket = socket.socket(family, kind, protocol)
    for name, value in (
        ("TCP_USER_TIMEOUT", _UNACKNOWLEDGED_MS),
        ("TCP_NOTSENT_LOWAT", _UNSENT_BYTES),
    ):
        # Not every system has both.
        if (option := getattr(socket, name, None)) is not None:
            bulk_socket.setsockopt(socket.IPPROTO_TCP, option, value)
    return bulk_socket


async def _limit_stalls(
    incoming: aiohttp.StreamReader, stall_timeout: StallTimeout, left_bytes: int, rate: RateLimit
) -> AsyncGenerator[bytes]:
    """What comes, as it comes, up to so many bytes.

    Raises:
        TimeoutError: Nothing came in time.
        BulkBrokenError: It ended before.
    """
    loop = asyncio.get_running_loop()
    while left_bytes > 0:
        asked_s = loop.time()
        async with asyncio.timeout(stall_timeout.limit_s(left_bytes)):
            piece = await incoming.readany()
        if not piece:
            raise BulkBrokenError(f"{left_bytes} bytes are missing at the end")
        stall_timeout.note_piece(loop.time() - asked_s)
        left_bytes -= len(piece)
        # What is not read yet fills the connection's buffers, and then the store waits.
        await rate.take(len(piece))
        yield piece


class _FilePayload(aiohttp.Payload):
    """A range of a file as the body of a request; in plaintext the system copies it."""

    def __init__(
        self,
        source: FileRange,
        stall: StallTimeout,
        limit: asyncio.Timeout,
        on_sent: Callable[[int], None],
        rate: RateLimit,
    ) -> None:
        super().__init__(source, content_type="application/octet-stream")
        self._size = source.span.end - source.span.start
        self._source = source
        self._stall = stall
        self._limit = limit
        self._on_sent = on_sent
        self._rate = rate
        self.answer_s = 0.0
        """Time that the answer may take beyond that of the bytes."""

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """A file's bytes are no text."""
        raise TypeError("the bytes of a blob are no text")

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Send the range in steps that take about as long on any line."""
        loop = asyncio.get_running_loop()
        # What breaks off is asked for anew: the client must not send it all again by itself.
        self._consumed = True
        writer.send_headers()
        transport = getattr(writer, "transport", None)
        if transport is None:
            raise aiohttp.ClientConnectionError("the connection was closed")
        offset, end = self._source.span
        step = PIECE_BYTES
        with open_file(self._source.path) as file:
            while offset < end:
                count = min(step, end - offset)
                await self._wait_for_rate(count)
                asked_s = loop.time()
                if transport.get_extra_info("sslcontext") is None:
                    if await loop.sendfile(transport, file, offset, count) < count:
                        raise OSError(errno.EIO, "the file became shorter")
                else:
                    await _copy(writer, file.fileno(), offset, count)
                took_s = loop.time() - asked_s
                offset += count
                self._note(count, took_s)
                step = step if self._rate.is_set else _next_step(step, took_s)
        # What the system holds must still arrive.
        held_bytes = min(end - self._source.span.start, _HELD_BYTES)
        wait_s = self._stall.limit_of_s(held_bytes) + self.answer_s
        self._limit.reschedule(loop.time() + wait_s)

    async def _wait_for_rate(self, size_bytes: int) -> None:
        """Wait as the limit of the rate wants it, which is no stall."""
        if self._rate.is_set:
            self._limit.reschedule(None)
            await self._rate.take(size_bytes)
            self._limit.reschedule(asyncio.get_running_loop().time() + self._stall.limit_s())

    def _note(self, size_bytes: int, took_s: float) -> None:
        pieces = max(1, size_bytes // PIECE_BYTES)
        self._stall.note_piece(took_s / pieces)
        self._on_sent(size_bytes)
        self._limit.reschedule(asyncio.get_running_loop().time() + self._stall.limit_s())


def open_file(path: Path) -> FileIO:
    """A file and nothing else: its folder may be another program's, which may leave links there."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    return FileIO(os.open(path, flags), "rb")


async def _copy(writer: AbstractStreamWriter, descriptor: int, offset: int, count: int) -> None:
    """Send bytes of a file through this process, which encrypts them."""
    end = offset + count
    while offset < end:
        size_bytes = min(_COPY_BYTES, end - offset)
        piece = await asyncio.to_thread(os.pread, descriptor, size_bytes, offset)
        if not piece:
            raise OSError(errno.EIO, "the file became shorter")
        await writer.write(piece)
        offset += len(piece)


def _next_step(step: int, took_s: float) -> int:
    if took_s < _STEP_S / 2:
        return min(2 * step, _STEP_BYTES_MAX)
    return max(step // 2, PIECE_BYTES) if took_s > _STEP_S else step


async def _refusal(response: aiohttp.ClientResponse) -> BulkRefusedError:
    if response.ok or response.status in {404, 416}:
        return BulkAbsentError(f"the store has not this range of it (status {response.status})")
    text = (await response.content.read(_TEXT_BYTES_MAX)).decode(errors="replace")
    return BulkRefusedError(f"the store answered {response.status}: {text}")


def _is_range(response: aiohttp.ClientResponse, start: int, end: int) -> bool:
    """Whether just these bytes come. Some stores answer 200 where 206 is meant."""
    is_range_stated = response.headers.get("Content-Range", "").startswith(
        f"bytes {start}-{end - 1}/"
    )
    is_partial = response.status == 206 or (response.status == 200 and is_range_stated)
    return is_partial and response.content_length == end - start


def _break_error(error: aiohttp.ClientError) -> BulkBrokenError:
    return BulkBrokenError(f"{type(error).__name__}: {error}")
