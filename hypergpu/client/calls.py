"""A connection to one coordinator: its stubs, and every call's deadline, token and error."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

import grpc

from hypergpu.client.connection import ConnectionTarget, check_who_answers, open_channel
from hypergpu.client.failures import explanation
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.v1 import job_pb2_grpc, payments_pb2_grpc
from hypergpu.wire.protocol import PROTOCOL_ENTRY
from hypergpu.wire.token import authorization

TRANSFER_TIMEOUT_S = 600.0
"""Deadline of one try of a transfer; the next try goes on from the committed offset."""


class CoordinatorCalls:
    """An open channel. Messages are protobuf here and in the modules that translate them."""

    def __init__(self, to: ConnectionTarget, channel: grpc.aio.Channel) -> None:
        self.to = to
        self.jobs = job_pb2_grpc.JobServiceStub(channel)
        self.operator = job_pb2_grpc.OperatorServiceStub(channel)
        self._channel = channel
        self._metadata = (("authorization", authorization(to.token)), PROTOCOL_ENTRY)
        self.payments = payments_pb2_grpc.PaymentsServiceStub(channel)

    @classmethod
    async def open(cls, to: ConnectionTarget) -> Self:
        """Connect; the secret travels only after the coordinator's CA was checked."""
        return cls(to, await open_channel(to))

    async def close(self) -> None:
        """Close the channel and end what still runs over it."""
        await self._channel.close()

    async def call(
        self, method: Callable[..., Any], request: object, timeout_s: float | None = None
    ) -> Any:
        """One answer of a stub's method.

        Raises:
            HyperGPUError: The coordinator's numbered reason, or the meaning of the broken call.
            RemoteFailureError: A numbered reason that this version does not know.
        """
        timeout_s = timeout_s or self.to.timeout_s
        try:
            return await method(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as broken:
            raise await self._explanation(broken) from broken

    async def stream(
        self, method: Callable[..., Any], request: object, timeout_s: float = TRANSFER_TIMEOUT_S
    ) -> AsyncIterator[Any]:
        """Every answer of a stub's method; raises as `call` does."""
        try:
            async for message in method(request, timeout=timeout_s, metadata=self._metadata):
                yield message
        except grpc.aio.AioRpcError as broken:
            raise await self._explanation(broken) from broken

    async def _explanation(self, broken: grpc.aio.AioRpcError) -> Exception:
        """The error of a failed call; of a connection that fails, whose fault that is."""
        meant = explanation(broken, self.to.address)
        if isinstance(meant, HyperGPUError) and meant.reason is Reason.COORDINATOR_UNREACHABLE:
            try:
                await asyncio.to_thread(check_who_answers, self.to)
            except HyperGPUError as refused:
                return refused
        return meant
