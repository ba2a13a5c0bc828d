"""A connection to one coordinator: which token, which address, whose CA; every call's deadline
and error.

The secret travels only after the CA's digest was checked against the token.
"""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import grpc
import msgspec

from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest
from hypergpu.protocol import PROTOCOL_ENTRY
from hypergpu.user.client.settings import (
    ResolvedSetting,
    cache_folder,
    resolve_settings,
    timeout_s,
    token_setting,
)
from hypergpu.v1 import job_pb2_grpc, payments_pb2_grpc, serving_pb2_grpc
from hypergpu.wire.authority import TLS_NAME, fetch_authority, reject_distant_plaintext
from hypergpu.wire.credentials import Token, authorization, parse_token, split_address
from hypergpu.wire.errors import error_in
from hypergpu.wire.keepalive import KEEPALIVE

if TYPE_CHECKING:
    from hypergpu.wire.bulk import BulkClient

RESTARTING = frozenset({Reason.COORDINATOR_UNREACHABLE, Reason.NOT_READY, Reason.STORE_UNREACHABLE})
"""Reasons that pass, as while a coordinator is being restarted: trying again may help."""
AWAY = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})


def explanation(broken: grpc.aio.AioRpcError, address: str) -> Exception:
    """What a failed call means, as an exception to raise."""
    if (numbered_error := error_in(broken.trailing_metadata())) is not None:
        return numbered_error
    code, details = broken.code(), broken.details() or "no details"
    if code in AWAY:
        why = "it did not answer in time" if code is grpc.StatusCode.DEADLINE_EXCEEDED else details
        return HyperGPUError(Reason.COORDINATOR_UNREACHABLE, f"the coordinator at {address}: {why}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        detail = (
            f"the coordinator at {address} does not know this call: it is older than this program,"
            " or this is its port for nodes"
        )
        return HyperGPUError(Reason.VERSION_MISMATCH, detail)
    return HyperGPUError(
        Reason.CALL_BROKEN, f"the coordinator at {address}: {code.name}: {details}"
    )


def pause_s(idle_tries: int) -> float:
    """How long to wait before trying again: doubled each time, at most 5 s."""
    return float(min(5.0, 0.1 * 2**idle_tries))


CONNECT_TIMEOUT_S = 5.0
HANDSHAKE_TIMEOUT_S = 20.0
"""Deadline for the handshake of a coordinator that is busy."""
OPTIONS = (
    ("grpc.max_receive_message_length", 4 << 20),
    *KEEPALIVE,
    # Home networks' proxies speak no HTTP/2; the coordinator is dialled directly.
    ("grpc.enable_http_proxy", 0),
    # A new connection does not inherit the back-off of an earlier one that failed.
    ("grpc.use_local_subchannel_pool", 1),
)


class ConnectionTarget(msgspec.Struct, frozen=True):
    """Whom to call, and as whom."""

    address: str
    token: Token
    timeout_s: float
    others: tuple[str, ...] = ()
    """Where coordinators listen that may go on in place of that one."""


def find_target(flags: Mapping[str, str | None], profile: Path | None = None) -> ConnectionTarget:
    """The coordinator that flags, environment and files name.

    Raises:
        HyperGPUError: None is named, the token is no token, or nobody listens there.
    """
    settings = resolve_settings(flags, profile)
    token = parse_token(stated_token(settings))
    stated_address = settings["address"].value
    addresses = (stated_address,) if stated_address else token.addresses
    address = listening(addresses)
    others = tuple(each for each in addresses if each != address)
    return ConnectionTarget(address, token, timeout_s(settings), others)


def stated_token(found: Mapping[str, ResolvedSetting]) -> str:
    """Text of the token that settings name. Reads a small file.

    Raises:
        HyperGPUError: COORDINATOR_UNNAMED, they name none; FILE_UNUSABLE.
    """
    name, setting = token_setting(found)
    if name == "token" and setting.value:
        return setting.value
    if not setting.value:
        detail = "no coordinator is known: no token, no token file, no `up` on this machine"
        raise HyperGPUError(Reason.COORDINATOR_UNNAMED, detail)
    try:
        return Path(setting.value).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        detail = f"the token file {setting.value} (from {setting.origin}): {why}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail) from error


def listening(addresses: tuple[str, ...]) -> str:
    """The first address that accepts a TCP connection."""
    failures = []
    for address in addresses:
        try:
            socket.create_connection(split_address(address), CONNECT_TIMEOUT_S).close()
        except OSError as error:
            failures.append(f"{address}: {error.strerror or error}")
        else:
            return address
    raise HyperGPUError(
        Reason.COORDINATOR_UNREACHABLE, f"no coordinator listens at {'; '.join(failures)}"
    )


async def open_channel(to: ConnectionTarget) -> grpc.aio.Channel:
    """A channel to the coordinator that the token names, and to no other.

    Raises:
        HyperGPUError: AUTHORITY_MISMATCH, or no TLS; for a token without a CA, an address that is
            not this machine.
    """
    if not to.token.authority:
        for address in (to.address, *to.others):
            reject_distant_plaintext(address)
        return grpc.aio.insecure_channel(await asyncio.to_thread(_dial_target, to), options=OPTIONS)
    authority = await asyncio.to_thread(_authority, to.address, to.token.authority)
    dialled_address = await asyncio.to_thread(_dial_target, to)
    options = (*OPTIONS, ("grpc.ssl_target_name_override", TLS_NAME))
    credentials = grpc.ssl_channel_credentials(root_certificates=authority)
    return grpc.aio.secure_channel(dialled_address, credentials, options=options)


def _dial_target(to: ConnectionTarget) -> str:
    """What gRPC dials: with several coordinators it tries their addresses in turn, for which they
    have to be numbers. Blocks.
    """
    if not to.others:
        return to.address
    socket_addresses = []
    for address in (to.address, *to.others):
        host, port = split_address(address)
        try:
            address_infos = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)
        except OSError:
            continue  # It may have a name again when it is needed.
        socket_addresses += [f"{each[4][0]}:{port}" for each in address_infos]
    return f"ipv4:{','.join(dict.fromkeys(socket_addresses))}" if socket_addresses else to.address


def check_who_answers(to: ConnectionTarget) -> None:
    """Look again at who listens there: the CA may have come from the cache.

    Raises:
        HyperGPUError: AUTHORITY_MISMATCH, another coordinator than the token's;
            COORDINATOR_UNREACHABLE, it is the port for nodes.
    """
    if not to.token.authority:
        return
    try:
        pem = fetch_authority(to.address, to.token.authority, timeout_s=HANDSHAKE_TIMEOUT_S)
    except HyperGPUError as error:
        # Of nobody listening, the call that failed says more.
        if error.reason is Reason.AUTHORITY_MISMATCH:
            raise
        return
    if _hangs_up(to.address, pem):
        fix = "name its main port, 7700 unless it was told another"
        detail = f"{to.address} is that coordinator's port for nodes"
        raise HyperGPUError(Reason.COORDINATOR_UNREACHABLE, detail, fix=fix)


def _hangs_up(address: str, pem: bytes) -> bool:
    """Whether it shakes hands and leaves, as the node port does without a node's certificate.

    The main port says something first: HTTP/2 begins with the server's settings.
    """
    context = ssl.create_default_context(cadata=pem.decode("ascii"))
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection(split_address(address), HANDSHAKE_TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname=TLS_NAME) as secure_socket,
        ):
            return secure_socket.recv(1) == b""
    except TimeoutError:
        return False
    except (ssl.SSLError, ConnectionError):
        return True
    except OSError:
        return False


def _authority(address: str, expected: Digest) -> bytes:
    """The CA named by the token, from the cache when it is there and right."""
    cache_file = cache_folder() / f"authority-{expected}.pem"
    try:
        pem = cache_file.read_bytes()
        if digest_of(ssl.PEM_cert_to_DER_cert(pem.decode("ascii"))) == expected:
            return pem
    except (OSError, ValueError):
        pass
    pem = fetch_authority(address, expected, timeout_s=HANDSHAKE_TIMEOUT_S)
    try:
        cache_file.parent.mkdir(parents=True, exist_ok=True)
        cache_file.write_bytes(pem)
    except OSError:
        pass  # Only a cache: a read-only home must not keep anybody from working.
    return pem


TRANSFER_TIMEOUT_S = 600.0
"""Deadline of one try of a transfer; the next try goes on from the committed offset."""


def _call_metadata(token: Token) -> tuple[tuple[str, str], ...]:
    return (("authorization", authorization(token)), PROTOCOL_ENTRY)


class CoordinatorCalls:
    """An open channel. Messages are protobuf here and in the modules that translate them."""

    def __init__(self, to: ConnectionTarget, channel: grpc.aio.Channel) -> None:
        self.to = to
        self.jobs = job_pb2_grpc.JobServiceStub(channel)
        self.operator = job_pb2_grpc.OperatorServiceStub(channel)
        self._channel = channel
        self._bulk: BulkClient | None = None
        self._metadata = _call_metadata(to.token)
        self.payments = payments_pb2_grpc.PaymentsServiceStub(channel)
        self.serving = serving_pb2_grpc.ServingServiceStub(channel)

    @classmethod
    async def open(cls, to: ConnectionTarget) -> Self:
        """Connect; the secret travels only after the coordinator's CA was checked."""
        return cls(to, await open_channel(to))

    @property
    def bulk(self) -> "BulkClient":
        """What tickets are used with, made when it is needed."""
        if self._bulk is None:
            # Imported here: its HTTP library takes a fifth of the time of a short command.
            from hypergpu.wire.bulk import BulkClient

            context = self._bulk_context if self.to.token.authority else None
            self._bulk = BulkClient(split_address(self.to.address)[0], context)
        return self._bulk

    def _bulk_context(self) -> ssl.SSLContext:
        """TLS for bulk. Reads a small file."""
        from hypergpu.wire.bulk import client_context

        authority = _authority(self.to.address, self.to.token.authority)
        return client_context(authority.decode("ascii"))

    async def close(self) -> None:
        """Close the channel and end what still runs over it."""
        if self._bulk is not None:
            await self._bulk.close()
        await self._channel.close()

    async def call(
        self,
        method: Callable[..., Any],
        request: object,
        timeout_s: float | None = None,
        *,
        token: Token | None = None,
    ) -> Any:
        """One answer of a stub's method.

        Args:
            method: Method of a stub of this connection.
            request: Its message.
            timeout_s: Deadline; None: that of the connection's target.
            token: Token that the call carries; None: that of the target.

        Raises:
            HyperGPUError: The coordinator's numbered reason, or the meaning of the broken call.
            RemoteFailureError: A numbered reason that this version does not know.
        """
        timeout_s = timeout_s or self.to.timeout_s
        metadata = self._metadata if token is None else _call_metadata(token)
        try:
            return await method(request, timeout=timeout_s, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise await self._explanation(error) from error

    async def stream(
        self, method: Callable[..., Any], request: object, timeout_s: float = TRANSFER_TIMEOUT_S
    ) -> AsyncIterator[Any]:
        """Every answer of a stub's method; raises as `call` does."""
        try:
            async for message in method(request, timeout=timeout_s, metadata=self._metadata):
                yield message
        except grpc.aio.AioRpcError as error:
            raise await self._explanation(error) from error

    async def _explanation(self, broken: grpc.aio.AioRpcError) -> Exception:
        """The error of a failed call; of a connection that fails, whose fault that is."""
        failure = explanation(broken, self.to.address)
        if isinstance(failure, HyperGPUError) and failure.reason is Reason.COORDINATOR_UNREACHABLE:
            try:
                await asyncio.to_thread(check_who_answers, self.to)
            except HyperGPUError as error:
                return error
        return failure
