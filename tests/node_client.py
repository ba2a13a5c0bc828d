"""A node reduced to its wire: says exactly what a test wants said, on a plaintext loopback."""

import asyncio
import io
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any

import aiohttp
import grpc
from msgspec.structs import replace
from yarl import URL

from hypergpu.crypto import IdentityKey, JoinClaim, sign
from hypergpu.digests import digest_of, digest_to_wire
from hypergpu.errors import HyperGPUError
from hypergpu.ids import Digest, JobKey, TokenId
from hypergpu.part_file import Span
from hypergpu.protocol import PROTOCOL, PROTOCOL_ENTRY
from hypergpu.statements import Contribution, shard_digest
from hypergpu.units import Bytes, Milliseconds, Samples
from hypergpu.v1 import node_pb2, node_pb2_grpc, tensor_pb2
from hypergpu.wire.credentials import parse_token
from hypergpu.wire.errors import error_in
from hypergpu.wire.messages import terms_value
from hypergpu.wire.update_requests import (
    NODE_HEADER,
    OFFER_HEADER,
    PROTOCOL_HEADER,
    UPDATE_PATH,
    UpdateAnswer,
    answer_in,
    offer_text,
    range_text,
)

if TYPE_CHECKING:
    from hypergpu.v1.node_pb2_grpc import NodeServiceAsyncStub

NOBODY_LOST = ("--lost-after-ms", "300000")
"""A coordinator's flags: a node reduced to its wire has no heartbeat."""


def reason_of(broken: Any) -> str:
    """The name of the numbered reason in a refused call."""
    numbered_error = error_in(broken.trailing_metadata())
    assert isinstance(numbered_error, HyperGPUError), broken
    return numbered_error.reason.name


def async_stub(channel: grpc.aio.Channel) -> "NodeServiceAsyncStub":
    """The stub under the type that its calls have on an asyncio channel."""
    return node_pb2_grpc.NodeServiceStub(channel)  # type: ignore[return-value]


def contribution(
    key: IdentityKey, assignment: node_pb2.Assignment, update: bytes, nonce: int
) -> Contribution:
    """What a node signs that says nothing of how long it computed."""
    lease, shard = assignment.lease, assignment.shard
    ranges = [(run.start, Samples(run.count)) for run in shard.ranges]
    return Contribution(
        job=JobKey(assignment.terms.job.hex()),
        epoch=assignment.terms.epoch,
        round=lease.round,
        node=key.node_id,
        shard=shard_digest(shard.partition, ranges),
        model=Digest(assignment.model.blob.digest.value.hex()),
        update=digest_of(update),
        samples=Samples(sum(count for _, count in ranges)),
        inner_steps=assignment.training.inner_steps,
        compute_ms=Milliseconds(0),
        update_bytes=Bytes(len(update)),
        lease=lease.number,
        nonce=nonce,
    )


class WireNode:
    """Joined, and holding whatever it is assigned."""

    def __init__(self, address: str, node_address: str) -> None:
        self.key = IdentityKey.generate()
        self.node_id = self.key.node_id
        self.metadata = (PROTOCOL_ENTRY, ("hypergpu-node", self.node_id))
        self._main = grpc.aio.insecure_channel(address)
        self.channel = grpc.aio.insecure_channel(node_address)
        self.stub = async_stub(self.channel)
        self._outbox: asyncio.Queue[node_pb2.ControlRequest | None] = asyncio.Queue()
        self._nonce = 0
        self.bulk_port = 0
        """0 before it joined."""
        self.is_starting = False
        """What its next hello says of its worker."""
        self.lacking_operators: tuple[str, ...] = ()
        """Operators that its torch lacks, as its next hello says."""
        self.unpacks = False
        """Whether it says that it unpacks messages."""
        self.takes_blobs = False
        """Whether it says that it takes blobs beside assignments."""
        self.signs_counts = False
        """Whether it says that it signs counts of what it gave."""
        self.queues_work = False
        """Whether it says that it takes its next packed work while it does one."""

    async def join(self, token_text: str) -> node_pb2.JoinResponse:
        """Trade a token for admission."""
        token = parse_token(token_text)
        claim = JoinClaim(TokenId(token.id), digest_of(b""))
        request = node_pb2.JoinRequest(
            version=node_pb2.Version(protocol=PROTOCOL, software="test"),
            token_id=token.id,
            token_secret=token.secret,
            public_key=self.key.public_key,
            signature=self.key.sign(claim),
        )
        stub = async_stub(self._main)
        answer = await stub.Join(request, metadata=(PROTOCOL_ENTRY,), timeout=240)
        self.bulk_port = answer.bulk_port
        return answer

    def control(
        self, workloads: Iterable[tuple[str, int]], working: Iterable[node_pb2.Lease] = ()
    ) -> AsyncIterator[node_pb2.ControlResponse]:
        """Open the control stream."""
        hello = node_pb2.Hello(
            version=node_pb2.Version(protocol=PROTOCOL, software="test"),
            capabilities=node_pb2.Capabilities(
                workloads=[
                    node_pb2.WorkloadVersion(name=name, version=version)
                    for name, version in workloads
                ],
                torch="2.6.0",
                lacking_operators=self.lacking_operators,
            ),
            working=working,
            is_starting=self.is_starting,
            unpacks=self.unpacks,
            takes_blobs=self.takes_blobs,
            signs_counts=self.signs_counts,
            queues_work=self.queues_work,
        )
        outbox: asyncio.Queue[node_pb2.ControlRequest | None] = asyncio.Queue()
        self._outbox = outbox
        outbox.put_nowait(node_pb2.ControlRequest(hello=hello))

        async def requests() -> AsyncIterator[node_pb2.ControlRequest]:
            while (message := await outbox.get()) is not None:
                yield message
                outbox.task_done()

        call = self.stub.Control(requests(), metadata=self.metadata)
        return aiter(call)

    def say(self, message: node_pb2.ControlRequest) -> None:
        """Send something on the control stream."""
        self._outbox.put_nowait(message)

    async def flush(self) -> None:
        """Wait until all was written. A write that a refusal meets would hide its reason."""
        await self._outbox.join()

    def offer(
        self,
        assignment: node_pb2.Assignment,
        update: bytes,
        *,
        nonce: int | None = None,
        epoch: int | None = None,
    ) -> node_pb2.OfferUpdateRequest:
        """A right offer, with a fresh nonce unless one is given.

        Args:
            assignment: The work.
            update: Its result.
            nonce: Of the offer.
            epoch: That it says to be signed for; None: it is signed for the assigned one, and does
                not say so.
        """
        if nonce is None:
            self._nonce += 1
            nonce = self._nonce
        lease, digest = assignment.lease, digest_of(update)
        statement = contribution(self.key, assignment, update, nonce)
        if epoch is not None:
            statement = replace(statement, epoch=epoch)
        separator = terms_value(assignment.terms).domain.separator()
        return node_pb2.OfferUpdateRequest(
            lease=lease,
            digest=tensor_pb2.Digest(value=digest_to_wire(digest)),
            size_bytes=len(update),
            nonce=nonce,
            signature=sign(self.key, separator, statement),
            epoch=epoch,
        )

    def update_headers(
        self, offer: node_pb2.OfferUpdateRequest, span: Span | None = None
    ) -> dict[str, str]:
        """Headers of a request that brings a range of an update, or asks what is missing."""
        headers = {
            OFFER_HEADER: offer_text(offer.SerializeToString()),
            PROTOCOL_HEADER: str(PROTOCOL),
            NODE_HEADER: self.node_id,
        }
        return headers if span is None else {**headers, "Content-Range": range_text(span)}

    async def bring(
        self, offer: node_pb2.OfferUpdateRequest, start: int, content: bytes
    ) -> UpdateAnswer:
        """The answer to a request that brings bytes of an update.

        Raises:
            HyperGPUError: The update was refused.
        """
        span = Span(start, start + len(content)) if content else None
        return await self._put(self.update_headers(offer, span), content)

    async def ask(self, offer: node_pb2.OfferUpdateRequest) -> UpdateAnswer:
        """The answer to a request that asks what is missing of an update.

        Raises:
            HyperGPUError: The update was refused.
        """
        return await self.bring(offer, 0, b"")

    async def submit(self, offer: node_pb2.OfferUpdateRequest, update: bytes) -> None:
        """Send an update, which is accepted on return.

        Raises:
            HyperGPUError: The update was refused.
        """
        answer = await self.bring(offer, 0, update)
        assert answer == UpdateAnswer(is_accepted=True)

    async def _put(self, headers: dict[str, str], content: bytes) -> UpdateAnswer:
        url = f"http://127.0.0.1:{self.bulk_port}{UPDATE_PATH}"
        async with (
            aiohttp.ClientSession() as session,
            session.put(url, data=io.BytesIO(content), headers=headers) as response,
        ):
            return answer_in(await response.read())

    async def resolve(self, digest: tensor_pb2.Digest) -> node_pb2.ResolveBlobResponse:
        """A ticket for a blob."""
        request = node_pb2.ResolveBlobRequest(digest=digest)
        return await self.stub.ResolveBlob(request, metadata=self.metadata, timeout=240)

    async def fetch(self, digest: tensor_pb2.Digest, start: int = 0) -> bytes:
        """A blob from ``start`` on."""
        resolution = await self.resolve(digest)
        status, content = await get_range(resolution.ticket.ranges[0], start, resolution.size_bytes)
        assert status == 206, content
        return content

    def hang_up(self) -> None:
        """End the control stream from this side."""
        self._outbox.put_nowait(None)

    async def close(self) -> None:
        """End both channels."""
        self.hang_up()
        await self.channel.close()
        await self._main.close()


async def get_range(
    ranged: tensor_pb2.TicketRange, start: int, end: int, method: str = "GET"
) -> tuple[int, bytes]:
    """The store's status and body for a range, asked for on this machine."""
    url = URL(ranged.url, encoded=True).with_host("127.0.0.1")
    headers = {**ranged.headers, "Range": f"bytes={start}-{end - 1}"}
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url, headers=headers) as response,
    ):
        return response.status, await response.read()


async def put_range(ranged: tensor_pb2.TicketRange, start: int, content: bytes) -> tuple[int, str]:
    """The store's status and text for bytes that are sent to it on this machine."""
    url = URL(ranged.url, encoded=True).with_host("127.0.0.1")
    headers = {**ranged.headers, "Content-Range": f"bytes {start}-{start + len(content) - 1}/*"}
    if ranged.is_whole:
        del headers["Content-Range"]
    async with (
        aiohttp.ClientSession() as session,
        session.put(url, data=io.BytesIO(content), headers=headers) as response,
    ):
        return response.status, await response.text()


async def next_assignment(
    stream: AsyncIterator[node_pb2.ControlResponse],
) -> node_pb2.Assignment:
    """The next assignment on a control stream."""
    async for message in stream:
        if message.HasField("assignment"):
            return message.assignment
    raise AssertionError("the stream ended without an assignment")
