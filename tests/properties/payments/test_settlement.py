"""Planned calls against the contract's rules: in the end everybody is paid once and in full."""

from dataclasses import dataclass, field
from itertools import islice
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from hypergpu.journal.events import JobEndedEvent
from hypergpu.journal.worth import worth
from hypergpu.units import Wei
from payments.core.ledger import Fact, LedgerState, UnsignedReceipt, adopt, fold
from payments.core.settlement import (
    NODES_PER_CALL,
    JobBook,
    JobWork,
    ReceiptLine,
    ReclaimOrder,
    funding_limit,
    leaf,
    merkle_root,
    plan_calls,
)
from payments.core.transactions import (
    AccountView,
    Distribute,
    FundJob,
    PlannedCall,
    RecordBatch,
    TotalsEntry,
    is_in_effect,
)
from tests.properties.payments.paying_jobs import (
    INITIALISED,
    NODES,
    PRICE,
    UNBONDING_S,
    WINDOW_S,
    LedgerModel,
    RevertedError,
    fold_all,
    job_created,
    journals,
    newest,
    parameters_changed,
    round_measured,
)
from tests.properties.statements import JOB, TERMS, node_key

ONE, OTHER = NODES[:2]


@dataclass
class SimulatedSettlement:
    """A coordinator that settles one job on the model, with a queue between them."""

    ledger: LedgerModel
    state: LedgerState
    is_each: bool = False
    receipts: list[UnsignedReceipt] = field(default_factory=list)
    queue: list[PlannedCall] = field(default_factory=list)
    mined: int = 0
    reclaim: ReclaimOrder = ReclaimOrder.NONE
    waiting: str = ""

    def fold(self, fact: Fact) -> None:
        folded_fact = fold(self.state, fact)
        self.state = folded_fact.state
        self.receipts.extend(folded_fact.receipts)

    def work(self) -> JobWork:
        book = JobBook()
        book.reclaim = self.reclaim
        for planned_call in self.queue:
            book.note_call(planned_call.purpose, planned_call.call)
        receipts = [each.receipt for each in self.receipts]
        book.note_receipts(
            ReceiptLine(r.node, r.epoch, r.sequence, r.total_score, leaf(r)) for r in receipts
        )
        pending_purposes = {planned_call.purpose for planned_call in self.queue[self.mined :]}
        return JobWork(self.state, book, pending_purposes, self.is_each)

    def plan(self) -> list[PlannedCall]:
        plan = plan_calls(self.work(), self.ledger.view())
        self.waiting = plan.waiting
        self.queue.extend(plan.calls)
        assert len({planned_call.purpose for planned_call in self.queue}) == len(self.queue)
        return list(plan.calls)

    def mine(self, count: int) -> None:
        for planned_call in self.queue[self.mined : self.mined + count]:
            before = self.ledger.view()
            try:
                self.ledger.call(planned_call.call)
            except RevertedError:
                assert is_in_effect(planned_call.call, before), planned_call
            self.mined += 1
        self.ledger.now_s += 1

    def settle(self) -> None:
        """Plan and mine until nothing is left, past the last window."""
        for _ in range(20):
            self.plan()
            self.mine(len(self.queue))
            self.ledger.now_s += WINDOW_S
        assert self.plan() == []


def new_settlement(
    *, tokens: int = 10**20, escrow: int = 10**15, is_each: bool = False
) -> SimulatedSettlement:
    state, _ = fold_all([job_created(escrow=escrow), INITIALISED])
    ledger = LedgerModel(PRICE, tokens=tokens, staked=[NODES[0].node_id])
    return SimulatedSettlement(ledger, state, is_each)


steps = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6), st.booleans()), max_size=15)


@settings(max_examples=200)
@given(journal=journals(), steps=steps, mode=st.sampled_from(["batched", "each"]))
def test_every_node_is_paid_its_worth_once(
    journal: list[Fact], steps: list[tuple[int, int, bool]], mode: str
) -> None:
    job = new_settlement(is_each=mode == "each")
    facts = iter(journal[1:])
    for folds, mines, is_forced in steps:
        for fact in islice(facts, folds):
            job.fold(fact)
        job.plan()
        job.mine(mines)
        if is_forced and job.receipts and job.ledger.is_open:
            newest_one = job.receipts[-1].receipt
            entry = TotalsEntry(newest_one.node, newest_one.sequence + 1, newest_one.total_score)
            job.ledger.record(entry, newest_one.epoch)
    for fact in facts:
        job.fold(fact)
    job.settle()
    assert job.ledger.paid == {
        node: worth(Wei(PRICE), tally.total_score)
        for node, tally in job.state.nodes.items()
        if worth(Wei(PRICE), tally.total_score)
    }


@given(journal=journals(), escrow=st.integers(1, 10**11), later=st.sampled_from([0, 10**15]))
def test_a_short_escrow_is_never_exceeded_and_made_good_when_raised(
    journal: list[Fact], escrow: int, later: int
) -> None:
    job = new_settlement(escrow=escrow)
    for fact in journal[1:-1]:
        job.fold(fact)
        job.plan()
        job.mine(3)
    if later:
        job.fold(parameters_changed(escrow=later))
        job.plan()
    job.fold(journal[-1])
    job.settle()
    owed_amount = sum(worth(Wei(PRICE), tally.total_score) for tally in job.state.nodes.values())
    paid_total = sum(job.ledger.paid.values())
    assert paid_total == (
        owed_amount if later else min(owed_amount, escrow) if job.ledger.is_open else 0
    )


@given(journal=journals(), cut=st.integers(1, 8))
def test_receipts_that_come_back_after_a_loss_are_paid(journal: list[Fact], cut: int) -> None:
    whole, receipts = fold_all(journal)
    job = new_settlement()
    for fact in journal[1:cut]:
        job.fold(fact)
    job.plan()
    job.fold(JobEndedEvent(phase="stopped", reason=""))
    job.settle()
    by_place = {(each.receipt.node, each.receipt.sequence): each for each in receipts}
    for receipt in newest(receipts).values():
        job.state = adopt(job.state, receipt)
        if (lost_receipt := by_place[receipt.node, receipt.sequence]) not in job.receipts:
            job.receipts.append(lost_receipt)
    job.settle()
    if job.ledger.is_open:
        assert job.ledger.paid == {
            node: amount
            for node, tally in whole.nodes.items()
            if (amount := worth(Wei(PRICE), tally.total_score))
        }


@given(
    totals=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=30),
    order=st.randoms(use_true_random=False),
)
def test_records_merge_to_the_same_accounts_in_any_order(
    totals: list[tuple[int, int]], order: Random
) -> None:
    entries = [TotalsEntry(NODES[node].node_id, count, count * 10**6) for node, count in totals]
    shuffled_entries = [*entries, *entries]
    order.shuffle(shuffled_entries)
    models = [LedgerModel(PRICE, tokens=10**12), LedgerModel(PRICE, tokens=10**12)]
    for model, records in zip(models, (entries, shuffled_entries), strict=True):
        model.is_open, model.free = True, 10**12
        for place, entry in enumerate(records):
            model.record(entry, place % 3)
    assert models[0].accounts == models[1].accounts
    assert models[0].free == models[1].free


def test_batches_split_by_nodes_and_prove_their_receipts() -> None:
    nodes = [node_key(number) for number in range(NODES_PER_CALL + 1)]
    job = new_settlement()
    for number in range(3):
        job.fold(round_measured(number, [(node, 10, 10_000) for node in nodes]))
    calls = [planned_call.call for planned_call in job.plan()]
    batches = [call for call in calls if isinstance(call, RecordBatch)]
    assert [len(batch.entries) for batch in batches] == [NODES_PER_CALL, 1]
    assert [batch.sequence for batch in batches] == [0, 1]
    assert {entry.total_score for batch in batches for entry in batch.entries} == {300_000}
    last = batches[1].entries[0].node
    leaves = [leaf(each.receipt) for each in job.receipts if each.receipt.node == last]
    assert batches[1].root == merkle_root(leaves)
    assert [len(call.nodes) for call in calls if isinstance(call, Distribute)] == [100, 1]


def test_an_entry_is_the_contracts_word() -> None:
    word = TotalsEntry(ONE.node_id, 7, 2**63).word()
    assert word.hex() == ONE.node_id[2:] + "00000007" + "8000000000000000"


def test_nothing_is_planned_for_a_job_without_pay_or_chain() -> None:
    free, _ = fold_all([job_created(price=0, escrow=0)])
    job = SimulatedSettlement(LedgerModel(0, tokens=0), free)
    assert job.plan() == []
    assert funding_limit(free, None).samples is None


def test_a_job_without_tokens_waits_with_the_fix_and_opens_no_round() -> None:
    job = new_settlement(tokens=5, escrow=10)
    assert job.plan() == []
    assert f"Fix: send the token to {TERMS.coordinator}" in job.waiting
    assert funding_limit(job.state, job.ledger.view()).samples == 0
    job.ledger.tokens = 10
    assert [planned_call.purpose for planned_call in job.plan()] == [
        f"approve/{JOB}/10",
        f"open/{JOB}",
    ]
    job.mine(2)
    assert funding_limit(job.state, job.ledger.view()).samples == 10 * 100 // PRICE


def test_funding_counts_from_the_samples_that_were_measured() -> None:
    job = new_settlement(escrow=PRICE * 100)
    job.fold(round_measured(0, [(ONE, 1_000, 5_000)]))
    job.plan()
    job.mine(9)
    limit = funding_limit(job.state, job.ledger.view())
    assert limit.samples == 1_000 + (100 * PRICE - 5 * PRICE) * 100 // PRICE
    assert "pay.escrow=AMOUNT" in limit.reason


def test_a_raised_escrow_is_funded_by_what_is_missing() -> None:
    job = new_settlement(escrow=1_000)
    job.plan()
    job.mine(2)
    job.fold(parameters_changed(escrow=1_700))
    calls = [planned_call.call for planned_call in job.plan()]
    assert calls[1] == FundJob(job=TERMS.job, amount=Wei(700))
    assert job.plan() == []


def test_an_escrow_that_was_paid_in_is_not_paid_in_again_when_a_block_shows_less() -> None:
    job = new_settlement(escrow=1_000)
    job.plan()
    job.mine(2)
    job.ledger.free -= 300
    assert job.plan() == []


def test_a_batch_after_a_lost_database_takes_the_ledgers_sequence() -> None:
    job = new_settlement()
    job.fold(round_measured(2, [(ONE, 10, 10_000)]))
    job.ledger.is_open, job.ledger.free, job.ledger.next_sequence = True, 10**15, 5
    batch = next(
        planned_call for planned_call in job.plan() if isinstance(planned_call.call, RecordBatch)
    )
    assert batch.purpose == f"batch/{JOB}/5"


def test_free_escrow_is_reclaimed_after_the_announced_end() -> None:
    job = new_settlement(tokens=10**15)
    job.fold(round_measured(2, [(OTHER, 10, 10_000)]))
    job.fold(JobEndedEvent(phase="completed", reason=""))
    job.settle()
    job.reclaim = ReclaimOrder.ANNOUNCE
    assert [planned_call.purpose for planned_call in job.plan()] == [f"request-reclaim/{JOB}"]
    job.mine(1)
    assert funding_limit(job.state, job.ledger.view()).samples == job.state.measured_samples
    job.reclaim = ReclaimOrder.TAKE
    assert job.plan() == []
    job.ledger.now_s += WINDOW_S + UNBONDING_S
    assert [planned_call.purpose for planned_call in job.plan()] == [f"reclaim/{JOB}/0"]
    job.mine(1)
    assert job.ledger.free == 0
    assert job.ledger.tokens == 10**15 - worth(Wei(PRICE), 100_000)


def test_reverted_calls_count_as_done_where_the_ledger_shows_their_effect() -> None:
    job = new_settlement()
    job.fold(round_measured(2, [(ONE, 10, 10_000)]))
    calls = {type(planned_call.call).__name__: planned_call.call for planned_call in job.plan()}
    empty = job.ledger.view()
    assert not any(is_in_effect(call, empty) for call in calls.values())
    job.mine(9)
    settled_view = job.ledger.view()
    for name in ("OpenJob", "RecordBatch", "Distribute"):
        assert is_in_effect(calls[name], settled_view), name
    less = settled_view._replace(accounts={ONE.node_id: AccountView(1, 99_999, Wei(0))})
    assert not is_in_effect(calls["RecordBatch"], less)
