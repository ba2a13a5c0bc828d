"""Blobs in and out: bulk messages built and taken apart by hand, uploads through quarantine,
resumable where they broke, exports that are read ahead in a thread, and tickets for downloads.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import NamedTuple

import structlog

from coordinator.core.job.state import Job, Model
from coordinator.shell.blobs.store import BlobReader
from coordinator.shell.blobs.upload_store import StripeUpload
from coordinator.shell.blobs.writing import WholeUpload
from coordinator.shell.failpoints import failpoint
from coordinator.shell.runtime.driver import JobRuntime
from coordinator.shell.runtime.nodes import AddBytes
from coordinator.shell.runtime.services import Services
from coordinator.shell.servicers.calls import Parser, Requests, parser
from hypergpu.crypto import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest, NodeId
from hypergpu.statements import BlobRef
from hypergpu.streams import PIECE_BYTES, StallTimeout, monotonic_ms
from hypergpu.tensors.layout import Layout
from hypergpu.units import Bytes, Milliseconds
from hypergpu.v1 import job_pb2, node_pb2
from hypergpu.wire.chunks import CHUNK_BYTES, BlobPiece, decode_chunk
from hypergpu.wire.messages import blob_value


def upload_parser(
    message: type[node_pb2.SubmitUpdateRequest | job_pb2.UploadDataRequest],
) -> Parser:
    """Parse a stream of one header and then chunks: gives its message or an `BlobPiece`."""
    slow = parser(message)

    def parse(raw: bytes) -> object:
        quick = decode_chunk(message.CHUNK_FIELD_NUMBER, raw)
        if quick is not None:
            return quick
        parsed = slow(raw)
        if parsed.HasField("chunk"):
            return BlobPiece(parsed.chunk.offset, memoryview(parsed.chunk.payload))
        return parsed.header

    return parse


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


async def _batch(stream: UploadStream) -> list[BlobPiece]:
    batch: list[BlobPiece] = []
    held_bytes = 0
    while held_bytes < stream.batch_bytes:
        asked_ms = monotonic_ms()
        piece = await stream.requests.next(round(1000 * stream.stall_timeout.limit_s()))
        if piece is None:
            break
        stream.stall_timeout.note_piece((monotonic_ms() - asked_ms) / 1000)
        if not isinstance(piece, BlobPiece):
            raise HyperGPUError(Reason.REQUEST_INVALID, "a header comes first and only once")
        stream.add_bytes(piece.payload.nbytes)
        batch.append(piece)
        held_bytes += piece.payload.nbytes
    return batch


def _store(upload: WholeUpload | StripeUpload, batch: list[BlobPiece]) -> None:
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


log = structlog.get_logger()

READ_BYTES = 4 * CHUNK_BYTES


async def blob_chunks(
    services: Services, digest: Digest, offset: int
) -> AsyncIterator[tuple[int, memoryview]]:
    """A blob from an offset to its end in chunks, each with its own offset.

    Raises:
        HyperGPUError: BLOB_UNKNOWN, it is missing or damaged; OFFSET_MISMATCH, it ends before.
    """
    loop = asyncio.get_running_loop()
    reader, block = await asyncio.to_thread(_open_blob, services, digest, offset)
    ahead: asyncio.Future[bytes] | None = None
    try:
        while block:
            end = offset + len(block)
            is_last = end >= reader.size_bytes
            ahead = None if is_last else loop.run_in_executor(None, reader.read, READ_BYTES)
            view = memoryview(block)
            for start in range(0, len(block), CHUNK_BYTES):
                yield offset + start, view[start : start + CHUNK_BYTES]
            offset, block = end, await ahead if ahead else b""
    finally:
        # A cancelled stream may leave a read under way in its thread: the file closes after it.
        if ahead is None or ahead.done():
            reader.close()
        else:
            ahead.add_done_callback(lambda _: reader.close())


def _open_blob(services: Services, digest: Digest, offset: int) -> tuple[BlobReader, bytes]:
    """A blob and its first bytes."""
    size_bytes = services.blobs.size(digest)
    # The offset comes from outside and may be larger than what a file can be asked for.
    if size_bytes is not None and offset > size_bytes:
        detail = f"it has {size_bytes} bytes, not {offset}"
        raise HyperGPUError(Reason.OFFSET_MISMATCH, detail)
    reader = services.blobs.open(digest, offset)
    try:
        return reader, reader.read(READ_BYTES)
    except BaseException:
        reader.close()
        raise


async def resolve_blob(
    services: Services, node: NodeId, digest: Digest
) -> node_pb2.ResolveBlobResponse:
    """Give a node a ticket for a blob of the job that it works for.

    Raises:
        HyperGPUError: BLOB_UNKNOWN, it may not see it or it is not there; NOT_READY, it is damaged
            and is being made again, or nobody knows yet what the job consists of.
    """
    runtime = services.allocator.runtime_of(node)
    if runtime is not None and runtime.layout is not None and digest == runtime.layout.digest:
        await asyncio.to_thread(_store_layout, services, runtime.layout)
    elif runtime is None or not _may_see(runtime, digest):
        raise HyperGPUError(Reason.BLOB_UNKNOWN, f"{digest} is no part of this node's work")
    try:
        blob = await asyncio.to_thread(services.blobs.find, digest)
    except HyperGPUError as error:
        if error.reason is Reason.BLOB_UNKNOWN and await _is_remade(services, runtime, digest):
            detail = "the model was damaged on disk and is being made again"
            raise HyperGPUError(Reason.NOT_READY, detail) from error
        raise
    purpose = runtime.job.job_id if digest in _model_digests(runtime.job) else ""
    ticket = services.bulk.ticket(node, blob, purpose)
    return node_pb2.ResolveBlobResponse(size_bytes=blob.size_bytes, ticket=ticket)


def _store_layout(services: Services, layout: Layout) -> None:
    """Make the job's layout a blob: a node's daemon applies deltas by it and cannot build it."""
    if services.blobs.size(layout.digest) is None:
        services.blobs.put(layout.to_json())


def _may_see(runtime: JobRuntime, digest: Digest) -> bool:
    """Whether a blob is part of the job.

    Raises:
        HyperGPUError: NOT_READY, that is not known yet.
    """
    if digest in _model_digests(runtime.job) or digest in _data_digests(runtime):
        return True
    if runtime.is_recovering:
        raise HyperGPUError(Reason.NOT_READY, f"{runtime.job.job_id} is being taken up again")
    return False


async def _is_remade(services: Services, runtime: JobRuntime, digest: Digest) -> bool:
    """Whether a missing blob belongs to the current model; then the machine learns of the loss."""
    model = runtime.job.model
    if model is None or digest not in {blob.digest for blob in model.newest_blobs}:
        return False
    await services.driver.report_lost_model(
        runtime.job.job_id, model.blob.digest, f"{digest} is damaged"
    )
    return True


def _digests(model: Model) -> tuple[Digest, ...]:
    return (model.blob.digest, *(delta.blob.digest for delta in model.deltas))


def _model_digests(job: Job) -> frozenset[Digest]:
    models = [model for model in (job.model, job.previous) if model is not None]
    return frozenset(digest for model in models for digest in _digests(model))


def _data_digests(runtime: JobRuntime) -> frozenset[Digest]:
    manifest = runtime.job.manifest
    entries = runtime.entries_of_manifest or frozenset()
    return entries | ({manifest.digest} if manifest else frozenset())
