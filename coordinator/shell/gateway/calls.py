"""NodeService as a gateway serves it: each call goes on to the active coordinator, and its answer
or its error comes back.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc
import structlog

from coordinator.core.hub.admission import Appointments
from coordinator.shell.gateway.coordinators import Coordinators
from coordinator.shell.gateway.session import CoordinatorGoneError, GatewaySession, SessionParts
from coordinator.shell.nodes.identity.gateways import GATEWAY_KEY, NODE_KEY, gateway_name
from hypergpu.clock import monotonic_ms
from hypergpu.crypto import is_node_id
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import NodeId
from hypergpu.protocol import PROTOCOL_KEY
from hypergpu.wire.credentials import Token
from hypergpu.wire.errors import DETAILS_KEY, error_in, error_metadata

log = structlog.get_logger()

_Context = Any  # grpc.aio.ServicerContext; its generic parameters differ between stub versions
Behaviour = Callable[[bytes, _Context], Awaitable[bytes]]
SERVICE = "hypergpu.v1.NodeService"
_SWEEP_S = 0.5
_FIRST_MESSAGE_S = 30.0
"""Only nodes with a certificate come this far, and they may be busy where thousands dial."""
_AWAY = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})
_STOPPING_DETAIL = "this gateway stops: dial again"
_AWAY_DETAIL = "the coordinator does not answer this gateway"


class PassedCalls:
    """The calls of all nodes of one gateway."""

    def __init__(
        self,
        coordinators: Coordinators,
        appointments: Appointments,
        parts: SessionParts,
        token: Token,
    ) -> None:
        """``token`` is the operator's that the gateway asked for its certificate with."""
        self._coordinators = coordinators
        self._appointments = appointments
        self._parts = parts
        self._token = token
        self._sessions: set[GatewaySession] = set()
        self._is_stopping = False

    @property
    def sessions(self) -> frozenset[GatewaySession]:
        """Open streams of nodes."""
        return frozenset(self._sessions)

    def join_handler(self) -> grpc.GenericRpcHandler:
        """The handler of the port that anybody may dial."""
        join: Any = grpc.unary_unary_rpc_method_handler(self._serve_call(self._join))
        return grpc.method_handlers_generic_handler(SERVICE, {"Join": join})

    def node_handler(self) -> grpc.GenericRpcHandler:
        """The handler of the port for nodes with a certificate."""
        ports = self._parts.ports
        rewrites: dict[str, Callable[[bytes], bytes]] = {
            "RenewCertificate": bytes,
            "ResolveBlob": ports.blob,
            "OfferUpdate": bytes,
            "CommitUpdate": bytes,
            "OfferResult": ports.result,
            "Contribute": bytes,
        }
        handlers: dict[str, Any] = {
            name: grpc.unary_unary_rpc_method_handler(self._serve_call(self._call(name, rewrite)))
            for name, rewrite in rewrites.items()
        }
        control: Any = self._serve_call(self._control)
        handlers["Control"] = grpc.stream_stream_rpc_method_handler(control)
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    def _serve_call(self, act: Behaviour) -> Behaviour:
        """Turn errors, of this gateway or passed back, into the call's status."""

        async def behaviour(raw: bytes, context: _Context) -> bytes:
            try:
                return await act(raw, context)
            except HyperGPUError as refusal:
                await _refuse(context, refusal)
            except grpc.aio.AioRpcError as error:
                await _pass_back(context, error)

        return behaviour

    async def _join(self, raw: bytes, context: _Context) -> bytes:
        upstream = self._coordinators.active
        call: Any = upstream.main.unary_unary(f"/{SERVICE}/Join")
        self._parts.counts.calls += 1
        answer = call(raw, metadata=_protocol(context), timeout=context.time_remaining())
        return self._parts.ports.join(await _result(answer))

    def _call(self, name: str, rewrite: Callable[[bytes], bytes]) -> Behaviour:
        async def act(raw: bytes, context: _Context) -> bytes:
            metadata = self._metadata(self._node(context), context)
            upstream = self._coordinators.active
            channel = upstream.take_channel()
            self._parts.counts.calls += 1
            try:
                call: Any = channel.unary_unary(f"/{SERVICE}/{name}")
                answer = call(raw, metadata=metadata, timeout=context.time_remaining())
                return rewrite(await _result(answer))
            finally:
                upstream.release(channel)

        return act

    async def _control(self, _: bytes, context: _Context) -> bytes:
        node = self._node(context)
        hello = await _first_message(context)
        if self._is_stopping:
            raise self._away(node, _STOPPING_DETAIL)
        if wait_ms := self._appointments.wait_ms(node, monotonic_ms()):
            self._parts.counts.postponed += 1
            detail = f"many nodes dial this gateway at once: come again in {wait_ms} ms"
            raise HyperGPUError(Reason.RATE_LIMITED, detail, wait_ms=wait_ms)
        upstream = self._coordinators.active
        channel = upstream.take_channel()
        try:
            call: Any = channel.stream_stream(f"/{SERVICE}/Control")(
                metadata=self._metadata(node, context)
            )
            await self._run_session(GatewaySession(node, context, call, self._parts), hello)
        except (CoordinatorGoneError, grpc.aio.AioRpcError) as error:
            if isinstance(error, grpc.aio.AioRpcError) and not _is_away(error):
                raise
            # All nodes lose their streams now: each is told when to come again.
            raise self._away(node, _AWAY_DETAIL) from error
        finally:
            upstream.release(channel)
        return b""

    async def _run_session(self, session: GatewaySession, hello: bytes) -> None:
        self._sessions.add(session)
        self._parts.counts.sessions += 1
        try:
            await session.run(hello)
        finally:
            self._sessions.discard(session)
            self._parts.counts.sessions -= 1

    def _metadata(self, node: NodeId, context: _Context) -> tuple[tuple[str, str], ...]:
        node_metadata = ((NODE_KEY, node), (GATEWAY_KEY, gateway_name(self._token.id)))
        return (*_protocol(context), *node_metadata)

    async def watch(self) -> None:
        """Let go of silent nodes, and let go on what was held long enough, until cancelled."""
        async with asyncio.TaskGroup() as flushes:
            while True:
                await asyncio.sleep(_SWEEP_S)
                now_ms = monotonic_ms()
                for session in list(self._sessions):
                    silent_ms = now_ms - session.heard_ms
                    if silent_ms > session.silence_limit_ms:
                        self._parts.counts.silent += 1
                        detail = f"nothing came for {silent_ms} ms"
                        session.end(HyperGPUError(Reason.STREAM_SILENT, detail))
                    elif session.is_due(now_ms):
                        flushes.create_task(session.flush())

    def stop(self) -> None:
        """End every stream; each node is told when to dial another gateway."""
        self._is_stopping = True
        for session in self._sessions:
            session.end(self._away(session.node, _STOPPING_DETAIL))

    def _away(self, node: NodeId, detail: str) -> HyperGPUError:
        wait_ms = self._appointments.appointment_ms(node, monotonic_ms())
        return HyperGPUError(Reason.NOT_READY, detail, wait_ms=wait_ms)

    def _node(self, context: _Context) -> NodeId:
        """The node that calls, by its certificate; by its word where there is no TLS.

        Raises:
            HyperGPUError: NODE_UNKNOWN, it is none.
        """
        names = context.auth_context().get("x509_common_name", ())
        node_name = names[0].decode("ascii", "replace") if names else ""
        if not self._token.authority:
            node_name = dict(context.invocation_metadata()).get(NODE_KEY, "")
        if not is_node_id(node_name):
            raise HyperGPUError(Reason.NODE_UNKNOWN, f"{node_name[:64]!r} is no node's id")
        return NodeId(node_name)


def _protocol(context: _Context) -> tuple[tuple[str, str], ...]:
    """The protocol that the caller speaks, which the coordinator judges."""
    metadata = context.invocation_metadata()
    return tuple((key, value) for key, value in metadata if key == PROTOCOL_KEY)


async def _first_message(context: _Context) -> bytes:
    """What a node says first. To one that is still sending it a refusal would not get through.

    Raises:
        HyperGPUError: STREAM_SILENT.
    """
    try:
        async with asyncio.timeout(_FIRST_MESSAGE_S):
            raw = await context.read()
    except TimeoutError:
        raise HyperGPUError(Reason.STREAM_SILENT, "a stream began with nothing") from None
    return b"" if raw is grpc.aio.EOF else bytes(raw)


async def _result(call: Awaitable[bytes]) -> bytes:
    """Answer to a call that goes on.

    Raises:
        grpc.aio.AioRpcError: It was refused, or broke.
        HyperGPUError: NOT_READY, its channel was closed, since another coordinator took over.
    """
    try:
        return await call
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise HyperGPUError(Reason.NOT_READY, _AWAY_DETAIL) from None


async def _refuse(context: _Context, refusal: HyperGPUError) -> NoReturn:
    await context.abort(
        grpc.StatusCode[refusal.reason.status],
        str(refusal),
        trailing_metadata=error_metadata(refusal),
    )
    raise AssertionError("abort always raises")


async def _pass_back(context: _Context, broken: grpc.aio.AioRpcError) -> NoReturn:
    """End a call as the coordinator ended it."""
    if _is_away(broken):
        await _refuse(context, HyperGPUError(Reason.NOT_READY, _AWAY_DETAIL))
    metadata = broken.trailing_metadata() or ()
    details = tuple((key, value) for key, value in metadata if key == DETAILS_KEY)
    await context.abort(broken.code(), broken.details(), trailing_metadata=details)
    raise AssertionError("abort always raises")


def _is_away(broken: grpc.aio.AioRpcError) -> bool:
    """Whether the connection broke, rather than that the coordinator ended the call."""
    return broken.code() in _AWAY and error_in(broken.trailing_metadata()) is None
