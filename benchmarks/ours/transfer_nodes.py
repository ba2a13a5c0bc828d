"""Nodes without daemon and worker in one process: the real code for updates and models, nothing
else. Spawned by `benchmarks.object_store`; each line on stdout is what a round's calls weighed.
"""

import asyncio
import sys
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.ours.sessions import CAPABLE
from gpu_node.core.events import TrainedUpdate
from gpu_node.shell.folder.state import StatePaths
from gpu_node.shell.link.access import Access
from gpu_node.shell.link.calls import NODE_KEY, Calls, capabilities_message, hello_message
from gpu_node.shell.link.channel import open_channel
from gpu_node.shell.transfer.cache import BlobCache
from gpu_node.shell.transfer.download import BlobSource, Download
from gpu_node.shell.transfer.uploads import Uploader
from hypergpu.assignment import Assignment, Lease
from hypergpu.crypto import IdentityKey
from hypergpu.digests import digest_of
from hypergpu.ids import Digest
from hypergpu.protocol import PROTOCOL_ENTRY
from hypergpu.tensors.codec import encode_update
from hypergpu.tensors.layout import Flat, Layout, layout_from_json
from hypergpu.units import Bytes, Milliseconds
from hypergpu.v1 import node_pb2
from hypergpu.wire.bulk import BulkClient
from hypergpu.wire.credentials import parse_token
from hypergpu.wire.messages import assignment_value, digest_message, lease_message

_TIMEOUT_MS = Milliseconds(60_000)
_CACHE_BYTES = Bytes(1 << 40)
_LAYOUT_BYTES_MAX = 1 << 20
_MADE = 4
"""Updates that all others are made of."""


class TransferNodes(msgspec.Struct, frozen=True):
    """What the process is told. First line on stdin."""

    nodes: int
    folder: str
    token: str


class WeighedCalls(Calls):
    """Calls whose messages are weighed."""

    weight_bytes = 0
    """Weight of requests and answers since the last look."""

    async def resolve_blob(
        self, digest: Digest, *, is_doubted: bool
    ) -> node_pb2.ResolveBlobResponse:
        answer = await super().resolve_blob(digest, is_doubted=is_doubted)
        request = node_pb2.ResolveBlobRequest(digest=digest_message(digest), is_doubted=is_doubted)
        self.weight_bytes += request.ByteSize() + answer.ByteSize()
        return answer

    async def offer_update(
        self, request: node_pb2.OfferUpdateRequest
    ) -> node_pb2.OfferUpdateResponse:
        answer = await super().offer_update(request)
        self.weight_bytes += request.ByteSize() + answer.ByteSize()
        return answer

    async def commit_update(self, lease: Lease, digest: Digest, size_bytes: Bytes) -> None:
        await super().commit_update(lease, digest, size_bytes)
        request = node_pb2.CommitUpdateRequest(
            lease=lease_message(lease), digest=digest_message(digest)
        )
        self.weight_bytes += request.ByteSize()


class MadeUpdates:
    """Updates that all nodes share, made once."""

    def __init__(self) -> None:
        self.content: list[bytes] = []
        self._lock = asyncio.Lock()

    async def make(self, download: Download, calls: Calls, layout: Digest) -> None:
        """Make them, unless they are."""
        async with self._lock:
            if not self.content:
                source = BlobSource(calls)
                text = await download.fetch_small(source, layout, _LAYOUT_BYTES_MAX)
                self.content = await asyncio.to_thread(_encode_all, layout_from_json(text))


class TransferNode:
    """One node: fetches what is new, sends an update that is made already."""

    def __init__(self, folder: Path, updates: MadeUpdates, number: int) -> None:
        self._paths = StatePaths(folder)
        self._key = IdentityKey.generate()
        self._updates = updates
        self._number = number

    async def run(self, token: str, others: int) -> None:
        """Join and work for ever."""
        with self._paths:
            access = Access(self._paths, self._key, timeout_ms=_TIMEOUT_MS)
            capabilities = capabilities_message(
                CAPABLE, f"transfer-{self._number}", node_pb2.Caps()
            )
            coordinator = await access.join(parse_token(token), capabilities)
            metadata = (PROTOCOL_ENTRY, (NODE_KEY, self._key.node_id))
            bulk = BulkClient("127.0.0.1", None)
            calls = WeighedCalls(
                open_channel(coordinator.address, None), metadata, _TIMEOUT_MS, bulk
            )
            control = calls.control()
            hello = hello_message(capabilities, (), ())
            await control.write(node_pb2.ControlRequest(hello=hello))
            download = Download(BlobCache(self._paths, _CACHE_BYTES))
            uploader = Uploader(self._paths, self._key)
            async for message in control:
                if message.HasField("assignment"):
                    assignment = assignment_value(message.assignment)
                    await self._fetch(download, calls, assignment)
                    await self._send(uploader, calls, assignment, others)
                    _say(calls.weight_bytes)
                    calls.weight_bytes = 0

    async def _fetch(self, download: Download, calls: Calls, assignment: Assignment) -> None:
        await self._updates.make(download, calls, assignment.task.layout)
        if assignment.deltas:
            path = await download.fetch(BlobSource(calls), assignment.deltas[-1].blob)
            path.unlink()

    async def _send(
        self, uploader: Uploader, calls: Calls, assignment: Assignment, others: int
    ) -> None:
        """Send an update that no other node sends in this round, nor this one in others."""
        place = self._number + others * assignment.lease.round
        content = bytearray(self._updates.content[place % _MADE])
        # The low byte of a scale: the update stays well-formed.
        content[0] = (content[0] + place // _MADE) % 256
        path = self._paths.update(assignment.lease.job_id, assignment.lease.round)
        path.parent.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(path.write_bytes, content)
        update = TrainedUpdate(
            digest=digest_of(bytes(content)),
            size_bytes=Bytes(len(content)),
            inner_steps=assignment.task.inner_steps,
            samples=assignment.task.samples,
        )
        await uploader.send(calls, assignment, update)
        path.unlink()


def _encode_all(layout: Layout) -> list[bytes]:
    updates = []
    for seed in range(_MADE):
        flat = Flat.empty(layout)
        np.random.default_rng(seed).standard_normal(out=flat.parameters, dtype=np.float32)
        flat.statistics[:] = 0
        flat.integers[:] = 0
        updates.append(encode_update(layout, "int4", flat).payload.tobytes())
    return updates


def _say(value: object) -> None:
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


async def work(told: TransferNodes) -> None:
    """Run all nodes until killed."""
    updates = MadeUpdates()
    nodes = [
        TransferNode(Path(told.folder) / f"transfer-{n}", updates, n) for n in range(told.nodes)
    ]
    await asyncio.gather(*(node.run(told.token, told.nodes) for node in nodes))


if __name__ == "__main__":
    asyncio.run(work(msgspec.json.decode(sys.stdin.readline(), type=TransferNodes)))
