"""Blobs out: read ahead in a thread while the transport sends."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import structlog

from coordinator.core.events import ModelLost
from coordinator.core.job import Job, Model
from coordinator.shell.blobs.interface import BlobReader
from coordinator.shell.runtime.parts import Parts
from coordinator.shell.runtime.room import Room
from coordinator.shell.servicers.wire import chunks
from hypergpu.ids import Digest, NodeId
from hypergpu.layout import Layout
from hypergpu.refusal import Reason, RefusalError
from hypergpu.units import Bytes, Milliseconds

log = structlog.get_logger()

READ_BYTES = 4 * chunks.CHUNK_BYTES


async def pieces(
    parts: Parts, digest: Digest, offset: int
) -> AsyncIterator[tuple[int, memoryview]]:
    """A blob in chunks from ``offset`` on, each with its own offset.

    Raises:
        RefusalError: BLOB_UNKNOWN, it is missing or damaged; OFFSET_MISMATCH, it ends before.
    """
    loop = asyncio.get_running_loop()
    reader, block = await asyncio.to_thread(_opened, parts, digest, offset)
    ahead: asyncio.Future[bytes] | None = None
    try:
        while block:
            end = offset + len(block)
            is_last = end >= reader.size_bytes
            ahead = None if is_last else loop.run_in_executor(None, reader.read, READ_BYTES)
            view = memoryview(block)
            for start in range(0, len(block), chunks.CHUNK_BYTES):
                yield offset + start, view[start : start + chunks.CHUNK_BYTES]
            offset, block = end, await ahead if ahead else b""
    finally:
        # A cancelled stream may leave a read under way in its thread: the file closes after it.
        if ahead is None or ahead.done():
            reader.close()
        else:
            ahead.add_done_callback(lambda _: reader.close())


def _opened(parts: Parts, digest: Digest, offset: int) -> tuple[BlobReader, bytes]:
    """A blob and its first bytes."""
    if (size_bytes := parts.blobs.size(digest)) is not None:
        _refuse_beyond(offset, size_bytes)
    reader = parts.blobs.open(digest, offset)
    try:
        return reader, reader.read(READ_BYTES)
    except BaseException:
        reader.close()
        raise


def _refuse_beyond(offset: int, size_bytes: int) -> None:
    # An offset comes from outside and may be larger than what a file can be asked for.
    if offset > size_bytes:
        raise RefusalError(Reason.OFFSET_MISMATCH, f"it has {size_bytes} bytes, not {offset}")


async def fetch(parts: Parts, node: NodeId, digest: Digest, offset: int) -> AsyncIterator[bytes]:
    """Serve a node a blob of the job that it works for.

    Raises:
        RefusalError: BLOB_UNKNOWN, it may not see it or it is not there; NOT_READY, it is damaged
            and is being made again, or nobody knows yet what the job consists of.
    """
    room = parts.staffing.room_of(node)
    if room is not None and room.layout is not None and digest == room.layout.digest:
        for answer in _layout_chunks(room.layout, offset):
            yield answer
        return
    if room is None or not _may_see(room, digest):
        raise RefusalError(Reason.BLOB_UNKNOWN, f"{digest} is no part of this node's work")
    is_model = digest in _model_digests(room.job)
    try:
        async for start, payload in pieces(parts, digest, offset):
            yield chunks.fetched(start, payload)
            if is_model:
                room.bytes_down = Bytes(room.bytes_down + payload.nbytes)
    except RefusalError as refused:
        if refused.reason is Reason.BLOB_UNKNOWN and await _is_remade(parts, room, digest):
            detail = "the model was damaged on disk and is being made again"
            raise RefusalError(Reason.NOT_READY, detail) from refused
        raise


def _may_see(room: Room, digest: Digest) -> bool:
    """Whether a blob is part of the job.

    Raises:
        RefusalError: NOT_READY, that is not known yet.
    """
    if digest in _model_digests(room.job) or digest in _data_digests(room):
        return True
    if room.is_recovering:
        raise RefusalError(Reason.NOT_READY, f"{room.job.job_id} is being taken up again")
    return False


def _layout_chunks(layout: Layout, offset: int) -> Iterator[bytes]:
    """The job's layout as a blob: a node's daemon applies deltas by it and cannot build it."""
    text = memoryview(layout.to_json())
    _refuse_beyond(offset, len(text))
    for start in range(offset, len(text), chunks.CHUNK_BYTES):
        yield chunks.fetched(start, text[start : start + chunks.CHUNK_BYTES])


async def _is_remade(parts: Parts, room: Room, digest: Digest) -> bool:
    """Whether a missing blob belongs to the current model; then the machine learns of the loss."""
    model = room.job.model
    if model is None or digest not in _digests(model):
        return False
    log.error("a model is damaged", job_id=room.job.job_id, blob=digest)
    lost = ModelLost(at_ms=Milliseconds(0), model=model.blob.digest, reason=f"{digest} is damaged")
    await parts.driver.insist(room.job.job_id, lost)
    return True


def _digests(model: Model) -> tuple[Digest, ...]:
    return (model.blob.digest, *((model.delta.blob.digest,) if model.delta else ()))


def _model_digests(job: Job) -> frozenset[Digest]:
    models = [model for model in (job.model, job.previous) if model is not None]
    return frozenset(digest for model in models for digest in _digests(model))


def _data_digests(room: Room) -> frozenset[Digest]:
    manifest = room.job.manifest
    entries = room.entries_of_manifest or frozenset()
    return entries | ({manifest.digest} if manifest else frozenset())
