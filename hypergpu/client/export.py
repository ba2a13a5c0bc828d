"""A job's model as a safetensors file with its card: fetched with resume, written whole."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import msgspec

from hypergpu.client.calls import RESTARTING, Coordinator, pause_s
from hypergpu.client.export_target import CARD_FIELD, JOB_FIELD, check_replaceable
from hypergpu.digest import (
    RunningDigest,
    digest_from_wire,
    digest_of,
    digest_to_wire,
    running_digest_of_file,
)
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.files import SHARED, write_durably
from hypergpu.ids import Digest
from hypergpu.tensors.layout import Kind, Layout, LayoutError, TensorSpec, layout_from_json
from hypergpu.v1 import job_pb2, tensor_pb2

MODEL_NAME = "model.safetensors"
CARD_NAME = "README.md"
IDLE_TRIES = 5
_ELEMENT = {Kind.PARAMETER: ("F32", 4), Kind.STATISTIC: ("F32", 4), Kind.INTEGER: ("I64", 8)}

Report = Callable[[int, int], None]
"""Told the bytes there are and the bytes there will be."""


class ModelFile(msgspec.Struct, frozen=True):
    """What an export left on disk."""

    model: Path
    card: Path
    digest: Digest
    """Of the model's flat bytes, as the job names it; not of the file."""
    size_bytes: int


class _Offer(msgspec.Struct, frozen=True):
    """The model a stream announced."""

    digest: Digest
    size_bytes: int
    layout: Layout
    card: str


class Order(msgspec.Struct, frozen=True):
    """Which model to take where."""

    job_id: str
    folder: Path
    """Made when missing; gets `MODEL_NAME` and `CARD_NAME`."""
    which: str = "latest"
    """``latest`` or ``best``."""
    is_overwriting: bool = False
    """Whether files that no export of this job left may be replaced."""


def export_model(coordinator: Coordinator, order: Order, report: Report) -> ModelFile:
    """Fetch a model into a folder; an interrupted fetch goes on the next time.

    Raises:
        HyperGPUError: There is no model, it arrived damaged, the folder cannot be written, or it
            holds files that are not this export's to replace.
    """
    job_id, folder, which = order.job_id, order.folder, order.which
    model, card = folder / MODEL_NAME, folder / CARD_NAME
    try:
        if not order.is_overwriting:
            check_replaceable(model, card, job_id)
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f".{job_id}-{which}.part"
        offer = _fetch(coordinator, _request(job_id, which), part, report)
        _write_safetensors(offer, part, model, job_id)
        write_durably(card, offer.card.encode("utf-8"), mode=SHARED)
        part.unlink()
    except OSError as broken:
        raise HyperGPUError(Reason.FILE_UNUSABLE, f"{folder}: {broken.strerror}") from broken
    return ModelFile(model, card, offer.digest, model.stat().st_size)


def _request(job_id: str, which: str) -> job_pb2.ExportModelRequest:
    return job_pb2.ExportModelRequest(job_id=job_id, which=which)


def _fetch(
    coordinator: Coordinator, request: job_pb2.ExportModelRequest, part: Path, report: Report
) -> _Offer:
    idle_tries = 0
    while True:
        _resume_from(request, part)
        started_at = request.offset
        try:
            return _fetched(coordinator, request, part, report)
        except HyperGPUError as refused:
            has_moved = part.exists() and part.stat().st_size > started_at
            idle_tries = 0 if has_moved else idle_tries + 1
            is_passing = refused.reason in RESTARTING
            if not is_passing or idle_tries >= IDLE_TRIES:
                raise
            time.sleep(pause_s(idle_tries))


def _named(part: Path) -> Path:
    return part.with_suffix(".digest")


def _resume_from(request: job_pb2.ExportModelRequest, part: Path) -> None:
    """Ask for what is missing of the model that the part belongs to."""
    try:
        digest = Digest(_named(part).read_text("ascii"))
        size = part.stat().st_size
        wire = digest_to_wire(digest)
    except (OSError, ValueError):
        part.unlink(missing_ok=True)
        return
    request.offset = size
    request.digest.CopyFrom(tensor_pb2.Digest(value=wire))


def _fetched(
    coordinator: Coordinator, request: job_pb2.ExportModelRequest, part: Path, report: Report
) -> _Offer:
    offer: _Offer | None = None
    running = RunningDigest()
    with part.open("ab") as file:
        for message in coordinator.export(request):
            if message.HasField("header"):
                offer = _offer(message.header)
                running = _begun(offer, request, part, file)
            elif offer is not None:
                _append(message.chunk, running, file)
                report(running.size_bytes, offer.size_bytes)
        file.flush()
        os.fsync(file.fileno())
    if offer is None or running.size_bytes < offer.size_bytes:
        raise HyperGPUError(Reason.COORDINATOR_UNREACHABLE, "the model's stream ended early")
    report(running.size_bytes, offer.size_bytes)
    if running.digest() != offer.digest:
        part.unlink()
        detail = f"the model arrived as {running.digest()[:16]}..., not {offer.digest[:16]}..."
        raise HyperGPUError(Reason.DIGEST_MISMATCH, detail)
    _named(part).unlink(missing_ok=True)
    return offer


def _offer(header: job_pb2.ExportHeader) -> _Offer:
    try:
        layout = layout_from_json(header.layout_json)
    except LayoutError as broken:
        raise HyperGPUError(Reason.CALL_BROKEN, f"the model's layout: {broken}") from broken
    if layout.model_bytes != header.blob.size_bytes:
        detail = f"a model of {header.blob.size_bytes} bytes with a layout of {layout.model_bytes}"
        raise HyperGPUError(Reason.CALL_BROKEN, detail)
    digest = digest_from_wire(header.blob.digest.value)
    return _Offer(digest, header.blob.size_bytes, layout, header.model_card)


def _begun(
    offer: _Offer, request: job_pb2.ExportModelRequest, part: Path, file: BinaryIO
) -> RunningDigest:
    """Keep the part when it is of this model, else start over."""
    is_same = request.offset > 0 and request.digest.value == digest_to_wire(offer.digest)
    if is_same and request.offset <= offer.size_bytes:
        return running_digest_of_file(part)
    file.truncate(0)
    _named(part).write_text(offer.digest, "ascii")
    return RunningDigest()


def _append(chunk: tensor_pb2.Chunk, running: RunningDigest, file: BinaryIO) -> None:
    if chunk.offset != running.size_bytes:
        detail = f"a chunk at {chunk.offset} where {running.size_bytes} was due"
        raise HyperGPUError(Reason.OFFSET_MISMATCH, detail)
    file.write(chunk.payload)
    running.update(chunk.payload)


def _write_safetensors(offer: _Offer, blob: Path, target: Path, job_id: str) -> None:
    """The flat bytes behind a safetensors header, copied in flat memory.

    Integers go first, so that every tensor is aligned to its elements.
    """
    integers_at = sum(
        _bytes(each) for each in offer.layout.tensors if each.kind is not Kind.INTEGER
    )
    header = _header(offer, job_id)
    fresh = target.with_name(f".{target.name}.tmp")
    with fresh.open("wb") as file, blob.open("rb") as source:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        source.seek(integers_at)
        shutil.copyfileobj(source, file, 1 << 20)
        source.seek(0)
        _copy(source, file, integers_at)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(target)


def _copy(source: BinaryIO, file: BinaryIO, count: int) -> None:
    while count > 0:
        piece = source.read(min(count, 1 << 20))
        if not piece:
            raise OSError(0, "the fetched model was cut while it was written")
        file.write(piece)
        count -= len(piece)


def _bytes(tensor: TensorSpec) -> int:
    return tensor.count * _ELEMENT[tensor.kind][1]


def _header(offer: _Offer, job_id: str) -> bytes:
    noted = {
        "format": "pt",
        "hypergpu.model": offer.digest,
        JOB_FIELD: job_id,
        CARD_FIELD: digest_of(offer.card.encode("utf-8")),
    }
    entries: dict[str, object] = {"__metadata__": noted}
    at = 0
    in_file = sorted(offer.layout.tensors, key=lambda each: each.kind is not Kind.INTEGER)
    for tensor in in_file:
        end = at + _bytes(tensor)
        entries[tensor.name] = {
            "dtype": _ELEMENT[tensor.kind][0],
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = msgspec.json.encode(entries)
    return text + b" " * (-len(text) % 8)
