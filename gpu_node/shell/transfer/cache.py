"""Blobs and datasets on disk by digest, verified once by each process and bounded in size."""

import asyncio
import contextlib
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from gpu_node.shell.folder.state import StatePaths
from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_of_file
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest, JobId
from hypergpu.units import Bytes

_MODELS_KEPT = 2
"""The newest of each job, and the one that a delta or a round assigned again starts from."""


class BlobCache:
    """Files by digest. Nothing is synced: a file that a crash damages is found and fetched anew."""

    def __init__(self, paths: StatePaths, limit_bytes: Bytes) -> None:
        self._blobs = paths.blobs
        self._datasets = paths.datasets
        self._most_bytes = self._limit_bytes = limit_bytes
        self._dataset_most_bytes: Bytes | None = None
        self._verified: set[Digest] = set()
        self._models: dict[JobId, list[Digest]] = {}
        self._pinned: frozenset[Digest] = frozenset()
        self._dataset_bytes: dict[str, int] = {}
        self._dataset_files: dict[Digest, Path] = {}
        self._spare = paths.blobs / "spare"

    def path(self, digest: Digest) -> Path:
        """Path of a blob, whether it is there or not."""
        return self._blobs / digest

    def part(self, digest: Digest) -> Path:
        """Path of a blob's bytes while they are fetched."""
        return self._blobs / f"{digest}.part"

    def dataset(self, manifest: Digest) -> Path:
        """Path of a dataset's folder, whether it is there or not."""
        return self._datasets / manifest

    async def find(self, blob: BlobRef) -> Path | None:
        """A blob's file if it is there and whole. A damaged file is deleted."""
        path = self.path(blob.digest)
        self._link_from_dataset(blob)
        if blob.digest not in self._verified:
            if not await asyncio.to_thread(_is_whole, path, blob):
                return None
            self._verified.add(blob.digest)
        if not path.exists():
            self._verified.discard(blob.digest)
            return None
        os.utime(path)
        return path

    def note_dataset(self, files: Mapping[Digest, Path]) -> None:
        """Remember files of a dataset that were checked, by their digests: a base that was trained
        on is served without being fetched again.
        """
        self._dataset_files.update(files)

    def _link_from_dataset(self, blob: BlobRef) -> None:
        source, path = self._dataset_files.get(blob.digest), self.path(blob.digest)
        if source is None or path.exists():
            return
        try:
            if source.stat().st_size == blob.size_bytes:
                os.link(source, path)
                self._verified.add(blob.digest)
        except OSError:  # The dataset was evicted.
            del self._dataset_files[blob.digest]

    def admit(self, partial: Path, digest: Digest) -> Path:
        """Add a file whose digest was just computed."""
        path = self.path(digest)
        partial.replace(path)
        self._verified.add(digest)
        return path

    def is_verified_dataset(self, manifest: Digest) -> bool:
        """Whether this process checked the dataset's files."""
        return manifest in self._verified

    def admit_dataset(self, manifest: Digest) -> None:
        """Remember that the dataset's files were checked."""
        self._verified.add(manifest)

    def discard(self, digests: Iterable[Digest]) -> None:
        """Delete blobs, but for the last one's file, which `reuse` gives away."""
        for digest in digests:
            self._verified.discard(digest)
            with contextlib.suppress(FileNotFoundError):
                self.path(digest).replace(self._spare)

    def reuse(self, part: Path, size_bytes: Bytes) -> bool:
        """Let a discarded file of exactly this size be a new part file, to be written over.

        Models of a job have one size, and the system has the pages of the last one in memory still:
        fresh ones were measured at two to ten times the cost.
        """
        try:
            spare = self._spare.stat()
            # Whoever has a link to it would see other bytes.
            if part.exists() or spare.st_size != size_bytes or spare.st_nlink > 1:
                return False
            self._spare.replace(part)
        except FileNotFoundError:
            return False
        return True

    def use_model(self, job_id: JobId, digest: Digest) -> None:
        """The job has a newer model: older ones than the last two go."""
        models = [each for each in self._models.get(job_id, []) if each != digest]
        models.append(digest)
        self._models[job_id] = models[-_MODELS_KEPT:]
        still_used = {model for job_models in self._models.values() for model in job_models}
        self.discard(old for old in models[:-_MODELS_KEPT] if old not in still_used)

    def pin(self, digests: frozenset[Digest]) -> None:
        """Name the blobs of the work at hand, which are never evicted."""
        self._pinned = digests

    def resize(self, limit_bytes: Bytes, dataset_most_bytes: Bytes) -> None:
        """Hold no more than this from now on, nor a larger dataset than that. Blocks."""
        self._limit_bytes = min(self._most_bytes, limit_bytes)
        self._dataset_most_bytes = dataset_most_bytes
        self.trim()

    def check_room(self, dataset_bytes: int) -> None:
        """Check that a dataset may be fetched.

        Raises:
            HyperGPUError: OWNER_DISK, it is larger than the owner's limit leaves.
        """
        most_bytes = self._dataset_most_bytes
        if most_bytes is not None and dataset_bytes > most_bytes:
            detail = f"the dataset has {dataset_bytes} bytes, its owner's limit leaves {most_bytes}"
            raise HyperGPUError(Reason.OWNER_DISK, detail)

    def size_bytes(self) -> int:
        """Bytes of all that it holds. Blocks."""
        return sum(each.size_bytes for each in self._files())

    def _files(self) -> list["_CachedFile"]:
        return [
            self._measure(path)
            for folder in (self._blobs, self._datasets)
            for path in folder.iterdir()
        ]

    def trim(self) -> None:
        """Delete the files used longest ago until the rest fits. Blocks."""
        files = self._files()
        total_bytes = sum(each.size_bytes for each in files)
        for each in sorted(files, key=lambda one: one.used_at_ns):
            if total_bytes <= self._limit_bytes:
                return
            digest = Digest(each.path.name.partition(".")[0])
            if digest not in self._pinned:
                each.delete()
                self._verified.discard(digest)
                total_bytes -= each.size_bytes

    def _measure(self, path: Path) -> "_CachedFile":
        if path.is_file():
            file_stat = path.stat()
            return _CachedFile(path, file_stat.st_size, file_stat.st_mtime_ns)
        # A dataset does not change once it is whole, and may have a great many files.
        if path.name not in self._dataset_bytes:
            files = (file for file in path.rglob("*") if file.is_file())
            self._dataset_bytes[path.name] = sum(file.stat().st_size for file in files)
        return _CachedFile(path, self._dataset_bytes[path.name], path.stat().st_mtime_ns)


class _CachedFile(NamedTuple):
    """One file or folder of the cache."""

    path: Path
    size_bytes: int
    used_at_ns: int

    def delete(self) -> None:
        """Remove it from disk."""
        if self.path.is_dir():
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            self.path.unlink(missing_ok=True)


def _is_whole(path: Path, blob: BlobRef) -> bool:
    try:
        if path.stat().st_size == blob.size_bytes and digest_of_file(path) == blob.digest:
            return True
    except FileNotFoundError:
        return False
    path.unlink(missing_ok=True)
    return False
