"""A user's folder to the coordinator: a manifest of digests, then each blob with resume."""

import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from hypergpu.client.calls import RESTARTING, Coordinator, blob_ref, pause_s
from hypergpu.dataset.manifest import checked_paths
from hypergpu.digest import digest_of_file
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest
from hypergpu.v1 import job_pb2, tensor_pb2

CHUNK_BYTES = 512 << 10
IDLE_TRIES = 5
"""Tries in a row that move no byte before the upload gives up."""

Advance = Callable[[int], None]
"""Told how many bytes were dealt with since the last call."""


class LocalFile(msgspec.Struct, frozen=True):
    """A file to send."""

    path: Path
    name: str
    """Relative to the folder, with forward slashes."""
    digest: Digest
    size_bytes: int


def listed_files(folder: Path) -> list[Path]:
    """Regular files below ``folder``, in an order that does not depend on the file system.

    Hidden files and folders stay at home.

    Raises:
        HyperGPUError: FILE_UNUSABLE, there is no such folder or nothing in it.
    """
    if not folder.is_dir():
        raise HyperGPUError(Reason.FILE_UNUSABLE, f"data.path: {folder} is not a folder")
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(place, name) for name in names if not name.startswith(".")]
    files = sorted(path for path in found if path.is_file())
    if not files:
        raise HyperGPUError(Reason.FILE_UNUSABLE, f"data.path: {folder} holds no file")
    return files


def named_files(folder: Path, files: list[Path], advance: Advance) -> list[LocalFile]:
    """Digest every file; reads each once.

    Raises:
        HyperGPUError: FILE_UNUSABLE, one cannot be read.
    """
    named = []
    for path in files:
        try:
            size_bytes = path.stat().st_size
            digest = digest_of_file(path)
        except OSError as broken:
            raise HyperGPUError(Reason.FILE_UNUSABLE, f"{path}: {broken.strerror}") from broken
        named.append(LocalFile(path, path.relative_to(folder).as_posix(), digest, size_bytes))
        advance(size_bytes)
    return named


def manifest(files: list[LocalFile]) -> tensor_pb2.Manifest:
    """What the coordinator and the nodes know of the folder.

    Raises:
        HyperGPUError: MANIFEST_INVALID, a file has a name that not every machine takes.
    """
    checked_paths(file.name for file in files)
    return tensor_pb2.Manifest(
        entries=[
            tensor_pb2.ManifestEntry(path=file.name, blob=blob_ref(file.digest, file.size_bytes))
            for file in files
        ]
    )


def upload(coordinator: Coordinator, files: list[LocalFile], advance: Advance) -> None:
    """Send what the coordinator does not hold; a file that occurs twice travels once.

    Raises:
        HyperGPUError: The coordinator refuses a file or stays away.
    """
    sent: set[Digest] = set()
    for file in files:
        if file.digest not in sent:
            sent.add(file.digest)
            _upload_file(coordinator, file, advance)
        else:
            advance(file.size_bytes)


def _upload_file(coordinator: Coordinator, file: LocalFile, advance: Advance) -> None:
    blob = blob_ref(file.digest, file.size_bytes)
    told = 0
    idle_tries = 0
    while True:
        try:
            offset = coordinator.uploaded(blob)
            if offset > told:
                advance(offset - told)
                idle_tries, told = 0, offset
            if offset >= file.size_bytes:
                return
            committed = coordinator.upload(_messages(file, blob, offset))
            advance(max(0, committed - told))
            told = max(told, committed)
            if committed >= file.size_bytes:
                return
        except HyperGPUError as refused:
            idle_tries += 1
            is_passing = refused.reason in RESTARTING | {Reason.OFFSET_MISMATCH}
            if not is_passing or idle_tries >= IDLE_TRIES:
                raise
            time.sleep(pause_s(idle_tries))


def _messages(
    file: LocalFile, blob: tensor_pb2.BlobRef, offset: int
) -> Iterator[job_pb2.UploadDataRequest]:
    yield job_pb2.UploadDataRequest(header=job_pb2.DataHeader(blob=blob, offset=offset))
    with file.path.open("rb") as source:
        source.seek(offset)
        for at in itertools.count(offset, CHUNK_BYTES):
            piece = source.read(CHUNK_BYTES)
            if not piece:
                return
            yield job_pb2.UploadDataRequest(chunk=tensor_pb2.Chunk(offset=at, payload=piece))
