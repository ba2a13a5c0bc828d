"""The calls of NodeService, each with its metadata and its deadline."""

from collections.abc import AsyncGenerator, AsyncIterator
from copy import copy
from typing import TYPE_CHECKING

import grpc

from gpu_node.shell.link.chunks import BlobPiece, decode_chunk
from hypergpu.ids import Digest
from hypergpu.statements.assignment import Lease
from hypergpu.units import Milliseconds
from hypergpu.v1 import node_pb2, node_pb2_grpc
from hypergpu.wire.assignment import digest_message, lease_message
from hypergpu.wire.bulk import WHOLE, Stripe

if TYPE_CHECKING:
    from hypergpu.v1.node_pb2_grpc import NodeServiceAsyncStub

Metadata = tuple[tuple[str, str], ...]
ControlCall = grpc.aio.StreamStreamCall[node_pb2.ControlRequest, node_pb2.ControlResponse]

_Fetch = grpc.aio.UnaryStreamMultiCallable[node_pb2.FetchBlobRequest, bytes]
_Submit = grpc.aio.StreamUnaryMultiCallable[bytes, node_pb2.SubmitUpdateResponse]

_ADMITTED_KEY = "hypergpu-admitted"
_WINDOW_BYTES = 32 << 10
"""Less than the 64 KiB that HTTP/2 lets a stream carry before it is told to go on."""
_PENDING = (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING)
_SERVICE = "/hypergpu.v1.NodeService/"


class Calls:
    """One channel's calls. Each raises `grpc.aio.AioRpcError` when it breaks or is rejected."""

    def __init__(
        self, channel: grpc.aio.Channel, metadata: Metadata, timeout_ms: Milliseconds
    ) -> None:
        self._channel = channel
        self._metadata = metadata
        self.further: tuple[Calls, ...] = ()
        """Calls over further connections to the same coordinator, for bulk."""
        self.timeout_ms = timeout_ms
        self._timeout_s = timeout_ms / 1000
        self._stub: NodeServiceAsyncStub = node_pb2_grpc.NodeServiceStub(channel)  # type: ignore[assignment]
        self._fetch: _Fetch = channel.unary_stream(
            f"{_SERVICE}FetchBlob",
            request_serializer=node_pb2.FetchBlobRequest.SerializeToString,
            response_deserializer=None,
        )
        self._submit: _Submit = channel.stream_unary(
            f"{_SERVICE}SubmitUpdate",
            request_serializer=None,
            response_deserializer=node_pb2.SubmitUpdateResponse.FromString,
        )

    def with_further(self, further: "tuple[Calls, ...]") -> "Calls":
        """The same calls, with further connections for bulk."""
        together = copy(self)
        together.further = further
        return together

    @property
    def connections(self) -> "tuple[Calls, ...]":
        """The calls over this connection and over each further one."""
        return (self, *self.further)

    async def connect(self) -> None:
        """Connect. Returns once that is done or has failed; then the next call fails."""
        state = self._channel.get_state(try_to_connect=True)
        while state in _PENDING:
            await self._channel.wait_for_state_change(state)
            state = self._channel.get_state(try_to_connect=True)

    async def join(self, request: node_pb2.JoinRequest) -> node_pb2.JoinResponse:
        """Trade a token for a certificate."""
        return await self._stub.Join(request, timeout=self._timeout_s, metadata=self._metadata)

    async def renew(
        self, request: node_pb2.RenewCertificateRequest
    ) -> node_pb2.RenewCertificateResponse:
        """Get a fresh certificate."""
        return await self._stub.RenewCertificate(
            request, timeout=self._timeout_s, metadata=self._metadata
        )

    def control(self) -> ControlCall:
        """Open the control stream. It has no deadline of its own: heartbeats watch over it."""
        return self._stub.Control(metadata=self._metadata)

    async def fetch(
        self, digest: Digest, offset: int, timeout_s: float, *, end: int = 0
    ) -> AsyncGenerator[BlobPiece]:
        """A blob's pieces from ``offset`` on, up to ``end`` or, with 0, to its last."""
        request = node_pb2.FetchBlobRequest(digest=digest_message(digest), offset=offset, end=end)
        call = self._fetch(request, timeout=timeout_s, metadata=self._metadata)
        try:
            async for raw in call:
                yield decode_chunk(raw)
        finally:
            call.cancel()

    async def query_upload(
        self, lease: Lease, digest: Digest, stripe: Stripe = WHOLE
    ) -> node_pb2.QueryUploadResponse:
        """Ask how much of an update, or of one of its stripes, the coordinator holds."""
        request = node_pb2.QueryUploadRequest(
            lease=lease_message(lease),
            digest=digest_message(digest),
            stripe=stripe.index,
            stripes=stripe.count,
        )
        return await self._stub.QueryUpload(
            request, timeout=self._timeout_s, metadata=self._metadata
        )

    async def submit(
        self, messages: AsyncIterator[bytes], timeout_s: float, bulk_bytes: int
    ) -> node_pb2.SubmitUpdateResponse:
        """Send an update: `SubmitUpdateRequest` messages, already serialized, the header first.

        The coordinator tells in initial metadata that it admits the header. Bulk written before
        could meet a closed stream; gRPC would report the failed write, not the rejection. Bulk that
        fits into the first window of a stream is sent at once, before any answer can come.

        Args:
            messages: The header, then chunks.
            timeout_s: Deadline of the call.
            bulk_bytes: Bytes of all chunks.
        """

        async def admitted_messages() -> AsyncIterator[bytes]:
            yield await anext(messages)
            if bulk_bytes > _WINDOW_BYTES and _ADMITTED_KEY not in dict(
                await call.initial_metadata()
            ):
                await call.code()  # Rejected: the iterator must not end before the call has.
                return
            async for message in messages:
                yield message

        call = self._submit(admitted_messages(), timeout=timeout_s, metadata=self._metadata)
        return await call

    async def close(self) -> None:
        """Close the channel; calls under way break."""
        await self._channel.close()
