"""One wrapper around every method of a service: it parses, asks the gate, and turns a refusal into
a status with its numbered reason.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Protocol, TypeVar

import grpc
import structlog
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from coordinator.shell.failpoints import failpoint
from coordinator.shell.service.streams import CurrentAnswers, let_begin
from coordinator.shell.store.journal.records import TokenRecord
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import NodeId, TokenId
from hypergpu.wire.credentials import Role
from hypergpu.wire.errors import error_metadata

log = structlog.get_logger()


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


_Context = Any  # grpc.aio.ServicerContext; its generic parameters differ between stub versions
Parser = Callable[[bytes], Any]
_Item = TypeVar("_Item")
_PAGE_ITEMS = 100


def _watch_nothing(_act: Callable[[], None]) -> Callable[[], None]:
    return lambda: None


class Caller:
    """Who calls, as far as the transport and the metadata tell."""

    def __init__(self, context: _Context, method: str) -> None:
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


def page_of(listed: Sequence[_Item], page: str) -> tuple[Sequence[_Item], str]:
    """The part of a list that a page names, and the name of the next; empty: there is none.

    Raises:
        HyperGPUError: REQUEST_INVALID, no page has this name.
    """
    if page and not (page.isdecimal() and len(page) < 9):
        raise HyperGPUError(Reason.REQUEST_INVALID, f"there is no page {page[:20]!r}")
    first = int(page or "0")
    next_first = first + _PAGE_ITEMS
    return listed[first:next_first], str(next_first) if next_first < len(listed) else ""


class Gate(Protocol):
    """Decides who may call what."""

    async def admit(self, caller: Caller) -> None:
        """Return when the caller may go on.

        Raises:
            HyperGPUError: it may not.
        """


class Requests:
    """A client's stream, each message with a deadline of its own."""

    def __init__(self, context: _Context, parse: Parser) -> None:
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

    def argument(raw: Any, context: _Context) -> Any:
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


_ArgumentReader = Callable[[Any, _Context], Any]


def answering(
    name: str, act: Callable[..., Awaitable[Message]], gate: Gate, argument: _ArgumentReader
) -> Callable[[Any, _Context], Awaitable[bytes]]:
    """Serve one answer a call, for callers whom the gate admits."""

    async def behaviour(raw: Any, context: _Context) -> bytes:
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
    name: str, act: Callable[..., AsyncIterator[Message]], gate: Gate, argument: _ArgumentReader
) -> Callable[[Any, _Context], AsyncIterator[bytes]]:
    """Serve a stream of answers a call, for callers whom the gate admits."""

    async def behaviour(raw: Any, context: _Context) -> AsyncIterator[bytes]:
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


async def _report_broken(context: _Context, name: str, error: Exception) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError | grpc.aio.UsageError):
        raise error
    log.error("a call broke", method=name, exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, f"{name} broke: see the coordinator's log")
    raise AssertionError("abort always raises")
