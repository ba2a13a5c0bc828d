"""Bulk between a user and the coordinator, with resume: a folder of data up, a job's model down."""

import asyncio
import functools
import itertools
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from hypergpu.client.connection import RESTARTING, TRANSFER_TIMEOUT_S, CoordinatorCalls, pause_s
from hypergpu.client.values import ModelChunk, ModelHeader, blob_ref, model_part
from hypergpu.crypto import RunningDigest, digest_of, digest_of_file, running_digest_of_file
from hypergpu.dataset import checked_paths
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest
from hypergpu.streams import SHARED, fill_durably, write_durably
from hypergpu.tensors.layout import Flat, unpack
from hypergpu.v1 import job_pb2, tensor_pb2

CHUNK_BYTES = 512 << 10
IDLE_TRIES = 5
"""Tries in a row that move no byte before a transfer gives up."""

Report = Callable[[str, int, int], None]
"""Takes a step's name, the bytes that are done and the bytes there are; from another thread."""


def ignore(_step: str, _done: int, _total: int) -> None:
    """A report that nobody reads."""


class LocalFile(msgspec.Struct, frozen=True):
    """A file to send."""

    path: Path
    name: str
    """Relative to the folder, with forward slashes."""
    digest: Digest
    size_bytes: int


async def send_folder(calls: CoordinatorCalls, folder: Path, report: Report) -> tensor_pb2.Manifest:
    """Send what the coordinator does not hold of a folder; returns the folder's manifest.

    Raises:
        HyperGPUError: A file cannot be read, or has a name that not every machine takes; or the
            coordinator refuses it or stays away.
    """
    files = await asyncio.to_thread(_read_folder, folder, report)
    checked_paths(file.name for file in files)
    step, done = f"uploading {folder.name}", 0
    total = sum(file.size_bytes for file in files)
    sent: set[Digest] = set()
    for file in files:
        # A file that occurs twice travels once.
        if file.digest not in sent:
            sent.add(file.digest)
            await _send_file(
                calls, file, functools.partial(_report_from, report, step, done, total)
            )
        done += file.size_bytes
        report(step, done, total)
    entries = [
        tensor_pb2.ManifestEntry(path=file.name, blob=blob_ref(file.digest, file.size_bytes))
        for file in files
    ]
    return tensor_pb2.Manifest(entries=entries)


def _report_from(report: Report, step: str, base: int, total: int, committed: int) -> None:
    report(step, base + committed, total)


def _read_folder(folder: Path, report: Report) -> list[LocalFile]:
    """Every regular file with its digest, in an order that does not depend on the file system.

    Hidden files and folders are left out.
    """
    if not folder.is_dir():
        raise HyperGPUError(Reason.FILE_UNUSABLE, f"data.path: {folder} is not a folder")
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(place, name) for name in names if not name.startswith(".")]
    paths = sorted(path for path in found if path.is_file())
    if not paths:
        raise HyperGPUError(Reason.FILE_UNUSABLE, f"data.path: {folder} holds no file")
    files, done, total = [], 0, sum(path.stat().st_size for path in paths)
    for path in paths:
        try:
            size_bytes, digest = path.stat().st_size, digest_of_file(path)
        except OSError as broken:
            raise HyperGPUError(Reason.FILE_UNUSABLE, f"{path}: {broken.strerror}") from broken
        files.append(LocalFile(path, path.relative_to(folder).as_posix(), digest, size_bytes))
        done += size_bytes
        report(f"reading {folder.name}", done, total)
    return files


async def _send_file(
    calls: CoordinatorCalls, file: LocalFile, advance: Callable[[int], None]
) -> None:
    blob = blob_ref(file.digest, file.size_bytes)
    committed = idle_tries = 0
    while True:
        try:
            asked = job_pb2.QueryDataRequest(blob=blob)
            offset = (await calls.call(calls.jobs.QueryData, asked)).committed_offset
            if offset < file.size_bytes:
                messages = _messages(file, blob, offset)
                sent = await calls.call(calls.jobs.UploadData, messages, TRANSFER_TIMEOUT_S)
                offset = sent.committed_offset
            if offset > committed:
                committed, idle_tries = offset, 0
                advance(committed)
            if committed >= file.size_bytes:
                return
        except HyperGPUError as refused:
            idle_tries += 1
            is_passing = refused.reason in RESTARTING | {Reason.OFFSET_MISMATCH}
            if not is_passing or idle_tries >= IDLE_TRIES:
                raise
            await asyncio.sleep(pause_s(idle_tries))


async def _messages(
    file: LocalFile, blob: tensor_pb2.BlobRef, offset: int
) -> AsyncIterator[job_pb2.UploadDataRequest]:
    yield job_pb2.UploadDataRequest(header=job_pb2.DataHeader(blob=blob, offset=offset))
    with file.path.open("rb") as source:
        source.seek(offset)
        for at in itertools.count(offset, CHUNK_BYTES):
            piece = source.read(CHUNK_BYTES)
            if not piece:
                return
            yield job_pb2.UploadDataRequest(chunk=tensor_pb2.Chunk(offset=at, payload=piece))


MODEL_NAME = "model.safetensors"
CARD_NAME = "README.md"
JOB_FIELD = "hypergpu.job"
CARD_FIELD = "hypergpu.card"
"""Digest of the card that was written beside the model."""


class ExportedModel(msgspec.Struct, frozen=True):
    """Files that an export left on disk."""

    model: Path
    card: Path
    digest: Digest
    """Digest of the model's flat bytes, as the job names it; not of the file."""
    size_bytes: int


class ExportOrder(msgspec.Struct, frozen=True):
    """Which model to take where."""

    job_id: str
    folder: Path
    which: str
    may_overwrite: bool

    @property
    def part(self) -> Path:
        """The flat bytes fetched so far."""
        return self.folder / f".{self.job_id}-{self.which}.part"

    @property
    def part_digest(self) -> Path:
        """Names the model that the part belongs to."""
        return self.part.with_suffix(".digest")


async def fetch_model(calls: CoordinatorCalls, order: ExportOrder, report: Report) -> ExportedModel:
    """Fetch a model into a folder; an interrupted fetch goes on the next time.

    Raises:
        HyperGPUError: There is no model, it arrived damaged, the folder cannot be written, or it
            holds files that are not this export's to replace.
    """
    model, card = order.folder / MODEL_NAME, order.folder / CARD_NAME
    try:
        if not order.may_overwrite:
            _require_replaceable(model, card, order.job_id)
        order.folder.mkdir(parents=True, exist_ok=True)
        header = await _fetch_with_resume(calls, order, report)
        await asyncio.to_thread(_write_safetensors, header, order, model)
        write_durably(card, header.card.encode("utf-8"), mode=SHARED)
        order.part.unlink()
    except OSError as broken:
        detail = f"{order.folder}: {broken.strerror}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail) from broken
    return ExportedModel(model, card, header.digest, model.stat().st_size)


async def _fetch_with_resume(
    calls: CoordinatorCalls, order: ExportOrder, report: Report
) -> ModelHeader:
    idle_tries = 0
    while True:
        request = _request(order)
        try:
            return await _fetch(calls, request, order, report)
        except HyperGPUError as refused:
            has_moved = order.part.exists() and order.part.stat().st_size > request.offset
            idle_tries = 0 if has_moved else idle_tries + 1
            if refused.reason not in RESTARTING or idle_tries >= IDLE_TRIES:
                raise
            await asyncio.sleep(pause_s(idle_tries))


def _request(order: ExportOrder) -> job_pb2.ExportModelRequest:
    """Ask for what is missing of the model that the part belongs to."""
    request = job_pb2.ExportModelRequest(job_id=order.job_id, which=order.which)
    try:
        digest, size = order.part_digest.read_text("ascii"), order.part.stat().st_size
        request.digest.CopyFrom(blob_ref(Digest(digest), 0).digest)
        request.offset = size
    except (OSError, ValueError):
        order.part.unlink(missing_ok=True)
    return request


async def _fetch(
    calls: CoordinatorCalls, request: job_pb2.ExportModelRequest, order: ExportOrder, report: Report
) -> ModelHeader:
    header: ModelHeader | None = None
    running, step = RunningDigest(), f"model of {order.job_id}"
    with order.part.open("ab") as file:
        async for message in calls.stream(calls.jobs.ExportModel, request):
            part = model_part(message)
            if isinstance(part, ModelHeader):
                header = part
                running = _kept_digest(header, request, order, file)
            elif header is not None:
                _append(part, running, file)
                report(step, running.size_bytes, header.size_bytes)
        file.flush()
        os.fsync(file.fileno())
    if header is None or running.size_bytes < header.size_bytes:
        raise HyperGPUError(Reason.COORDINATOR_UNREACHABLE, "the model's stream ended early")
    if running.digest() != header.digest:
        order.part.unlink()
        detail = f"the model arrived as {running.digest()[:16]}..., not {header.digest[:16]}..."
        raise HyperGPUError(Reason.DIGEST_MISMATCH, detail)
    order.part_digest.unlink(missing_ok=True)
    return header


def _kept_digest(
    header: ModelHeader, request: job_pb2.ExportModelRequest, order: ExportOrder, file: BinaryIO
) -> RunningDigest:
    """Digest of the part when it is of this model; else start over."""
    is_same = request.offset > 0 and request.digest == blob_ref(header.digest, 0).digest
    if is_same and request.offset <= header.size_bytes:
        return running_digest_of_file(order.part)
    file.truncate(0)
    order.part_digest.write_text(header.digest, "ascii")
    return RunningDigest()


def _append(chunk: ModelChunk, running: RunningDigest, file: BinaryIO) -> None:
    if chunk.offset != running.size_bytes:
        detail = f"a chunk at {chunk.offset} where {running.size_bytes} was due"
        raise HyperGPUError(Reason.OFFSET_MISMATCH, detail)
    file.write(chunk.payload)
    running.update(chunk.payload)


def _require_replaceable(model: Path, card: Path, job_id: str) -> None:
    """Refuse to write over what is not ours.

    Raises:
        HyperGPUError: FILE_PRESENT, with the file and whose it is.
    """
    written = _metadata(model) if model.exists() else {}
    if model.exists() and written.get(JOB_FIELD) != job_id:
        whose = f"{written[JOB_FIELD]}'s model" if JOB_FIELD in written else "no export's"
        raise HyperGPUError(Reason.FILE_PRESENT, f"{model} is there already and is {whose}")
    if card.exists() and written.get(CARD_FIELD) != digest_of(card.read_bytes()):
        detail = f"{card} is there already and is not as an export of {job_id} left it"
        raise HyperGPUError(Reason.FILE_PRESENT, detail)


def _metadata(model: Path) -> dict[str, str]:
    """Metadata that an export left in the file; empty for another program's file."""
    try:
        with safe_open(model, "np") as file:
            return dict(file.metadata() or {})
    except SafetensorError:
        return {}


def _write_safetensors(header: ModelHeader, order: ExportOrder, target: Path) -> None:
    """Write the flat bytes as named tensors; the file appears whole or not at all."""
    flat = Flat.view(header.layout, np.memmap(order.part, np.uint8, mode="r"))
    metadata = {
        "format": "pt",
        "hypergpu.model": header.digest,
        JOB_FIELD: order.job_id,
        CARD_FIELD: digest_of(header.card.encode("utf-8")),
    }
    tensors = unpack(header.layout, flat)
    fill_durably(target, lambda path: save_file(tensors, path, metadata))
