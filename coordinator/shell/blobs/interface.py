"""What every blob store offers. Calls block: call them from a thread, in any number.

A full disk, or a full quota, raises `HyperGPUError` (DISK_FULL) and leaves no partial blob behind.
A blob that is missing or damaged raises `HyperGPUError` (BLOB_UNKNOWN).
"""

from pathlib import Path
from typing import Protocol

import msgspec

from hypergpu.ids import Digest
from hypergpu.statements.assignment import BlobRef
from hypergpu.units import Bytes

KEEP_S = 60
"""A fresh blob outlives every collection for this long: its owner needs time to journal it."""


class Usage(msgspec.Struct, frozen=True):
    """How full a store is."""

    used_bytes: Bytes
    """Blobs, and the declared sizes of the uploads under way."""
    quota_bytes: Bytes
    """0: none."""


class Collected(msgspec.Struct, frozen=True):
    """What a collection removed."""

    digests: tuple[Digest, ...]
    freed_bytes: Bytes


class BlobReader(Protocol):
    """An open blob. It can be read to its end even when it is collected meanwhile."""

    @property
    def size_bytes(self) -> Bytes:
        """Of the whole blob."""

    def read(self, size_bytes: int) -> bytes:
        """The next bytes, shorter only at the end, where it is empty."""

    def close(self) -> None:
        """Let go of the file."""


class Blobs(Protocol):
    """A content-addressed store."""

    def put(self, content: bytes, *, keep_s: int = KEEP_S) -> BlobRef:
        """Store some bytes, durably."""

    def adopt(self, path: Path, blob: BlobRef, *, keep_s: int = KEEP_S) -> None:
        """Take over a finished file, durably and without copying it. Its digest is believed.

        The file must lie on the store's file system, best in `work_path`. It is gone afterwards;
        when the disk is full it stays.
        """

    def adopt_unsynced(self, path: Path, blob: BlobRef, *, keep_s: int = KEEP_S) -> None:
        """Like `adopt`, but a power cut before `sync` may lose it: for what can be recomputed."""

    def sync(self, digest: Digest) -> None:
        """Make a blob durable."""

    def open(self, digest: Digest, offset: int = 0) -> BlobReader:
        """Read a blob from ``offset``. The first use after a start reads it whole and checks it."""

    def path(self, digest: Digest) -> Path:
        """A file that holds exactly the blob, checked like `open`; never write to it."""

    def size(self, digest: Digest) -> Bytes | None:
        """The stored size; None when there is no such blob. Checks nothing, reads nothing."""

    def mark(self) -> int:
        """A moment for `collect`, to be taken before looking at what is live."""

    def collect(
        self, live: frozenset[Digest], *, mark: int | None = None, spares_older: bool = False
    ) -> Collected:
        """Remove every blob that is not in ``live`` and whose ``keep_s`` is over.

        What was stored after ``mark`` stays: whoever found out what is live may not have known it.
        ``spares_older`` leaves what was stored before this process as well: for when not all that
        earlier ones needed could be found out.
        """

    def reuse(self, path: Path, size_bytes: int) -> bool:
        """Give a file of exactly this size, left by a removed blob, the name ``path``.

        Writing it over from its start is cheaper than a new file. False: there is none.
        """

    def work_path(self, name: str) -> Path:
        """Where to write a file to adopt. What still lies there at the next start is removed."""

    def usage(self) -> Usage:
        """How full the store is."""
