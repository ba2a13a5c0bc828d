"""Admission of calls to services that an extension adds to the user port."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from coordinator.shell.servicers.wire.handlers import Context, Gate, answering, parser, streaming

Handler = Any  # grpc.RpcMethodHandler; the stubs lack its attributes


class ExtensionInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the methods of one service as `generic_handler` wraps our own: gate, parser, errors.

    A method is ``async def name(request, context)``; it may raise `HyperGPUError`. It is an async
    generator where the server streams. Calls of other services pass.
    """

    def __init__(self, service: ServiceDescriptor) -> None:
        self._service = service
        self.gates: Callable[[str], Gate] | None = None
        """The gate of each method; no call is served before it is set."""

    async def intercept_service(
        self,
        continuation: Callable[[Any], Awaitable[Handler]],
        handler_call_details: Any,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        service, _, method = handler_call_details.method[1:].rpartition("/")
        if handler is None or service != self._service.full_name:
            return handler
        if self.gates is None:
            raise AssertionError("gates are set before the server starts")
        return _guard(handler, self._service.methods_by_name[method], self.gates(method))


def _guard(handler: Handler, method: MethodDescriptor, gate: Gate) -> Handler:
    parse = parser(GetMessageClass(method.input_type))
    name = f"{method.containing_service.name}.{method.name}"

    def argument(raw: Any, context: Context) -> Any:
        return parse(raw), context

    if method.server_streaming:
        stream = streaming(name, lambda call, _: handler.unary_stream(*call), gate, argument)
        return grpc.unary_stream_rpc_method_handler(stream)
    answer = answering(name, lambda call, _: handler.unary_unary(*call), gate, argument)
    return grpc.unary_unary_rpc_method_handler(answer)
