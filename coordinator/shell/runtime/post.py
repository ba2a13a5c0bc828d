"""Receipts on their way to the nodes that earned them: in order, none twice, none left out.

A node says in its hello how many it holds of each job. What it lacks comes out of the journal; from
then on each new one is sent as it is made, as long as it is the next.
"""

import asyncio
from collections.abc import Mapping, Sequence

import structlog

from coordinator.core.job import Job
from coordinator.core.metering.accounts import account_of
from coordinator.shell.journal.ledger.interface import ReceiptBook
from coordinator.shell.journal.ledger.records import ReceiptRecord
from coordinator.shell.metering.desk import LedgerDesk
from coordinator.shell.runtime.room import Room
from coordinator.shell.runtime.roster import Session
from hypergpu.ids import JobId, NodeId
from hypergpu.v1 import node_pb2, receipt_pb2
from hypergpu.wire.ledger import receipt_message, terms_message, voucher_message

log = structlog.get_logger()

_IN_A_MESSAGE = 100
"""About 50 KB."""


class ReceiptPost:
    """Remembers of each connected node what it was sent."""

    def __init__(self, rooms: Mapping[JobId, Room], book: ReceiptBook, desk: LedgerDesk) -> None:
        self._rooms = rooms
        self._book = book
        self._desk = desk
        self._next: dict[Session, dict[JobId, int]] = {}
        """The sequence that each node lacks first, by job; 0 where there is none."""
        self._catching_up: set[asyncio.Task[None]] = set()

    def greeted(self, session: Session, held: Mapping[JobId, int]) -> None:
        """A node is there and holds so many receipts of these jobs. Send what it lacks."""
        self._next[session] = dict(held)
        lacking = [
            room for room in self._rooms.values() if self._lacks(session, room.job, room.job.job_id)
        ]
        if lacking:
            task = asyncio.create_task(self._catch_up(session, lacking), name="receipts")
            self._catching_up.add(task)
            task.add_done_callback(self._caught_up)

    def gone(self, session: Session) -> None:
        """The node's stream has ended."""
        self._next.pop(session, None)

    def made(self, sessions: Mapping[NodeId, Session], records: Sequence[ReceiptRecord]) -> None:
        """New receipts are durable. A node that lacks earlier ones has them with those."""
        mine: dict[tuple[NodeId, JobId], list[ReceiptRecord]] = {}
        for record in records:
            mine.setdefault((record.signed.receipt.node, record.job_id), []).append(record)
        for (node, job_id), own in mine.items():
            session = sessions.get(node)
            if session is not None and session in self._next:
                self._send(session, job_id, own)

    def _lacks(self, session: Session, job: Job, job_id: JobId) -> bool:
        there = account_of(job.metering, session.node).receipts
        return self._next[session].get(job_id, 0) < there

    async def _catch_up(self, session: Session, rooms: Sequence[Room]) -> None:
        for room in rooms:
            job_id = room.job.job_id
            while session in self._next and self._lacks(session, room.job, job_id):
                before = self._next[session].get(job_id, 0)
                kept = await asyncio.to_thread(self._book.receipts, job_id, node=session.node)
                self._send(session, job_id, kept)
                if session not in self._next or self._next[session].get(job_id, 0) == before:
                    break

    def _send(self, session: Session, job_id: JobId, records: Sequence[ReceiptRecord]) -> None:
        """Send those that follow on what the node has."""
        following = self._next.get(session)
        room = self._rooms.get(job_id)
        if following is None or room is None:
            return
        first = following.get(job_id, 0)
        lacking = [record for record in records if record.signed.receipt.sequence >= first]
        if not lacking or lacking[0].signed.receipt.sequence != first:
            return
        for start in range(0, len(lacking), _IN_A_MESSAGE):
            piece = lacking[start : start + _IN_A_MESSAGE]
            message = receipt_pb2.Receipts(
                job_id=job_id, receipts=[receipt_message(record.signed) for record in piece]
            )
            if room.job.terms is not None:
                message.terms.CopyFrom(terms_message(room.job.terms, epoch=0))
            if (voucher := self._desk.voucher(room.job, session.node)) is not None:
                message.voucher.CopyFrom(voucher_message(voucher))
            session.send(node_pb2.ControlResponse(receipts=message))
        following[job_id] = first + len(lacking)

    def _caught_up(self, task: "asyncio.Task[None]") -> None:
        self._catching_up.discard(task)
        if not task.cancelled() and (broken := task.exception()) is not None:
            log.error(
                "receipts were not sent: the node has them on its next start", exc_info=broken
            )
