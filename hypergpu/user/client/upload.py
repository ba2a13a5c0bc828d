"""Sends a user's data to the coordinator, with resume."""

import asyncio
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from hypergpu.data_paths import checked_paths
from hypergpu.digests import digest_of_file
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest
from hypergpu.line_limits import PIECE_BYTES, StallTimeout
from hypergpu.part_file import Span
from hypergpu.units import Milliseconds
from hypergpu.user.client.connection import TRANSFER_TIMEOUT_S, CoordinatorCalls, pause_s
from hypergpu.user.client.resume import (
    IDLE_TRIES,
    PASSING,
    ReportProgress,
    explain_broken,
    span_bytes,
)
from hypergpu.user.client.values import blob_ref
from hypergpu.v1 import job_pb2, tensor_pb2
from hypergpu.wire.bulk_ranges import FileRange


class LocalFile(msgspec.Struct, frozen=True):
    """A file to send."""

    path: Path
    name: str
    """Relative to the folder, with forward slashes."""
    digest: Digest
    size_bytes: int


async def send_folder(
    calls: CoordinatorCalls, folder: Path, report: ReportProgress
) -> tensor_pb2.Manifest:
    """Send what the coordinator does not hold of a folder; returns the folder's manifest.

    Raises:
        HyperGPUError: A file cannot be read, or has a name that not every machine takes; or the
            coordinator refuses it or stays away.
    """
    files = await asyncio.to_thread(_read_folder, folder, report)
    checked_paths(file.name for file in files)
    step, done_bytes = f"uploading {folder.name}", 0
    total = sum(file.size_bytes for file in files)
    sent_digests: set[Digest] = set()
    for file in files:
        # A file that occurs twice travels once.
        if file.digest not in sent_digests:
            sent_digests.add(file.digest)
            await _send_file(
                calls, file, functools.partial(_report_from, report, step, done_bytes, total)
            )
        done_bytes += file.size_bytes
        report(step, done_bytes, total)
    entries = [
        tensor_pb2.ManifestEntry(path=file.name, blob=blob_ref(file.digest, file.size_bytes))
        for file in files
    ]
    return tensor_pb2.Manifest(entries=entries)


async def send_file(
    calls: CoordinatorCalls, path: Path, report: ReportProgress
) -> tensor_pb2.BlobRef:
    """Send one file, unless the coordinator holds it.

    Raises:
        HyperGPUError: It cannot be read, or the coordinator refuses it or stays away.
    """
    file = await asyncio.to_thread(_read_file, path, path.name)
    step, size = f"uploading {file.name}", file.size_bytes
    await _send_file(calls, file, functools.partial(_report_from, report, step, 0, size))
    return blob_ref(file.digest, size)


async def send_files(
    calls: CoordinatorCalls, paths: Sequence[Path], step: str, report: ReportProgress
) -> list[tensor_pb2.BlobRef]:
    """Send files, each unless the coordinator holds it, and report them as one step.

    Raises:
        HyperGPUError: As `send_file`.
    """
    files = [await asyncio.to_thread(_read_file, path, path.name) for path in paths]
    done_bytes, total = 0, sum(file.size_bytes for file in files)
    for file in files:
        advance = functools.partial(_report_from, report, step, done_bytes, total)
        await _send_file(calls, file, advance)
        done_bytes += file.size_bytes
        report(step, done_bytes, total)
    return [blob_ref(file.digest, file.size_bytes) for file in files]


def _report_from(report: ReportProgress, step: str, base: int, total: int, committed: int) -> None:
    report(step, base + committed, total)


def _read_folder(folder: Path, report: ReportProgress) -> list[LocalFile]:
    """Every regular file with its digest, in an order that does not depend on the file system.

    Hidden files and folders are left out.
    """
    if not folder.is_dir():
        raise HyperGPUError(Reason.FILE_UNUSABLE, f"data.path: {folder} is not a folder")
    visible_paths = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        visible_paths += [Path(place, name) for name in names if not name.startswith(".")]
    paths = sorted(path for path in visible_paths if path.is_file())
    if not paths:
        raise HyperGPUError(Reason.FILE_UNUSABLE, f"data.path: {folder} holds no file")
    files, done_bytes, total = [], 0, sum(path.stat().st_size for path in paths)
    for path in paths:
        files.append(_read_file(path, path.relative_to(folder).as_posix()))
        done_bytes += files[-1].size_bytes
        report(f"reading {folder.name}", done_bytes, total)
    return files


def _read_file(path: Path, name: str) -> LocalFile:
    try:
        # Links are followed here; what sends the file opens no link.
        return LocalFile(path.resolve(), name, digest_of_file(path), path.stat().st_size)
    except OSError as error:
        raise HyperGPUError(Reason.FILE_UNUSABLE, f"{path}: {error.strerror}") from error


async def _send_file(
    calls: CoordinatorCalls, file: LocalFile, advance: Callable[[int], None]
) -> None:
    committed_bytes, idle_tries, wrong_digests = 0, 0, 0
    while True:
        missing_spans = [Span(0, file.size_bytes)]
        try:
            offer = await _offer_file(calls, file)
            missing_spans = [Span(each.start, each.end) for each in offer.ticket.ranges]
            if not offer.is_stored:
                advance(file.size_bytes - span_bytes(missing_spans))
                await _send_ranges(calls, file, offer.ticket, advance)
                commit = job_pb2.CommitDataRequest(blob=blob_ref(file.digest, file.size_bytes))
                await calls.call(calls.jobs.CommitData, commit, TRANSFER_TIMEOUT_S)
            advance(file.size_bytes)
            return
        except HyperGPUError as error:
            held_bytes = file.size_bytes - span_bytes(missing_spans)
            idle_tries = idle_tries + 1 if held_bytes <= committed_bytes else 0
            committed_bytes = max(committed_bytes, held_bytes)
            # Once an object store may have changed them; twice it was somebody here.
            wrong_digests += error.reason is Reason.DIGEST_MISMATCH
            is_passing = error.reason in PASSING and wrong_digests <= 1
            if not is_passing or idle_tries >= IDLE_TRIES:
                raise
            await asyncio.sleep(pause_s(idle_tries))


async def _offer_file(calls: CoordinatorCalls, file: LocalFile) -> job_pb2.OfferDataResponse:
    request = job_pb2.OfferDataRequest(blob=blob_ref(file.digest, file.size_bytes))
    answer: job_pb2.OfferDataResponse = await calls.call(calls.jobs.OfferData, request)
    return answer


async def _send_ranges(
    calls: CoordinatorCalls,
    file: LocalFile,
    ticket: tensor_pb2.Ticket,
    advance: Callable[[int], None],
) -> None:
    """Send what is missing of a file, one range after the other."""
    left_bytes = file.size_bytes - sum(each.end - each.start for each in ticket.ranges)

    def count(size_bytes: int) -> None:
        nonlocal left_bytes
        left_bytes += size_bytes
        advance(left_bytes)

    for each in ticket.ranges:
        stall = StallTimeout(PIECE_BYTES, Milliseconds(round(1000 * calls.to.timeout_s)))
        source = FileRange(file.path, Span(each.start, each.end))
        try:
            with explain_broken(calls, each):
                await calls.bulk.send(each, source, stall, count)
        except OSError as error:
            detail = f"{file.path}: {error.strerror}"
            raise HyperGPUError(Reason.FILE_UNUSABLE, detail) from error
