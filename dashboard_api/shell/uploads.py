"""Data sets that users send piece by piece; interrupted ones go on where they were.

An archive is unpacked within bounds: no links, no way out of its folder, no bomb.
"""

import asyncio
import re
import secrets
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

import msgspec

from dashboard_api.shell.failures import RequestRefusedError
from hypergpu.clock import unix_ms

PIECE_BYTES_MAX = 8 << 20
ENTRIES_MAX = 100_000
UNPACKED_FACTOR = 4
"""An archive may unpack to this many times the limit of uploads."""
UPLOADS_MAX = 16
KEPT_MS = 24 * 3_600_000
CHUNK_BYTES = 1 << 20
_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._ -]{0,99}", re.ASCII)


class Upload(msgspec.Struct):
    """A data set under way."""

    id: str
    owner: str
    """Id of the session's token: nobody else sees it."""
    name: str
    size_bytes: int
    made_at_ms: int
    committed_bytes: int = 0


class Uploads:
    """Uploads in a folder."""

    def __init__(self, folder: Path, bytes_max: int) -> None:
        self._folder = folder
        self._bytes_max = bytes_max
        self._writing: dict[str, asyncio.Lock] = {}

    def begin(self, owner: str, name: str, size_bytes: int) -> Upload:
        """Start an upload.

        Raises:
            RequestRefusedError: It is too large, has an impossible name, or there are too many.
        """
        if not _NAME.fullmatch(name):
            message = "a name has letters, digits, dots, dashes and blanks, at most 100"
            raise RequestRefusedError(400, message, "rename the file")
        if not 0 < size_bytes <= self._bytes_max:
            message = f"{size_bytes} bytes are not from 1 to {self._bytes_max}"
            fix = "send a larger data set by the command line: hypergpu job submit"
            raise RequestRefusedError(413, message, fix)
        self._remove_old()
        own = [each for each in self._all() if each.owner == owner]
        if len(own) >= UPLOADS_MAX:
            raise RequestRefusedError(429, f"{UPLOADS_MAX} uploads are open", "finish one first")
        upload = Upload(secrets.token_hex(16), owner, name, size_bytes, unix_ms())
        self._path(upload.id).mkdir(parents=True, mode=0o700)
        self._part(upload.id).touch(mode=0o600)
        self._write_facts(upload)
        return upload

    def find(self, upload_id: str, owner: str) -> Upload:
        """An upload of its owner.

        Raises:
            RequestRefusedError: There is none.
        """
        upload = self._read_facts(upload_id) if _ID.fullmatch(upload_id) else None
        if upload is None or upload.owner != owner:
            raise RequestRefusedError(404, f"there is no upload {upload_id[:40]!r}", "begin anew")
        upload.committed_bytes = self._part(upload_id).stat().st_size
        return upload

    async def append(self, upload: Upload, offset: int, piece: bytes) -> Upload:
        """Add a piece; one whose beginning is there already is cut.

        Raises:
            RequestRefusedError: It does not continue what is there, or there is more than stated.
        """
        async with self._writing.setdefault(upload.id, asyncio.Lock()):
            committed_bytes = self._part(upload.id).stat().st_size
            if offset > committed_bytes:
                message = f"the piece begins at {offset}, {committed_bytes} bytes are there"
                raise RequestRefusedError(409, message, f"go on at {committed_bytes}")
            fresh = piece[committed_bytes - offset :]
            if committed_bytes + len(fresh) > upload.size_bytes:
                message = f"more than the {upload.size_bytes} bytes that were stated"
                raise RequestRefusedError(413, message, "begin a larger upload")
            await asyncio.to_thread(_append, self._part(upload.id), fresh)
        return self.find(upload.id, upload.owner)

    def data_folder(self, upload: Upload) -> Path:
        """Folder with the complete data set, unpacked if it is an archive; blocks.

        Raises:
            RequestRefusedError: It is not complete, or its archive is refused.
        """
        if upload.committed_bytes < upload.size_bytes:
            message = f"{upload.committed_bytes} of {upload.size_bytes} bytes are there"
            raise RequestRefusedError(409, message, f"go on at {upload.committed_bytes}")
        folder = self._path(upload.id) / "content"
        if folder.is_dir():
            return folder
        fresh = folder.with_name("unpacking")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(mode=0o700)
        try:
            unpack(self._part(upload.id), upload.name, fresh, self._bytes_max * UNPACKED_FACTOR)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
        fresh.replace(folder)
        return folder

    def _all(self) -> Iterator[Upload]:
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            if (upload := self._read_facts(path.name)) is not None:
                yield upload

    def _remove_old(self) -> None:
        for upload in list(self._all()):
            if unix_ms() - upload.made_at_ms > KEPT_MS:
                shutil.rmtree(self._path(upload.id), ignore_errors=True)

    def _path(self, upload_id: str) -> Path:
        return self._folder / upload_id

    def _part(self, upload_id: str) -> Path:
        return self._path(upload_id) / "part"

    def _write_facts(self, upload: Upload) -> None:
        (self._path(upload.id) / "facts.json").write_bytes(msgspec.json.encode(upload))

    def _read_facts(self, upload_id: str) -> Upload | None:
        try:
            content = (self._path(upload_id) / "facts.json").read_bytes()
            return msgspec.json.decode(content, type=Upload)
        except (OSError, msgspec.DecodeError):
            return None


def unpack(source: Path, name: str, folder: Path, bytes_max: int) -> None:
    """Fill a folder from a zip or tar archive; any other file is put in as it is.

    Raises:
        RequestRefusedError: The archive is damaged, too large, or names a place outside.
    """
    lower = name.lower()
    try:
        if lower.endswith(".zip"):
            with zipfile.ZipFile(source) as archive:
                _unpack_zip(archive, folder, bytes_max)
        elif lower.endswith((".tar", ".tar.gz", ".tgz")):
            with tarfile.open(source) as archive:
                _unpack_tar(archive, folder, bytes_max)
        else:
            shutil.copyfile(source, folder / name)
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, RuntimeError) as error:
        raise _refusal(f"it cannot be read: {error}") from error
    except (NotImplementedError, OSError, ValueError) as error:
        raise _refusal(f"it cannot be unpacked: {error}") from error


def _unpack_zip(archive: zipfile.ZipFile, folder: Path, bytes_max: int) -> None:
    entries = archive.infolist()
    if len(entries) > ENTRIES_MAX:
        raise _refusal(f"it has over {ENTRIES_MAX} entries")
    left_bytes = bytes_max
    for entry in entries:
        mode = entry.external_attr >> 16
        if entry.is_dir():
            continue
        if mode and not stat.S_ISREG(mode) and stat.S_IFMT(mode):
            raise _refusal(f"{entry.filename[:80]!r} is no regular file")
        with archive.open(entry) as content:
            left_bytes -= _write(content, inside(folder, entry.filename), left_bytes)


def _unpack_tar(archive: tarfile.TarFile, folder: Path, bytes_max: int) -> None:
    left_bytes = bytes_max
    for number, entry in enumerate(archive):
        if number >= ENTRIES_MAX:
            raise _refusal(f"it has over {ENTRIES_MAX} entries")
        if entry.isdir():
            continue
        content = archive.extractfile(entry) if entry.isreg() else None
        if content is None:
            raise _refusal(f"{entry.name[:80]!r} is no regular file")
        with content:
            left_bytes -= _write(content, inside(folder, entry.name), left_bytes)


def inside(folder: Path, name: str) -> Path:
    """Place of an archive's entry within a folder.

    Raises:
        RequestRefusedError: The name leads out of it, or no machine takes it.
    """
    path = PurePosixPath(name.replace("\\", "/"))
    is_odd = "\x00" in name or len(name) > 1000 or ":" in name
    if is_odd or path.is_absolute() or not path.parts or ".." in path.parts:
        raise _refusal(f"{name[:80]!r} leads out of its folder")
    return folder.joinpath(*path.parts)


def _write(content: IO[bytes], target: Path, left: int) -> int:
    """Write an entry; returns its size, whatever its header said."""
    target.parent.mkdir(parents=True, exist_ok=True)
    size = 0
    with target.open("xb") as file:
        while chunk := content.read(CHUNK_BYTES):
            size += len(chunk)
            if size > left:
                raise _refusal("it unpacks to too much")
            file.write(chunk)
    return size


def _append(path: Path, piece: bytes) -> None:
    with path.open("ab") as file:
        file.write(piece)


def _refusal(problem: str) -> RequestRefusedError:
    fix = "make an archive of plain files with names inside of one folder"
    return RequestRefusedError(400, f"the archive is refused: {problem}", fix)
