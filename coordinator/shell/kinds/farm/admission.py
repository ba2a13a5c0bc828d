"""Admits a new farm job: its user has sent what it names, and its manifest says what is asked."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from msgspec.structs import replace

from coordinator.core.farm.events import MapCreated
from coordinator.shell.kinds.farm.runtime import InputChunks
from coordinator.shell.kinds.performers.file_admission import admit_files
from coordinator.shell.kinds.performers.packed_work import ForeignBlobs
from coordinator.shell.store.storage import Storage
from hypergpu.blobs import BlobRef
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.farm.bundles import BUNDLE_CHUNKS_MOST
from hypergpu.farm.item_chunks import MANIFEST_BYTES_MOST, ItemManifest, read_manifest
from hypergpu.ids import JobId
from hypergpu.units import several

_SECRET_BYTES = 16


class JobAdmission:
    """Reads manifests of jobs that are not created yet."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._manifests: dict[JobId, InputChunks] = {}

    @asynccontextmanager
    async def admit(self, event: MapCreated, foreign: ForeignBlobs) -> AsyncIterator[MapCreated]:
        """Complete the event of a new job. Its blobs are pinned until the context ends.

        Args:
            event: As the request has it.
            foreign: Tells which blobs the caller has not shown to have.

        Raises:
            HyperGPUError: BLOB_UNKNOWN, the caller has not sent a blob, or it is gone;
                MANIFEST_INVALID; REQUEST_INVALID, the manifest has another number of items.
        """
        request = event.request
        files = (request.manifest, *request.files.values())
        async with admit_files(self._storage, files, foreign):
            manifest = await self._read(request.manifest)
            _require_items(manifest, request.items)
            chunks = [chunk.blob for chunk in manifest.chunks]
            async with admit_files(self._storage, chunks, foreign):
                self._manifests[event.job_id] = InputChunks(manifest)
                try:
                    yield replace(
                        event,
                        bundle_items_most=bundle_items_most(manifest),
                        draw_seed=secrets.token_hex(_SECRET_BYTES),
                    )
                finally:
                    self._manifests.pop(event.job_id, None)

    def chunks_of(self, job_id: JobId) -> InputChunks | None:
        """The chunks of a job that is being created; None: there is no such job."""
        return self._manifests.get(job_id)

    async def _read(self, manifest: BlobRef) -> ItemManifest:
        if manifest.size_bytes > MANIFEST_BYTES_MOST:
            detail = f"the manifest has {manifest.size_bytes} bytes, {MANIFEST_BYTES_MOST} at most"
            raise HyperGPUError(Reason.MANIFEST_INVALID, detail, fix="use larger chunks")
        return await asyncio.to_thread(stored_items, self._storage, manifest)


def stored_items(storage: Storage, manifest: BlobRef) -> ItemManifest:
    """Read a job's manifest back. Blocks.

    Raises:
        HyperGPUError: BLOB_UNKNOWN, it is missing or damaged; MANIFEST_INVALID.
    """
    return read_manifest(storage.blobs.path(manifest.digest).read_bytes())


def bundle_items_most(manifest: ItemManifest) -> int:
    """Items that any bundle may have without touching more than `BUNDLE_CHUNKS_MOST` chunks."""
    items = [chunk.items for chunk in manifest.chunks]
    inner = BUNDLE_CHUNKS_MOST - 1
    if len(items) <= inner:
        return sum(items)
    window = least = sum(items[:inner])
    for place in range(inner, len(items)):
        window += items[place] - items[place - inner]
        least = min(least, window)
    return least + 1


def _require_items(manifest: ItemManifest, items: int) -> None:
    if manifest.items != items:
        detail = f"the manifest has {several(manifest.items, 'item')}, the request {items}"
        raise HyperGPUError(Reason.REQUEST_INVALID, detail, fix="state the manifest's number")
