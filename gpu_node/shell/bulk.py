"""Ranges of blobs by HTTP, for tickets that the coordinator gives."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import aiohttp
from yarl import URL

from hypergpu.v1 import tensor_pb2
from hypergpu.wire.credentials import TLS_NAME

_IDLE_S = 120.0
"""Unused for so long, connections are closed: a round is seldom further from the next."""
_BUFFER_BYTES = 512 << 10
"""Most bytes of a connection that wait in memory."""
_TEXT_BYTES_MAX = 200


class BulkBrokenError(Exception):
    """Bytes broke off or were refused; another attempt may go on where they did."""


class TlsFiles(NamedTuple):
    """Certificates and key of mutual TLS. The certificate's file is renewed now and then."""

    authority: Path
    key: Path
    certificate: Path


class BulkClient:
    """Connections to one coordinator's store, made when they are needed and kept for a while."""

    def __init__(self, host: str, files: TlsFiles | None) -> None:
        """Dial ``host`` wherever a ticket names the coordinator; without files in plaintext."""
        self._host = host
        self._files = files
        self._context: ssl.SSLContext | None = None
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def open(
        self, ranged: tensor_pb2.TicketRange, start: int, end: int
    ) -> AsyncIterator[aiohttp.StreamReader]:
        """The bytes of a blob from ``start`` to ``end``, as they come.

        Raises:
            BulkBrokenError: The connection broke, or they were refused.
        """
        headers = {**ranged.headers, "Range": f"bytes={start}-{end - 1}"}
        url, is_ours = URL(ranged.url), False
        if url.host == TLS_NAME:
            url, is_ours = url.with_host(self._host), True
        named = TLS_NAME if is_ours and url.scheme == "https" else None
        try:
            async with self._open_session().get(
                url, headers=headers, server_hostname=named
            ) as response:
                if response.status != 206 or response.content_length != end - start:
                    text = (await response.content.read(_TEXT_BYTES_MAX)).decode(errors="replace")
                    raise BulkBrokenError(f"the store answered {response.status}: {text}")
                yield response.content
        except aiohttp.ClientError as broken:
            raise BulkBrokenError(f"{type(broken).__name__}: {broken}") from broken

    def take_certificate(self) -> None:
        """Dial with the renewed certificate from now on. Reads small files."""
        if self._context is not None and self._files is not None:
            self._context.load_cert_chain(self._files.certificate, self._files.key)

    async def close(self) -> None:
        """Close all connections; what is under way breaks."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            if self._files is not None:
                authority = self._files.authority.read_text("ascii")
                self._context = ssl.create_default_context(cadata=authority)
                self.take_certificate()
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0, keepalive_timeout=_IDLE_S, ssl=self._context or True
                ),
                # Every wait of a transfer has a limit of its own.
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Accept-Encoding": "identity"},
                auto_decompress=False,
                read_bufsize=_BUFFER_BYTES,
            )
        return self._session
