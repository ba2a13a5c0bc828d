"""Fetches a job's model from the coordinator, with resume, and writes it as files."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from hypergpu.digests import digest_from_wire, digest_of, digest_of_file
from hypergpu.durable import SHARED, fill_durably, write_durably
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest
from hypergpu.line_limits import PIECE_BYTES, StallTimeout
from hypergpu.part_file import DigestingPartFile, PartFile, Span
from hypergpu.programs.checks import read_program
from hypergpu.programs.container import CONSTANT, TENSORS_PATH, ProgramError
from hypergpu.tensors.layout import Flat, unpack
from hypergpu.units import Bytes, Milliseconds
from hypergpu.user.client.connection import CoordinatorCalls, pause_s
from hypergpu.user.client.resume import (
    IDLE_TRIES,
    PASSING,
    ReportProgress,
    explain_broken,
    span_bytes,
)
from hypergpu.user.client.values import ModelHeader, model_header
from hypergpu.v1 import job_pb2, tensor_pb2
from hypergpu.wire.bulk_ranges import BulkAbsentError
from hypergpu.workloads.entry import NODE_DATA_FIELD, OPTIONS_FIELD, WORKLOAD_FIELD
from hypergpu.workloads.registry import UnknownWorkloadError, find

_Answer = TypeVar("_Answer")
MODEL_NAME = "model.safetensors"
CARD_NAME = "README.md"
LOADER_NAME = "load.py"
JOB_FIELD = "hypergpu.job"
CARD_FIELD = "hypergpu.card"
"""Digest of the card that was written beside the model."""


class ExportedModel(msgspec.Struct, frozen=True):
    """Files that an export left on disk."""

    model: Path
    card: Path
    loader: Path
    """A program that loads the model; of a training through a ring, the settings that peft loads it
    by.
    """
    digest: Digest
    """Digest of the model's flat bytes, as the job names it, not of the file; of a training through
    a ring, of the file.
    """
    size_bytes: int


class ExportOrder(msgspec.Struct, frozen=True):
    """Which model to take where."""

    job_id: str
    folder: Path
    which: str
    may_overwrite: bool
    workload: str
    options: Mapping[str, object]
    node_data: str = ""
    """Data set that stayed on its nodes; empty: none."""
    is_weights_alone: bool = False
    """Whether nothing else is wanted that would run the model."""

    @property
    def part(self) -> Path:
        """The flat bytes fetched so far."""
        return self.folder / f".{self.job_id}-{self.which}.part"


class WantedBlob(NamedTuple):
    """A blob on its way to a file."""

    name: str
    """For messages."""
    digest: Digest
    size_bytes: int
    ticket: tensor_pb2.Ticket
    part: Path
    """The file that holds those of its bytes that came."""

    @property
    def part_digest(self) -> Path:
        """Names the blob that the part belongs to."""
        return self.part.with_suffix(".digest")


class FetchedBytes:
    """How much came, in all tries."""

    count = 0
    is_doubted = False
    """Whether the last ticket led to something else, or to nothing."""


async def fetch_model(
    calls: CoordinatorCalls, order: ExportOrder, report: ReportProgress
) -> ExportedModel:
    """Fetch a model into a folder; an interrupted fetch goes on the next time.

    Raises:
        HyperGPUError: There is no model, it arrived damaged, the folder cannot be written, or it
            holds files that are not this export's to replace.
    """
    model, card = order.folder / MODEL_NAME, order.folder / CARD_NAME
    loader, program = order.folder / LOADER_NAME, _loader_program()
    try:
        if not order.may_overwrite:
            require_replaceable(model, card, order.job_id)
            if loader.exists() and loader.read_bytes() != program:
                raise HyperGPUError(Reason.FILE_PRESENT, f"{loader} is there already")
        order.folder.mkdir(parents=True, exist_ok=True)
        header = await fetch_with_resume(
            lambda fetched_bytes: _fetch(calls, order, fetched_bytes, report)
        )
        await asyncio.to_thread(_write_safetensors, header, order, model)
        write_durably(card, header.card.encode("utf-8"), mode=SHARED)
        write_durably(loader, program, mode=SHARED)
        order.part.unlink()
    except OSError as error:
        detail = f"{order.folder}: {error.strerror}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail) from error
    return ExportedModel(model, card, loader, header.digest, model.stat().st_size)


def _loader_program() -> bytes:
    """The same for every job: nothing that a coordinator sends is ever run."""
    return files("hypergpu.user.client").joinpath("load.py.txt").read_bytes()


async def fetch_with_resume(fetch: Callable[[FetchedBytes], Awaitable[_Answer]]) -> _Answer:
    """Fetch again what broke off by itself, where it goes on.

    Args:
        fetch: Fetches what is missing, and counts what came.

    Raises:
        HyperGPUError: It is not there, arrived damaged twice, or the coordinator stays away.
    """
    idle_tries, wrong_digests, fetched_bytes = 0, 0, FetchedBytes()
    while True:
        before = fetched_bytes.count
        try:
            return await fetch(fetched_bytes)
        except HyperGPUError as error:
            idle_tries = 0 if fetched_bytes.count > before else idle_tries + 1
            wrong_digests += error.reason is Reason.DIGEST_MISMATCH
            is_passing = error.reason in PASSING and wrong_digests <= 1
            if not is_passing or idle_tries >= IDLE_TRIES:
                raise
            await asyncio.sleep(pause_s(idle_tries))


async def _fetch(
    calls: CoordinatorCalls, order: ExportOrder, fetched: FetchedBytes, report: ReportProgress
) -> ModelHeader:
    """Fetch what is missing of the model."""
    request = job_pb2.ResolveModelRequest(
        job_id=order.job_id, which=order.which, is_doubted=fetched.is_doubted
    )
    answer = await calls.call(calls.jobs.ResolveModel, request)
    fetched.is_doubted = False
    header = model_header(answer)
    if not order.is_weights_alone:
        await _fetch_files(calls, order, answer.files, fetched, report)
    name = f"model of {order.job_id}"
    model = WantedBlob(name, header.digest, header.size_bytes, answer.ticket, order.part)
    await fetch_blob(calls, model, fetched, report)
    return header


async def _fetch_files(
    calls: CoordinatorCalls,
    order: ExportOrder,
    offered: Iterable[job_pb2.ModelFile],
    fetched: FetchedBytes,
    report: ReportProgress,
) -> None:
    """Fetch what runs the model. Only files that the workload as installed here names are taken."""
    by_path = {each.path: each for each in offered}
    for path in _exported_files(order.workload):
        if path not in by_path or not await asyncio.to_thread(_is_needed, order.folder, path):
            continue
        file, target = by_path[path], order.folder / path
        digest = digest_from_wire(file.blob.digest.value)
        if target.is_file() and await asyncio.to_thread(digest_of_file, target) == digest:
            continue
        if target.exists() and not (order.may_overwrite or (order.folder / MODEL_NAME).exists()):
            raise HyperGPUError(Reason.FILE_PRESENT, f"{target} is there already")
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.part")
        blob = WantedBlob(path, digest, file.blob.size_bytes, file.ticket, part)
        await fetch_blob(calls, blob, fetched, report)
        part.chmod(SHARED)
        part.replace(target)


def _exported_files(workload: str) -> tuple[str, ...]:
    try:
        return find(workload).exported_files
    except UnknownWorkloadError:
        return ()


def _is_needed(folder: Path, path: str) -> bool:
    """Whether a model needs the file: a program's tensors only where the model has not all."""
    if path != TENSORS_PATH:
        return True
    try:
        program = read_program(folder)
    except ProgramError:
        return True  # A later version has written it, and may know more roles.
    return any(each.role == CONSTANT for each in program.tensors)


async def fetch_blob(
    calls: CoordinatorCalls, blob: WantedBlob, fetched: FetchedBytes, report: ReportProgress
) -> None:
    """Fetch what is missing of a blob into its part, which then holds it whole.

    Raises:
        HyperGPUError: DIGEST_MISMATCH, it arrived damaged; or what broke the transfer.
    """
    _begin_part(blob)
    part = DigestingPartFile(blob.part, Bytes(blob.size_bytes))
    try:
        missing_spans = part.missing()
        done_bytes = blob.size_bytes - span_bytes(missing_spans)
        for start, end in missing_spans:
            ticket_range = next(
                each for each in blob.ticket.ranges if each.start <= start < each.end
            )
            with explain_broken(calls, ticket_range), _doubting(fetched):
                async for size_bytes in _fetch_range(calls, ticket_range, part, Span(start, end)):
                    fetched.count += size_bytes
                    done_bytes += size_bytes
                    report(blob.name, done_bytes, blob.size_bytes)
        digest = await asyncio.to_thread(part.finish)
    finally:
        part.close()
    if digest != blob.digest:
        blob.part.unlink()
        fetched.is_doubted = True
        detail = f"the {blob.name} arrived as {digest[:16]}..., not {blob.digest[:16]}..."
        raise HyperGPUError(Reason.DIGEST_MISMATCH, detail)
    blob.part_digest.unlink(missing_ok=True)


@contextmanager
def _doubting(fetched: FetchedBytes) -> Iterator[None]:
    """Doubt a ticket by which the store does not give the model."""
    try:
        yield
    except BulkAbsentError:
        fetched.is_doubted = True
        raise


async def _fetch_range(
    calls: CoordinatorCalls, ranged: tensor_pb2.TicketRange, part: PartFile, span: Span
) -> AsyncIterator[int]:
    """Write a range as it comes; gives the size of each piece."""
    stall = StallTimeout(PIECE_BYTES, Milliseconds(round(1000 * calls.to.timeout_s)))
    at = span.start
    async with calls.bulk.open(ranged, span, stall) as pieces:
        async for piece in pieces:
            part.write(at, piece)
            at += len(piece)
            yield len(piece)


def _begin_part(blob: WantedBlob) -> None:
    """Keep a part that belongs to this blob; start over with any other."""
    try:
        is_same = blob.part_digest.read_text("ascii") == blob.digest
    except (OSError, ValueError):
        is_same = False
    if not is_same:
        blob.part.unlink(missing_ok=True)
        blob.part_digest.write_text(blob.digest, "ascii")


def require_replaceable(model: Path, card: Path, job_id: str) -> None:
    """Refuse to write over what no export of this job wrote.

    Raises:
        HyperGPUError: FILE_PRESENT, with the file and whose it is.
    """
    metadata = _metadata(model) if model.exists() else {}
    if model.exists() and metadata.get(JOB_FIELD) != job_id:
        whose = f"{metadata[JOB_FIELD]}'s model" if JOB_FIELD in metadata else "no export's"
        raise HyperGPUError(Reason.FILE_PRESENT, f"{model} is there already and is {whose}")
    if card.exists() and metadata.get(CARD_FIELD) != digest_of(card.read_bytes()):
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
        WORKLOAD_FIELD: order.workload,
        OPTIONS_FIELD: msgspec.json.encode(order.options).decode(),
    } | ({NODE_DATA_FIELD: order.node_data} if order.node_data else {})
    tensors = unpack(header.layout, flat)
    fill_durably(target, lambda path: save_file(tensors, path, metadata), mode=SHARED)
