"""One gateway from start to end: finds a coordinator, binds, serves, leaves in good order."""

import asyncio
import os
import signal
import sys
from functools import partial
from typing import Any

import grpc
import msgspec
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from coordinator.core.hub.admission import Appointments
from coordinator.shell.app.ports import (
    OPTIONS,
    bound_port,
    check_hosts,
    dialled_hosts,
    joined_address,
)
from coordinator.shell.gateway.calls import SERVICE, PassedCalls
from coordinator.shell.gateway.coordinators import Coordinators
from coordinator.shell.gateway.counts import GatewayCounts
from coordinator.shell.gateway.figures import gateway_metrics
from coordinator.shell.gateway.session import SessionParts
from coordinator.shell.gateway.settings import GatewaySettings
from coordinator.shell.gateway.splice import BulkSplice
from coordinator.shell.gateway.tickets import OwnPorts, PortRewriter
from coordinator.shell.gateway.upstream import ReachedCoordinator
from coordinator.shell.metrics.server import MetricsServer, admit_loopback, require_loopback
from coordinator.shell.probe_echo import ProbeEcho
from coordinator.shell.probe_tokens import ProbeTokens
from coordinator.shell.rate import NODE_CALLS
from hypergpu.clock import monotonic_ms, unix_ms
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import NodeId
from hypergpu.rates import RateLimiter
from hypergpu.wire.authority import is_loopback
from hypergpu.wire.credentials import Role, Token

log = structlog.get_logger()

_LOG_S = 60.0
_BURST_S = 5
"""Nodes of so many seconds may come at once: one that is turned away shook hands for nothing."""
_SHARED_PORT = tuple((name, 1 if name == "grpc.so_reuseport" else value) for name, value in OPTIONS)
"""Gateways of one machine may share their ports: the system spreads connections over them."""


class GatewayReady(msgspec.Struct, frozen=True):
    """The one line on standard output, once calls are served."""

    address: str
    """Where this machine dials."""
    addresses: tuple[str, ...]
    """What join tokens are to name."""
    node_port: int
    bulk_port: int
    coordinator: str
    process_id: int
    metrics_port: int
    """0: no metrics are served."""


class GatewayApp:
    """The process as a whole."""

    def __init__(self, settings: GatewaySettings, token: Token) -> None:
        """Judge the settings.

        Raises:
            HyperGPUError: The token is no operator's, a host is none, or others than this machine
                would be served in plaintext.
        """
        if token.role is not Role.OPERATOR:
            detail = f"the token is for a {token.role.value}: a gateway needs an operator's"
            raise HyperGPUError(Reason.ROLE_FORBIDDEN, detail)
        if not token.authority and not is_loopback(settings.listen):
            detail = (
                "the coordinator runs without TLS, so a gateway needs a loopback address,"
                f" not --listen {settings.listen}"
            )
            raise HyperGPUError(Reason.ADDRESS_UNUSABLE, detail)
        check_hosts(settings.advertise)
        if settings.metrics_listen:
            require_loopback(settings.metrics_listen, "a gateway knows no operator but its own")
        self._settings = settings
        self._token = token
        self._hosts = dialled_hosts(settings)
        addresses = settings.coordinator or token.addresses
        self._coordinators = Coordinators(addresses, token, self._hosts)
        self._counts = GatewayCounts()
        self._health = health.aio.HealthServicer()
        self._splice = BulkSplice(lambda: self._coordinators.active.bulk_target)
        self._main = grpc.aio.server(options=_SHARED_PORT)
        self._node = grpc.aio.server(options=_SHARED_PORT)
        self._port = self._node_port = 0
        self._is_stopping = asyncio.Event()

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT.

        Raises:
            HyperGPUError: No coordinator takes this gateway, for a reason that lasts, or a port
                cannot be bound.
        """
        self._catch_signals()
        upstream = await self._find_coordinator()
        if upstream is None:
            return
        passed_calls = await self._bind(upstream)
        metrics = MetricsServer(partial(self._tell_metrics, passed_calls), admit_loopback)
        if self._settings.metrics_listen:
            await metrics.open(self._settings.metrics_listen)
        await self._main.start()
        await self._node.start()
        await self._health.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
        self._announce(upstream, metrics)
        forever = [
            asyncio.create_task(self._coordinators.run()),
            asyncio.create_task(passed_calls.watch()),
            asyncio.create_task(self._tell_counts()),
            asyncio.create_task(self._is_stopping.wait()),
        ]
        # All but the last end with an error only.
        ended_tasks, _ = await asyncio.wait(forever, return_when=asyncio.FIRST_COMPLETED)
        await metrics.close()
        await self._leave(passed_calls)
        for task in forever:
            task.cancel()
        await self._coordinators.close()
        for task in ended_tasks:
            task.result()

    async def _find_coordinator(self) -> ReachedCoordinator | None:
        """The first that takes this gateway; None: it was told to stop before."""
        task = asyncio.create_task(self._coordinators.find())
        stop_task = asyncio.create_task(self._is_stopping.wait())
        await asyncio.wait((task, stop_task), return_when=asyncio.FIRST_COMPLETED)
        stop_task.cancel()
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.wait((task,))
        return None

    async def _bind(self, upstream: ReachedCoordinator) -> PassedCalls:
        """Take the ports, and say what is served on each."""
        settings = self._settings
        self._port = bound_port(self._main, settings.listen, settings.port, self._tls(None))
        mutual = self._tls(upstream.certified.authority)
        self._node_port = bound_port(self._node, settings.listen, settings.node_port, mutual)
        await self._splice.bind(settings.listen, settings.bulk_port)
        tokens = ProbeTokens(upstream.certified.probe_secret)
        echo = ProbeEcho(tokens, lambda _: True, clock=unix_ms, shares_port=True)
        await echo.open(settings.listen, self._node_port)
        calls = RateLimiter(NODE_CALLS)

        def count_message(node: NodeId) -> None:
            if not calls.take(node, monotonic_ms()):
                raise HyperGPUError(Reason.RATE_LIMITED, f"too many messages from {node}")

        ports = PortRewriter(OwnPorts(self._node_port, self._splice.port))
        parts = SessionParts(self._counts, echo, ports, count_message, self._lost_after_ms)
        burst = _BURST_S * settings.streams_per_s
        appointments = Appointments(settings.streams_per_s, burst)
        passed_calls = PassedCalls(self._coordinators, appointments, parts, self._token)
        self._main.add_generic_rpc_handlers((passed_calls.join_handler(),))
        self._node.add_generic_rpc_handlers((passed_calls.node_handler(),))
        for server in (self._main, self._node):
            health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        return passed_calls

    def _tls(self, client_authority: bytes | None) -> grpc.ServerCredentials | None:
        if not self._token.authority:
            return None
        shown_coordinators: list[ReachedCoordinator] = []

        def renew() -> Any:
            """The certificate for a new connection; None: still the one before."""
            active = self._coordinators.active
            if shown_coordinators == [active]:
                return None
            shown_coordinators[:] = [active]
            pair = (active.key.pem, active.certified.certificate + active.certified.authority)
            return grpc.ssl_server_certificate_configuration(
                [pair], root_certificates=client_authority
            )

        return grpc.dynamic_ssl_server_credentials(
            renew(), renew, require_client_authentication=client_authority is not None
        )

    def _lost_after_ms(self) -> int:
        return self._coordinators.active.certified.lost_after_ms

    def _announce(self, upstream: ReachedCoordinator, metrics: MetricsServer) -> None:
        addresses = tuple(joined_address(host, self._port) for host in self._hosts)
        ready = GatewayReady(
            address=addresses[-1],
            addresses=addresses,
            node_port=self._node_port,
            bulk_port=self._splice.port,
            coordinator=upstream.address,
            process_id=os.getpid(),
            metrics_port=metrics.port,
        )
        sys.stdout.write(msgspec.json.encode(ready).decode() + "\n")
        sys.stdout.flush()
        log.info("serving", addresses=addresses, node_port=self._node_port)

    async def _tell_metrics(self, passed: PassedCalls) -> bytes:
        return gateway_metrics(self._counts, passed.sessions, self._coordinators.active.address)

    async def _tell_counts(self) -> None:
        while True:
            await asyncio.sleep(_LOG_S)
            log.info("a minute passed", **self._counts.take())

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._is_stopping.set)

    async def _leave(self, passed: PassedCalls) -> None:
        log.info("stopping: nodes are told to dial again")
        await self._health.enter_graceful_shutdown()
        passed.stop()
        self._splice.close()
        grace_s = self._settings.drain_timeout_ms / 1000
        await asyncio.gather(self._main.stop(grace_s), self._node.stop(grace_s))
