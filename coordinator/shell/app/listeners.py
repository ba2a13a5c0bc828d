"""The two listeners, one that anybody may dial and one for nodes with a certificate, and the
health that they tell: NOT_SERVING is the first thing that SIGTERM causes.
"""

import asyncio
import contextlib
import ipaddress
import re
import socket
from collections.abc import AsyncIterator, Iterable
from typing import Any, NamedTuple

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2

from coordinator.config import Settings
from coordinator.shell.identity.authority import Authority, ServerIdentity
from coordinator.shell.identity.rate import GuessLimiter
from coordinator.shell.identity.tokens import IssuedTokens
from coordinator.shell.servicers.calls import (
    OPERATORS,
    USERS,
    Caller,
    Gate,
    JoinGate,
    NodeGate,
    OpenGate,
    TokenGate,
    generic_handler,
)
from coordinator.shell.servicers.job import JobServicer
from coordinator.shell.servicers.node import JOIN, NodeServicer
from coordinator.shell.servicers.operator import OperatorServicer
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.extension import USER_METHODS, PaymentsPlugin
from hypergpu.v1 import job_pb2, node_pb2, payments_pb2

SERVICES = ("", "hypergpu.v1.NodeService", "hypergpu.v1.JobService", "hypergpu.v1.OperatorService")
METHODS = frozenset({"Check", "Watch"})
"""What every version of the service has."""
WATCHES_MAX = 256
"""At a time: anybody may open one."""


class HealthServicer:
    """Says whether this coordinator takes calls."""

    def __init__(self) -> None:
        self._is_serving = False
        self._parts: dict[str, bool] = {}
        self._changed = asyncio.Event()
        self._is_closed = False
        self._watches = 0

    def set_serving(self, *, is_serving: bool) -> None:
        """Change the answer and tell whoever watches."""
        self._is_serving = is_serving
        self._wake()

    def set_part(self, name: str, is_serving: bool) -> None:  # noqa: FBT001 - it is the value
        """Change the answer about a part that training goes on without."""
        self._parts[name] = is_serving
        self._wake()

    def close(self) -> None:
        """End every watch."""
        self._is_closed = True
        self._wake()

    async def check(
        self, request: health_pb2.HealthCheckRequest, caller: Caller
    ) -> health_pb2.HealthCheckResponse:
        return self._answer(request.service)

    async def watch(
        self, request: health_pb2.HealthCheckRequest, caller: Caller
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        if self._watches >= WATCHES_MAX:
            raise HyperGPUError(Reason.RATE_LIMITED, f"{WATCHES_MAX} watches are open: use Check")
        self._watches += 1
        try:
            while not self._is_closed:
                changed = self._changed
                yield self._answer(request.service)
                await changed.wait()
        finally:
            self._watches -= 1

    def _answer(self, service: str) -> health_pb2.HealthCheckResponse:
        if service not in SERVICES and service not in self._parts:
            unknown = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            return health_pb2.HealthCheckResponse(status=unknown)
        is_serving = self._parts.get(service, self._is_serving)
        serving = health_pb2.HealthCheckResponse.SERVING
        not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
        return health_pb2.HealthCheckResponse(status=serving if is_serving else not_serving)

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


MESSAGE_BYTES_MAX = 4 << 20
_CALLS_MAX = 4_096
"""At a time, of users and of nodes that join; whoever comes then is told to try again."""
_NODE_CALLS_MAX = 16_384
"""At a time: a stream a node, beside it offers and tickets."""
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9.])?", re.ASCII)
OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 15_000),
    # Whoever says nothing is let go of: a port must not fill up with connections that do nothing.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 300_000),
    # Two coordinators on one port would each get half of the calls.
    ("grpc.so_reuseport", 0),
)


class Servicers(NamedTuple):
    """What the listeners serve."""

    health: HealthServicer
    jobs: JobServicer
    operator: OperatorServicer
    nodes: NodeServicer
    node_gate: NodeGate
    payments: PaymentsPlugin | None = None


class Listeners:
    """Both servers, bound to their ports."""

    def __init__(self, settings: Settings, authority: Authority | None) -> None:
        self._settings = settings
        self._authority = authority
        self._main = grpc.aio.server(options=OPTIONS, maximum_concurrent_rpcs=_CALLS_MAX)
        self._node = grpc.aio.server(options=OPTIONS, maximum_concurrent_rpcs=_NODE_CALLS_MAX)
        self.port = 0
        self.node_port = 0

    def bind(self, hosts: tuple[str, ...], now_s: int) -> None:
        """Take both ports. What is called before `start` waits.

        Raises:
            HyperGPUError: ADDRESS_UNUSABLE, a port is taken or the address is not this machine's.
        """
        settings, authority = self._settings, self._authority
        if authority is None:
            self.port = _bound(self._main, settings.listen, settings.port, None)
            self.node_port = _bound(self._node, settings.listen, settings.node_port, None)
            return
        identity = authority.server_identity(hosts, now_s)
        main = _credentials(identity, None)
        mutual = _credentials(identity, authority.pem)
        self.port = _bound(self._main, settings.listen, settings.port, main)
        self.node_port = _bound(self._node, settings.listen, settings.node_port, mutual)

    async def start(
        self, servicers: Servicers, tokens: IssuedTokens, guesses: GuessLimiter
    ) -> None:
        """Serve."""
        nodes = _service(node_pb2, "NodeService")
        jobs = _service(job_pb2, "JobService")
        operator = _service(job_pb2, "OperatorService")
        health = _service(health_pb2, "Health")
        users = TokenGate(tokens, guesses, USERS)
        operators = TokenGate(tokens, guesses, OPERATORS)
        others = frozenset(nodes.methods_by_name) - JOIN
        checks = generic_handler(health, servicers.health, OpenGate(), methods=METHODS)
        self._main.add_generic_rpc_handlers(
            (
                checks,
                generic_handler(nodes, servicers.nodes, JoinGate(), methods=JOIN),
                generic_handler(jobs, servicers.jobs, users),
                generic_handler(operator, servicers.operator, operators),
            )
        )
        if servicers.payments is not None:
            found = payments_handlers(servicers.payments.servicer(), users, operators)
            self._main.add_generic_rpc_handlers(found)
        gate = servicers.node_gate
        self._node.add_generic_rpc_handlers(
            (
                checks,
                generic_handler(nodes, servicers.nodes, gate, methods=others),
            )
        )
        await self._main.start()
        await self._node.start()

    async def stop(self, grace_s: float) -> None:
        """Take no new calls; what is under way has ``grace_s`` to end."""
        await asyncio.gather(self._main.stop(grace_s), self._node.stop(grace_s))


def payments_handlers(
    servicer: object, users: Gate, operators: Gate
) -> tuple[grpc.GenericRpcHandler, grpc.GenericRpcHandler]:
    """PaymentsService: some of its methods serve users, the others operators."""
    service = _service(payments_pb2, "PaymentsService")
    others = frozenset(service.methods_by_name) - USER_METHODS
    return (
        generic_handler(service, servicer, users, methods=USER_METHODS),
        generic_handler(service, servicer, operators, methods=others),
    )


def _service(module: Any, name: str) -> ServiceDescriptor:
    """A service's descriptor; generated modules and their stubs disagree about its type."""
    descriptor: ServiceDescriptor = module.DESCRIPTOR.services_by_name[name]
    return descriptor


def _credentials(
    identity: ServerIdentity, client_authority: bytes | None
) -> grpc.ServerCredentials:
    pairs = [(identity.private_key_pem, identity.chain_pem)]
    return grpc.ssl_server_credentials(
        pairs,
        root_certificates=client_authority,
        require_client_auth=client_authority is not None,
    )


def _bound(
    server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None
) -> int:
    address = joined_address(host, port)
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise HyperGPUError(Reason.ADDRESS_UNUSABLE, f"{address} cannot be bound") from error


def joined_address(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def is_wildcard(host: str) -> bool:
    """Whether the address stands for every address of this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def check_hosts(hosts: Iterable[str]) -> None:
    """Reject what nobody could dial, before tokens and the certificate name it.

    Raises:
        HyperGPUError: ADDRESS_UNUSABLE, one is neither a name nor an address.
    """
    for host in hosts:
        try:
            ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            if not _HOST.fullmatch(host):
                detail = f"--advertise {host!r} is no host"
                fix = "give a name or an address without a port: --advertise gpu.example.org"
                raise HyperGPUError(Reason.ADDRESS_UNUSABLE, detail, fix=fix) from None


def dialled_hosts(settings: Settings) -> tuple[str, ...]:
    """Under which hosts the listeners can be reached, best first."""
    if settings.advertise:
        return settings.advertise
    if not is_wildcard(settings.listen):
        return (settings.listen,)
    return tuple(dict.fromkeys((*_outward_host(), "127.0.0.1")))


def _outward_host() -> tuple[str, ...]:
    """The address of the interface that leads to other machines; nothing is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # a documentation address: only the route is looked up
        return (str(probe.getsockname()[0]),)
    return ()
