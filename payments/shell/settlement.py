"""One tick of settlement: look at the chain, follow the queue, plan the next calls of each job.

Where the block of a tick has left the chain by the end of the reading, nothing is planned from it.
Training waits for none of this: a chain that is away is asked again later.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence

import structlog

from hypergpu.extension import CoordinatorHost
from hypergpu.ids import JobId, NodeId
from hypergpu.statements import SignedReceipt
from payments.core.ledger import LedgerState
from payments.core.settlement import (
    FundingLimit,
    JobBook,
    JobWork,
    ReceiptLine,
    ReclaimOrder,
    funding_limit,
    plan_calls,
)
from payments.core.transactions import Halt, JobOnLedger, OutboxRow, PlannedCall
from payments.shell.chains import ChainUnreachableError
from payments.shell.ethereum import ChainBlock, Ethereum
from payments.shell.ledger_reader import LedgerReader
from payments.shell.projection import Projection, receipt_line
from payments.shell.signing import LedgerAddresses, payload
from payments.shell.transactions import TransactionQueue, UnsignedTransaction

log = structlog.get_logger()

_RECEIPTS_AT_ONCE = 500
_FUNDING_GAIN_PARTS = 10
"""A higher limit is journalled once it adds a tenth to what is left of the one before."""


class Settler:
    """Settles the jobs of one ledger. Its methods are called on the event loop, one at a time."""

    def __init__(
        self,
        host: CoordinatorHost,
        projection: Projection,
        queue: TransactionQueue,
        ledger: tuple[Ethereum, LedgerAddresses],
        *,
        is_each: bool,
    ) -> None:
        self._host = host
        self._projection = projection
        self._store = queue.store
        self._queue = queue
        self._chain, self._target = ledger
        self._reader = LedgerReader(*ledger, queue.account.address)
        self._is_each = is_each
        self._books: dict[JobId, JobBook] = {}
        self._settled: set[JobId] = set()
        self._head: ChainBlock | None = None
        self.halts: Mapping[JobId | None, Halt] = {}
        self.views: Mapping[JobId, JobOnLedger] = {}
        self.waiting: dict[JobId, str] = {}

    @property
    def head(self) -> ChainBlock | None:
        """Block of the last tick."""
        return self._head

    async def tick(self, *, has_receipts: bool) -> None:
        """Look and act once.

        Args:
            has_receipts: Whether the projection has changed since the last tick.

        Raises:
            ChainUnreachableError: The RPC does not answer; the next tick goes on from what is
                stored.
        """
        head = await self._chain.head()
        is_new = self._head is None or head.hash != self._head.hash
        if not is_new and not has_receipts:
            return
        states = {state.job_id: state for state in self._active_states()}
        if is_new:
            is_reorganised = not await self._is_extended_by(head)
            if is_reorganised:
                self._reader.invalidate_all()
            for row in await self._queue.look(head, is_reorganised=is_reorganised):
                self._touch(row)
        views = await self._reader.read(list(states.values()), head)
        still = await self._chain.block(head.number)
        if still is None or still.hash != head.hash:
            self._reader.invalidate_all()
            raise ChainUnreachableError("the chain was reorganised while it was read")
        if is_new:
            self.halts = await self._queue.follow(views)
        self._head, self.views = head, {**self.views, **views}
        for job_id, view in views.items():
            await self._settle(states[job_id], view, head)

    def order_reclaim(self, job_id: JobId, order: ReclaimOrder) -> None:
        """Take an operator's order about a job's free escrow; it is kept."""
        name = f"reclaim/{job_id}"
        self._store.keep_value(name, str(order.value).encode())
        self._settled.discard(job_id)
        if job_id in self._books:
            self._books[job_id].reclaim = order

    async def retry(self, job_id: JobId) -> list[str]:
        """Clear a job's halt. Returns the purposes that were given up and are planned anew."""
        given_up = await self._queue.abandon(job_id)
        self._books.pop(job_id, None)
        self._head = None
        return given_up

    def note_receipts(self, job_id: JobId, lines: Iterable[ReceiptLine]) -> None:
        """Add new receipts to what is to be recorded."""
        self._settled.discard(job_id)
        if book := self._books.get(job_id):
            book.note_receipts(lines)

    def _active_states(self) -> list[LedgerState]:
        return [
            state
            for job_id, state in self._projection.states.items()
            if state.unit_price
            and state.terms.domain.chain_id == self._queue.account.chain_id
            and state.terms.domain.contract == self._target.ledger
            and job_id not in self._settled
        ]

    async def _is_extended_by(self, head: ChainBlock) -> bool:
        """Whether the block of the last tick is still in the chain."""
        if self._head is None or head.parent == self._head.hash:
            return True
        block = await self._chain.block(self._head.number)
        return block is not None and block.hash == self._head.hash

    def _touch(self, row: OutboxRow) -> None:
        if row.job_id is None:
            return
        epoch = getattr(row.call, "epoch", None)
        state = self._projection.states.get(row.job_id)
        # A batch for an epoch that is closed goes into the first open one behind it.
        last = state.ended_epochs + 1 if state else 0
        self._reader.invalidate(row.job_id, () if epoch is None else range(epoch, last + 1))

    async def _settle(self, state: LedgerState, view: JobOnLedger, head: ChainBlock) -> None:
        job_id = state.job_id
        book = self._books.get(job_id)
        if book is None:
            # Receipts that come while it is filled are noted too.
            book = self._books[job_id] = JobBook()
            await asyncio.to_thread(self._fill_book, book, state)
        is_halted = job_id in self.halts or None in self.halts
        if not is_halted:
            plan = plan_calls(self._work(state, book), view)
            self.waiting[job_id] = plan.waiting
            transactions = await asyncio.to_thread(self._payloads, job_id, plan.calls)
            rows = await self._queue.add(transactions, head)
            # Noted before they are sent: an RPC that fails now must not have them planned again.
            _note_rows(book, rows)
            await self._queue.send(rows)
        await self._change_funding(state, book, view)
        self._note_settled(state, book, view)

    def _work(self, state: LedgerState, book: JobBook) -> JobWork:
        own = self._own_rows(state.job_id)
        pending_purposes = {row.purpose for row in own if row.inclusion is None}
        return JobWork(state, book, pending_purposes, self._is_each)

    def _own_rows(self, job_id: JobId) -> list[OutboxRow]:
        return [row for row in self._queue.rows if row.job_id == job_id and not row.is_abandoned]

    def _fill_book(self, book: JobBook, state: LedgerState) -> None:
        """Fill a job's book from what is stored. Blocks."""
        job_id = state.job_id
        _note_rows(book, self._store.job_rows(self._queue.account, job_id))
        for node in state.nodes:
            first = book.sealed_count(node)
            while receipts := self._store.receipts(job_id, node, first):
                book.note_receipts(map(receipt_line, receipts))
                first = receipts[-1].receipt.sequence + 1
        book.reclaim = ReclaimOrder(int(self._store.value(f"reclaim/{job_id}") or b"0"))

    def _payloads(self, job_id: JobId, calls: Sequence[PlannedCall]) -> list[UnsignedTransaction]:
        """The transactions of calls. Blocks on the store."""
        known_receipts: dict[tuple[NodeId, int], SignedReceipt] = {}

        def find_receipt(node: NodeId, sequence: int) -> SignedReceipt:
            if (node, sequence) not in known_receipts:
                receipts = self._store.receipts(job_id, node, sequence, limit=_RECEIPTS_AT_ONCE)
                known_receipts.update(((node, each.receipt.sequence), each) for each in receipts)
            return known_receipts[node, sequence]

        return [
            UnsignedTransaction(
                each.purpose, job_id, each.call, payload(each.call, self._target, find_receipt)
            )
            for each in calls
        ]

    async def _change_funding(self, state: LedgerState, book: JobBook, view: JobOnLedger) -> None:
        """Journal the work that the escrow covers, where that changes what the job may do."""
        limit = funding_limit(state, view)
        if wait_reason := self.waiting.get(state.job_id):
            limit = limit._replace(reason=wait_reason)
        if state.is_over or not _is_news(limit, book.funding, state):
            return
        refusal = await self._host.change_funding(state.job_id, limit.samples, limit.reason)
        if refusal:
            log.info("the job did not take its funding", job=state.job_id, reason=refusal)
        book.funding = limit

    def _note_settled(self, state: LedgerState, book: JobBook, view: JobOnLedger) -> None:
        """Leave a job alone that is over, recorded and paid."""
        rows = self._own_rows(state.job_id)
        is_due = any(epoch.nodes_due() for epoch in view.epochs.values())
        is_reclaiming = book.reclaim is not ReclaimOrder.NONE and view.is_open and bool(view.free)
        if state.is_over and not (book.lines or rows or is_due or is_reclaiming):
            self._settled.add(state.job_id)
            del self._books[state.job_id]


def _note_rows(book: JobBook, rows: Iterable[OutboxRow]) -> None:
    for row in rows:
        if not row.is_abandoned:
            book.note_call(row.purpose, row.call)


def _is_news(limit: FundingLimit, before: FundingLimit | None, state: LedgerState) -> bool:
    if before is None or limit.samples is None or before.samples is None:
        return before is None or limit.samples != before.samples
    gain, left_samples = limit.samples - before.samples, before.samples - state.measured_samples
    return (
        gain < 0
        or gain * _FUNDING_GAIN_PARTS > left_samples
        or (not gain and limit.reason != before.reason and left_samples <= 0)
    )
