"""Turns journal rows into stored receipts: read, fold, sign, commit, hand to the nodes.

Receipts and the cursor behind the rows that gave them are one commit, so that a kill repeats none
and loses none. The digest of the last folded row tells a journal that was replaced by an older
copy: it is folded from its beginning then, and rounds that have receipts give none again.
"""

import asyncio
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec
import structlog

from hypergpu.crypto import keccak, signed_digest, struct_hash
from hypergpu.digests import digest_of
from hypergpu.extension import CoordinatorHost, JournalRow
from hypergpu.ids import JobId, NodeId
from hypergpu.ledger_terms import separator_of
from hypergpu.statements import Receipt, SignedReceipt, receipt_fault
from payments.core.ledger import LedgerState, adopt, decode, fold, folded_anew
from payments.core.settlement import ReceiptLine
from payments.shell.store import JobRecord, PaymentStore

log = structlog.get_logger()

ROWS_AT_ONCE = 500
RECEIPTS_AT_ONCE = 1_000
"""Most receipts that a node which was away is handed."""
_NEWEST_RECEIPTS = 2
"""Looked at before all others when a receipt is wanted."""
_encoder = msgspec.json.Encoder()
_states = msgspec.json.Decoder(LedgerState)
_BEGINNING = 0, ""
_Result = TypeVar("_Result")


class NewReceipts(NamedTuple):
    """New receipts of one job, and their lines for settlement."""

    receipts: list[SignedReceipt]
    lines: list[ReceiptLine]
    rows_count: int = 0
    """Journal rows that were folded, whether they gave receipts or not."""


NoteReceipts = Callable[[JobId, Sequence[ReceiptLine]], None]


class Projection:
    """The fold of every job. Its methods are called on the event loop and work in threads."""

    def __init__(
        self,
        host: CoordinatorHost,
        store: PaymentStore,
        note_receipts: NoteReceipts = lambda *_: None,
    ) -> None:
        """Take up the stored folds. Blocks.

        Args:
            host: Has the journals.
            store: Keeps the receipts.
            note_receipts: Called on the event loop with what is new.
        """
        self.note_receipts = note_receipts
        self.node_name = host.node_name
        self._host = host
        self._store = store
        self._lock = asyncio.Lock()
        self._states: dict[JobId, LedgerState] = {}
        self._cursors: dict[JobId, tuple[int, str]] = {}
        """Each job's sequence of its next row, and the mark of the row before it."""
        self._read_folds()

    @property
    def states(self) -> Mapping[JobId, LedgerState]:
        """The fold of each job that has begun one."""
        return self._states

    async def advance(self) -> bool:
        """Fold all durable rows of all jobs and hand new receipts to connected nodes.

        Returns:
            Whether there were any new rows that pay depends on.
        """
        changes = [
            await self.advance_job(job_id)
            for job_id in self._host.jobs()
            if job_id not in self._states or not self._states[job_id].is_over
        ]
        return any(changes)

    async def advance_job(self, job_id: JobId) -> bool:
        """The same for one job."""
        has_changed = False
        async with self._lock:
            while True:
                rows_count = await _to_its_end(self._advance_once(job_id))
                has_changed = has_changed or rows_count > 0
                # Fewer than were asked for: no more were there.
                if rows_count < ROWS_AT_ONCE:
                    return has_changed

    async def begun_state(self, job_id: JobId) -> LedgerState | None:
        """The fold of a job, which is begun where the job is so new that it was not; None: there
        is no such job.
        """
        if job_id not in self._states and job_id in self._host.jobs():
            await self.advance_job(job_id)
        return self._states.get(job_id)

    async def start_over(self) -> None:
        """Read the stored folds again: nobody knows whether a commit that failed was one.

        Nodes are handed what was stored by it.
        """
        async with self._lock:
            before = dict(self._states)
            await _to_its_end(asyncio.to_thread(self._read_folds))
            for job_id, state in self._states.items():
                known_nodes = before[job_id].nodes if job_id in before else {}
                for node in state.nodes:
                    await self._send_missing(
                        job_id, node, known_nodes[node].count if node in known_nodes else 0
                    )

    async def _advance_once(self, job_id: JobId) -> int:
        """Fold the next rows and tell of their receipts. Returns how many rows there were."""
        new_receipts = await asyncio.to_thread(self.fold_rows, job_id)
        self.note_receipts(job_id, new_receipts.lines)
        self._hand_out(job_id, new_receipts.receipts)
        return new_receipts.rows_count

    def _read_folds(self) -> None:
        for job_id, record in self._store.jobs().items():
            self._states[job_id] = _states.decode(record.state)
            self._cursors[job_id] = self._trusted_cursor(job_id, record)
            if record.cursor and self._cursors[job_id] == _BEGINNING:
                self._states[job_id] = folded_anew(self._states[job_id])

    def fold_rows(self, job_id: JobId, limit: int = ROWS_AT_ONCE) -> NewReceipts:
        """Fold the next rows of a job and commit their receipts. Blocks."""
        first, _ = self._cursors.get(job_id, _BEGINNING)
        rows = self._host.rows(job_id, first, limit)
        if not rows:
            return NewReceipts([], [])
        state, new_receipts = self._fold(self._states.get(job_id), rows)
        if state is not None:
            record = JobRecord(rows[-1].sequence + 1, _mark(rows[-1]), _encoder.encode(state))
            self._store.keep_job(job_id, record, new_receipts.receipts)
            self._states[job_id] = state
        self._cursors[job_id] = rows[-1].sequence + 1, _mark(rows[-1])
        return new_receipts._replace(rows_count=len(rows))

    def receipts(self, job_id: JobId, wanted: Mapping[NodeId, int]) -> list[SignedReceipt]:
        """Stored receipts of nodes' work in a training, each of one round. Blocks."""
        receipts = (self._receipt(job_id, node, round) for node, round in wanted.items())
        return [signed_receipt for signed_receipt in receipts if signed_receipt is not None]

    def _receipt(self, job_id: JobId, node: NodeId, round: int) -> SignedReceipt | None:
        """A node's receipt of a round, of which sequence and round both ascend."""
        state = self._states.get(job_id)
        count = state.nodes[node].count if state is not None and node in state.nodes else 0

        def receipt(sequence: int) -> SignedReceipt:
            return self._store.receipts(job_id, node, sequence, limit=1)[0]

        # Most often it is the newest.
        near = max(0, count - _NEWEST_RECEIPTS)
        for first in (near, 0):
            sequences = range(first, count)
            at = first + bisect_left(sequences, round, key=lambda each: receipt(each).receipt.round)
            if at < count and (signed_receipt := receipt(at)).receipt.round == round:
                return signed_receipt
        return None

    async def greet(self, node: NodeId, newest: Mapping[JobId, SignedReceipt]) -> None:
        """Take over receipts that only the node has, and hand it those that it lacks."""
        async with self._lock:
            for job_id in list(self._states):
                newest_receipt = newest.get(job_id)
                if newest_receipt is not None:
                    work = asyncio.to_thread(self._take_over, job_id, node, newest_receipt)
                    taken_receipts = await _to_its_end(work)
                    self.note_receipts(job_id, [receipt_line(each) for each in taken_receipts])
                first = 0 if newest_receipt is None else newest_receipt.receipt.sequence + 1
                await self._send_missing(job_id, node, first)

    async def _send_missing(self, job_id: JobId, node: NodeId, first: int) -> None:
        """Hand a node its receipts from a sequence on."""
        tally = self._states[job_id].nodes.get(node)
        if tally is None or tally.count <= first:
            return
        first = max(first, tally.count - RECEIPTS_AT_ONCE)
        missing_receipts = await asyncio.to_thread(self._store.receipts, job_id, node, first)
        self._host.send_receipts(node, job_id, missing_receipts)

    def _fold(
        self, state: LedgerState | None, rows: Sequence[JournalRow]
    ) -> tuple[LedgerState | None, NewReceipts]:
        new_receipts = NewReceipts([], [])
        for row in rows:
            fact = decode(row.kind, row.body)
            if fact is None:
                continue
            state, unsigned_receipts = fold(state, fact)
            separator = separator_of(state.terms.domain)
            # Signing lets go of the interpreter's lock. Each receipt is signed as it is made, so
            # that threads which verify never wait for more than one receipt's share of Python.
            for each in unsigned_receipts:
                receipt_hash = struct_hash(each.receipt)
                signed_receipt = SignedReceipt(
                    receipt=each.receipt,
                    signature=self._host.key.sign_digest(signed_digest(separator, receipt_hash)),
                    contribution=each.contribution,
                    contribution_signature=each.contribution_signature,
                )
                new_receipts.receipts.append(signed_receipt)
                new_receipts.lines.append(_line(each.receipt, receipt_hash))
        return state, new_receipts

    def _take_over(self, job_id: JobId, node: NodeId, shown: SignedReceipt) -> list[SignedReceipt]:
        """The receipt that was stored; empty: none was."""
        state = self._states[job_id]
        adopted_state = adopt(state, shown.receipt)
        if adopted_state is state:
            return []
        fault = receipt_fault(shown, state.terms.domain, state.terms.coordinator)
        if fault or shown.receipt.node != node:
            log.warning("a node shows a receipt that is not ours", node=node, reason=fault)
            return []
        log.warning("a node has a newer receipt than the journal", node=node, job=job_id)
        known_receipts = self._store.receipts(job_id, node, shown.receipt.sequence, limit=1)
        is_new = not known_receipts or known_receipts[0].receipt.sequence != shown.receipt.sequence
        taken_receipts = [shown] if is_new else []
        record = JobRecord(*self._cursors[job_id], _encoder.encode(adopted_state))
        self._store.keep_job(job_id, record, taken_receipts)
        self._states[job_id] = adopted_state
        return taken_receipts

    def _hand_out(self, job_id: JobId, signed: Sequence[SignedReceipt]) -> None:
        by_node: dict[NodeId, list[SignedReceipt]] = defaultdict(list)
        for each in signed:
            by_node[each.receipt.node].append(each)
        for node, receipts in by_node.items():
            # A node that is away gets them when it dials in.
            self._host.send_receipts(node, job_id, receipts[-RECEIPTS_AT_ONCE:])

    def _trusted_cursor(self, job_id: JobId, record: JobRecord) -> tuple[int, str]:
        """The stored cursor, or the beginning where the journal is not the one that was folded."""
        if record.cursor == 0 or job_id not in self._host.jobs():
            return record.cursor, record.mark
        last = self._host.rows(job_id, record.cursor - 1, 1)
        if last and _mark(last[0]) == record.mark:
            return record.cursor, record.mark
        log.warning("the journal is older than its receipts: folded anew", job=job_id)
        return _BEGINNING


async def _to_its_end(work: Coroutine[object, object, _Result]) -> _Result:
    """Await work to its end, also where the caller is cancelled: its thread goes on in any case,
    and the next fold must not begin from what it is about to change.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def receipt_line(signed: SignedReceipt) -> ReceiptLine:
    """A stored receipt as settlement sees it."""
    return _line(signed.receipt, struct_hash(signed.receipt))


def _line(receipt: Receipt, hashed: bytes) -> ReceiptLine:
    return ReceiptLine(
        receipt.node, receipt.epoch, receipt.sequence, receipt.total_score, keccak(hashed)
    )


def _mark(row: JournalRow) -> str:
    return digest_of(row.kind.encode() + b"\0" + row.body)
