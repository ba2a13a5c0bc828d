"""The two listeners, one that anybody may dial and one for nodes with a certificate, and the
health that they tell: NOT_SERVING is the first thing that SIGTERM causes.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, NamedTuple

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2

from coordinator.config import Settings
from coordinator.shell.app.ports import OPTIONS, bound_port
from coordinator.shell.nodes.identity.authority import Authority, ServerIdentity
from coordinator.shell.nodes.identity.tokens import IssuedTokens
from coordinator.shell.rate import GuessLimiter
from coordinator.shell.service.calls import Caller, Gate, generic_handler
from coordinator.shell.service.gates import (
    OPERATORS,
    USERS,
    DrivingGate,
    JoinGate,
    NodeGate,
    OpenGate,
    TokenGate,
)
from coordinator.shell.service.job import JobServicer
from coordinator.shell.service.ledger import RequireVisible, VisibleLedgers
from coordinator.shell.service.node import JOIN, NodeServicer
from coordinator.shell.service.operator import OperatorServicer
from coordinator.shell.service.serving import ServingServicer
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.extension import USER_METHODS, PaymentsPlugin
from hypergpu.v1 import job_pb2, node_pb2, payments_pb2, serving_pb2

SERVICES = (
    "",
    "hypergpu.v1.NodeService",
    "hypergpu.v1.JobService",
    "hypergpu.v1.OperatorService",
    "hypergpu.v1.ServingService",
)
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
                change = self._changed
                yield self._answer(request.service)
                await change.wait()
        finally:
            self._watches -= 1

    def _answer(self, service: str) -> health_pb2.HealthCheckResponse:
        if service not in SERVICES and service not in self._parts:
            unknown_service = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            return health_pb2.HealthCheckResponse(status=unknown_service)
        is_serving = self._parts.get(service, self._is_serving)
        serving_status = health_pb2.HealthCheckResponse.SERVING
        not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
        return health_pb2.HealthCheckResponse(status=serving_status if is_serving else not_serving)

    def _wake(self) -> None:
        change, self._changed = self._changed, asyncio.Event()
        change.set()


_CALLS_MAX = 4_096
"""At a time, of users and of nodes that join; whoever comes then is told to try again."""
_NODE_CALLS_MAX = 16_384
"""At a time: a stream a node, beside it offers and tickets."""


class Servicers(NamedTuple):
    """What the listeners serve."""

    health: HealthServicer
    jobs: JobServicer
    operator: OperatorServicer
    serving: ServingServicer
    nodes: NodeServicer
    node_gate: NodeGate
    payments: PaymentsPlugin | None = None
    check_driving: Callable[[], None] = lambda: None
    """Raises `HyperGPUError` once another coordinator may drive: nobody is answered any more."""


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
            self.port = bound_port(self._main, settings.listen, settings.port, None)
            self.node_port = bound_port(self._node, settings.listen, settings.node_port, None)
            return
        identity = authority.server_identity(hosts, now_s)
        main = _credentials(identity, None)
        mutual = _credentials(identity, authority.pem)
        self.port = bound_port(self._main, settings.listen, settings.port, main)
        self.node_port = bound_port(self._node, settings.listen, settings.node_port, mutual)

    async def start(
        self, servicers: Servicers, tokens: IssuedTokens, guesses: GuessLimiter
    ) -> None:
        """Serve."""
        nodes = _service(node_pb2, "NodeService")
        jobs = _service(job_pb2, "JobService")
        operator = _service(job_pb2, "OperatorService")
        models = _service(serving_pb2, "ServingService")
        health = _service(health_pb2, "Health")
        driving_gate = partial(DrivingGate, servicers.check_driving)
        users = driving_gate(TokenGate(tokens, guesses, USERS))
        operators = driving_gate(TokenGate(tokens, guesses, OPERATORS))
        others = frozenset(nodes.methods_by_name) - JOIN
        checks = generic_handler(
            health, servicers.health, driving_gate(OpenGate()), methods=METHODS
        )
        self._main.add_generic_rpc_handlers(
            (
                checks,
                generic_handler(nodes, servicers.nodes, driving_gate(JoinGate()), methods=JOIN),
                generic_handler(jobs, servicers.jobs, users),
                generic_handler(models, servicers.serving, users),
                generic_handler(operator, servicers.operator, operators),
            )
        )
        if servicers.payments is not None:
            handlers = payments_handlers(
                servicers.payments.servicer(), users, operators, servicers.jobs.require_visible
            )
            self._main.add_generic_rpc_handlers(handlers)
        gate = driving_gate(servicers.node_gate)
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
    servicer: object, users: Gate, operators: Gate, require_visible: RequireVisible
) -> tuple[grpc.GenericRpcHandler, grpc.GenericRpcHandler]:
    """PaymentsService: some of its methods serve users, the others operators.

    Args:
        servicer: Of the payments package.
        users: Gate of what users read.
        operators: Gate of everything else.
        require_visible: Refuses a reader who may not see the job.
    """
    service = _service(payments_pb2, "PaymentsService")
    others = frozenset(service.methods_by_name) - USER_METHODS
    ledgers = VisibleLedgers(servicer, require_visible)
    return (
        generic_handler(service, ledgers, users, methods=USER_METHODS),
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
