"""The node's end of a measured line: the daemon's own link and transfers, and no training.

Run as a program where the node is: joins with the token of its first input line, then moves its
round's model or update, over so many connections, for each order.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import grpc
import msgspec
import numpy as np

from benchmarks.ours.connections.coordinator_end import PARAMETERS, SIZE_BYTES
from gpu_node.core.assignment import Assignment, Update
from gpu_node.core.events import LinkLost, ShardAssigned
from gpu_node.shell.link.access import Access, Applicant, join
from gpu_node.shell.link.calls import Calls
from gpu_node.shell.link.control import ControlLink
from gpu_node.shell.link.lines import Lines
from gpu_node.shell.link.post import Post
from gpu_node.shell.logs import set_up_logs
from gpu_node.shell.state.keys import identity_key
from gpu_node.shell.state.places import Places
from gpu_node.shell.transfer.cache import BlobCache
from gpu_node.shell.transfer.download import Download
from gpu_node.shell.transfer.upload import Uploader
from gpu_node.shell.translate import capabilities_message
from gpu_node.shell.worker.messages import Ready
from hypergpu.digest import digest_of
from hypergpu.errors import HyperGPUError
from hypergpu.units import Bytes, Milliseconds, Samples
from hypergpu.wire.token import parse_token

_TIMEOUT_MS = Milliseconds(10_000)
_CACHE_BYTES = Bytes(1 << 30)
_CAPABLE = capabilities_message(
    Ready(
        device="cpu",
        device_name="none",
        memory_bytes=Bytes(0),
        kind="null",
        workloads={"null": 1},
    ),
    "benchmark",
)


class TransferOrder(msgspec.Struct, frozen=True):
    """What to move."""

    way: Literal["up", "down"]
    connections: int


class TransferTime(msgspec.Struct, frozen=True):
    """What it took, without handshakes."""

    took_s: float
    breaks: int
    """How often a connection broke; it went on from there."""


class LaneNode:
    """One node of one job."""

    def __init__(self, places: Places) -> None:
        identity = identity_key(places)
        self.applicant = Applicant(places, identity, _CAPABLE, _TIMEOUT_MS)
        self._places = places
        self._access = Access(places, identity)
        self._post = Post()
        self._link = ControlLink(self._access, _CAPABLE, self._post, timeout_ms=_TIMEOUT_MS)
        self._cache = BlobCache(places, _CACHE_BYTES)
        self._download = Download(self._cache)
        self._uploader = Uploader(places, identity, earnings=self._link.earnings)
        values = np.random.default_rng(1).standard_normal(PARAMETERS, np.float32)
        self._content = (values / 1000).tobytes()
        digest = digest_of(self._content)
        self._update = Update(digest, Bytes(SIZE_BYTES), inner_steps=1, samples=Samples(1))
        self._assignments: asyncio.Queue[Assignment] = asyncio.Queue()
        self._assignment: Assignment | None = None

    async def follow(self) -> None:
        """Keep the control stream open, and what it assigns."""
        self._link.open(())
        while True:
            match await self._post.next():
                case ShardAssigned(assignment=assignment):
                    self._assignments.put_nowait(assignment)
                case LinkLost():
                    self._link.open(())
                case _:
                    pass

    async def move(self, order: TransferOrder) -> TransferTime:
        """Move bytes over connections of their own, fresh for each order."""
        assignment = self._assignment or await self._assignments.get()
        self._assignment = None if order.way == "up" else assignment
        moving = self._send if order.way == "up" else self._fetch
        if order.way == "up":
            path = self._places.update(assignment.lease.job_id, assignment.lease.round)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(self._content)
            self._uploader.made(assignment.lease)
        breaks = 0
        async with self._connect(order.connections, assignment) as calls:
            started_s = time.monotonic()
            while True:
                try:
                    await moving(calls, assignment)
                except (grpc.aio.AioRpcError, HyperGPUError, TimeoutError) as broken:
                    breaks += 1
                    sys.stderr.write(f"{order}: {broken}\n")
                else:
                    return TransferTime(time.monotonic() - started_s, breaks)

    async def _send(self, calls: Calls, assignment: Assignment) -> None:
        await self._uploader.send(calls, assignment, self._update)

    async def _fetch(self, calls: Calls, assignment: Assignment) -> None:
        model = assignment.task.model
        await self._download.fetch(calls, model)
        self._cache.discard([model.digest])

    @asynccontextmanager
    async def _connect(self, connections: int, assignment: Assignment) -> AsyncIterator[Calls]:
        """As many connections as a plan asks for, hands shaken, nothing moved over them yet."""
        first = self._access.calls(_TIMEOUT_MS)
        lines = Lines(lambda: self._access.calls(_TIMEOUT_MS))
        try:
            async with lines.over(first, connections) as calls:
                digest, lease = self._update.digest, assignment.lease
                await asyncio.gather(*(each.query_upload(lease, digest) for each in calls.lines))
                yield calls
        finally:
            await lines.close()
            await first.close()


async def _obey(folder: Path) -> None:
    loop = asyncio.get_running_loop()
    token = parse_token((await loop.run_in_executor(None, sys.stdin.readline)).strip())
    with Places(folder) as places:
        node = LaneNode(places)
        await join(node.applicant, token)
        following = asyncio.create_task(node.follow())
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            moved = await node.move(msgspec.json.decode(line, type=TransferOrder))
            sys.stdout.write(msgspec.json.encode(moved).decode() + "\n")
            sys.stdout.flush()
        following.cancel()


if __name__ == "__main__":
    set_up_logs("warning")
    asyncio.run(_obey(Path(sys.argv[1])))
