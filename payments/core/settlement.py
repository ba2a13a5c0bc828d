"""The next calls that settle a job, from its receipts and the ledger's state.

Theory of operation. Totals only grow and the contract merges them by maximum, so any call may be
repeated and nothing has to be undone. A job is opened with its escrow. When an epoch ends, batches
state the totals of its nodes, and payments right behind them close the epoch and pay the nodes with
stake; none waits for another, since one account's transactions are mined in order. The other nodes
are paid when the challenge window is over. Whatever else adds to shares (receipts that nodes forced
in, receipts that came back after a loss, escrow that arrived late) shows as a share that is due in
an epoch that is over, and is paid when it is seen.

Each call has a purpose. A purpose that is queued is not planned again, so planning is idempotent. A
batch is a Merkle tree as OpenZeppelin lays it out, so that its tools check one: a node is the
Keccak-256 of its two children, the smaller first. The tree is one array: node ``i`` has the
children ``2i + 1`` and ``2i + 2``, and the leaves fill its end backwards, in ascending order.
Leaves are hashed twice (`leaf`), so that no inner node passes for a leaf.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from hypergpu.crypto import keccak, struct_hash
from hypergpu.ids import NodeId
from hypergpu.journal.worth import worth
from hypergpu.statements import Receipt
from hypergpu.units import Samples, Wei
from payments.core.ledger import NO_DIGEST, LedgerState, funded_samples
from payments.core.transactions import (
    Approve,
    ChainCall,
    Distribute,
    FundJob,
    JobOnLedger,
    OpenJob,
    PlannedCall,
    Reclaim,
    RecordBatch,
    RecordReceipt,
    RequestReclaim,
    TotalsEntry,
)

HASH_BYTES = 32


def leaf(receipt: Receipt) -> bytes:
    """Leaf of a receipt in the tree of its batch, the same in every domain.

    Raises:
        ValueError: A number does not fit its field.
    """
    return keccak(struct_hash(receipt))


def merkle_root(leaves: Iterable[bytes]) -> bytes:
    """Root over leaves in any order: n - 1 hashes.

    Raises:
        ValueError: There is no leaf, one comes twice, or one is not 32 bytes.
    """
    ordered_leaves = sorted(leaves)
    count = len(ordered_leaves)
    if not count:
        raise ValueError("a tree without leaves has no root")
    if any(len(each) != HASH_BYTES for each in ordered_leaves):
        raise ValueError(f"a leaf is {HASH_BYTES} bytes")
    if len(set(ordered_leaves)) < count:
        raise ValueError("a leaf comes twice: a receipt is counted once")
    nodes = [b""] * (count - 1) + ordered_leaves[::-1]
    for place in range(count - 2, -1, -1):
        one, other = nodes[2 * place + 1], nodes[2 * place + 2]
        nodes[place] = keccak(one + other if one < other else other + one)
    return nodes[0]


NODES_PER_CALL = 100
"""Nodes in one batch or payment: a new node costs 90,000 gas, a transaction has 16.7 million."""
NO_RECEIPTS = bytes(HASH_BYTES)
"""Root of a batch without receipts: it repeats totals after escrow arrived."""


class ReceiptLine(NamedTuple):
    """A stored receipt, as far as settlement depends on it."""

    node: NodeId
    epoch: int
    sequence: int
    total_score: int
    leaf: bytes
    """See `payments.core.settlement.leaf`."""


class ReclaimOrder(Enum):
    """Order of the operator about a job's free escrow."""

    NONE = 0
    ANNOUNCE = 1
    TAKE = 2


class JobBook:
    """A job's receipts and calls in memory, as far as planning needs them."""

    def __init__(self) -> None:
        self.lines: dict[int, dict[NodeId, dict[int, ReceiptLine]]] = {}
        """Receipts that no queued call records, by epoch, node and sequence."""
        self.sealed: dict[NodeId, TotalsEntry] = {}
        """Highest totals that queued batches and records of the job state."""
        self.next_sequence = 0
        """One more than the highest sequence of a queued batch."""
        self.queued: set[str] = set()
        """Purposes of the job's rows in the queue, whatever became of them, without abandoned
        ones."""
        self.reclaim = ReclaimOrder.NONE
        self.funding: FundingLimit | None = None
        """The limit that was journalled last."""

    def note_call(self, purpose: str, call: ChainCall | None) -> None:
        """Note a queued call, and drop the receipts that it records."""
        self.queued.add(purpose)
        if isinstance(call, RecordBatch):
            self.next_sequence = max(self.next_sequence, call.sequence + 1)
            for entry in call.entries:
                self._seal(entry)
        elif isinstance(call, RecordReceipt):
            self._seal(call.entry)

    def note_receipts(self, lines: Iterable[ReceiptLine]) -> None:
        """Add receipts that are to be recorded. Called for every receipt on the event loop."""
        for line in lines:
            if line.sequence >= self.sealed_count(line.node):
                nodes = self.lines.setdefault(line.epoch, {})
                nodes.setdefault(line.node, {})[line.sequence] = line

    def sealed_count(self, node: NodeId) -> int:
        """Receipts of a node that queued calls record."""
        entry = self.sealed.get(node)
        return entry.count if entry else 0

    def _seal(self, entry: TotalsEntry) -> None:
        node = entry.node
        self.sealed[node] = sealed_totals = _higher_totals(entry, self.sealed.get(node, entry))
        for epoch, nodes in list(self.lines.items()):
            own = nodes.pop(node, {})
            if open_lines := {at: line for at, line in own.items() if at >= sealed_totals.count}:
                nodes[node] = open_lines
            elif not nodes:
                del self.lines[epoch]


class JobWork(NamedTuple):
    """Everything about a job that settlement starts from, beside the chain."""

    state: LedgerState
    book: JobBook
    pending: Collection[str] = frozenset()
    """Purposes of the queued rows that are in no block of the view's chain."""
    is_each: bool = False
    """Record receipts one by one instead of in batches."""


class SettlementPlan(NamedTuple):
    """Calls to queue now, in order."""

    calls: tuple[PlannedCall, ...] = ()
    waiting: str = ""
    """Reason why the job waits for the operator, with the fix; empty: it does not."""


class FundingLimit(NamedTuple):
    """Work that a job's escrow covers."""

    samples: Samples | None
    """Accepted samples since the job's beginning; None: no limit."""
    reason: str = ""


def plan_calls(work: JobWork, view: JobOnLedger) -> SettlementPlan:
    """The next calls for a job that pays; none where all that can be done is queued.

    Args:
        work: The job.
        view: The ledger at the block that ``work.pending`` is of.
    """
    state = work.state
    if not state.unit_price or not state.terms.domain.chain_id:
        return SettlementPlan()
    opening_plan = _plan_opening(work, view)
    if opening_plan.waiting or view.is_closed_to_records:
        closing_calls = (*_payments_due(work, view), *_reclaim(work, view)) if view.is_open else ()
        return SettlementPlan(closing_calls, opening_plan.waiting)
    is_opening = any(isinstance(planned_call.call, OpenJob) for planned_call in opening_plan.calls)
    if not (view.is_open or is_opening or f"open/{state.job_id}" in work.book.queued):
        return SettlementPlan()
    records = _records(work, view)
    calls = (
        *opening_plan.calls,
        *records,
        *_top_up(work, view, has_records=bool(records)),
        *_payments_due(work, view),
        *_reclaim(work, view),
    )
    return SettlementPlan(calls)


def funding_limit(state: LedgerState, view: JobOnLedger | None) -> FundingLimit:
    """How much of a job's work its escrow on the ledger covers.

    Args:
        state: The job's pay so far.
        view: The ledger; None: it was not read yet.
    """
    if not state.unit_price:
        return FundingLimit(None)
    if view is None or not view.is_open:
        return FundingLimit(Samples(0), "the escrow is not on the ledger yet")
    if view.ends_at_s:
        reason = "the job's end is announced on the ledger: hypergpu ledger reclaim takes its rest"
        return FundingLimit(state.measured_samples, reason)
    samples = funded_samples(
        view.capacity, state.unit_price, state.total_score, state.measured_samples
    )
    key = "budget" if state.is_farm else "pay.escrow"
    reason = (
        f"the escrow on the ledger covers {samples:,} {state.terms.unit.value}; raise it:"
        f" hypergpu job set {key}=AMOUNT"
    )
    return FundingLimit(samples, reason)


def _plan_opening(work: JobWork, view: JobOnLedger) -> SettlementPlan:
    """Open the job, or add what its escrow was raised by."""
    state = work.state
    job_id, escrow = state.job_id, state.escrow
    if not view.is_open:
        purpose = f"open/{job_id}"
        missing_amount = Wei(escrow)
        call: ChainCall = OpenJob(
            job_id=job_id,
            unit=state.terms.unit,
            coordinator=state.terms.coordinator,
            model=state.model,
            dataset=state.dataset,
            unit_price=state.unit_price,
            epochs=state.planned_epochs,
            escrow=escrow,
        )
    else:
        purpose = f"fund/{job_id}/{escrow}"
        missing_amount = Wei(max(0, escrow - view.capacity))
        call = FundJob(job=state.terms.job, amount=missing_amount)
    approve = f"approve/{job_id}/{escrow}"
    # Whatever the ledger shows at some block, an escrow as stated is paid in once.
    is_queued = purpose in work.book.queued or approve in work.book.queued
    is_needless = state.is_over and (view.is_open or not state.total_score)
    is_early = not view.is_open and state.model == NO_DIGEST
    if is_queued or is_early or not missing_amount or view.ends_at_s or is_needless:
        return SettlementPlan()
    if view.balance < missing_amount:
        reason = (
            f"ESCROW_SHORT: the escrow of {job_id} lacks {missing_amount}, the coordinator's"
            f" account has {view.balance}. Fix: send the token to {state.terms.coordinator}"
        )
        return SettlementPlan(waiting=reason)
    approval = PlannedCall(approve, Approve(amount=missing_amount))
    return SettlementPlan((approval, PlannedCall(purpose, call)))


def _records(work: JobWork, view: JobOnLedger) -> tuple[PlannedCall, ...]:
    """Record the receipts that no queued call covers, and pay the epochs that ended."""
    state = work.state
    if work.is_each:
        return tuple(_single_records(work))
    calls: list[PlannedCall] = []
    totals = dict(work.book.sealed)
    sequence = max(work.book.next_sequence, view.next_sequence)
    for epoch, nodes in _recordable_lines(work):
        ordered_nodes = sorted(nodes)
        for start in range(0, len(ordered_nodes), NODES_PER_CALL):
            chunk = ordered_nodes[start : start + NODES_PER_CALL]
            for node in chunk:
                score = max(line.total_score for line in nodes[node].values())
                new_totals = TotalsEntry(node, max(nodes[node]) + 1, score)
                totals[node] = _higher_totals(totals.get(node, new_totals), new_totals)
            batch = RecordBatch(
                job=state.terms.job,
                epoch=epoch,
                sequence=sequence,
                root=merkle_root(line.leaf for node in chunk for line in nodes[node].values()),
                entries=tuple(totals[node] for node in chunk),
            )
            calls.append(PlannedCall(f"batch/{state.job_id}/{sequence}", batch))
            sequence += 1
        calls.extend(_distributions(work, epoch, ordered_nodes, kind="pay"))
    return tuple(calls)


_EpochLines = tuple[int, Mapping[NodeId, Mapping[int, ReceiptLine]]]


def _recordable_lines(work: JobWork) -> Iterator[_EpochLines]:
    """Receipts of the epochs that ended, by node and sequence.

    All receipts of a farm job are signed for epoch 0, as they come in another order than leases:
    those that there are when an epoch of accepted bundles has ended are recorded in it.
    """
    state, lines = work.state, work.book.lines
    if state.is_farm:
        epoch = state.ended_epochs - 1
        is_recorded = f"pay/{state.job_id}/{epoch}/0" in work.book.queued
        if epoch >= 0 and lines and (state.is_over or not is_recorded):
            yield epoch, lines[0]
        return
    for epoch in sorted(lines):
        if not (epoch < state.ended_epochs or state.is_over):
            break
        yield epoch, lines[epoch]


def _single_records(work: JobWork) -> Iterator[PlannedCall]:
    state = work.state
    epochs = work.book.lines.values()
    lines = (line for nodes in epochs for own in nodes.values() for line in own.values())
    for line in sorted(lines, key=lambda line: (line.epoch, line.node, line.sequence)):
        entry = TotalsEntry(line.node, line.sequence + 1, line.total_score)
        purpose = f"record/{state.job_id}/{line.epoch}/{line.node}/{line.sequence}"
        if purpose not in work.book.queued:
            call = RecordReceipt(job=state.terms.job, epoch=line.epoch, entry=entry)
            yield PlannedCall(purpose, call)


def _top_up(work: JobWork, view: JobOnLedger, *, has_records: bool) -> tuple[PlannedCall, ...]:
    """Repeat totals that were recorded while the escrow was short, once it has something again."""
    state = work.state
    records = (f"batch/{state.job_id}/", f"record/{state.job_id}/")
    if has_records or not view.free or any(each.startswith(records) for each in work.pending):
        return ()
    short = [
        TotalsEntry(node, account.counted, account.total_score)
        for node, account in sorted(view.accounts.items())
        if worth(state.unit_price, account.total_score) > account.earned
    ][:NODES_PER_CALL]
    if not short:
        return ()
    sequence = max(work.book.next_sequence, view.next_sequence)
    batch = RecordBatch(
        job=state.terms.job,
        epoch=state.ended_epochs,
        sequence=sequence,
        root=NO_RECEIPTS,
        entries=tuple(short),
    )
    return (PlannedCall(f"batch/{state.job_id}/{sequence}", batch),)


def _payments_due(work: JobWork, view: JobOnLedger) -> tuple[PlannedCall, ...]:
    """Pay the shares that are seen to be due: epochs still open, and those out of their window."""
    calls: list[PlannedCall] = []
    for number, epoch in sorted(view.epochs.items()):
        nodes = epoch.nodes_due()
        if not nodes:
            continue
        if epoch.closed_at_s:
            if view.time_s >= epoch.closed_at_s + view.window_s:
                calls.extend(_distributions(work, number, nodes, kind="late"))
        elif _is_epoch_over(work, view, number):
            calls.extend(_distributions(work, number, nodes, kind="sweep"))
    return tuple(calls)


def _is_epoch_over(work: JobWork, view: JobOnLedger, epoch: int) -> bool:
    """Whether no record for an open epoch is on its way or still to come."""
    state = work.state
    own = (f"pay/{state.job_id}/{epoch}/", f"record/{state.job_id}/{epoch}/")
    if any(purpose.startswith(own) for purpose in work.pending):
        return False
    return epoch < state.ended_epochs or state.is_over or view.is_closed_to_records


def _reclaim(work: JobWork, view: JobOnLedger) -> tuple[PlannedCall, ...]:
    state = work.state
    if work.book.reclaim is ReclaimOrder.NONE or not view.is_open:
        return ()
    if not view.ends_at_s:
        call = PlannedCall(f"request-reclaim/{state.job_id}", RequestReclaim(job=state.terms.job))
        return () if call.purpose in work.book.queued else (call,)
    prefix = f"reclaim/{state.job_id}/"
    is_pending = any(purpose.startswith(prefix) for purpose in work.pending)
    is_due = view.time_s >= view.ends_at_s and bool(view.free)
    if work.book.reclaim is not ReclaimOrder.TAKE or is_pending or not is_due:
        return ()
    number = sum(1 for purpose in work.book.queued if purpose.startswith(prefix))
    return (PlannedCall(f"{prefix}{number}", Reclaim(job=state.terms.job)),)


def _distributions(
    work: JobWork, epoch: int, nodes: Sequence[NodeId], *, kind: str
) -> Iterator[PlannedCall]:
    state = work.state
    for number, start in enumerate(range(0, len(nodes), NODES_PER_CALL)):
        purpose = f"{kind}/{state.job_id}/{epoch}/{number}"
        if purpose not in work.book.queued:
            chunk = tuple(nodes[start : start + NODES_PER_CALL])
            call = Distribute(job=state.terms.job, epoch=epoch, nodes=chunk)
            yield PlannedCall(purpose, call)


def _higher_totals(one: TotalsEntry, other: TotalsEntry) -> TotalsEntry:
    """The higher of two totals of a node."""
    return TotalsEntry(
        one.node, max(one.count, other.count), max(one.total_score, other.total_score)
    )
