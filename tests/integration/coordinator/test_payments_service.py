"""A service that payments add to the user port is admitted and answered like our own."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from coordinator.shell.app.listeners import payments_handlers
from coordinator.shell.servicers.wire.handlers import Caller
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.v1 import payments_pb2, payments_pb2_grpc
from tests.node_client import reason_of


class RoleGate:
    """Admits who shows a role."""

    def __init__(self, role: str) -> None:
        self._role = role

    async def admit(self, caller: Caller) -> None:
        if caller.metadata.get("role") != self._role:
            raise HyperGPUError(Reason.ROLE_FORBIDDEN, f"{caller.method} needs {self._role}")


class LedgerAnswers:
    async def get_ledger(self, request: Any, caller: Caller) -> Any:
        if request.job_id == "unknown":
            raise HyperGPUError(Reason.JOB_UNKNOWN, "there is no job 'unknown'")
        return payments_pb2.GetLedgerResponse(escrow=request.job_id)

    async def list_receipts(self, request: Any, caller: Caller) -> Any:
        for number in range(2):
            yield payments_pb2.ListReceiptsResponse(node_id=str(number))

    async def request_reclaim(self, request: Any, caller: Caller) -> Any:
        raise HyperGPUError(Reason.JOB_UNKNOWN, "no job ends here")

    async def reclaim(self, request: Any, caller: Caller) -> Any:
        raise HyperGPUError(Reason.JOB_UNKNOWN, "no job ends here")

    async def retry_halted(self, request: Any, caller: Caller) -> Any:
        return payments_pb2.RetryHaltedResponse(purposes=[request.job_id])


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server()
    handlers = payments_handlers(LedgerAnswers(), RoleGate("user"), RoleGate("operator"))
    server.add_generic_rpc_handlers(handlers)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


USER, OPERATOR = (("role", "user"),), (("role", "operator"),)


async def test_users_read_and_operators_act(channel: grpc.aio.Channel) -> None:
    stub: Any = payments_pb2_grpc.PaymentsServiceStub(channel)
    shown = await stub.GetLedger(payments_pb2.GetLedgerRequest(job_id="job-1"), metadata=USER)
    assert shown.escrow == "job-1"
    request = payments_pb2.ListReceiptsRequest(job_id="job-1")
    assert [each.node_id async for each in stub.ListReceipts(request, metadata=USER)] == ["0", "1"]
    retry = payments_pb2.RetryHaltedRequest(job_id="job-1")
    assert list((await stub.RetryHalted(retry, metadata=OPERATOR)).purposes) == ["job-1"]
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.RetryHalted(retry, metadata=USER)
    assert reason_of(refused.value) == "ROLE_FORBIDDEN"


async def test_an_error_of_the_service_keeps_its_reason(channel: grpc.aio.Channel) -> None:
    stub: Any = payments_pb2_grpc.PaymentsServiceStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.GetLedger(payments_pb2.GetLedgerRequest(job_id="unknown"), metadata=USER)
    assert reason_of(refused.value) == "JOB_UNKNOWN"
