"""Keeps receipts and epoch ends in the very transaction that journals what earned them."""

from collections.abc import Sequence

import msgspec
from sqlalchemy import insert, select, update
from sqlalchemy.engine import Connection

from coordinator.core.settlement.epoch import Epoch
from coordinator.shell.journal.ledger.records import Earnings, EpochEnd, ReceiptRecord
from coordinator.shell.journal.records import JournalConflictError
from coordinator.shell.journal.sql.tables import EPOCHS, RECEIPT_COUNTS, RECEIPTS
from hypergpu.ids import JobId, NodeId


def keep_earnings(connection: Connection, earnings: Earnings) -> None:
    """Write receipts and epoch ends in a transaction that is open.

    Raises:
        JournalConflictError: a receipt's sequence is not the node's next, or its epoch has ended.
            The caller's transaction must then be given up.
    """
    counts = _next_counts(connection, earnings.receipts)
    for job_id, number in {(one.job_id, one.signed.receipt.epoch) for one in earnings.receipts}:
        if _opened(connection, job_id, number):
            raise JournalConflictError(
                f"epoch {number} of {job_id} has ended and takes no more receipts"
            )
    if earnings.receipts:
        connection.execute(insert(RECEIPTS), [_receipt_row(one) for one in earnings.receipts])
    for (job_id, node), kept in counts.items():
        of_node = (RECEIPT_COUNTS.c.job_id == job_id) & (RECEIPT_COUNTS.c.node == node)
        connection.execute(update(RECEIPT_COUNTS).where(of_node).values(kept=kept))
    for end in earnings.ends:
        _leave(connection, end)


def _next_counts(
    connection: Connection, records: Sequence[ReceiptRecord]
) -> dict[tuple[JobId, NodeId], int]:
    """How many receipts each node will have once these are kept."""
    counts: dict[tuple[JobId, NodeId], int] = {}
    for record in records:
        receipt = record.signed.receipt
        key = (record.job_id, receipt.node)
        if key not in counts:
            counts[key] = _kept(connection, *key)
        if receipt.sequence != counts[key]:
            raise JournalConflictError(
                f"receipt {receipt.sequence} of {receipt.node} in {record.job_id} cannot be kept: "
                f"its next is {counts[key]}"
            )
        counts[key] += 1
    return counts


def _kept(connection: Connection, job_id: JobId, node: NodeId) -> int:
    of_node = (RECEIPT_COUNTS.c.job_id == job_id) & (RECEIPT_COUNTS.c.node == node)
    kept: int | None = connection.scalar(select(RECEIPT_COUNTS.c.kept).where(of_node))
    if kept is None:
        row = {"job_id": job_id, "node": node, "kept": 0, "sealed": 0}
        connection.execute(insert(RECEIPT_COUNTS), row)
        return 0
    return kept


def _opened(connection: Connection, job_id: JobId, number: int) -> bool:
    """Whether the epoch has ended; makes its row when it is new."""
    of_epoch = (EPOCHS.c.job_id == job_id) & (EPOCHS.c.number == number)
    is_left: bool | None = connection.scalar(select(EPOCHS.c.is_left).where(of_epoch))
    if is_left is None:
        epoch = Epoch(job_id=job_id, number=number)
        row = {
            "job_id": job_id,
            "number": number,
            "is_left": False,
            "is_last": False,
            "state": epoch.state.value,
            "body_json": msgspec.json.encode(epoch),
        }
        connection.execute(insert(EPOCHS), row)
        return False
    return is_left


def _leave(connection: Connection, end: EpochEnd) -> None:
    _opened(connection, end.job_id, end.number)
    of_epoch = (EPOCHS.c.job_id == end.job_id) & (EPOCHS.c.number == end.number)
    values = {"is_left": True} | ({"is_last": True} if end.is_last else {})
    connection.execute(update(EPOCHS).where(of_epoch).values(**values))


def _receipt_row(record: ReceiptRecord) -> dict[str, object]:
    receipt = record.signed.receipt
    return {
        "job_id": record.job_id,
        "node": receipt.node,
        "sequence": receipt.sequence,
        "epoch": receipt.epoch,
        "round": receipt.round,
        "samples": receipt.samples,
        "quality_bps": receipt.quality_bps,
        "leaf": record.leaf,
        "contribution": bytes.fromhex(receipt.contribution),
        "body_json": msgspec.json.encode(record.signed),
    }
