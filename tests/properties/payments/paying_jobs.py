"""Random journals of jobs that pay and the receipts that follow; the contract's rules in Python."""

from collections.abc import Iterable
from typing import Any

import msgspec
from hypothesis import strategies as st

from hypergpu.blobs import BlobRef
from hypergpu.crypto import IdentityKey
from hypergpu.digests import digest_of
from hypergpu.ids import NodeId
from hypergpu.jobfile.spec import JobSpec, Pay, TrainingSettings
from hypergpu.journal.events import (
    JobCreatedEvent,
    JobEndedEvent,
    JournalledModel,
    ModelInitialisedEvent,
    ParametersChangedEvent,
    RoundMeasuredEvent,
)
from hypergpu.journal.measured_work import MeasuredWork
from hypergpu.statements import Receipt
from hypergpu.units import BasisPoints, Bytes, Wei
from payments.core.ledger import Fact, LedgerState, UnsignedReceipt, fold
from payments.core.transactions import (
    AccountView,
    Approve,
    ChainCall,
    Distribute,
    EpochView,
    FundJob,
    JobOnLedger,
    OpenJob,
    Reclaim,
    RecordBatch,
    RecordReceipt,
    RequestReclaim,
    ShareState,
    ShareView,
    TotalsEntry,
)
from tests.properties.statements import JOB, TERMS, Work, contribution_of, node_key

NODES = [node_key(number) for number in range(4)]
ROUNDS_PER_EPOCH = 3
PRICE = 1_700_003


def spec(*, price: int = PRICE, escrow: int = 10**15, rounds: int = 30) -> JobSpec:
    """Job file of a job that pays."""
    pay = Pay(unit_price=price, escrow=escrow, rounds_per_epoch=ROUNDS_PER_EPOCH)
    return JobSpec(workload="digits", training=TrainingSettings(rounds=rounds), pay=pay)


def as_json(described: JobSpec) -> dict[str, Any]:
    """A job's description as a journal has it."""
    fields: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(described))
    return fields


def job_created(**figures: int) -> JobCreatedEvent:
    """The job's first fact."""
    return JobCreatedEvent(job_id=JOB, spec=as_json(spec(**figures)), terms=TERMS)


def parameters_changed(**figures: int) -> ParametersChangedEvent:
    """A change of the job's description."""
    return ParametersChangedEvent(spec=as_json(spec(**figures)))


INITIALISED = ModelInitialisedEvent(model=JournalledModel(BlobRef(digest_of(b"a model"), Bytes(7))))


def round_measured(
    round_: int, works: Iterable[tuple[IdentityKey, int, int]]
) -> RoundMeasuredEvent:
    """A measured round of nodes with their samples and quality."""
    updates = tuple(
        MeasuredWork(
            contribution=contribution_of(
                node, Work(round_, round_ // ROUNDS_PER_EPOCH, samples, quality)
            ),
            signature=b"signed by %s" % node.node_id.encode(),
            quality_bps=BasisPoints(quality),
            evaluator="agreement",
        )
        for node, samples, quality in works
    )
    return RoundMeasuredEvent(round=round_, updates=updates)


works = st.lists(
    st.tuples(st.sampled_from(NODES), st.integers(1, 5_000), st.integers(0, 10_000)),
    max_size=4,
    unique_by=lambda work: work[0].node_id,
)


@st.composite
def journals(draw: st.DrawFn, *, is_ended: bool = True) -> list[Fact]:
    """Creation, measured rounds in ascending order (some missing), and the end."""
    rounds = sorted(draw(st.sets(st.integers(0, 14), max_size=10)))
    facts: list[Fact] = [job_created()]
    facts.extend(round_measured(number, draw(works)) for number in rounds)
    return [*facts, JobEndedEvent(phase="completed", reason="")] if is_ended else facts


def fold_all(
    facts: Iterable[Fact], state: LedgerState | None = None
) -> tuple[LedgerState, list[UnsignedReceipt]]:
    """Fold facts in order."""
    receipts: list[UnsignedReceipt] = []
    for fact in facts:
        folded_fact = fold(state, fact)
        state = folded_fact.state
        receipts.extend(folded_fact.receipts)
    assert state is not None
    return state, receipts


def newest(receipts: Iterable[UnsignedReceipt]) -> dict[NodeId, Receipt]:
    """Newest receipt of each node."""
    return {each.receipt.node: each.receipt for each in receipts}


WINDOW_S = 100
UNBONDING_S = 300


class RevertedError(Exception):
    """The contract refused a call."""


class LedgerModel:
    """One job on the contract, with the coordinator's tokens."""

    def __init__(self, price: int, *, tokens: int, staked: Iterable[NodeId] = ()) -> None:
        self.price, self.tokens, self.staked = price, tokens, set(staked)
        self.now_s, self.ends_at_s = 1_000, 0
        self.is_open = False
        self.free, self.next_sequence = 0, 0
        self.allowance = 0
        self.accounts: dict[NodeId, AccountView] = {}
        self.epochs: dict[int, EpochView] = {}
        self.paid: dict[NodeId, int] = {}

    def call(self, call: ChainCall) -> None:
        """Carry out a call of the coordinator.

        Raises:
            RevertedError: The contract refuses it.
        """
        match call:
            case Approve():
                self.allowance = call.amount
            case OpenJob():
                self._take(call.escrow, is_refused=self.is_open)
                self.is_open = True
            case FundJob():
                self._take(call.amount, is_refused=not self.is_open)
            case RecordBatch() | RecordReceipt():
                self._record_call(call)
            case Distribute():
                self.distribute(call.epoch, call.nodes)
            case RequestReclaim() | Reclaim():
                self._reclaim(call)

    def record(self, entry: TotalsEntry, epoch: int) -> int:
        """Raise a node's totals to an entry's; the amount allotted."""
        while self.epochs.get(epoch, EpochView()).closed_at_s:
            epoch += 1
        before = self.accounts.get(entry.node, AccountView())
        total = max(before.total_score, entry.total_score)
        delta = min(max(0, self.price * total // 1_000_000 - before.earned), self.free)
        self.accounts[entry.node] = AccountView(
            max(before.counted, entry.count), total, Wei(before.earned + delta)
        )
        self.free -= delta
        at = self.epochs.get(epoch, EpochView(self.now_s))
        if delta:
            share = at.shares.get(entry.node, ShareView(ShareState.DUE, Wei(0)))
            raised_share = ShareView(ShareState.DUE, Wei(share.amount + delta))
            at = at._replace(shares={**at.shares, entry.node: raised_share})
        self.epochs[epoch] = at
        return delta

    def distribute(self, epoch: int, nodes: Iterable[NodeId]) -> None:
        """Pay shares that are due against stake or after the window."""
        self._close(epoch)
        at = self.epochs[epoch]
        is_over = self.now_s >= at.closed_at_s + WINDOW_S
        shares = dict(at.shares)
        for node in nodes:
            share = shares.get(node)
            if share and share.state is ShareState.DUE and (is_over or node in self.staked):
                shares[node] = share._replace(state=ShareState.PAID)
                self.paid[node] = self.paid.get(node, 0) + share.amount
        self.epochs[epoch] = at._replace(shares=shares)

    def view(self) -> JobOnLedger:
        """The model as settlement sees it."""
        if not self.is_open:
            return JobOnLedger(self.now_s, WINDOW_S, Wei(self.tokens))
        return JobOnLedger(
            time_s=self.now_s,
            window_s=WINDOW_S,
            balance=Wei(self.tokens),
            is_open=True,
            unit_price=Wei(self.price),
            free=Wei(self.free),
            next_sequence=self.next_sequence,
            ends_at_s=self.ends_at_s,
            accounts=dict(self.accounts),
            epochs=dict(self.epochs),
        )

    def _record_call(self, call: RecordBatch | RecordReceipt) -> None:
        is_late = self.ends_at_s and self.now_s >= self.ends_at_s - WINDOW_S
        self._refuse_unless(self.is_open and not is_late)
        if isinstance(call, RecordBatch):
            self._refuse_unless(call.sequence == self.next_sequence)
            self.next_sequence += 1
            for entry in call.entries:
                self.record(entry, call.epoch)
            return
        before = self.accounts.get(call.entry.node, AccountView())
        delta = self.record(call.entry, call.epoch)
        self._refuse_unless(bool(delta) or not before.covers(call.entry))

    def _reclaim(self, call: RequestReclaim | Reclaim) -> None:
        if isinstance(call, RequestReclaim):
            self._refuse_unless(self.is_open and not self.ends_at_s)
            self.ends_at_s = self.now_s + WINDOW_S + UNBONDING_S
            return
        self._refuse_unless(bool(self.ends_at_s) and self.now_s >= self.ends_at_s)
        self.tokens, self.free = self.tokens + self.free, 0

    def _close(self, epoch: int) -> None:
        self._refuse_unless(self.is_open)
        at = self.epochs.get(epoch, EpochView(self.now_s))
        if not at.closed_at_s:
            self.epochs[epoch] = at._replace(closed_at_s=self.now_s)

    def _take(self, amount: int, *, is_refused: bool) -> None:
        self._refuse_unless(not is_refused and amount <= min(self.allowance, self.tokens))
        self.allowance -= amount
        self.tokens -= amount
        self.free += amount

    def _refuse_unless(self, is_allowed: bool) -> None:  # noqa: FBT001 - a condition
        if not is_allowed:
            raise RevertedError
