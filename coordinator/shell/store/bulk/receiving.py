"""Uploads as a bulk process takes them: ranges written straight into files that are there."""

import asyncio
import errno
import itertools
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from aiohttp import web

from coordinator.shell.store.blobs.writing import begin_writeback
from coordinator.shell.store.bulk.messages import BytesReceived
from coordinator.shell.store.bulk.tickets import Claims
from hypergpu.clock import monotonic_us
from hypergpu.errors import Reason
from hypergpu.ids import NodeId
from hypergpu.part_file import PartFile, Span
from hypergpu.units import Bytes
from hypergpu.wire.update_requests import range_in

_SILENCE_S = 8.0
"""A sender of whom nothing comes for so long is cut off; it goes on with what was not written."""
_REQUESTS_MAX = 32
"""At a time to one upload in one process; a node uses at most sixteen connections."""
_BATCH_BYTES = 1 << 20
"""Recorded and reported at once; also what a kill may cost each connection."""
_SMALL_BATCH_BYTES = 64 << 10
_BATCH_US = 50_000
"""Time after which a small batch is recorded too: over a slow line a large one takes long."""
_MISSING_MAX = 1_000
"""Ranges that an answer names as missing, of 20 bytes each; the others are named later."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class UploadTarget(NamedTuple):
    """The upload that bytes are for."""

    name: str
    size_bytes: Bytes
    sender: NodeId | None
    """None: a user."""


class RangeRefusedError(Exception):
    """A range was not written whole; what was recorded of it counts.

    Args:
        status: Of the answer to a request with a ticket.
        reason: For the answer to an update.
        text: Why, for people.
    """

    def __init__(self, status: int, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.reason = reason


class _Upload:
    """A file that requests write to, open as long as there is one."""

    def __init__(self, part: PartFile) -> None:
        self.part = part
        self.connections: set[asyncio.Transport] = set()
        """Connections of the requests that write to it."""


class _ReceivedBatch:
    """Bytes of one request in a row that are written and not recorded yet."""

    def __init__(self, sender: NodeId | None, part: PartFile, start: int, request: int) -> None:
        self._sender = sender
        self._part = part
        self._start = self.end = start
        self._request = request
        self._is_first = True
        self._since_us = monotonic_us()

    def write(self, piece: bytes) -> None:
        """Write the next bytes."""
        self._part.write_unrecorded(self.end, piece)
        self.end += len(piece)

    @property
    def is_due(self) -> bool:
        """Whether it is worth recording."""
        size_bytes = self.end - self._start
        # When the first bytes came is where measuring the line begins.
        is_late = self._is_first or monotonic_us() - self._since_us >= _BATCH_US
        return size_bytes >= _BATCH_BYTES or (size_bytes >= _SMALL_BATCH_BYTES and is_late)

    def record(self, *, is_last: bool = False) -> BytesReceived:
        """Let what was written count; the message says so."""
        size_bytes, self._since_us = self.end - self._start, monotonic_us()
        if size_bytes:
            self._part.record(Span(self._start, self.end))
            begin_writeback(self._part.descriptor, self._start, self.end)
        self._start, self._is_first = self.end, False
        return BytesReceived(
            self._sender, self._request, Bytes(size_bytes), self._since_us, is_last
        )

    def abandon(self) -> BytesReceived:
        """The message of a request that ends and brought nothing more that counts."""
        return BytesReceived(self._sender, self._request, Bytes(0), monotonic_us(), is_last=True)


class UploadReceiver:
    """Writes what is sent to the uploads of one folder."""

    def __init__(self, folder: Path, say: Callable[[BytesReceived], None]) -> None:
        """Tell of bytes as they are recorded."""
        self._folder = folder
        self._say = say
        self._uploads: dict[str, _Upload] = {}
        # Numbers of other processes differ in their lower bits.
        self._numbers = itertools.count(os.getpid(), 1 << 24)

    def close(self, name: str) -> None:
        """Write to an upload no more: its requests end."""
        upload = self._uploads.pop(name, None)
        if upload is None:
            return
        upload.part.close()
        for connection in upload.connections:
            connection.abort()

    async def receive(self, request: web.BaseRequest, claims: Claims) -> web.StreamResponse:
        """Take one range by a ticket."""
        span = range_in(request.headers.get("Content-Range", ""), request.content_length)
        if span is None or not span.start < span.end <= claims.size_bytes:
            text = f"name a range within bytes 0 to {claims.size_bytes}, and send just that"
            return _refusal(416, text)
        target = UploadTarget(claims.name, claims.size_bytes, claims.bearer)
        try:
            await self.take(request, target, span)
        except RangeRefusedError as error:
            return _refusal(error.status, str(error))
        return web.Response(status=204)

    async def take(
        self, request: web.BaseRequest, target: UploadTarget, span: Span
    ) -> tuple[Span, ...]:
        """Write and record the range that a request brings.

        Returns:
            What is missing of the upload then, of the first ranges; other processes' are seen, too.

        Raises:
            RangeRefusedError: It was not written whole.
        """
        if request.transport is None:
            raise RangeRefusedError(400, Reason.CALL_BROKEN, "it is gone")
        try:
            upload = self._open(target)
        except FileNotFoundError:
            raise _closed_error("there is no such upload, or not any more") from None
        if len(upload.connections) >= _REQUESTS_MAX:
            text = f"{_REQUESTS_MAX} requests write to it already"
            raise RangeRefusedError(429, Reason.RATE_LIMITED, text)
        with self._writing(target.name, upload, request.transport):
            await self._take(request, target.sender, upload.part, span)
            if upload.part.descriptor < 0:
                raise _closed_error("it was closed")
            return tuple(upload.part.missing()[:_MISSING_MAX])

    async def _take(
        self, request: web.BaseRequest, sender: NodeId | None, part: PartFile, span: Span
    ) -> None:
        batch = _ReceivedBatch(sender, part, span.start, next(self._numbers))
        try:
            await self._write(request, batch, part, span)
        except OSError as error:
            full = error.errno in _FULL
            reason = Reason.DISK_FULL if full else Reason.STREAM_SILENT
            text = f"the bytes broke off: {error}"
            raise RangeRefusedError(507 if full else 408, reason, text) from error
        finally:
            self._say(self._end(batch, part))

    @staticmethod
    def _end(batch: _ReceivedBatch, part: PartFile) -> BytesReceived:
        """Let the rest count, unless the upload was closed meanwhile or the disk is full."""
        if part.descriptor >= 0:
            with suppress(OSError):
                return batch.record(is_last=True)
        return batch.abandon()

    async def _write(
        self, request: web.BaseRequest, batch: _ReceivedBatch, part: PartFile, span: Span
    ) -> None:
        """Write what comes, to the end of the range."""
        async for piece in _pieces(request):
            if part.descriptor < 0:
                raise _closed_error("it was closed")
            if batch.end + len(piece) > span.end:
                raise RangeRefusedError(400, Reason.CALL_BROKEN, "more came than the range has")
            batch.write(piece)
            if batch.is_due:
                self._say(batch.record())
                if part.is_deleted:
                    raise _closed_error("its lease has ended")
        if batch.end < span.end:
            raise RangeRefusedError(400, Reason.CALL_BROKEN, "less came than the range has")
        # Before the answer, and not at the end alone: a full disk must be told.
        self._say(batch.record())

    def _open(self, target: UploadTarget) -> _Upload:
        upload = self._uploads.get(target.name)
        if upload is None or upload.part.is_deleted:
            part = PartFile(self._folder / target.name, target.size_bytes)
            upload = self._uploads[target.name] = _Upload(part)
        return upload

    @contextmanager
    def _writing(self, name: str, upload: _Upload, connection: asyncio.Transport) -> Iterator[None]:
        upload.connections.add(connection)
        try:
            yield
        finally:
            upload.connections.discard(connection)
            if not upload.connections:
                upload.part.close()
                if self._uploads.get(name) is upload:
                    del self._uploads[name]


async def _pieces(request: web.BaseRequest) -> AsyncIterator[bytes]:
    """The body as it comes.

    Raises:
        TimeoutError: Nothing came in time.
    """
    while True:
        async with asyncio.timeout(_SILENCE_S):
            piece = await request.content.readany()
        if not piece:
            return
        yield piece


def _closed_error(text: str) -> RangeRefusedError:
    """The error where an upload takes no bytes: it was accepted, replaced, or its lease ended."""
    return RangeRefusedError(404, Reason.OFFSET_MISMATCH, text)


def _refusal(status: int, text: str) -> web.Response:
    """An answer after which the connection ends: what is still sent is not read."""
    response = web.Response(status=status, text=text)
    response.force_close()
    return response
