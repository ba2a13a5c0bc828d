"""PaymentsService of a coordinator, and the commands that need no key: verify and reclaim."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc.aio
import msgspec

from hypergpu.client.asynchronous import AsyncCoordinator
from hypergpu.client.connection import ConnectionTarget, CoordinatorCalls, find_target
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId, NodeId
from hypergpu.terminal.output import Column, confirm, say, say_json, say_table
from hypergpu.units import Wei
from hypergpu.v1 import payments_pb2 as pb
from hypergpu.v1 import payments_pb2_grpc
from hypergpu.wire.messages import receipt_value, terms_value
from payments.cli.options import JobAt, NamedJobAt
from payments.cli.show import amount_text, time_text
from payments.core.verify import (
    FILE_BYTES_MAX,
    NodeFinding,
    ReceiptFile,
    Verification,
    decode_file,
    verify,
)
from payments.shell.chains import CallRefusedError, ChainUnreachableError

Result = TypeVar("Result")


async def read_receipts(at: JobAt, file: Path | None = None) -> ReceiptFile:
    """All receipts of a job, from a file that `ledger export` wrote or from the coordinator."""
    if file is not None:
        return read_receipt_file(file)
    async with open_payments_client(at) as payments:
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
async def open_payments_client(at: JobAt | NamedJobAt) -> AsyncIterator[PaymentsClient]:
    """Connect to the payments of a job's coordinator."""
    flags = {"address": at.address, "token_file": at.token_file}
    calls = await PaymentsCalls.open(await asyncio.to_thread(find_target, flags))
    try:
        yield PaymentsClient(calls, JobId(await AsyncCoordinator(calls).find_job(at.job)))
    finally:
        await calls.close()


class Verified(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag="hypergpu/verified/2"
):
    """Result of a check."""

    job: str
    chain_id: int
    ledger: str
    block: int | None
    """None: no chain was asked."""
    is_sound: bool
    faults: tuple[str, ...]
    open: tuple[str, ...]
    nodes: tuple[NodeFinding, ...]
    decimals: int


def verify_job(
    at: JobAt, file: Path | None, chain_url: str, *, is_offline: bool, as_json: bool
) -> None:
    """Check a job and print the result; a fault is an error."""
    found = run(lambda: _check_job(at, file, chain_url, is_offline=is_offline))
    if as_json:
        say_json(found)
    else:
        _say(found)
    if not found.is_sound:
        detail = f"{found.job}: {len(found.faults)} faults in its receipts or its pay"
        fix = "show them to its nodes; arbiters void what was paid wrongly: hypergpu ledger void"
        raise HyperGPUError(Reason.SIGNATURE_INVALID, detail, fix=fix)


async def _check_job(at: JobAt, file: Path | None, chain_url: str, *, is_offline: bool) -> Verified:
    receipts = await read_receipts(at, file)
    domain = receipts.terms.domain
    if is_offline or not domain.chain_id:
        return _result(receipts, verify(receipts), decimals=0)
    # Receipts alone are checked without the extra [chain].
    from payments.cli.account import open_ledger, read_records

    if file is None and not chain_url:
        async with open_payments_client(at) as payments:
            chain_url = (await payments.ledger()).on_chain.url
    async with open_ledger(domain, chain_url) as ledger:
        records = await read_records(ledger, receipts.terms)
        return _result(receipts, verify(receipts, records), decimals=ledger.decimals)


def _result(file: ReceiptFile, found: Verification, *, decimals: int) -> Verified:
    domain = file.terms.domain
    return Verified(
        job=file.job_id,
        chain_id=domain.chain_id,
        ledger=domain.contract,
        is_sound=not found.faults,
        decimals=decimals,
        **found._asdict(),
    )


def _say(found: Verified) -> None:
    figures = ("receipts", "score", "worth", "recorded", "allotted", "paid", "void")
    columns = (Column("node"), *(Column(title, is_number=True) for title in figures))
    shown = partial(amount_text, decimals=found.decimals)
    rows = [
        [
            *(node.node, str(node.receipts), str(node.total_score), shown(node.worth)),
            *(str(node.recorded_score), *map(shown, (node.allotted, node.paid, node.void))),
        ]
        for node in found.nodes
    ]
    say_table(columns, rows, empty=f"{found.job} has no receipts")
    for title, texts in (("fault", found.faults), ("open", found.open)):
        for text in texts:
            say(f"{title}: {text}")
    against = "no chain was asked"
    if found.block is not None:
        against = f"compared with {found.ledger} on chain {found.chain_id} at block {found.block}"
    receipts = sum(node.receipts for node in found.nodes)
    verdict = "sound" if found.is_sound else f"{len(found.faults)} faults"
    say(f"{found.job}: {receipts} receipts, {verdict}; {against}")


_LOOK_EACH_S = 0.5
_LOOKS = 60


class Reclaimed(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag="hypergpu/reclaimed/2"
):
    """State of a job's end on its ledger."""

    job: str
    purpose: str
    """Purpose of the queued transaction; empty: none was queued."""
    ends_at_unix_s: int
    """0: the announcement is not in a block yet."""
    free_escrow: str


def reclaim_job(at: NamedJobAt, *, yes: bool, as_json: bool) -> None:
    """Announce a job's end; once its time has come, take what is free."""
    state, sentence = run(lambda: _announce_or_take(at, yes=yes))
    if as_json:
        say_json(state)
    else:
        say(sentence)


async def _announce_or_take(at: NamedJobAt, *, yes: bool) -> tuple[Reclaimed, str]:
    async with open_payments_client(at) as payments:
        chain = await _chain(payments)
        free = amount_text(int(chain.free_escrow), chain.decimals)
        if not chain.ends_at_unix_s:
            question = (
                f"end {payments.job_id} on its ledger for good? Receipts that are not recorded"
                " when the wait is over are not paid"
            )
            confirm(question, yes=yes)
            purpose = await payments.request_reclaim()
            chain = await _wait(payments, lambda found: found.ends_at_unix_s > 0)
            when = time_text(chain.ends_at_unix_s) if chain.ends_at_unix_s else "a time to come"
            said = f"{payments.job_id} ends at {when}; run this again then to take what is free"
        elif chain.block_time_unix_s < chain.ends_at_unix_s:
            purpose, when = "", time_text(chain.ends_at_unix_s)
            said = f"{payments.job_id} ends at {when}; {free} is free now: run this again then"
        elif not int(chain.free_escrow):
            purpose, said = "", f"nothing of {payments.job_id} is free"
        else:
            purpose = await payments.reclaim()
            chain = await _wait(payments, lambda found: not int(found.free_escrow))
            is_back = not int(chain.free_escrow)
            said = f"{free} of {payments.job_id} " + ("is paid back" if is_back else "is queued")
        state = Reclaimed(
            job=payments.job_id,
            purpose=purpose,
            ends_at_unix_s=chain.ends_at_unix_s,
            free_escrow=chain.free_escrow,
        )
        return state, said


async def _chain(payments: PaymentsClient) -> pb.LedgerOnChain:
    ledger = await payments.ledger()
    if ledger.HasField("on_chain") and ledger.on_chain.is_open:
        return ledger.on_chain
    detail = f"{payments.job_id} is not open on a ledger: no escrow of it lies there"
    fix = "see its state: hypergpu ledger show JOB"
    raise HyperGPUError(Reason.JOB_PHASE, detail, fix=fix)


async def _wait(
    payments: PaymentsClient, is_reached: Callable[[pb.LedgerOnChain], bool]
) -> pb.LedgerOnChain:
    """The job on the ledger once a change is in a block, or as it is after half a minute."""
    chain = await _chain(payments)
    for _ in range(_LOOKS):
        if is_reached(chain):
            break
        await asyncio.sleep(_LOOK_EACH_S)
        chain = await _chain(payments)
    return chain
