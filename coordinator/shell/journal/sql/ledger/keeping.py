"""Keeps receipts and epoch ends in the very transaction that journals what earned them."""

from collections.abc import Collection, Sequence

import msgspec
from sqlalchemy import bindparam, insert, select, update
from sqlalchemy.engine import Connection

from coordinator.core.settlement.epoch import Epoch
from coordinator.shell.journal.ledger.records import (
    Earnings,
    EpochEnd,
    ReceiptRecord,
    UnsealedReceipt,
)
from coordinator.shell.journal.records import JournalConflictError
from coordinator.shell.journal.sql.ledger.bulk import Row, insert_rows
from coordinator.shell.journal.sql.tables import EPOCHS, RECEIPT_COUNTS, RECEIPTS
from hypergpu.ids import JobId, NodeId

_NODES_AT_ONCE = 500
_KEEP_COUNTS = (
    update(RECEIPT_COUNTS)
    .where(
        RECEIPT_COUNTS.c.job_id == bindparam("of_job"),
        RECEIPT_COUNTS.c.node == bindparam("of_node"),
    )
    .values(kept=bindparam("now_kept"))
)
Key = tuple[JobId, NodeId]


def keep_earnings(connection: Connection, earnings: Earnings) -> None:
    """Write receipts and epoch ends in a transaction that is open.

    Raises:
        JournalConflictError: a receipt's sequence is not the node's next. The caller's transaction
            must then be given up.
    """
    _count(connection, earnings.receipts)
    for job_id, number in {(one.job_id, one.signed.receipt.epoch) for one in earnings.receipts}:
        _open(connection, job_id, number)
    insert_rows(connection, RECEIPTS, [_receipt_row(one) for one in earnings.receipts])
    for end in earnings.ends:
        _leave(connection, end)


def leave_all(connection: Connection, job_id: JobId) -> None:
    """Leave every epoch of a job in a transaction that is open."""
    wanted = select(EPOCHS.c.number).where(EPOCHS.c.job_id == job_id).order_by(EPOCHS.c.number)
    numbers = connection.scalars(wanted).all()
    for number in numbers:
        _leave(connection, EpochEnd(job_id, number, is_last=number == numbers[-1]))


def _count(connection: Connection, records: Sequence[ReceiptRecord]) -> None:
    """Count receipts for their nodes, refusing what is not a node's next."""
    known = _kept(connection, {(one.job_id, one.signed.receipt.node) for one in records})
    counts: dict[Key, int] = {}
    for record in records:
        receipt = record.signed.receipt
        key = (record.job_id, receipt.node)
        following = counts.get(key)
        if following is None:
            following = known.get(key, 0)
        if receipt.sequence != following:
            raise JournalConflictError(
                f"receipt {receipt.sequence} of {receipt.node} in {record.job_id} cannot be kept: "
                f"its next is {following}"
            )
        counts[key] = following + 1
    fresh = [(*key, kept, 0) for key, kept in counts.items() if key not in known]
    insert_rows(connection, RECEIPT_COUNTS, fresh)
    if moved := [
        {"of_job": job_id, "of_node": node, "now_kept": kept}
        for (job_id, node), kept in counts.items()
        if (job_id, node) in known
    ]:
        connection.execute(_KEEP_COUNTS, moved)


def _kept(connection: Connection, keys: Collection[Key]) -> dict[Key, int]:
    """How many receipts each node has; nothing of those that have none."""
    counts: dict[Key, int] = {}
    for job_id in {job_id for job_id, _ in keys}:
        nodes = sorted(node for of_job, node in keys if of_job == job_id)
        for first in range(0, len(nodes), _NODES_AT_ONCE):
            wanted = select(RECEIPT_COUNTS.c.node, RECEIPT_COUNTS.c.kept).where(
                RECEIPT_COUNTS.c.job_id == job_id,
                RECEIPT_COUNTS.c.node.in_(nodes[first : first + _NODES_AT_ONCE]),
            )
            counts |= {(job_id, node): kept for node, kept in connection.execute(wanted)}
    return counts


def _open(connection: Connection, job_id: JobId, number: int) -> None:
    """Make the epoch's row when it is new."""
    of_epoch = (EPOCHS.c.job_id == job_id) & (EPOCHS.c.number == number)
    if connection.scalar(select(EPOCHS.c.number).where(of_epoch)) is not None:
        return
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


def _leave(connection: Connection, end: EpochEnd) -> None:
    _open(connection, end.job_id, end.number)
    of_epoch = (EPOCHS.c.job_id == end.job_id) & (EPOCHS.c.number == end.number)
    values = {"is_left": True} | ({"is_last": True} if end.is_last else {})
    connection.execute(update(EPOCHS).where(of_epoch).values(**values))


def _receipt_row(record: ReceiptRecord) -> Row:
    """In the order of the table's columns."""
    return (*UnsealedReceipt.of(record), msgspec.json.encode(record.signed))
