"""The standard health service. NOT_SERVING is the first thing that SIGTERM causes."""

import asyncio
from collections.abc import AsyncIterator

from grpc_health.v1 import health_pb2

from coordinator.shell.servicers.wire.handlers import Caller
from hypergpu.errors import HyperGPUError, Reason

SERVICES = ("", "hypergpu.v1.NodeService", "hypergpu.v1.JobService", "hypergpu.v1.OperatorService")
METHODS = frozenset({"Check", "Watch"})
"""What every version of the service has."""
WATCHES_MAX = 256
"""At a time: anybody may open one."""


class HealthServicer:
    """Says whether this coordinator takes calls."""

    def __init__(self) -> None:
        self._is_serving = False
        self._changed = asyncio.Event()
        self._is_closed = False
        self._watches = 0

    def set_serving(self, *, is_serving: bool) -> None:
        """Change the answer and tell whoever watches."""
        self._is_serving = is_serving
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
        if service not in SERVICES:
            unknown = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            return health_pb2.HealthCheckResponse(status=unknown)
        is_serving = self._is_serving
        serving = health_pb2.HealthCheckResponse.SERVING
        not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
        return health_pb2.HealthCheckResponse(status=serving if is_serving else not_serving)

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
