"""Blobs out: read ahead in a thread while the transport sends."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import NamedTuple

import structlog

from coordinator.core.job.events import ModelLost
from coordinator.core.job.state import Job, Model
from coordinator.shell.blobs.store import BlobReader
from coordinator.shell.runtime.job_runtime import JobRuntime
from coordinator.shell.runtime.services import Services
from coordinator.shell.servicers.wire import chunks
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest, NodeId
from hypergpu.tensors.layout import Layout
from hypergpu.units import Bytes, Milliseconds
from hypergpu.wire.bulk import PIECE_BYTES

log = structlog.get_logger()

READ_BYTES = 4 * chunks.CHUNK_BYTES
_RANGE_READ_BYTES = 4 * PIECE_BYTES
"""A range is small, comes over a slow link, and many may be read at once."""


class BlobRange(NamedTuple):
    """A blob, or the part of it that a caller wants."""

    digest: Digest
    offset: int = 0
    end: int = 0
    """The first byte that is not wanted; 0: all to its end."""

    @property
    def chunk_bytes(self) -> int:
        """How much a chunk carries."""
        return PIECE_BYTES if self.end else chunks.CHUNK_BYTES

    def read_bytes(self, start: int) -> int:
        """How much to read from ``start`` on."""
        return min(_RANGE_READ_BYTES, self.end - start) if self.end else READ_BYTES

    def reject_beyond(self, size_bytes: int) -> None:
        """Reject what a blob of this size does not have.

        Raises:
            HyperGPUError: OFFSET_MISMATCH.
        """
        # Both come from outside and may be larger than what a file can be asked for.
        if max(self.offset, self.end) > size_bytes:
            detail = f"it has {size_bytes} bytes, not {max(self.offset, self.end)}"
            raise HyperGPUError(Reason.OFFSET_MISMATCH, detail)
        if self.end and self.end <= self.offset:
            detail = f"a range ends behind its start: {self.offset} to {self.end}"
            raise HyperGPUError(Reason.OFFSET_MISMATCH, detail)


async def blob_chunks(
    services: Services, wanted: BlobRange
) -> AsyncIterator[tuple[int, memoryview]]:
    """A blob, or a range of it, in chunks, each with its own offset.

    Raises:
        HyperGPUError: BLOB_UNKNOWN, it is missing or damaged; OFFSET_MISMATCH, it ends before.
    """
    loop = asyncio.get_running_loop()
    reader, block = await asyncio.to_thread(_open_blob, services, wanted)
    ahead: asyncio.Future[bytes] | None = None
    offset, stop = wanted.offset, wanted.end or reader.size_bytes
    try:
        while block:
            end = offset + len(block)
            is_last = end >= stop
            left = wanted.read_bytes(end)
            ahead = None if is_last else loop.run_in_executor(None, reader.read, left)
            view = memoryview(block)
            for start in range(0, len(block), wanted.chunk_bytes):
                yield offset + start, view[start : start + wanted.chunk_bytes]
            offset, block = end, await ahead if ahead else b""
    finally:
        # A cancelled stream may leave a read under way in its thread: the file closes after it.
        if ahead is None or ahead.done():
            reader.close()
        else:
            ahead.add_done_callback(lambda _: reader.close())


def _open_blob(services: Services, wanted: BlobRange) -> tuple[BlobReader, bytes]:
    """A blob and its first bytes."""
    if (size_bytes := services.blobs.size(wanted.digest)) is not None:
        wanted.reject_beyond(size_bytes)
    reader = services.blobs.open(wanted.digest, wanted.offset)
    try:
        return reader, reader.read(wanted.read_bytes(wanted.offset))
    except BaseException:
        reader.close()
        raise


async def fetch_blob(services: Services, node: NodeId, wanted: BlobRange) -> AsyncIterator[bytes]:
    """Serve a node a blob of the job that it works for.

    Raises:
        HyperGPUError: BLOB_UNKNOWN, it may not see it or it is not there; NOT_READY, it is damaged
            and is being made again, or nobody knows yet what the job consists of.
    """
    runtime, digest = services.allocator.runtime_of(node), wanted.digest
    if runtime is not None and runtime.layout is not None and digest == runtime.layout.digest:
        for answer in _layout_chunks(runtime.layout, wanted):
            yield answer
        return
    if runtime is None or not _may_see(runtime, digest):
        raise HyperGPUError(Reason.BLOB_UNKNOWN, f"{digest} is no part of this node's work")
    is_model = digest in _model_digests(runtime.job)
    try:
        async for start, payload in blob_chunks(services, wanted):
            yield chunks.encode_fetched(start, payload)
            if is_model:
                runtime.bytes_down = Bytes(runtime.bytes_down + payload.nbytes)
    except HyperGPUError as error:
        if error.reason is Reason.BLOB_UNKNOWN and await _is_remade(services, runtime, digest):
            detail = "the model was damaged on disk and is being made again"
            raise HyperGPUError(Reason.NOT_READY, detail) from error
        raise


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


def _layout_chunks(layout: Layout, wanted: BlobRange) -> Iterator[bytes]:
    """The job's layout as a blob: a node's daemon applies deltas by it and cannot build it."""
    text = memoryview(layout.to_json())
    wanted.reject_beyond(len(text))
    end = wanted.end or len(text)
    for start in range(wanted.offset, end, wanted.chunk_bytes):
        yield chunks.encode_fetched(start, text[start : min(end, start + wanted.chunk_bytes)])


async def _is_remade(services: Services, runtime: JobRuntime, digest: Digest) -> bool:
    """Whether a missing blob belongs to the current model; then the machine learns of the loss."""
    model = runtime.job.model
    if model is None or digest not in _remakable(model):
        return False
    log.error("a model is damaged", job_id=runtime.job.job_id, blob=digest)
    lost = ModelLost(at_ms=Milliseconds(0), model=model.blob.digest, reason=f"{digest} is damaged")
    await services.driver.insist(runtime.job.job_id, lost)
    return True


def _remakable(model: Model) -> tuple[Digest, ...]:
    """What the fold that made the model makes again: of its deltas, the newest."""
    newest = model.newest_delta
    return (model.blob.digest, *((newest.blob.digest,) if newest else ()))


def _digests(model: Model) -> tuple[Digest, ...]:
    return (model.blob.digest, *(delta.blob.digest for delta in model.deltas))


def _model_digests(job: Job) -> frozenset[Digest]:
    models = [model for model in (job.model, job.previous) if model is not None]
    return frozenset(digest for model in models for digest in _digests(model))


def _data_digests(runtime: JobRuntime) -> frozenset[Digest]:
    manifest = runtime.job.manifest
    entries = runtime.entries_of_manifest or frozenset()
    return entries | ({manifest.digest} if manifest else frozenset())
