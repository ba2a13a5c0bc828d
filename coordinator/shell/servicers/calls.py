"""One wrapper around every method of a service: parses, admits by protocol, identity, revocation,
role and rate, and turns a refusal into a status with its numbered reason.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NoReturn, Protocol, TypeVar

import grpc
import structlog
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from coordinator.core.hub.admission import Appointments
from coordinator.shell.failpoints import failpoint
from coordinator.shell.identity.gateways import GATEWAY_KEY, NODE_KEY, gateway_token
from coordinator.shell.identity.rate import NODE_CALLS, GuessLimiter, OpenCounter, Rate, RateLimiter
from coordinator.shell.identity.tokens import IssuedTokens
from coordinator.shell.journal.records import TokenRecord
from coordinator.shell.runtime.nodes import KnownNodes
from coordinator.shell.servicers.streams import CurrentAnswers, let_begin
from hypergpu import streams
from hypergpu.crypto import is_node_id
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import NodeId, TokenId
from hypergpu.streams import PROTOCOL, PROTOCOL_KEY, SOFTWARE, monotonic_ms, unix_s
from hypergpu.units import Milliseconds
from hypergpu.v1 import node_pb2
from hypergpu.wire.credentials import Role, parse_authorization
from hypergpu.wire.errors import error_metadata


async def abort(
    context: "grpc.aio.ServicerContext[bytes, bytes]", refusal: HyperGPUError
) -> NoReturn:
    """End the call with the refusal."""
    await context.abort(
        grpc.StatusCode[refusal.reason.status],
        str(refusal),
        trailing_metadata=error_metadata(refusal),
    )
    raise AssertionError("abort always raises")


log = structlog.get_logger()

Context = Any  # grpc.aio.ServicerContext; its generic parameters differ between stub versions
Parser = Callable[[bytes], Any]
Listed = TypeVar("Listed")
_PAGE_ITEMS = 100


def _watch_nothing(_act: Callable[[], None]) -> Callable[[], None]:
    return lambda: None


class Caller:
    """Who calls, as far as the transport and the metadata tell."""

    def __init__(self, context: Context, method: str) -> None:
        self.method = method
        self.peer: str = context.peer()
        self.metadata = {
            key: value for key, value in context.invocation_metadata() if isinstance(value, str)
        }
        names = context.auth_context().get("x509_common_name", ())
        self.certificate_name = names[0].decode("ascii", "replace") if names else ""
        self.token: TokenRecord | None = None
        """The token that the gate admitted; None: the call needs none."""
        self.own_nodes: frozenset[NodeId] | None = None
        """Nodes that joined with the caller's token, where it is a node's; None: it sees all."""
        self.gateway: TokenId | None = None
        """Token of the gateway that speaks for the node; None: the node itself calls."""
        self.recheck: Callable[[], None] = lambda: None
        """Raise `HyperGPUError` where the token was revoked or expired since."""
        self.watch_token: Callable[[Callable[[], None]], Callable[[], None]] = _watch_nothing
        """Have an action called, by any thread, once the token is revoked; returns the undoing."""
        self.hold_stream: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        """Count one more open stream of the caller, or refuse it."""

    def may_change(self, owner: TokenId) -> bool:
        """Whether the caller may change a job that belongs to a token."""
        token = self.token
        return token is None or token.role is Role.OPERATOR or token.token_id == owner


def page_of(listed: Sequence[Listed], page: str) -> tuple[Sequence[Listed], str]:
    """The part of a list that a page names, and the name of the next; empty: there is none.

    Raises:
        HyperGPUError: REQUEST_INVALID, no page has this name.
    """
    if page and not (page.isdecimal() and len(page) < 9):
        raise HyperGPUError(Reason.REQUEST_INVALID, f"there is no page {page[:20]!r}")
    first = int(page or "0")
    following = first + _PAGE_ITEMS
    return listed[first:following], str(following) if following < len(listed) else ""


class Gate(Protocol):
    """Decides who may call what."""

    async def admit(self, caller: Caller) -> None:
        """Return when the caller may go on.

        Raises:
            HyperGPUError: it may not.
        """


class Requests:
    """A client's stream, each message with a deadline of its own."""

    def __init__(self, context: Context, parse: Parser) -> None:
        self._context = context
        self._parse = parse

    async def next(self, timeout_ms: int | None) -> Any | None:
        """The next message; None when the client has no more.

        Args:
            timeout_ms: None: it is waited for however long it takes.

        Raises:
            HyperGPUError: STREAM_SILENT after ``timeout_ms``; REQUEST_INVALID, it does not parse.
        """
        try:
            async with asyncio.timeout(None if timeout_ms is None else timeout_ms / 1000):
                raw = await self._context.read()
        except TimeoutError:
            raise HyperGPUError(Reason.STREAM_SILENT, f"nothing came for {timeout_ms} ms") from None
        return None if raw is grpc.aio.EOF else self._parse(raw)


def generic_handler(
    service: ServiceDescriptor,
    servicer: object,
    gate: Gate,
    *,
    methods: frozenset[str] | None = None,
) -> grpc.GenericRpcHandler:
    """Serve a service's methods by the servicer's methods of the same name in snake case.

    Args:
        service: Descriptor from the generated module.
        servicer: Has ``async def name(request, caller)``; the first argument is `Requests` when the
            client streams; an async generator when the server streams.
        gate: Asked before each call.
        methods: Only these of the service; all when None.
    """
    handlers = {}
    for method in service.methods:
        if methods is not None and method.name not in methods:
            continue
        parse = parser(GetMessageClass(method.input_type))
        handlers[method.name] = _handler(
            method, getattr(servicer, _snake(method.name)), parse, gate
        )
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def parser(message: type[Message]) -> Parser:
    """Parse with protobuf; what does not parse is refused."""

    def parse(raw: bytes) -> Message:
        try:
            return message.FromString(raw)
        except DecodeError:
            name = message.DESCRIPTOR.name
            raise HyperGPUError(Reason.REQUEST_INVALID, f"the bytes are no {name}") from None

    return parse


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)[1:]


def _handler(method: MethodDescriptor, act: Callable[..., Any], parse: Parser, gate: Gate) -> Any:
    name = f"{method.containing_service.name}.{method.name}"

    def argument(raw: Any, context: Context) -> Any:
        return Requests(context, parse) if method.client_streaming else parse(raw)

    if not method.server_streaming:
        answer = answering(name, act, gate, argument)
        if method.client_streaming:
            return grpc.stream_unary_rpc_method_handler(answer)
        return grpc.unary_unary_rpc_method_handler(answer)
    stream = streaming(name, act, gate, argument)
    if method.client_streaming:
        return grpc.stream_stream_rpc_method_handler(stream)
    return grpc.unary_stream_rpc_method_handler(stream)


Argument = Callable[[Any, Context], Any]


def answering(
    name: str, act: Callable[..., Awaitable[Message]], gate: Gate, argument: Argument
) -> Callable[[Any, Context], Awaitable[bytes]]:
    """Serve one answer a call, for callers whom the gate admits."""

    async def behaviour(raw: Any, context: Context) -> bytes:
        try:
            caller = Caller(context, name)
            await gate.admit(caller)
            answer = await act(argument(raw, context), caller)
            return answer.SerializeToString()
        except HyperGPUError as error:
            return await abort(context, error)
        except Exception as error:  # noqa: BLE001  a call that breaks ends alone, and is logged once
            return await _report_broken(context, name, error)

    return behaviour


def streaming(
    name: str, act: Callable[..., AsyncIterator[Message]], gate: Gate, argument: Argument
) -> Callable[[Any, Context], AsyncIterator[bytes]]:
    """Serve a stream of answers a call, for callers whom the gate admits."""

    async def behaviour(raw: Any, context: Context) -> AsyncIterator[bytes]:
        try:
            caller = Caller(context, name)
            try:
                await gate.admit(caller)
            except HyperGPUError:
                await let_begin(raw, context)
                raise
            with caller.hold_stream():
                answers = CurrentAnswers(act(argument(raw, context), caller), caller)
                with contextlib.closing(answers):
                    async for answer in answers:
                        yield answer.SerializeToString()
                        failpoint("serve.answer")
        except HyperGPUError as error:
            await abort(context, error)
        except Exception as error:  # noqa: BLE001  as above
            await _report_broken(context, name, error)

    return behaviour


async def _report_broken(context: Context, name: str, error: Exception) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError | grpc.aio.UsageError):
        raise error
    log.error("a call broke", method=name, exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, f"{name} broke: see the coordinator's log")
    raise AssertionError("abort always raises")


def version_message() -> node_pb2.Version:
    """What this coordinator speaks."""
    return node_pb2.Version(protocol=PROTOCOL, software=SOFTWARE)


def reject_other_version(theirs: node_pb2.Version) -> None:
    """Reject a peer of another protocol.

    Raises:
        HyperGPUError: VERSION_MISMATCH, with the command that upgrades the older side.
    """
    reject_other_protocol(theirs.protocol, theirs.software or "it")


def reject_other_protocol(theirs: int, who: str) -> None:
    """As `reject_other_version`, for a bare number."""
    there, here = "on that machine", "where the coordinator runs"
    streams.refuse_other_protocol(theirs, who, there=there, here=here)


OPERATORS = frozenset({Role.OPERATOR})
USERS = frozenset({Role.USER, Role.OPERATOR})
_NODE_OWNERS = frozenset({Role.NODE, Role.OPERATOR})
_READERS = frozenset(Role)
"""A node's token reads of the nodes that joined with it and of the jobs they had a part in."""
_ROLES = {
    "JobService.ListJobs": _READERS,
    "JobService.GetJob": _READERS,
    "JobService.WatchJob": _READERS,
    "JobService.GetToken": _READERS,
    "PaymentsService.GetLedger": _READERS,
    "PaymentsService.ListReceipts": _READERS,
    "OperatorService.ListNodes": _READERS,
    "OperatorService.WatchTelemetry": _READERS,
    "OperatorService.DrainNode": _NODE_OWNERS,
    "OperatorService.PauseNode": _NODE_OWNERS,
    "OperatorService.ResumeNode": _NODE_OWNERS,
}
"""Who may call a method where its service's gate does not decide."""
_OFFERS = Rate(burst=100, interval_ms=Milliseconds(50))
"""Offers of one node: each may cost a row in the journal."""


_STREAMS_PER_S, _STREAMS_BURST = 500, 1_000
"""Control streams that may open: whoever comes beyond that is told when to."""
_NODE_STREAMS_MAX = 4
"""A new control stream ends the older ones, which may take a moment."""
_TOKEN_CALLS = Rate(burst=2_000, interval_ms=Milliseconds(1))
"""Calls of one token to one service: a data set of many small files takes two calls a file."""
_TOKEN_STREAMS_MAX = 256
"""Open streams of one token at one service: a page holds one for each job that runs."""


class OpenGate:
    """Admits everybody: for the health service."""

    async def admit(self, caller: Caller) -> None:
        return


class DrivingGate:
    """Admits nobody, and ends every stream, once another coordinator may drive."""

    def __init__(self, check_driving: Callable[[], None], gate: Gate) -> None:
        """Ask ``gate`` while ``check_driving`` does not raise."""
        self._check_driving = check_driving
        self._gate = gate

    async def admit(self, caller: Caller) -> None:
        self._check_driving()
        await self._gate.admit(caller)
        recheck = caller.recheck

        def recheck_both() -> None:
            self._check_driving()
            recheck()

        caller.recheck = recheck_both


class JoinGate:
    """Admits whoever speaks our protocol; the join itself judges the token."""

    async def admit(self, caller: Caller) -> None:
        reject_other_caller(caller)


class TokenGate:
    """Admits holders of a token whose role may call the method."""

    def __init__(self, tokens: IssuedTokens, guesses: GuessLimiter, roles: frozenset[Role]) -> None:
        """Judge by `tokens`; ``roles`` may call the methods that `_ROLES` does not name."""
        self._tokens = tokens
        self._guesses = guesses
        self._roles = roles
        self._calls = RateLimiter(_TOKEN_CALLS)
        self._streams = OpenCounter(_TOKEN_STREAMS_MAX, "streams")

    async def admit(self, caller: Caller) -> None:
        reject_other_caller(caller)
        credential = parse_authorization(caller.metadata.get("authorization", ""))
        roles = _ROLES.get(caller.method, self._roles)
        with self._guesses.count_failures({Reason.TOKEN_INVALID: credential.token_id}):
            record = self._tokens.check(credential, roles, unix_s())
        if not self._calls.take(record.token_id, monotonic_ms()):
            raise HyperGPUError(Reason.RATE_LIMITED, f"too many calls with token {record.token_id}")
        caller.token = record
        caller.hold_stream = partial(self._streams.hold, f"token {record.token_id}")
        if record.role is Role.NODE:
            caller.own_nodes = await asyncio.to_thread(self._tokens.joined_nodes, record.token_id)
        caller.recheck = lambda: self._tokens.check_current(record.token_id, unix_s())
        caller.watch_token = partial(self._tokens.watch, record.token_id)


class NodeGate:
    """Admits nodes that joined: by their certificate, or by name alone where a gateway speaks for
    them or on a plaintext loopback.
    """

    def __init__(
        self, nodes: KnownNodes, *, is_plaintext: bool, tokens: IssuedTokens | None = None
    ) -> None:
        """Admit gateways whose token is one of `tokens` and good; none of them without."""
        self._tokens = tokens
        self._nodes = nodes
        self._is_plaintext = is_plaintext
        self._offers = RateLimiter(_OFFERS)
        self._calls = RateLimiter(NODE_CALLS)
        self._streams = OpenCounter(_NODE_STREAMS_MAX, "control streams")
        self._appointments = Appointments(_STREAMS_PER_S, _STREAMS_BURST)

    def let_in(self, node: NodeId) -> None:
        """Let a control stream open, for which the node has said hello.

        Raises:
            HyperGPUError: RATE_LIMITED, too many nodes dial at once, with the time to come again.
        """
        if wait_ms := self._appointments.wait_ms(node, monotonic_ms()):
            detail = f"many nodes dial at once: come again in {wait_ms} ms"
            raise HyperGPUError(Reason.RATE_LIMITED, detail, wait_ms=wait_ms)

    async def admit(self, caller: Caller) -> None:
        self._admit_gateway(caller)
        node = self.node(caller)
        self.check(node)
        reject_other_caller(caller)
        is_offer = caller.method == "NodeService.OfferUpdate"
        if is_offer and not self._offers.take(node, monotonic_ms()):
            raise HyperGPUError(Reason.RATE_LIMITED, f"too many offers from {node}")
        self.count_message(node)
        caller.hold_stream = partial(self._streams.hold, f"node {node}")

    def _admit_gateway(self, caller: Caller) -> None:
        shown = caller.certificate_name
        if self._is_plaintext:
            shown = caller.metadata.get(GATEWAY_KEY, "")
        token_id, tokens = gateway_token(shown), self._tokens
        if token_id is None or tokens is None:
            return
        tokens.check_current(token_id, unix_s())
        caller.gateway = token_id
        caller.recheck = lambda: tokens.check_current(token_id, unix_s())
        caller.watch_token = partial(tokens.watch, token_id)

    def count_message(self, node: NodeId) -> None:
        """Count a call of a node, or a message in its control stream.

        Raises:
            HyperGPUError: RATE_LIMITED, they are too many.
        """
        if not self._calls.take(node, monotonic_ms()):
            raise HyperGPUError(Reason.RATE_LIMITED, f"too many messages from {node}")

    def node(self, caller: Caller) -> NodeId:
        """The caller's id.

        Raises:
            HyperGPUError: NODE_UNKNOWN, it shows none.
        """
        shown = caller.certificate_name
        if self._is_plaintext or caller.gateway is not None:
            shown = caller.metadata.get(NODE_KEY, "")
        if not is_node_id(shown):
            raise HyperGPUError(Reason.NODE_UNKNOWN, f"{shown[:64]!r} is no node's id")
        return NodeId(shown)

    def check(self, node: NodeId) -> None:
        """Reject a node that never joined or was revoked.

        Raises:
            HyperGPUError: NODE_UNKNOWN or NODE_REVOKED.
        """
        self._nodes.check(node)


def reject_other_caller(caller: Caller) -> None:
    """Reject a caller whose metadata names another protocol, or none.

    Raises:
        HyperGPUError: VERSION_MISMATCH, with the command that upgrades the older side.
    """
    spoken = caller.metadata.get(PROTOCOL_KEY, "0")
    reject_other_protocol(
        int(spoken) if spoken.isdecimal() and len(spoken) < 9 else 0, "the caller"
    )


def peer_host(peer: str) -> str:
    """The address in gRPC's name of a peer, without the port."""
    kind, _, rest = peer.partition(":")
    return rest.rpartition(":")[0] if kind in {"ipv4", "ipv6"} else peer
