"""One coordinator as a gateway sees it: a certificate from it, and channels to its ports."""

import asyncio
from typing import NamedTuple

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from grpc_health.v1 import health_pb2

from coordinator.shell.app.ports import joined_address
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.protocol import PROTOCOL_ENTRY
from hypergpu.v1 import job_pb2
from hypergpu.wire.authority import TLS_NAME, fetch_authority, reject_distant_plaintext
from hypergpu.wire.credentials import Token, authorization, split_address
from hypergpu.wire.errors import error_in
from hypergpu.wire.keepalive import KEEPALIVE

OPTIONS: tuple[tuple[str, str | int], ...] = (
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.max_send_message_length", 4 << 20),
    *KEEPALIVE,
    # Channels to one address have a connection each.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
_NAMED_OPTIONS = (*OPTIONS, ("grpc.ssl_target_name_override", TLS_NAME))
STREAMS_A_CONNECTION = 1_000
"""One connection's window, and its order of bytes, are shared by all of its streams."""
_CALL_S = 5.0
_CERTIFY = "/hypergpu.v1.OperatorService/CertifyGateway"
_CHECK = "/grpc.health.v1.Health/Check"


class TlsKey(NamedTuple):
    """A gateway's TLS key, which never touches the disk, and the request to certify it."""

    pem: bytes
    request_pem: bytes


def made_key() -> TlsKey:
    """A fresh key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gateway")])
    request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return TlsKey(pem, request.public_bytes(serialization.Encoding.PEM))


class GatewayIdentity(NamedTuple):
    """As whom a gateway asks for its certificate."""

    token: Token
    """An operator's."""
    key: TlsKey
    hosts: tuple[str, ...]
    """Under which nodes dial the gateway."""


class ReachedCoordinator:
    """One coordinator that answered."""

    def __init__(
        self,
        address: str,
        main: grpc.aio.Channel,
        key: TlsKey,
        certified: job_pb2.CertifyGatewayResponse,
    ) -> None:
        self.address = address
        self.main = main
        """Channel to the port that takes joins."""
        self.key = key
        self.certified = certified
        host, _ = split_address(address)
        self.bulk_target = host, certified.bulk_port
        self._node_address = joined_address(host, certified.node_port)
        self._streams: dict[grpc.aio.Channel, int] = {}
        """Channels to the port of nodes, with the streams that are open on each."""

    @classmethod
    async def certify(cls, address: str, identity: GatewayIdentity) -> "ReachedCoordinator":
        """Ask a coordinator for a certificate; the token's secret follows the check of its CA.

        Raises:
            HyperGPUError: AUTHORITY_MISMATCH, another coordinator answers there; its own reason;
                COORDINATOR_UNREACHABLE, none answers.
        """
        main = await _main_channel(address, identity.token)
        request = job_pb2.CertifyGatewayRequest(hosts=identity.hosts)
        if identity.token.authority:
            request.certificate_request = identity.key.request_pem
        metadata = (("authorization", authorization(identity.token)), PROTOCOL_ENTRY)
        call = main.unary_unary(
            _CERTIFY,
            request_serializer=job_pb2.CertifyGatewayRequest.SerializeToString,
            response_deserializer=job_pb2.CertifyGatewayResponse.FromString,
        )
        try:
            answer = await call(request, metadata=metadata, timeout=_CALL_S)
        except grpc.aio.AioRpcError as error:
            await main.close()
            raise _call_error(error, address) from error
        except BaseException:
            await main.close()
            raise
        return cls(address, main, identity.key, answer)

    async def is_serving(self) -> bool:
        """Whether it says that it takes calls."""
        call = self.main.unary_unary(
            _CHECK,
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        try:
            answer = await call(health_pb2.HealthCheckRequest(), timeout=_CALL_S)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def take_channel(self) -> grpc.aio.Channel:
        """The channel to the port of nodes with the fewest streams, for one stream more."""
        channel = min(self._streams, key=self._streams.__getitem__, default=None)
        if channel is None or self._streams[channel] >= STREAMS_A_CONNECTION:
            channel = self._open_channel()
        self._streams[channel] = self._streams.get(channel, 0) + 1
        return channel

    def release(self, channel: grpc.aio.Channel) -> None:
        """A stream over a channel has ended."""
        if channel in self._streams:
            self._streams[channel] -= 1

    @property
    def streams(self) -> int:
        """Number of streams that are open."""
        return sum(self._streams.values())

    def _open_channel(self) -> grpc.aio.Channel:
        if not self.certified.certificate:
            return grpc.aio.insecure_channel(self._node_address, options=OPTIONS)
        credentials = grpc.ssl_channel_credentials(
            root_certificates=self.certified.authority,
            private_key=self.key.pem,
            certificate_chain=self.certified.certificate,
        )
        return grpc.aio.secure_channel(self._node_address, credentials, options=_NAMED_OPTIONS)

    async def close(self) -> None:
        """End every stream and call."""
        channels, self._streams = [self.main, *self._streams], {}
        await asyncio.gather(*(channel.close() for channel in channels))


async def _main_channel(address: str, token: Token) -> grpc.aio.Channel:
    if not token.authority:
        reject_distant_plaintext(address)
        return grpc.aio.insecure_channel(address, options=OPTIONS)
    authority = await asyncio.to_thread(
        fetch_authority, address, token.authority, timeout_s=_CALL_S
    )
    credentials = grpc.ssl_channel_credentials(root_certificates=authority)
    return grpc.aio.secure_channel(address, credentials, options=_NAMED_OPTIONS)


def _call_error(broken: grpc.aio.AioRpcError, address: str) -> HyperGPUError:
    numbered_error = error_in(broken.trailing_metadata())
    if isinstance(numbered_error, HyperGPUError):
        return numbered_error
    if broken.code() is grpc.StatusCode.UNIMPLEMENTED:
        detail = f"the coordinator at {address} knows no gateways: it is older than this program"
        return HyperGPUError(Reason.VERSION_MISMATCH, detail)
    detail = f"{address}: {broken.code().name}: {broken.details() or 'no details'}"
    return HyperGPUError(Reason.COORDINATOR_UNREACHABLE, detail)
