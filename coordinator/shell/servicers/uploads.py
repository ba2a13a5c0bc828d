"""Uploads of nodes and users, stored through quarantine and resumable where they broke."""

import asyncio
from typing import NamedTuple

from coordinator.shell.blobs.stripes import StripeUpload
from coordinator.shell.blobs.upload import WholeUpload
from coordinator.shell.failpoints import failpoint
from coordinator.shell.runtime.services import Services
from coordinator.shell.servicers.wire.chunks import CHUNK_BYTES, UploadChunk
from coordinator.shell.servicers.wire.handlers import Requests
from coordinator.shell.telemetry.upload_meter import AddBytes
from hypergpu.digest import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.process.clock import monotonic_ms
from hypergpu.statements.assignment import BlobRef
from hypergpu.units import Bytes, Milliseconds
from hypergpu.v1 import job_pb2
from hypergpu.wire.assignment import blob_value
from hypergpu.wire.bulk import PIECE_BYTES, StallTimeout

_BATCH_BYTES = 2 << 20
_STRIPE_BATCH_BYTES = 2 * PIECE_BYTES
"""There may be sixteen stripes at once, each over a slow connection."""
_KEEP_DATA_S = 24 * 3600
"""A user's file waits this long for the job that names it."""


class UploadStream(NamedTuple):
    """An upload, and the stream that its bytes come from."""

    upload: WholeUpload | StripeUpload
    requests: Requests
    stall_timeout: StallTimeout
    add_bytes: AddBytes = lambda _: None
    """Hears of the bytes of each piece as it comes."""

    @property
    def batch_bytes(self) -> int:
        """Stored per hop to a thread; also what a break may cost beyond what is in flight."""
        return _BATCH_BYTES if isinstance(self.upload, WholeUpload) else _STRIPE_BATCH_BYTES


async def store_stream(stream: UploadStream) -> Bytes:
    """Store what the stream brings. Storing and receiving overlap.

    Returns:
        The committed offset once the stream has ended or everything is there.

    Raises:
        HyperGPUError: a gap, too many bytes, a bad value, a silent stream, a full disk. What came
            before it stays committed.
    """
    storing: asyncio.Future[None] | None = None
    try:
        while True:
            batch = await _batch(stream)
            if storing is not None:
                await storing
            if not batch:
                return stream.upload.committed_offset
            storing = asyncio.ensure_future(asyncio.to_thread(_store, stream.upload, batch))
    finally:
        if storing is not None and not storing.done():
            await asyncio.wait([storing])


async def _batch(stream: UploadStream) -> list[UploadChunk]:
    batch: list[UploadChunk] = []
    held_bytes = 0
    while held_bytes < stream.batch_bytes:
        asked_ms = monotonic_ms()
        piece = await stream.requests.next(round(1000 * stream.stall_timeout.limit_s()))
        if piece is None:
            break
        stream.stall_timeout.note_piece((monotonic_ms() - asked_ms) / 1000)
        if not isinstance(piece, UploadChunk):
            raise HyperGPUError(Reason.REQUEST_INVALID, "a header comes first and only once")
        stream.add_bytes(piece.payload.nbytes)
        batch.append(piece)
        held_bytes += piece.payload.nbytes
    return batch


def _store(upload: WholeUpload | StripeUpload, batch: list[UploadChunk]) -> None:
    for piece in batch:
        upload.append(piece.offset, piece.payload)
    failpoint("upload.appended")


def end_attempt(upload: WholeUpload | StripeUpload) -> None:
    """End an attempt without waiting for it: what is stored stays."""
    if not upload.is_open:
        return
    asyncio.get_running_loop().run_in_executor(None, upload.close)


async def receive_data(services: Services, requests: Requests) -> job_pb2.UploadDataResponse:
    """Store one file of a user's dataset."""
    timeout_ms = services.settings.read_timeout_ms
    header = await requests.next(timeout_ms)
    if not isinstance(header, job_pb2.DataHeader):
        raise HyperGPUError(Reason.REQUEST_INVALID, "the stream begins with a header")
    blob = blob_value(header.blob)
    held = await asyncio.to_thread(stored_bytes, services, blob)
    if held == blob.size_bytes:
        return job_pb2.UploadDataResponse(committed_offset=held)
    upload = await asyncio.to_thread(services.uploads.open, _data_key(blob), blob)
    try:
        reject_other_offset(upload, header.offset)
        await requests.admit()
        stall_timeout = StallTimeout(min(CHUNK_BYTES, blob.size_bytes), Milliseconds(timeout_ms))
        committed = await store_stream(UploadStream(upload, requests, stall_timeout))
        if committed == blob.size_bytes:
            await asyncio.to_thread(upload.finish, keep_s=_KEEP_DATA_S)
    finally:
        end_attempt(upload)
    return job_pb2.UploadDataResponse(committed_offset=committed)


def reject_other_offset(upload: WholeUpload | StripeUpload, offset: int) -> None:
    """Reject a stream that does not start where the stored bytes end.

    Raises:
        HyperGPUError: OFFSET_MISMATCH, with the committed offset.
    """
    if offset != upload.committed_offset:
        detail = f"{offset} came, {upload.committed_offset} is next"
        raise HyperGPUError(Reason.OFFSET_MISMATCH, detail)


def stored_bytes(services: Services, blob: BlobRef) -> Bytes:
    """How much of a user's file is here. Blocks. An empty file needs no upload: it is made."""
    if services.blobs.size(blob.digest) == blob.size_bytes:
        return blob.size_bytes
    if blob.size_bytes == 0 and blob.digest == digest_of(b""):
        services.blobs.put(b"", keep_s=_KEEP_DATA_S)
    return services.uploads.committed_offset(_data_key(blob))


def _data_key(blob: BlobRef) -> str:
    return f"data/{blob.digest}/{blob.size_bytes}"
