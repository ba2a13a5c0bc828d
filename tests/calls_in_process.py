"""Calls of a coordinator's services without a transport: its handlers, and what gRPC hands them."""

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

from coordinator.shell.app.listeners import HealthServicer
from coordinator.shell.nodes.identity.authority import Authority
from coordinator.shell.nodes.identity.gateways import NODE_KEY
from coordinator.shell.nodes.identity.tokens import IssuedTokens
from coordinator.shell.nodes.known_nodes import KnownNodes
from coordinator.shell.rate import GuessLimiter
from coordinator.shell.service.calls import generic_handler
from coordinator.shell.service.gates import NodeGate, OpenGate
from coordinator.shell.service.node_session import Enrolment
from coordinator.shell.service.operator import OperatorServicer
from hypergpu.ids import NodeId
from hypergpu.protocol import PROTOCOL_ENTRY
from hypergpu.v1 import job_pb2, node_pb2, payments_pb2
from payments.shell.projection import Projection
from payments.shell.service import PaymentsServicer
from payments.shell.store import PaymentStore
from tests.unit.shell.whole_shell import WholeShell, payments_of

_ANSWERS_MAX = 3
_WAIT_S = 0.01
"""A stream that says nothing for so long waits for something to happen: it is left."""
MODULES = (node_pb2, job_pb2, payments_pb2, health_pb2)


class CallContext:
    """What a handler gets of a call: who calls, its further messages, and a way to refuse it."""

    def __init__(self, messages: Iterable[bytes], node: NodeId | None = None) -> None:
        node_entry = () if node is None else ((NODE_KEY, str(node)),)
        self._metadata = (PROTOCOL_ENTRY, *node_entry)
        self._messages = iter(messages)
        self.status = grpc.StatusCode.OK
        self.details = ""
        self.answer = b""

    def peer(self) -> str:
        return "ipv4:192.0.2.1:5000"

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    def auth_context(self) -> dict[str, tuple[bytes, ...]]:
        return {}

    async def read(self) -> object:
        return next(self._messages, grpc.aio.EOF)

    async def abort(self, code: grpc.StatusCode, details: str = "", **_: object) -> NoReturn:
        self.status, self.details = code, details
        raise grpc.aio.AbortError


class Conversation(CallContext):
    """A node's control stream, which says one thing after the other."""

    def __init__(self, node: NodeId) -> None:
        super().__init__((), node)
        self._said: asyncio.Queue[bytes] = asyncio.Queue()

    def say(self, **message: Any) -> None:
        self._said.put_nowait(node_pb2.ControlRequest(**message).SerializeToString())

    async def read(self) -> bytes:
        return await self._said.get()


class Method(NamedTuple):
    """A method of a service."""

    name: str
    """``Service.Method``."""
    kind: type[Message]
    """The message that it takes."""
    handler: Any
    """gRPC's handler."""


class ServedMethods:
    """Every method of every service over one set of services, whoever calls."""

    def __init__(self, services: WholeShell, folder: Path) -> None:
        store = PaymentStore("", folder)
        self.projection = projection = Projection(payments_of(services).host, store)
        journal, guesses = services.journal, GuessLimiter()
        tokens, self.nodes = IssuedTokens(journal), KnownNodes(journal)
        authority = Authority.open(folder, now_s=1_900_000_000)
        enrolment = Enrolment(authority=authority, tokens=tokens, nodes=self.nodes, guesses=guesses)
        gate = NodeGate(self.nodes, is_plaintext=True)
        servicers = {
            "NodeService": services.node_servicer(gate, enrolment),
            "JobService": services.job_servicer(),
            "OperatorService": OperatorServicer(
                driver=services.driver,
                fleet=services.fleet,
                tokens=tokens,
                known=self.nodes,
                others=services.others,
                reasons=services.reasons,
                authority=authority.digest,
            ),
            "PaymentsService": PaymentsServicer(projection, store, None),
            "Health": HealthServicer(),
        }
        self.tokens = tokens
        self._services = services
        self.methods = [
            method
            for module in MODULES
            for name, service in module.DESCRIPTOR.services_by_name.items()
            for method in _methods(service, servicers[name])
        ]

    async def call(self, method: Method, messages: list[bytes], node: NodeId | None) -> CallContext:
        """Call a method with the bytes of one message or more; returns how it ended."""
        handler = method.handler
        first = messages[0]
        context = CallContext(messages, node)
        argument = None if handler.request_streaming else first
        try:
            if handler.response_streaming:
                behaviour = handler.stream_stream or handler.unary_stream
                await _read_some(behaviour(argument, context))
            else:
                context.answer = await handler.unary_unary(argument, context)
        except grpc.aio.AbortError:
            pass
        if node is not None:
            newest_receipts = payments_of(self._services).greeted.pop(node, {})
            await self.projection.greet(node, newest_receipts)
        return context


async def _read_some(answers: Any) -> None:
    """Read answers until there are no more, enough, or none for a while."""
    async with aclosing(answers):
        for _ in range(_ANSWERS_MAX):
            try:
                async with asyncio.timeout(_WAIT_S):
                    await anext(answers)
            except (TimeoutError, StopAsyncIteration):
                return


def _methods(service: ServiceDescriptor, servicer: object) -> Iterator[Method]:
    names = None if service.name != "Health" else frozenset({"Check", "Watch"})
    service_handler = generic_handler(service, servicer, OpenGate(), methods=names)
    for method in service.methods:
        handler = service_handler.service(_CallDetails(f"/{service.full_name}/{method.name}"))
        if handler is not None:
            kind = GetMessageClass(method.input_type)
            yield Method(f"{service.name}.{method.name}", kind, handler)


class _CallDetails:
    def __init__(self, method: str) -> None:
        self.method = method
        self.invocation_metadata: tuple[tuple[str, str | bytes], ...] = ()
