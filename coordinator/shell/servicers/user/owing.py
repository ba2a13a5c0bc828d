"""`GetLedger` and `ListReceipts`: what a job owes its nodes, and what proves it."""

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from coordinator.core.metering.accounts import account_of, earned
from coordinator.core.settlement.sending import TransactionState
from coordinator.shell.journal.ledger.records import OutboxRow, ReceiptRecord
from coordinator.shell.runtime.parts import Parts
from coordinator.shell.runtime.room import Room
from hypergpu.ids import JobId, NodeId
from hypergpu.ledger.pay import score
from hypergpu.ledger.terms import Terms
from hypergpu.v1 import job_pb2
from hypergpu.wire.ledger import receipt_message, terms_message

if TYPE_CHECKING:
    from coordinator.shell.metering.settling import Settling

_IN_A_MESSAGE = 500


async def accounts(parts: Parts, room: Room) -> job_pb2.GetLedgerResponse:
    """The job's accounts, as far as its receipts are made."""
    job = room.job
    kept = await asyncio.to_thread(parts.journal.receipts, job.job_id)
    answer = job_pb2.GetLedgerResponse(
        terms=terms_message(job.terms or Terms(), 0),
        unit_price=str(job.spec.pay.unit_price),
        escrow=str((job.next_spec or job.spec).escrow),
        spent=str(job.metering.spent),
        is_over=job.metering.is_over,
        unmeasured_rounds=len(job.metering.unmeasured),
    )
    by_node: dict[NodeId, list[ReceiptRecord]] = {node: [] for node in job.members}
    for record in kept:
        receipt = record.signed.receipt
        # The journal may have gone on since the job was looked at: its accounts know less then.
        if receipt.sequence < account_of(job.metering, receipt.node).receipts:
            by_node.setdefault(receipt.node, []).append(record)
    for node, own in by_node.items():
        receipts = [record.signed.receipt for record in own]
        answer.nodes.add(
            node_id=node,
            name=parts.roster.name_of(node),
            receipts=len(receipts),
            samples=sum(receipt.samples for receipt in receipts),
            score=str(sum(score(each.samples, each.quality_bps) for each in receipts)),
            earned=str(earned(job, node)),
            vouched=str(account_of(job.metering, node).vouched),
        )
    if parts.settling is not None:
        answer.chain.CopyFrom(_chain_message(parts.settling, job.job_id))
        rows = await asyncio.to_thread(_transactions, parts, parts.settling, job.job_id)
        answer.transactions.extend(rows)
    return answer


def _chain_message(settling: "Settling", job_id: JobId) -> job_pb2.ChainState:
    # What talks to a chain is an extra: it is there where something settles.
    from hypergpu.chain.rpc.transport import open_address

    state = settling.state
    _, ending = settling.ending(job_id)
    told = [ending, *(each for each in [state.complaint] if each not in ending)]
    return job_pb2.ChainState(
        url=open_address(settling.url),
        height=state.height,
        waiting=state.waiting,
        mined=state.mined,
        complaint="; ".join(filter(None, told)),
        halted=state.halted,
    )


def _transactions(
    parts: Parts, settling: "Settling", job_id: JobId
) -> list[job_pb2.LedgerTransaction]:
    rows = parts.journal.transactions(settling.account, states=tuple(TransactionState))
    return [transaction_message(row) for row in rows if row.transaction.job_id == job_id]


def transaction_message(row: OutboxRow) -> job_pb2.LedgerTransaction:
    """A transaction as it is told."""
    return job_pb2.LedgerTransaction(
        hash=f"0x{row.hash.hex()}",
        attempts=[f"0x{each.attempt.hash.hex()}" for each in row.attempts],
        purpose=row.transaction.purpose,
        epoch=row.transaction.epoch,
        state=row.state.value,
        block=row.block.number if row.block is not None else 0,
    )


async def receipts(parts: Parts, room: Room) -> AsyncIterator[job_pb2.ListReceiptsResponse]:
    """Every receipt of a job."""
    kept = await asyncio.to_thread(parts.journal.receipts, room.job.job_id)
    start = 0
    while start < len(kept):
        node = kept[start].signed.receipt.node
        end = start
        while (
            end < len(kept)
            and end - start < _IN_A_MESSAGE
            and kept[end].signed.receipt.node == node
        ):
            end += 1
        page = [receipt_message(record.signed) for record in kept[start:end]]
        yield job_pb2.ListReceiptsResponse(node_id=node, receipts=page)
        start = end
