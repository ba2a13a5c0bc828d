"""A user's folder to the coordinator: a manifest of digests, then each blob with resume."""

import asyncio
import functools
import itertools
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec

from hypergpu.client.calls import TRANSFER_TIMEOUT_S, CoordinatorCalls
from hypergpu.client.failures import RESTARTING, pause_s
from hypergpu.client.translation import blob_ref
from hypergpu.dataset.manifest import checked_paths
from hypergpu.digest import digest_of_file
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest
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
