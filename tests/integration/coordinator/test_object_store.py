"""The object store beside a server that is away, throttles, lies, or says what is wrong."""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web

from coordinator.shell.store.blobs.store import BlobStore
from coordinator.shell.store.blobs.upload_store import UploadStore, upload_name
from coordinator.shell.store.blobs.writing import Space
from coordinator.shell.store.bulk.bucket import S3Bucket
from coordinator.shell.store.bulk.messages import BytesServed
from coordinator.shell.store.bulk.object_store import ObjectStore
from hypergpu.blobs import BlobRef
from hypergpu.command_line import program
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest, JobId, NodeId
from hypergpu.units import Bytes
from hypergpu.user.cluster.s3_server import BUCKET, S3Server
from hypergpu.wire.packing import pack_addresses, unpack_addresses
from tests.node_client import get_range, put_range
from tests.polling import first_true_of
from tests.s3_buckets import FaultyServer, bucket_of

NODE = NodeId("0x" + "a1" * 20)
OTHER = NodeId("0x" + "b2" * 20)
CONTENT = bytes(range(256)) * 1000
LARGE = bytes(range(250)) * 84_000
BLOB = BlobRef(digest_of(CONTENT), Bytes(len(CONTENT)))
NAME = upload_name("an update", owner="a node")
FUTURE_S = 4e9


class Kit:
    """A store over a folder, and a server in front of which faults may stand."""

    def __init__(self, folder: Path, bucket: S3Bucket) -> None:
        self.blobs = BlobStore(folder, Space(folder, 0))
        self.uploads = UploadStore(folder, self.blobs, self.blobs.space)
        self.served: list[BytesServed] = []
        self.bucket = bucket
        self.store = ObjectStore(bucket, folder, self.blobs, self.uploads, self.served.append)

    async def offer(self, content: bytes = CONTENT) -> list[int]:
        """Offer an upload and send what is missing; gives the status of each PUT."""
        blob = BlobRef(digest_of(content), Bytes(len(content)))
        ticket = await self.store.upload_ticket(NODE, self.uploads.open(NAME, blob))
        put_answers = [
            await put_range(each, each.start, content[each.start : each.end])
            for each in ticket.ranges
        ]
        return [status for status, _ in put_answers]

    async def commit(self) -> None:
        sealed_path = await self.store.receive_upload(NAME, BLOB)
        await asyncio.to_thread(self.uploads.finish, sealed_path, BLOB)

    async def fetch(self, blob: BlobRef = BLOB) -> bytes:
        """What a node gets by a fresh ticket."""
        ticket = await self.store.ticket(NODE, blob)
        return (await get_range(ticket.ranges[0], 0, blob.size_bytes))[1]

    async def keys(self) -> list[str]:
        """Keys of all objects."""
        return [each.key for each in await asyncio.to_thread(self.bucket.objects)]


@pytest.fixture
async def faulty(s3_server: S3Server) -> AsyncIterator[FaultyServer]:
    server = FaultyServer(s3_server)
    async with server.serving():
        yield server


@pytest.fixture
def kit(tmp_path: Path, s3_server: S3Server, faulty: FaultyServer) -> Kit:
    return Kit(tmp_path, bucket_of(s3_server, url=faulty.url))


def refusing(
    status: int, code: str, *, methods: str = "GET PUT HEAD DELETE POST"
) -> Callable[[web.Request], Awaitable[web.Response | None]]:
    """A fault that refuses requests in S3's words."""

    async def refuse(request: web.Request) -> web.Response | None:
        if request.method not in methods.split():
            return None
        await request.read()
        text = f"<Error><Code>{code}</Code><Message>as the test wants it</Message></Error>"
        return web.Response(status=status, body=text.encode(), content_type="application/xml")

    return refuse


async def refusal_of(asking: Awaitable[object]) -> HyperGPUError:
    with pytest.raises(HyperGPUError) as failure:
        await asking
    return failure.value


async def test_throttling_is_a_reason_and_passes(kit: Kit, faulty: FaultyServer) -> None:
    kit.blobs.put(CONTENT)
    faulty.fault = refusing(503, "SlowDown")
    refusal = await refusal_of(kit.fetch())
    assert refusal.reason is Reason.STORE_UNREACHABLE
    assert "SlowDown" in refusal.detail
    assert "SlowDown" in kit.store.obstacle
    faulty.fault = None
    assert (await refusal_of(kit.fetch())).reason is Reason.STORE_UNREACHABLE
    await kit.store.look()
    assert not kit.store.obstacle
    assert await kit.fetch() == CONTENT


async def test_a_store_that_is_away_at_a_commit_keeps_the_upload(
    kit: Kit, faulty: FaultyServer
) -> None:
    assert await kit.offer() == [200]
    faulty.fault = refusing(500, "InternalError")
    refusal = await refusal_of(kit.commit())
    assert refusal.reason is Reason.STORE_UNREACHABLE
    faulty.fault = None
    await kit.store.look()
    assert await kit.offer() == []
    await kit.commit()
    assert kit.blobs.path(BLOB.digest).read_bytes() == CONTENT


async def test_clocks_that_differ_are_named(kit: Kit, faulty: FaultyServer) -> None:
    kit.blobs.put(CONTENT)
    faulty.fault = refusing(403, "RequestTimeTooSkewed")
    assert "RequestTimeTooSkewed" in (await refusal_of(kit.fetch())).detail


@pytest.mark.parametrize("code", ["AccessDenied", "NoSuchBucket", "SignatureDoesNotMatch"])
async def test_a_bucket_that_is_forbidden_ends_the_start(
    kit: Kit, faulty: FaultyServer, code: str
) -> None:
    faulty.fault = refusing(403, code)
    refusal = await refusal_of(kit.store.bind("", 0, None))
    assert refusal.reason is Reason.ARGUMENT_INVALID
    assert code in refusal.detail


async def test_a_store_that_is_away_at_the_start_may_come_back(
    kit: Kit, faulty: FaultyServer
) -> None:
    faulty.fault = refusing(503, "SlowDown")
    await kit.store.bind("", 0, None)


async def test_a_copy_that_lies_is_replaced_once_somebody_doubts_it(
    kit: Kit, faulty: FaultyServer
) -> None:
    kit.blobs.put(CONTENT)
    faulty.fault = lying_copies
    assert await kit.fetch() != CONTENT
    await kit.store.doubt(BLOB.digest)
    assert await kit.fetch() == CONTENT
    write_requests = [each for each in faulty.asked if each.startswith("PUT")]
    await kit.store.doubt(BLOB.digest)
    await kit.fetch()
    assert [each for each in faulty.asked if each.startswith("PUT")] == write_requests


async def test_a_copy_of_another_size_is_replaced_each_time(kit: Kit, tmp_path: Path) -> None:
    kit.blobs.put(CONTENT)
    short = tmp_path / "short"
    for content in (CONTENT[:1000], b""):
        await kit.fetch()
        short.write_bytes(content)
        await asyncio.to_thread(kit.bucket.write, max(await kit.keys()), short)
        await kit.store.doubt(BLOB.digest)
        assert await kit.fetch() == CONTENT


async def test_an_upload_of_another_size_is_sent_again(kit: Kit, tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_bytes(CONTENT[:1000])
    await kit.offer()
    await asyncio.to_thread(kit.bucket.write, (await kit.keys())[0], short)
    assert (await refusal_of(kit.commit())).reason is Reason.OFFSET_MISMATCH
    assert await kit.keys() == []
    assert await kit.offer() == [200]
    await kit.commit()


async def lying_copies(request: web.Request) -> web.Response | None:
    """The first copy of a blob is something else, whatever is written over it."""
    if request.method == "GET" and request.path.endswith(".0"):
        headers = {"Content-Range": f"bytes 0-{len(CONTENT) - 1}/{len(CONTENT)}"}
        return web.Response(status=206, body=bytes(len(CONTENT)), headers=headers)
    return None


async def test_an_upload_that_the_store_changes_is_found(kit: Kit, faulty: FaultyServer) -> None:
    await kit.offer()

    async def change(request: web.Request) -> web.Response | None:
        if request.method != "GET":
            return None
        headers = {"Content-Range": f"bytes 0-{len(CONTENT) - 1}/{len(CONTENT)}"}
        return web.Response(status=206, body=bytes(len(CONTENT)), headers=headers)

    faulty.fault = change
    assert (await refusal_of(kit.commit())).reason is Reason.DIGEST_MISMATCH
    faulty.fault = None
    assert await kit.offer() == [200]
    await kit.commit()


async def test_an_object_cut_short_is_sent_again(kit: Kit, faulty: FaultyServer) -> None:
    await kit.offer()

    async def cut(request: web.Request) -> web.Response | None:
        if request.method != "GET":
            return None
        return web.Response(status=206, body=CONTENT[:1000])

    faulty.fault = cut
    assert (await refusal_of(kit.commit())).reason is Reason.OFFSET_MISMATCH
    faulty.fault = None
    await kit.offer()
    await kit.commit()
    assert kit.blobs.path(BLOB.digest).read_bytes() == CONTENT


async def test_a_copy_is_written_once_for_all_who_ask(kit: Kit, faulty: FaultyServer) -> None:
    kit.blobs.put(CONTENT)
    job = JobId("job-000000000001")
    await asyncio.gather(*(kit.store.ticket(node, BLOB, job) for node in (NODE, OTHER) * 10))
    assert len([each for each in faulty.asked if each.startswith("PUT")]) == 1
    assert [each.size_bytes for each in kit.served] == [len(CONTENT)] * 2


async def test_committed_uploads_and_removed_blobs_leave_the_bucket(kit: Kit) -> None:
    await kit.offer()
    await kit.commit()
    await kit.fetch()
    assert len(await kit.keys()) == 1
    kit.store.remove([BLOB.digest, Digest(digest_of(b"another"))])

    async def is_empty() -> bool:
        return not await kit.keys()

    await first_true_of(is_empty)


async def test_what_nobody_knows_is_swept_and_the_rest_stays(kit: Kit) -> None:
    await kit.offer()
    kept_blob = kit.blobs.put(b"kept")
    await kit.fetch(kept_blob)
    await kit.store.ticket(NODE, kit.blobs.put(b"gone", keep_s=-1))
    kit.blobs.collect(frozenset({kept_blob.digest}))
    assert await asyncio.to_thread(kit.store.sweep, 0) == 0
    assert await asyncio.to_thread(kit.store.sweep, FUTURE_S) == 1
    assert len(await kit.keys()) == 2
    kit.uploads.discard(NAME)
    assert await asyncio.to_thread(kit.store.sweep, FUTURE_S) == 1
    assert await kit.fetch(kept_blob) == b"kept"


async def test_parts_that_nobody_finishes_are_swept(kit: Kit) -> None:
    blob = BlobRef(digest_of(LARGE), Bytes(len(LARGE)))
    ticket = await kit.store.upload_ticket(NODE, kit.uploads.open(NAME, blob))
    await put_range(ticket.ranges[0], 0, LARGE[: ticket.ranges[0].end])
    assert await asyncio.to_thread(kit.store.sweep, FUTURE_S) == 0
    kit.uploads.discard(NAME)
    assert await asyncio.to_thread(kit.store.sweep, FUTURE_S) == 1
    assert await asyncio.to_thread(kit.bucket.part_uploads, "") == []


async def test_addresses_are_told_by_what_differs_from_one_that_opens_nothing(kit: Kit) -> None:
    kit.blobs.put(CONTENT)
    known_address = kit.store.known_address
    assert known_address.endswith("X-Amz-Signature=")
    for ticket in (
        await kit.store.ticket(NODE, BLOB),
        await kit.store.upload_ticket(NODE, kit.uploads.open(NAME, BLOB)),
    ):
        packed_ticket = pack_addresses(ticket, known_address)
        assert packed_ticket.ByteSize() < ticket.ByteSize() / 3
        assert unpack_addresses(packed_ticket, known_address) == ticket


async def test_no_key_is_in_what_a_node_gets(kit: Kit, s3_server: S3Server) -> None:
    secret = s3_server.environment["AWS_SECRET_ACCESS_KEY"]
    ticket = await kit.store.upload_ticket(NODE, kit.uploads.open(NAME, BLOB))
    assert secret not in str(ticket)
    assert NAME not in str(ticket)


@pytest.mark.parametrize("address", ["", "http://bucket", "s3://", "s3://UPPER/x", "s3://b?c"])
def test_an_address_that_names_no_bucket_is_refused(address: str) -> None:
    with pytest.raises(HyperGPUError) as failure:
        S3Bucket(address, "x")
    assert failure.value.reason is Reason.ARGUMENT_INVALID


@pytest.mark.parametrize(
    ("bucket", "secret", "said"),
    [
        (BUCKET, "", ""),
        ("elsewhere", "", "NoSuchBucket"),
        (BUCKET, "forged", "SignatureDoesNotMatch"),
    ],
)
def test_a_bucket_is_tried_for_doctor(
    s3_server: S3Server, bucket: str, secret: str, said: str
) -> None:
    keys = {"AWS_SECRET_ACCESS_KEY": secret} if secret else {}
    process = subprocess.run(
        program("coordinator.shell.store.bulk.try_bucket", f"s3://{bucket}/here"),
        capture_output=True,
        text=True,
        env={**os.environ, **s3_server.environment, **keys},
        check=False,
    )
    assert (process.returncode == 0) == (not said)
    assert said in process.stdout
    assert "forged" not in process.stdout + process.stderr
