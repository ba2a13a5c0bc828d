"""A user's dataset, from its manifest to a folder of files, each checked by its digest."""

import asyncio
import os
import shutil
import threading
from collections.abc import Mapping
from itertools import islice
from pathlib import Path, PurePosixPath

from google.protobuf.message import DecodeError

from gpu_node.shell.link.calls import Calls
from gpu_node.shell.transfer.cache import BlobCache
from gpu_node.shell.transfer.download import Download
from gpu_node.shell.transfer.gather import gather_or_cancel
from hypergpu.dataset.manifest import checked_paths
from hypergpu.digest import digest_of_file
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.statements.assignment import BlobRef
from hypergpu.v1 import tensor_pb2
from hypergpu.wire.assignment import blob_value

_AT_ONCE = 8
"""Small files cost a round trip each."""


def manifest_entries(content: bytes) -> dict[PurePosixPath, BlobRef]:
    """Read a manifest, trusting nothing in it.

    Raises:
        HyperGPUError: MANIFEST_INVALID, it is malformed or a path leads elsewhere; REQUEST_INVALID,
            a digest is malformed.
    """
    try:
        manifest = tensor_pb2.Manifest.FromString(content)
    except DecodeError:
        raise HyperGPUError(Reason.MANIFEST_INVALID, "the bytes are no manifest") from None
    paths = checked_paths(entry.path for entry in manifest.entries)
    blobs = (blob_value(entry.blob) for entry in manifest.entries)
    return dict(zip(paths, blobs, strict=True))


class Datasets:
    """Fetches datasets. Raises the errors of `Download.fetch` and `manifest_entries`."""

    def __init__(self, cache: BlobCache, download: Download) -> None:
        self._cache = cache
        self._download = download
        self._layout_lock = threading.Lock()

    async def fetch(self, calls: Calls, manifest: BlobRef) -> Path:
        """The folder that holds exactly the manifest's files."""
        folder = self._cache.dataset(manifest.digest)
        if self._cache.is_verified_dataset(manifest.digest) and folder.exists():
            os.utime(folder)
            return folder
        listing = await self._download.fetch(calls, manifest)
        entries = await asyncio.to_thread(lambda: manifest_entries(listing.read_bytes()))
        if not await asyncio.to_thread(_is_whole, folder, entries):
            await self._fetch_files(calls, folder, entries)
        self._cache.admit_dataset(manifest.digest)
        return folder

    async def _fetch_files(
        self, calls: Calls, folder: Path, entries: dict[PurePosixPath, BlobRef]
    ) -> None:
        files: list[Path] = []
        left = iter(entries.values())
        while batch := list(islice(left, _AT_ONCE)):
            files += await gather_or_cancel([self._download.fetch(calls, blob) for blob in batch])
        sources = dict(zip(entries, files, strict=True))
        await asyncio.to_thread(self._lay_out, folder, sources)
        await asyncio.to_thread(self._cache.discard, [blob.digest for blob in entries.values()])

    def _lay_out(self, folder: Path, sources: Mapping[PurePosixPath, Path]) -> None:
        """Make the folder out of cached files. Blocks, as there may be a great many."""
        making = folder.with_suffix(".making")
        # Nobody waits for the thread of a stopped task; the next task's thread waits here for it.
        with self._layout_lock:
            shutil.rmtree(making, ignore_errors=True)
            making.mkdir()
            for path, file in sources.items():
                target = making / path
                target.parent.mkdir(parents=True, exist_ok=True)
                os.link(file, target)
            shutil.rmtree(folder, ignore_errors=True)
            making.replace(folder)


def _is_whole(folder: Path, entries: dict[PurePosixPath, BlobRef]) -> bool:
    try:
        return all(
            (folder / path).stat().st_size == blob.size_bytes
            and digest_of_file(folder / path) == blob.digest
            for path, blob in entries.items()
        )
    except OSError:
        return False
