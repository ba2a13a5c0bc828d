"""Removes blobs that no job needs, and copies those that an earlier process left only here to the
object store.
"""

import asyncio
import time
from contextlib import suppress
from typing import Protocol

import structlog

from coordinator.shell.failpoints import failpoint
from coordinator.shell.store.blobs.store import BlobStore
from coordinator.shell.store.storage import Storage
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest
from hypergpu.units import Bytes

log = structlog.get_logger()


_COLLECT_PAUSE = 9
"""Times as long as it took: whatever the number of blobs, a tenth of one thread collects."""
_COLLECT_EVERY_S = 30.0
_RETRY_S = 5.0


class BlobNeeds(Protocol):
    """Which files jobs need."""

    def digests(self) -> frozenset[Digest]:
        """Every blob that some job is known to need."""

    def are_complete(self) -> bool:
        """Whether no job may need more than `digests`."""

    def open_uploads(self) -> set[str] | None:
        """Uploads that nodes may make now; None: of some jobs nobody knows it."""


class BlobCollector:
    """Removes blobs that no job needs, soon after one has moved on."""

    def __init__(self, storage: Storage, needs: BlobNeeds) -> None:
        self._storage = storage
        self._needs = needs
        self._is_requested = asyncio.Event()

    def request(self) -> None:
        """Collect soon: some job needs less than before."""
        self._is_requested.set()

    async def run(self) -> None:
        """Collect on request, as often as that is cheap, and every half minute, for ever.

        Soon is worth it: what the round before left is written over while it is still in the
        caches of the system, and fresh pages cost it several times as much.
        """
        expired_s = time.monotonic()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_COLLECT_EVERY_S):
                    await self._is_requested.wait()
            self._is_requested.clear()
            began_s = time.monotonic()
            if began_s - expired_s >= _COLLECT_EVERY_S:
                await asyncio.to_thread(self._storage.uploads.expire)
                expired_s = began_s
            await self._discard_void_uploads()
            await collect(self._storage, self._needs)
            await asyncio.sleep(_COLLECT_PAUSE * (time.monotonic() - began_s))

    async def _discard_void_uploads(self) -> None:
        """Discard uploads under leases that have ended."""
        uploads = self._storage.uploads
        # Listed before the runtimes are asked: an upload under a newer lease has another file.
        owned_paths = uploads.owned_uploads()
        open_uploads = self._needs.open_uploads()
        if not owned_paths or open_uploads is None:
            return
        if count := await asyncio.to_thread(uploads.forget, owned_paths, keeps=open_uploads):
            log.debug("uploads under void leases were discarded", uploads=count)


async def collect(storage: Storage, needs: BlobNeeds) -> Bytes:
    """Remove the blobs that no job needs, as far as that is known. Returns how much that freed."""
    async with storage.pins.collecting:
        failpoint("collect.begin")
        mark = storage.blobs.mark()
        is_sure, live = needs.are_complete(), needs.digests() | storage.pins.all()
        try:
            collection = await asyncio.to_thread(
                storage.blobs.collect, live, mark=mark, spares_older=not is_sure
            )
        except (HyperGPUError, OSError) as error:
            log.warning("blobs were not collected", reason=str(error))
            return Bytes(0)
    failpoint("collect.done")
    storage.bulk.remove(collection.digests)
    if collection.digests:
        log.debug("blobs were collected", freed_bytes=collection.freed_bytes)
    return collection.freed_bytes


async def copy_leftovers(storage: Storage, needs: BlobNeeds) -> None:
    """Copy to where blobs outlive this machine what an earlier process left only here: first what
    jobs need, later what was not collected meanwhile.
    """
    leftovers = storage.blobs.unsynced_blobs
    needed_digests = needs.digests() | storage.pins.all()
    for digest in sorted(leftovers & needed_digests):
        await _copy_leftover(storage.blobs, digest)
    await asyncio.sleep(_COLLECT_EVERY_S)
    for digest in sorted(leftovers - needed_digests):
        await _copy_leftover(storage.blobs, digest)


async def _copy_leftover(blobs: BlobStore, digest: Digest) -> None:
    while True:
        try:
            return await asyncio.to_thread(blobs.sync, digest)
        except HyperGPUError as error:
            if error.reason is Reason.BLOB_UNKNOWN:
                return None  # It was collected.
            log.warning("a blob is only here", blob=digest, reason=str(error))
        except OSError as error:
            log.warning("a blob is only here", blob=digest, reason=str(error))
        await asyncio.sleep(_RETRY_S)
