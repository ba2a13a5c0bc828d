"""Content-addressed store: files ``blobs/ab/abcd...``, written beside and renamed into place, or
over spare files. A damaged one is found at its first use after a start, moved to ``damaged/``, and
counts as missing. Calls block; a full disk raises DISK_FULL and leaves no partial blob.
"""

import fcntl
import os
import secrets
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

import msgspec
import structlog

from coordinator.shell.store.blobs.spares import Spares
from coordinator.shell.store.blobs.writing import (
    KEEP_S,
    Space,
    reject_when_full,
    sync_file,
    sync_folder,
    write_whole,
)
from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_of, digest_of_file, is_digest
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest
from hypergpu.units import Bytes

ABSENT_KEEP_S = 25 * 3600
"""What another coordinator left is kept for longer than anything that no job needs, by clocks that
may differ.
"""

log = structlog.get_logger()


class Collected(msgspec.Struct, frozen=True):
    """Blobs that a collection removed."""

    digests: tuple[Digest, ...]
    freed_bytes: Bytes


BLOBS = "blobs"
"""Folder of the blobs in a coordinator's folder."""


def blob_path(blobs: Path, digest: Digest) -> Path:
    """Path of a blob's file, there or not."""
    return blobs / digest[:2] / digest


def open_locked(path: Path) -> BinaryIO | None:
    """Open a blob's file such that nobody writes over it until it is closed; None: it is gone.

    The lock holds between processes, and ends with a process that is killed.
    """
    with ExitStack() as stack, suppress(FileNotFoundError, BlockingIOError):
        file = stack.enter_context(path.open("rb", buffering=0))
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        # Between the two the file may have been given away.
        if os.path.samestat(path.stat(), os.fstat(file.fileno())):
            stack.pop_all()
            return file
    return None


class BlobCopy(NamedTuple):
    """The copy of a blob."""

    size_bytes: Bytes
    since_s: float
    """When it was written, in Unix time of where it is."""


class BlobCopies(Protocol):
    """Copies of all blobs, away from this machine. Calls block."""

    def copies(self) -> Mapping[Digest, BlobCopy]:
        """Every blob that is there."""

    def find(self, digest: Digest) -> BlobCopy | None:
        """The newest copy of a blob; None: there is none."""

    def keep(self, blob: BlobRef, path: Path) -> None:
        """Have a blob there; returns once it is."""

    def fetch(self, blob: BlobRef, path: Path) -> bool:
        """Write a blob to a file; False: nothing there is that blob."""

    def forget(self, digest: Digest) -> None:
        """Let go of a blob that is not needed any more. Does not block."""


class BlobStore:
    """The store under one folder, open in one process only: the journal's lock sees to it.

    With copies no blob is durable before it is among them, and what is missing here is fetched.
    A blob and its copies are given up together: what is being stored is not collected, and what
    was collected is copied anew when it comes again.
    """

    def __init__(self, folder: Path, space: Space, copies: BlobCopies | None = None) -> None:
        """Open the store, making its folders, and drop what an earlier process left half-done.

        Raises:
            HyperGPUError: STORE_UNREACHABLE, nobody knows what copies there are.
        """
        self._copies = copies
        self._folder = folder / BLOBS
        self._damaged = folder / "damaged"
        self._work = folder / "work"
        self.space = space
        self._verified: set[Digest] = set()
        self._unsynced: set[Digest] = set()
        self._placing = threading.Lock()
        self._placed: dict[Digest, int] = {}
        self._placements = 0
        self._arriving: Counter[Digest] = Counter()
        """How many calls are storing each of these blobs: copied away, perhaps not yet here."""
        self._names: set[Digest] = set()
        """Digests of all files in the store: no round looks through its 256 folders."""
        self._spares = Spares(folder / "spares", space)
        shutil.rmtree(self._work, ignore_errors=True)
        for own_folder in (self._folder, self._damaged, self._work):
            own_folder.mkdir(parents=True, exist_ok=True)
        for path in self.files():
            self._names.add(Digest(path.name))
            space.count(path.stat().st_size)
        self._absent: dict[Digest, BlobCopy] = {}
        """Blobs that only the copies have."""
        if copies is not None:
            self._compare(copies)

    def put(self, content: bytes, *, keep_s: int = KEEP_S) -> BlobRef:
        """Store some bytes, durably."""
        blob = BlobRef(digest_of(content), Bytes(len(content)))
        path = self.work_path(f"put-{secrets.token_hex(8)}")
        try:
            with reject_when_full(f"blob {blob.digest}"):
                _write(path, content)
                self._place(path, blob, keep_s, is_durable=True)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return blob

    def adopt(self, path: Path, blob: BlobRef, *, keep_s: int = KEEP_S) -> None:
        """Take over a finished file, durably and without copying it. Its digest is believed.

        The file must lie on the store's file system, best in `work_path`. It is gone afterwards;
        when the disk is full it stays.
        """
        with reject_when_full(f"blob {blob.digest}"):
            self._place(path, blob, keep_s, is_durable=True)

    def adopt_unsynced(self, path: Path, blob: BlobRef, *, keep_s: int = KEEP_S) -> None:
        """Like `adopt`, but a power cut before `sync` may lose it: for what can be recomputed."""
        with reject_when_full(f"blob {blob.digest}"):
            self._place(path, blob, keep_s, is_durable=False)

    def sync(self, digest: Digest) -> None:
        """Make a blob durable."""
        with self._arrival(digest):
            path = self._known_path(digest)
            if digest not in self._unsynced:
                return
            with reject_when_full(f"blob {digest}"):
                sync_file(path)
                sync_folder(path.parent)
            if self._copies is not None:
                self._copies.keep(BlobRef(digest, Bytes(path.stat().st_size)), path)
            self._unsynced.discard(digest)

    @property
    def unsynced_blobs(self) -> frozenset[Digest]:
        """Blobs that `sync` has something to do for."""
        return frozenset(self._unsynced)

    def bring(self, digests: Iterable[Digest]) -> None:
        """Fetch those of the blobs that only the copies have.

        Raises:
            HyperGPUError: STORE_UNREACHABLE; DISK_FULL.
        """
        for digest in digests:
            if digest in self._absent:
                self._fetch(digest)

    def path(self, digest: Digest) -> Path:
        """A file that holds exactly the blob; never write to it.

        The first use after a start reads it whole and checks it.
        """
        path = self._known_path(digest)
        if digest not in self._verified:
            self._verify(path, digest)
        return path

    def find(self, digest: Digest) -> BlobRef:
        """A blob that is here, checked like `path`."""
        try:
            return BlobRef(digest, Bytes(self.path(digest).stat().st_size))
        except FileNotFoundError:
            raise _unknown_blob(digest, "it was just collected") from None

    def small_content(self, blob: BlobRef) -> bytes | None:
        """All bytes of a small blob, checked; None: it is not here, or damaged. Looks for no copy,
        and reads the whole file.
        """
        if (file := open_locked(self._path(blob.digest))) is None:
            return None
        with file:
            content = file.read()
        return content if digest_of(content) == blob.digest else None

    def size(self, digest: Digest) -> Bytes | None:
        """The stored size; None when there is no such blob. Checks nothing, reads nothing."""
        try:
            return Bytes(self._path(digest).stat().st_size)
        except FileNotFoundError:
            absent = self._absent.get(digest)
            return None if absent is None else absent.size_bytes

    def mark(self) -> int:
        """A moment for `collect`, to be taken before looking at what is live."""
        return self._placements

    def collect(
        self, live: frozenset[Digest], *, mark: int | None = None, spares_older: bool = False
    ) -> Collected:
        """Remove every blob that is not in ``live`` and whose ``keep_s`` is over.

        Blobs stored after ``mark`` stay: the caller may not have known them when it found out what
        is live. ``spares_older`` leaves blobs stored before this process as well: for when not all
        that earlier ones needed could be found out.
        """
        mark = self._placements if mark is None else mark
        self._spares.expire()
        removed_digests: list[Digest] = []
        freed_bytes = 0
        now_s = time.time()
        with self._placing:
            unneeded_digests = sorted(self._names - live)
            far = [] if spares_older else self._unneeded_copies(live, now_s)
            for digest in far:
                self._absent.pop(digest, None)
                self._forget_copies(digest)
            removed_digests += far
        for digest in unneeded_digests:
            path = self._path(digest)
            with self._placing, suppress(FileNotFoundError):
                if digest in self._arriving or path.stat().st_mtime > now_s:
                    continue
                placed_mark = self._placed.get(digest, 0)
                if placed_mark > mark or (spares_older and not placed_mark):
                    continue
                freed_bytes += self._forget(path, digest)
                self._forget_copies(digest)
                self._remove(path)
                removed_digests.append(digest)
        return Collected(tuple(removed_digests), Bytes(freed_bytes))

    def _unneeded_copies(self, live: frozenset[Digest], now_s: float) -> list[Digest]:
        """What only the copies have, is not live, and is not young: the coordinator before knew how
        long it had to be kept, such as a user's files that no job names yet.
        """
        return [
            digest
            for digest, copy in self._absent.items()
            if digest not in live
            and digest not in self._arriving
            and copy.since_s + ABSENT_KEEP_S <= now_s
        ]

    def reuse(self, path: Path, size_bytes: int) -> bool:
        """Give a file of exactly this size, left by a removed blob, the name ``path``.

        Writing it over from its start is cheaper than a new file. False: there is none.
        """
        return self._spares.take(path, size_bytes)

    def work_path(self, name: str) -> Path:
        """Where to write a file to adopt. A file still there at the next start is removed."""
        return self._work / name

    def files(self) -> Iterator[Path]:
        """Every blob's file, named by its digest."""
        return (path for path in self._folder.glob("??/*") if is_digest(path.name))

    @contextmanager
    def _arrival(self, digest: Digest) -> Iterator[None]:
        """Leave the blob and its copies to the block: neither is collected meanwhile."""
        with self._placing:
            self._arriving[digest] += 1
        try:
            yield
        finally:
            with self._placing:
                self._arriving[digest] -= 1
                self._arriving = +self._arriving

    def _place(self, path: Path, blob: BlobRef, keep_s: int, *, is_durable: bool) -> None:
        """Count a file's size as used and give the file its blob's name."""
        with self._arrival(blob.digest):
            self._place_arriving(path, blob, keep_s, is_durable=is_durable)

    def _place_arriving(self, path: Path, blob: BlobRef, keep_s: int, *, is_durable: bool) -> None:
        self.space.take_written(blob.size_bytes)
        target = self._path(blob.digest)
        try:
            if path.stat().st_size != blob.size_bytes:
                raise HyperGPUError(
                    Reason.DIGEST_MISMATCH, f"{path} is not {blob.size_bytes} bytes"
                )
            if is_durable:
                sync_file(path)
                if self._copies is not None:
                    self._copies.keep(blob, path)
            with self._placing:
                self._placements += 1
                self._placed[blob.digest] = self._placements
                is_fresh = self._replace(path, target, blob.digest)
                until_s = max(target.stat().st_mtime, time.time() + keep_s)
                os.utime(target, (until_s, until_s))
        except BaseException:
            self.space.give(blob.size_bytes)
            raise
        if is_durable:
            sync_folder(target.parent)
            self._unsynced.discard(blob.digest)
        elif is_fresh:
            self._unsynced.add(blob.digest)

    def _replace(self, path: Path, target: Path, digest: Digest) -> bool:
        """Rename, unless a good blob of that name is there. Returns whether the file was taken."""
        if target.exists():
            self.space.give(target.stat().st_size)
            if digest in self._verified and digest not in self._unsynced:
                path.unlink()
                return False
        elif not target.parent.exists():
            target.parent.mkdir()
            sync_folder(self._folder)
        path.replace(target)
        self._names.add(digest)
        self._verified.add(digest)
        return True

    def _verify(self, path: Path, digest: Digest) -> None:
        try:
            actual_digest = digest_of_file(path)
        except FileNotFoundError:
            raise _unknown_blob(digest, "it was just collected") from None
        except OSError as error:
            actual_digest = Digest(f"unreadable: {error.strerror}")
        if actual_digest == digest:
            self._verified.add(digest)
            return
        with self._placing, suppress(FileNotFoundError):
            self._forget(path, digest)
            path.rename(self._damaged / f"{digest}-{secrets.token_hex(4)}")
            sync_folder(path.parent)
        log.error("a damaged blob is set aside", blob=digest, folder=str(self._damaged))
        if not self._has_come_back(digest):
            raise _unknown_blob(digest, "its bytes were damaged on disk")

    def _has_come_back(self, digest: Digest) -> bool:
        """Whether the copies gave a blob back whose file was damaged; not while they are away."""
        if self._copies is None:
            return False
        try:
            if (copy := self._copies.find(digest)) is not None:
                self._absent[digest] = copy
                self._fetch(digest)
        except HyperGPUError as error:
            if error.reason is not Reason.STORE_UNREACHABLE:
                raise
        return self._path(digest).exists()

    def _remove(self, path: Path) -> None:
        """Delete a file, or keep it to be written over unless somebody reads it."""
        with path.open("rb", buffering=0) as file:
            try:
                # Held until the file has another name: see `open_locked`.
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._spares.offer(path)
            except BlockingIOError:
                path.unlink()

    def _forget_copies(self, digest: Digest) -> None:
        if self._copies is not None:
            self._copies.forget(digest)

    def _forget(self, path: Path, digest: Digest) -> int:
        size_bytes = path.stat().st_size
        self.space.give(size_bytes)
        self._names.discard(digest)
        self._verified.discard(digest)
        self._unsynced.discard(digest)
        self._placed.pop(digest, None)
        return size_bytes

    def _known_path(self, digest: Digest) -> Path:
        path = self._path(digest)
        if not path.exists() and digest in self._absent:
            self._fetch(digest)
        if not path.exists():
            raise _unknown_blob(digest, "it is not stored here")
        return path

    def _fetch(self, digest: Digest) -> None:
        """Bring a blob here that only the copies have, or find that they have it no more."""
        assert self._copies is not None  # noqa: S101 - else nothing is absent
        blob = BlobRef(digest, self._absent[digest].size_bytes)
        work = self.work_path(f"fetched-{secrets.token_hex(8)}")
        with reject_when_full(f"blob {digest}"):
            try:
                if self._copies.fetch(blob, work):
                    self._place(work, blob, KEEP_S, is_durable=True)
                else:
                    log.error("the copies of a blob are damaged", blob=digest)
            finally:
                work.unlink(missing_ok=True)
        self._absent.pop(digest, None)

    def _compare(self, copies: BlobCopies) -> None:
        """Find what only the copies have, and what is only here, which is not durable yet."""
        there = copies.copies()
        self._absent = {digest: there[digest] for digest in there.keys() - self._names}
        self._unsynced |= self._names - there.keys()

    def _path(self, digest: Digest) -> Path:
        if not is_digest(digest):
            raise _unknown_blob(digest, "that is no digest")
        return blob_path(self._folder, digest)


def _write(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        write_whole(descriptor, content, 0)
    finally:
        os.close(descriptor)


def _unknown_blob(digest: Digest, why: str) -> HyperGPUError:
    return HyperGPUError(Reason.BLOB_UNKNOWN, f"blob {digest[:80]}: {why}")
