"""PaymentsService of a coordinator, for commands."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar, cast

import grpc.aio

from hypergpu.client.asynchronous import AsyncCoordinator
from hypergpu.client.calls import Calls
from hypergpu.client.connection import Target, find_target
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId, NodeId
from hypergpu.statements.domain import Terms
from hypergpu.units import Wei
from hypergpu.v1 import payments_pb2 as pb
from hypergpu.v1 import payments_pb2_grpc
from hypergpu.wire.statements import receipt_value, terms_value
from payments.core.receipts import ReceiptFile
from payments.shell.chain_errors import CallRefusedError, ChainUnreachableError

Result = TypeVar("Result")


class Where(NamedTuple):
    """Options that name a coordinator; None: the settings do."""

    address: str | None = None
    token_file: str | None = None


class PaymentsCalls(Calls):
    """An open channel with the stub of PaymentsService."""

    def __init__(self, to: Target, channel: grpc.aio.Channel) -> None:
        super().__init__(to, channel)
        self.payments = payments_pb2_grpc.PaymentsServiceStub(channel)


class PaymentsClient:
    """Every call of PaymentsService about one job."""

    def __init__(self, calls: PaymentsCalls, job_id: JobId) -> None:
        self._calls, self.job_id = calls, job_id

    async def ledger(self) -> pb.GetLedgerResponse:
        """Accounts and settlement of the job."""
        request = pb.GetLedgerRequest(job_id=self.job_id)
        try:
            found = await self._calls.call(self._calls.payments.GetLedger, request)
        except HyperGPUError as refused:
            if refused.reason is not Reason.VERSION_MISMATCH:
                raise
            detail = (
                f"the coordinator at {self._calls.to.address} has no payments package, or is older"
            )
            fix = "install hypergpu whole where the coordinator runs"
            raise HyperGPUError(refused.reason, detail, fix=fix) from refused
        return cast("pb.GetLedgerResponse", found)

    async def receipt_file(self) -> ReceiptFile:
        """All receipts of the job, with its terms and price."""
        ledger = await self.ledger()
        request = pb.ListReceiptsRequest(job_id=self.job_id)
        receipts = [
            receipt_value(each, NodeId(message.node_id))
            async for message in self._calls.stream(self._calls.payments.ListReceipts, request)
            for each in message.receipts
        ]
        return ReceiptFile(
            self.job_id, terms_value(ledger.terms), Wei(int(ledger.unit_price)), tuple(receipts)
        )

    async def terms(self) -> Terms:
        """Terms of the job."""
        return terms_value((await self.ledger()).terms)

    async def request_reclaim(self) -> str:
        """Announce the job's end on the ledger; the purpose of the transaction."""
        request = pb.RequestReclaimRequest(job_id=self.job_id)
        return str((await self._calls.call(self._calls.payments.RequestReclaim, request)).purpose)

    async def reclaim(self) -> str:
        """Take the job's free escrow; the purpose of the transaction."""
        request = pb.ReclaimRequest(job_id=self.job_id)
        return str((await self._calls.call(self._calls.payments.Reclaim, request)).purpose)

    async def retry_halted(self) -> list[str]:
        """Clear the job's halt; purposes that are tried again."""
        request = pb.RetryHaltedRequest(job_id=self.job_id)
        return list((await self._calls.call(self._calls.payments.RetryHalted, request)).purposes)


def run(work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    """Run a command's coroutine, with a chain's failures as numbered errors."""
    try:
        return asyncio.run(work())
    except ChainUnreachableError as away:
        raise HyperGPUError(Reason.CHAIN_UNREACHABLE, str(away)) from away
    except CallRefusedError as refused:
        raise HyperGPUError(Reason.REQUEST_INVALID, f"the chain refused: {refused}") from refused


@asynccontextmanager
async def open_payments_client(where: Where, job: str | None) -> AsyncIterator[PaymentsClient]:
    """Connect to a coordinator's payments.

    Args:
        where: The coordinator.
        job: Id, name or beginning of an id of a job; None: the newest.
    """
    flags = {"address": where.address, "token_file": where.token_file}
    calls = await PaymentsCalls.open(await asyncio.to_thread(find_target, flags))
    try:
        yield PaymentsClient(calls, JobId(await AsyncCoordinator(calls).find_job(job)))
    finally:
        await calls.close()
