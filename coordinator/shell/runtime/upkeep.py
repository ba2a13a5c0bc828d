"""What is done now and then: collecting blobs nobody needs, storing counters and last sights."""

import asyncio
import time

import structlog

from coordinator.core.job import ENDED
from coordinator.shell import translate
from coordinator.shell.failpoints import failpoint
from coordinator.shell.runtime.parts import Parts
from coordinator.shell.runtime.room import Room
from hypergpu.errors import HyperGPUError
from hypergpu.units import Bytes

log = structlog.get_logger()

_COLLECT_PAUSE = 9
"""Times as long as it took: whatever the number of blobs, a tenth of one thread collects."""
_COLLECT_EVERY_S = 30.0
_LEDGER_S = 5.0


class Collector:
    """Removes blobs that no job needs, soon after one has moved on."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._wanted = asyncio.Event()

    def ask(self) -> None:
        """Some job needs less than before."""
        self._wanted.set()

    async def run(self) -> None:
        """Collect when asked, as often as that is cheap, and every half minute, for ever.

        Soon is worth it: what the round before left is written over while it is still in the
        caches of the system, and fresh pages cost it several times as much.
        """
        while True:
            try:
                async with asyncio.timeout(_COLLECT_EVERY_S):
                    await self._wanted.wait()
            except TimeoutError:
                await asyncio.to_thread(self._parts.quarantine.expire)
            self._wanted.clear()
            began_s = time.monotonic()
            if not self._parts.driver.unreadable:
                await self._forget_void_uploads()
            await collect(self._parts)
            await asyncio.sleep(_COLLECT_PAUSE * (time.monotonic() - began_s))

    async def _forget_void_uploads(self) -> None:
        """Throw away what nodes uploaded under leases that have ended."""
        quarantine = self._parts.quarantine
        # Listed before the rooms are asked: an upload under a newer lease has another file.
        owned = quarantine.owned()
        keeps = {name for room in self._parts.driver.rooms.values() for name in room.uploaders()}
        if owned and (forgotten := await asyncio.to_thread(quarantine.forget, owned, keeps=keeps)):
            log.debug("uploads under void leases were thrown away", uploads=forgotten)


async def collect(parts: Parts) -> Bytes:
    """Remove the blobs that no job needs, as far as that is known. Returns how much that freed."""
    async with parts.pins.collecting:
        failpoint("collect.begin")
        mark = parts.blobs.mark()
        is_sure, live = parts.knows_live(), parts.live()
        try:
            collected = await asyncio.to_thread(
                parts.blobs.collect, live, mark=mark, spares_older=not is_sure
            )
        except (HyperGPUError, OSError) as failed:
            log.warning("blobs were not collected", reason=str(failed))
            return Bytes(0)
    failpoint("collect.done")
    if collected.digests:
        log.debug("blobs were collected", freed_bytes=collected.freed_bytes)
    return collected.freed_bytes


async def keep_ledger(parts: Parts) -> None:
    """Store nodes' counters and last sights every few seconds, for ever."""
    while True:
        await asyncio.sleep(_LEDGER_S)
        await store_ledger(parts)


async def store_ledger(parts: Parts) -> None:
    """Store what has been counted since the last time."""
    counts = parts.roster.counted()
    now_ms = time.time_ns() // 1_000_000
    seen = {node: now_ms - (parts.roster.silent_ms(node) or 0) for node in parts.roster.sessions}
    try:
        await parts.driver.in_writer(parts.journal.keep_ledger, seen, counts)
    except HyperGPUError as refused:
        log.warning("counters are not stored yet", reason=str(refused))
        for node, count in counts.items():
            parts.roster.count(node, accepted=count.accepted, refused=count.refused)
    parts.roster.stored()


def release_members(parts: Parts, room: Room) -> None:
    """Tell every node that ever worked for an ended job that it may delete what it keeps for it."""
    if room.job.phase not in ENDED:
        return
    message = translate.release_message(room.job.job_id, room.job.reason)
    for node in room.job.members:
        parts.roster.send(node, message)
