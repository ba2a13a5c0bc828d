"""PaymentsService of a coordinator, for commands."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import grpc.aio

from hypergpu.client.asynchronous import AsyncCoordinator
from hypergpu.client.calls import CoordinatorCalls
from hypergpu.client.connection import ConnectionTarget, find_target
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId, NodeId
from hypergpu.units import Wei
from hypergpu.v1 import payments_pb2 as pb
from hypergpu.v1 import payments_pb2_grpc
from hypergpu.wire.statements import receipt_value, terms_value
from payments.core.receipt_file import FILE_BYTES_MAX, ReceiptFile, decode_file
from payments.shell.chain_errors import CallRefusedError, ChainUnreachableError

Result = TypeVar("Result")


class JobAt(NamedTuple):
    """Options that name a job and its coordinator, or a file of its receipts."""

    job: str | None
    """Id, name or beginning of an id; None: the newest."""
    address: str | None
    token_file: str | None
    file: Path | None = None
    """Written by `ledger export`; None: the coordinator is asked."""

    async def receipts(self) -> ReceiptFile:
        """All receipts of the job, from the file or the coordinator."""
        if self.file is not None:
            return read_receipt_file(self.file)
        async with open_payments_client(self) as payments:
            return await payments.receipt_file()


def read_receipt_file(path: Path) -> ReceiptFile:
    """Read a file that `ledger export` wrote."""
    try:
        with path.open("rb") as opened:
            return decode_file(opened.read(FILE_BYTES_MAX + 1), source=str(path))
    except OSError as broken:
        detail = f"{path} cannot be read: {broken.strerror}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail) from broken


class PaymentsCalls(CoordinatorCalls):
    """An open channel with the stub of PaymentsService."""

    def __init__(self, to: ConnectionTarget, channel: grpc.aio.Channel) -> None:
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
async def open_payments_client(at: JobAt) -> AsyncIterator[PaymentsClient]:
    """Connect to the payments of a job's coordinator."""
    flags = {"address": at.address, "token_file": at.token_file}
    calls = await PaymentsCalls.open(await asyncio.to_thread(find_target, flags))
    try:
        yield PaymentsClient(calls, JobId(await AsyncCoordinator(calls).find_job(at.job)))
    finally:
        await calls.close()
