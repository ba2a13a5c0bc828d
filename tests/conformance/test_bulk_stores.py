"""Every store of bulk bytes: what is fetched, what is sent, and what goes on after a restart."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from coordinator.shell.store.blobs.store import BlobStore
from coordinator.shell.store.blobs.upload_store import UploadStore, upload_name
from coordinator.shell.store.blobs.writing import Space
from coordinator.shell.store.bulk.embedded import EmbeddedStore
from coordinator.shell.store.bulk.object_store import ObjectStore
from coordinator.shell.store.bulk.store import BulkStore
from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import NodeId
from hypergpu.line_limits import PIECE_BYTES, StallTimeout
from hypergpu.part_file import Span
from hypergpu.units import Bytes, Milliseconds
from hypergpu.user.cluster.s3_server import S3Server
from hypergpu.v1 import tensor_pb2
from hypergpu.wire.bulk import BulkClient
from hypergpu.wire.bulk_ranges import BulkRefusedError, FileRange
from tests.node_client import get_range, put_range
from tests.s3_buckets import bucket_of

NODE = NodeId("0x" + "a1" * 20)
SMALL = bytes(range(256)) * 1000
LARGE = bytes(range(250)) * 84_000
NAME = upload_name("an update", owner="a node")


def blob_of(content: bytes) -> BlobRef:
    return BlobRef(digest_of(content), Bytes(len(content)))


class Plane:
    """A coordinator's folder and its store, which may be opened anew."""

    def __init__(self, folder: Path, make: Callable[["Plane"], BulkStore]) -> None:
        self.folder = folder
        self._make = make
        self._running: asyncio.Task[None] | None = None
        self.open()

    def open(self) -> None:
        """Begin as a fresh process does."""
        self.blobs = BlobStore(self.folder, Space(self.folder, 0))
        self.uploads = UploadStore(self.folder, self.blobs, self.blobs.space)
        self.store = self._make(self)

    async def start(self) -> None:
        """Serve."""
        await self.store.bind("127.0.0.1", 0, None)
        self._running = asyncio.create_task(self.store.run())

    async def stop(self) -> None:
        """End serving."""
        assert self._running is not None
        self._running.cancel()
        await asyncio.wait([self._running])

    async def offer(self, content: bytes, name: str = NAME) -> tensor_pb2.Ticket:
        """A ticket for what is missing of an upload."""
        return await self.store.upload_ticket(NODE, self.uploads.open(name, blob_of(content)))

    async def commit(self, content: bytes, name: str = NAME) -> None:
        """Make a blob of an upload."""
        sealed_path = await self.store.receive_upload(name, blob_of(content))
        await asyncio.to_thread(self.uploads.finish, sealed_path, blob_of(content))

    async def send(self, content: bytes, name: str = NAME) -> list[int]:
        """Send what is missing of an upload; gives where its ranges began."""
        ticket = await self.offer(content, name)
        for each in ticket.ranges:
            status, answer_text = await put_range(each, each.start, content[each.start : each.end])
            assert status in {200, 204}, answer_text
        return [each.start for each in ticket.ranges]


@pytest.fixture(params=["embedded", "s3"])
async def plane(
    request: pytest.FixtureRequest, tmp_path: Path, s3_server: S3Server
) -> AsyncIterator[Plane]:
    prefix = secrets.token_hex(8)

    def make(plane: Plane) -> BulkStore:
        if request.param == "embedded":
            return EmbeddedStore(plane.folder, plane.uploads, lambda _: None)
        bucket = bucket_of(s3_server, prefix=prefix)
        return ObjectStore(bucket, plane.folder, plane.blobs, plane.uploads, lambda _: None)

    bulk_plane = Plane(tmp_path, make)
    await bulk_plane.start()
    try:
        yield bulk_plane
    finally:
        await bulk_plane.stop()


@asynccontextmanager
async def bulk_client() -> AsyncIterator[BulkClient]:
    client = BulkClient("127.0.0.1", None)
    try:
        yield client
    finally:
        await client.close()


def stall() -> StallTimeout:
    return StallTimeout(PIECE_BYTES, Milliseconds(20_000))


async def test_ranges_of_a_blob_are_fetched(plane: Plane) -> None:
    blob = plane.blobs.put(SMALL)
    ticket = await plane.store.ticket(NODE, blob)
    async with bulk_client() as client:
        for start, end in ((0, len(SMALL)), (17, 18), (100_000, 255_999)):
            async with client.open(ticket.ranges[0], Span(start, end), stall()) as pieces:
                assert b"".join([piece async for piece in pieces]) == SMALL[start:end]


async def test_a_ticket_that_is_ready_fetches_the_blob(plane: Plane) -> None:
    blob = plane.blobs.put(SMALL)
    ticket = plane.store.ready_ticket(NODE, blob, "")
    if isinstance(plane.store, ObjectStore):
        assert ticket is None
        return
    assert ticket is not None
    status, content = await get_range(ticket.ranges[0], 0, len(SMALL))
    assert (status, content) == (206, SMALL)


async def test_a_range_outside_is_refused(plane: Plane) -> None:
    ticket = await plane.store.ticket(NODE, plane.blobs.put(SMALL))
    async with bulk_client() as client:
        outside = Span(len(SMALL), len(SMALL) + 5)
        with pytest.raises(BulkRefusedError):
            await client.open(ticket.ranges[0], outside, stall()).__aenter__()


async def test_an_empty_blob_needs_no_request(plane: Plane) -> None:
    ticket = await plane.store.ticket(NODE, plane.blobs.put(b""))
    assert sum(each.end - each.start for each in ticket.ranges) == 0


@pytest.mark.parametrize("content", [SMALL, LARGE], ids=["small", "large"])
async def test_an_upload_becomes_a_blob(plane: Plane, content: bytes, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(content)
    ticket = await plane.offer(content)
    async with bulk_client() as client:
        for each in ticket.ranges:
            file = FileRange(source, Span(each.start, each.end))
            await client.send(each, file, stall(), lambda _: None)
    assert not (await plane.offer(content)).ranges
    await plane.commit(content)
    assert plane.blobs.path(digest_of(content)).read_bytes() == content


async def test_what_is_missing_is_told_and_sent_after_a_restart(plane: Plane) -> None:
    first = (await plane.offer(LARGE)).ranges[0]
    end = min(first.end, 8 << 20)
    part = LARGE[first.start : end]
    assert (await put_range(first, first.start, part))[0] in {200, 204}
    await plane.stop()
    plane.open()
    await plane.start()
    assert min(await plane.send(LARGE)) == end
    await plane.commit(LARGE)
    assert plane.blobs.path(digest_of(LARGE)).read_bytes() == LARGE


@pytest.mark.parametrize("content", [SMALL, LARGE], ids=["small", "large"])
async def test_an_upload_with_a_gap_is_not_sealed_and_goes_on(plane: Plane, content: bytes) -> None:
    first = (await plane.offer(content)).ranges[0]
    if len(content) > len(SMALL):
        await put_range(first, first.start, content[first.start : min(first.end, 8 << 20)])
    with pytest.raises(HyperGPUError) as failure:
        await plane.commit(content)
    assert failure.value.reason is Reason.OFFSET_MISMATCH
    await plane.send(content)
    await plane.commit(content)
    assert plane.blobs.path(digest_of(content)).read_bytes() == content


async def test_wrong_bytes_are_found_and_may_be_sent_again(plane: Plane) -> None:
    ticket = (await plane.offer(SMALL)).ranges[0]
    await put_range(ticket, 0, SMALL[::-1])
    with pytest.raises(HyperGPUError) as failure:
        await plane.commit(SMALL)
    assert failure.value.reason is Reason.DIGEST_MISMATCH
    assert plane.blobs.space.used_bytes == 0
    await plane.send(SMALL)
    await plane.commit(SMALL)


@pytest.mark.parametrize("content", [SMALL + b"x", SMALL[:-1]], ids=["more", "fewer"])
async def test_another_size_does_not_become_the_upload(plane: Plane, content: bytes) -> None:
    ticket = (await plane.offer(SMALL)).ranges[0]
    status, _ = await put_range(ticket, 0, content)
    if content[:-1] == SMALL:
        assert status >= 400
    with pytest.raises(HyperGPUError) as failure:
        await plane.commit(SMALL)
    assert failure.value.reason is Reason.OFFSET_MISMATCH


async def test_a_ticket_is_for_one_upload_and_one_method(plane: Plane) -> None:
    own = (await plane.offer(SMALL)).ranges[0]
    other = (await plane.offer(SMALL, upload_name("another", owner="another node"))).ranges[0]
    mixed_range = tensor_pb2.TicketRange()
    mixed_range.CopyFrom(own)
    path = other.url.partition("?")[0]
    mixed_range.url = path + own.url.removeprefix(own.url.partition("?")[0])
    assert mixed_range.url != own.url
    assert (await put_range(mixed_range, 0, SMALL))[0] == 403
    assert (await get_range(own, 0, 1))[0] == 403


async def test_what_is_sent_after_the_commit_changes_nothing(plane: Plane) -> None:
    ticket = (await plane.offer(SMALL)).ranges[0]
    await put_range(ticket, 0, SMALL)
    await plane.commit(SMALL)
    await put_range(ticket, 0, SMALL[::-1])
    assert plane.blobs.path(digest_of(SMALL)).read_bytes() == SMALL


async def test_two_send_one_upload_at_once(plane: Plane) -> None:
    await asyncio.gather(plane.send(LARGE), plane.send(LARGE))
    await plane.commit(LARGE)
    assert plane.blobs.path(digest_of(LARGE)).read_bytes() == LARGE


async def test_a_blob_is_fetched_after_a_restart(plane: Plane) -> None:
    blob = plane.blobs.put(SMALL)
    await plane.store.ticket(NODE, blob)
    await plane.stop()
    plane.open()
    await plane.start()
    ticket = await plane.store.ticket(NODE, blob)
    assert (await get_range(ticket.ranges[0], 0, len(SMALL)))[1] == SMALL
