from typing import Any

import pytest
from grpc_health.v1 import health_pb2

from coordinator.shell.servicers.health import WATCHES_MAX, HealthServicer
from hypergpu.errors import HyperGPUError, Reason

NOBODY: Any = None
REQUEST = health_pb2.HealthCheckRequest()


async def test_watches_are_limited_and_make_room_when_they_end() -> None:
    health = HealthServicer()
    watches: list[Any] = [health.watch(REQUEST, NOBODY) for _ in range(WATCHES_MAX)]
    for watch in watches:
        await anext(watch)
    with pytest.raises(HyperGPUError) as refused:
        await anext(health.watch(REQUEST, NOBODY))
    assert refused.value.reason is Reason.RATE_LIMITED

    for watch in watches:
        await watch.aclose()
    assert (await anext(health.watch(REQUEST, NOBODY))).status
