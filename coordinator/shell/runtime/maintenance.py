"""Periodic work: collecting unused blobs, storing nodes' counters and times of last contact."""

import asyncio
import time

import structlog

from coordinator.shell.failpoints import failpoint
from coordinator.shell.runtime.services import Services
from hypergpu.errors import HyperGPUError
from hypergpu.units import Bytes

log = structlog.get_logger()

_COLLECT_PAUSE = 9
"""Times as long as it took: whatever the number of blobs, a tenth of one thread collects."""
_COLLECT_EVERY_S = 30.0
_STORE_S = 5.0


class BlobCollector:
    """Removes blobs that no job needs, soon after one has moved on."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._is_requested = asyncio.Event()

    def request(self) -> None:
        """Collect soon: some job needs less than before."""
        self._is_requested.set()

    async def run(self) -> None:
        """Collect on request, as often as that is cheap, and every half minute, for ever.

        Soon is worth it: what the round before left is written over while it is still in the
        caches of the system, and fresh pages cost it several times as much.
        """
        while True:
            try:
                async with asyncio.timeout(_COLLECT_EVERY_S):
                    await self._is_requested.wait()
            except TimeoutError:
                await asyncio.to_thread(self._services.uploads.expire)
            self._is_requested.clear()
            began_s = time.monotonic()
            if not self._services.driver.unreadable:
                await self._discard_void_uploads()
            await collect(self._services)
            await asyncio.sleep(_COLLECT_PAUSE * (time.monotonic() - began_s))

    async def _discard_void_uploads(self) -> None:
        """Discard uploads under leases that have ended."""
        uploads = self._services.uploads
        # Listed before the runtimes are asked: an upload under a newer lease has another file.
        owned = uploads.owned_uploads()
        open_uploads = {
            name
            for runtime in self._services.driver.runtimes.values()
            for name in runtime.open_uploads()
        }
        if not owned:
            return
        if count := await asyncio.to_thread(uploads.forget, owned, keeps=open_uploads):
            log.debug("uploads under void leases were discarded", uploads=count)


async def collect(services: Services) -> Bytes:
    """Remove the blobs that no job needs, as far as that is known. Returns how much that freed."""
    async with services.pins.collecting:
        failpoint("collect.begin")
        mark = services.blobs.mark()
        is_sure, live = services.knows_needed_blobs(), services.needed_blobs()
        try:
            collected = await asyncio.to_thread(
                services.blobs.collect, live, mark=mark, spares_older=not is_sure
            )
        except (HyperGPUError, OSError) as failed:
            log.warning("blobs were not collected", reason=str(failed))
            return Bytes(0)
    failpoint("collect.done")
    if collected.digests:
        log.debug("blobs were collected", freed_bytes=collected.freed_bytes)
    return collected.freed_bytes


async def keep_node_counts(services: Services) -> None:
    """Store nodes' counters and last contacts every few seconds, for ever."""
    while True:
        await asyncio.sleep(_STORE_S)
        await store_node_counts(services)


async def store_node_counts(services: Services) -> None:
    """Store last contacts, and counts since the last time."""
    nodes, counts = services.nodes, dict(services.nodes.counts)
    now_ms = time.time_ns() // 1_000_000
    seen = {node: now_ms - (nodes.silent_ms(node) or 0) for node in nodes.streams}
    try:
        await services.driver.in_writer(services.journal.record_activity, seen, counts)
    except HyperGPUError as refused:
        log.warning("counters are not stored yet", reason=str(refused))
        return
    for node, stored in counts.items():
        nodes.count(node, accepted=-stored.accepted, refused=-stored.refused)
