"""Bytes in: updates of nodes and files of users, through quarantine, resumable where they broke."""

import asyncio
from typing import NamedTuple

from coordinator.shell.blobs.stripes import StripeUpload
from coordinator.shell.blobs.upload import Upload
from coordinator.shell.failpoints import failpoint
from coordinator.shell.runtime.services import Services
from coordinator.shell.servicers.wire.chunks import CHUNK_BYTES, Piece
from coordinator.shell.servicers.wire.handlers import Requests
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


class Intake(NamedTuple):
    """Where an upload goes and where its bytes come from."""

    upload: Upload | StripeUpload
    requests: Requests
    patience: StallTimeout

    @property
    def batch_bytes(self) -> int:
        """Stored per hop to a thread; also what a break may cost beyond what is in flight."""
        return _BATCH_BYTES if isinstance(self.upload, Upload) else _STRIPE_BATCH_BYTES


async def take_in(intake: Intake) -> Bytes:
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
            batch = await _batch(intake)
            if storing is not None:
                await storing
            if not batch:
                return intake.upload.committed_offset
            storing = asyncio.ensure_future(asyncio.to_thread(_store, intake.upload, batch))
    finally:
        if storing is not None and not storing.done():
            await asyncio.wait([storing])


async def _batch(intake: Intake) -> list[Piece]:
    batch: list[Piece] = []
    held_bytes = 0
    while held_bytes < intake.batch_bytes:
        asked_ms = monotonic_ms()
        piece = await intake.requests.next(round(1000 * intake.patience.limit_s()))
        if piece is None:
            break
        intake.patience.note_piece((monotonic_ms() - asked_ms) / 1000)
        if not isinstance(piece, Piece):
            raise HyperGPUError(Reason.REQUEST_INVALID, "a header comes first and only once")
        batch.append(piece)
        held_bytes += piece.payload.nbytes
    return batch


def _store(upload: Upload | StripeUpload, batch: list[Piece]) -> None:
    for piece in batch:
        upload.append(piece.offset, piece.payload)
    failpoint("upload.appended")


def leave(upload: Upload | StripeUpload) -> None:
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
    held = await asyncio.to_thread(held_bytes, services, blob)
    if held == blob.size_bytes:
        return job_pb2.UploadDataResponse(committed_offset=held)
    upload = await asyncio.to_thread(services.quarantine.open, _data_key(blob), blob)
    try:
        refuse_other_offset(upload, header.offset)
        await requests.admit()
        patience = StallTimeout(min(CHUNK_BYTES, blob.size_bytes), Milliseconds(timeout_ms))
        committed = await take_in(Intake(upload, requests, patience))
        if committed == blob.size_bytes:
            await asyncio.to_thread(upload.finish, keep_s=_KEEP_DATA_S)
    finally:
        leave(upload)
    return job_pb2.UploadDataResponse(committed_offset=committed)


def refuse_other_offset(upload: Upload | StripeUpload, offset: int) -> None:
    """Refuse a stream that does not start where the stored bytes end.

    Raises:
        HyperGPUError: OFFSET_MISMATCH, with the committed offset.
    """
    if offset != upload.committed_offset:
        detail = f"{offset} came, {upload.committed_offset} is next"
        raise HyperGPUError(Reason.OFFSET_MISMATCH, detail)


def held_bytes(services: Services, blob: BlobRef) -> Bytes:
    """How much of a user's file is here. Blocks. An empty file needs no upload: it is made."""
    if services.blobs.size(blob.digest) == blob.size_bytes:
        return blob.size_bytes
    if blob.size_bytes == 0 and blob.digest == digest_of(b""):
        services.blobs.put(b"", keep_s=_KEEP_DATA_S)
    return services.quarantine.committed_offset(_data_key(blob))


def _data_key(blob: BlobRef) -> str:
    return f"data/{blob.digest}/{blob.size_bytes}"
