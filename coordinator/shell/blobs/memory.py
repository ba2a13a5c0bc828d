"""Blobs that are gone when the process ends. Files appear only where somebody asks for a path."""

import io
import threading
import time
from pathlib import Path

from coordinator.shell.blobs.interface import KEEP_S, Collected, Usage
from coordinator.shell.blobs.space import Space
from hypergpu.digest import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest
from hypergpu.statements.assignment import BlobRef
from hypergpu.units import Bytes


class MemoryReader:
    """A blob's bytes and how far they were read."""

    def __init__(self, content: bytes, offset: int) -> None:
        self._size_bytes = Bytes(len(content))
        self._stream = io.BytesIO(content)
        self._stream.seek(offset)

    @property
    def size_bytes(self) -> Bytes:
        return self._size_bytes

    def read(self, size_bytes: int) -> bytes:
        return self._stream.read(size_bytes)

    def close(self) -> None:
        self._stream.close()


class MemoryBlobs:
    """The store as a dictionary. ``folder`` takes work files and the files behind `path`."""

    def __init__(self, folder: Path, space: Space) -> None:
        self._folder = folder
        self.space = space
        self._lock = threading.Lock()
        self._contents: dict[Digest, bytes] = {}
        self._kept_until_s: dict[Digest, float] = {}
        self._placed: dict[Digest, int] = {}
        self._placements = 0

    def put(self, content: bytes, *, keep_s: int = KEEP_S) -> BlobRef:
        blob = BlobRef(digest_of(content), Bytes(len(content)))
        self.space.take(blob.size_bytes)
        with self._lock:
            if blob.digest in self._contents:
                self.space.give(blob.size_bytes)
            self._contents[blob.digest] = content
            self._kept_until_s[blob.digest] = time.time() + keep_s
            self._placements += 1
            self._placed[blob.digest] = self._placements
        return blob

    def adopt(self, path: Path, blob: BlobRef, *, keep_s: int = KEEP_S) -> None:
        if path.stat().st_size != blob.size_bytes:
            raise HyperGPUError(
                Reason.DIGEST_MISMATCH, f"{path} is not {blob.size_bytes} bytes long"
            )
        self.put(path.read_bytes(), keep_s=keep_s)
        path.unlink()

    def adopt_unsynced(self, path: Path, blob: BlobRef, *, keep_s: int = KEEP_S) -> None:
        self.adopt(path, blob, keep_s=keep_s)

    def sync(self, digest: Digest) -> None:
        self._content(digest)

    def open(self, digest: Digest, offset: int = 0) -> MemoryReader:
        return MemoryReader(self._content(digest), offset)

    def path(self, digest: Digest) -> Path:
        path = self._folder / digest
        path.write_bytes(self._content(digest))
        return path

    def size(self, digest: Digest) -> Bytes | None:
        with self._lock:
            content = self._contents.get(digest)
        return None if content is None else Bytes(len(content))

    def mark(self) -> int:
        return self._placements

    def collect(
        self, live: frozenset[Digest], *, mark: int | None = None, spares_older: bool = False
    ) -> Collected:
        now_s = time.time()
        with self._lock:
            mark = self._placements if mark is None else mark
            dead = [
                digest
                for digest in self._contents
                if digest not in live
                and self._placed[digest] <= mark
                and self._kept_until_s[digest] <= now_s
            ]
            freed_bytes = sum(len(self._contents.pop(digest)) for digest in dead)
        for digest in dead:
            (self._folder / digest).unlink(missing_ok=True)
        self.space.give(freed_bytes)
        return Collected(tuple(dead), Bytes(freed_bytes))

    def reuse(self, path: Path, size_bytes: int) -> bool:
        return False

    def work_path(self, name: str) -> Path:
        return self._folder / name

    def usage(self) -> Usage:
        return self.space.usage()

    def _content(self, digest: Digest) -> bytes:
        with self._lock:
            content = self._contents.get(digest)
        if content is None:
            raise HyperGPUError(Reason.BLOB_UNKNOWN, f"blob {digest[:80]}: it is not stored here")
        return content
