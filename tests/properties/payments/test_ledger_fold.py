"""The fold gives each accepted update one receipt, whatever the journal goes through."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.training.job.events import (
    Event,
    JobCreated,
    MeasuredUpdate,
    ParametersChanged,
    RoundMeasured,
)
from coordinator.core.work.work_events import JobEnded, NodeLost
from hypergpu.journal.events import JobEndedEvent, RoundMeasuredEvent
from hypergpu.journal.worth import worth
from hypergpu.statements import WHOLE_BPS, contribution_hash
from hypergpu.units import Milliseconds, Samples, Wei
from payments.core.ledger import Fact, LedgerState, adopt, decode, fold, funded_samples
from tests.properties.payments.paying_jobs import (
    NODES,
    fold_all,
    job_created,
    journals,
    newest,
    parameters_changed,
    round_measured,
    spec,
)
from tests.properties.statements import JOB

ONE, OTHER = NODES[:2]


@given(journal=journals())
def test_receipts_are_dense_and_carry_running_totals(journal: list[Fact]) -> None:
    state, receipts = fold_all(journal)
    for node, tally in state.nodes.items():
        own = [each.receipt for each in receipts if each.receipt.node == node]
        assert [receipt.sequence for receipt in own] == list(range(tally.count))
        total = 0
        for receipt in own:
            total += receipt.score
            assert receipt.total_score == total
        assert tally.total_score == total
    rounds = [fact for fact in journal if isinstance(fact, RoundMeasuredEvent)]
    updates = [work for fact in rounds for work in fact.updates]
    assert len(receipts) == len(updates)
    for each, work in zip(receipts, updates, strict=True):
        assert each.contribution == work.contribution
        assert each.receipt.contribution == contribution_hash(work.contribution).hex()
        assert each.contribution_signature == work.signature


@given(journal=journals(), splits=st.lists(st.integers(0, 12), max_size=3))
def test_any_replay_of_the_journal_gives_no_receipt_twice(
    journal: list[Fact], splits: list[int]
) -> None:
    whole, expected_receipts = fold_all(journal)
    state, receipts = fold_all(journal[:1])
    for start in (*splits, 0):
        state, more = fold_all(journal[start:], state)
        receipts.extend(more)
    given_twice = [(each.receipt.node, each.receipt.round) for each in receipts]
    assert len(given_twice) == len(set(given_twice))
    if not splits:
        assert (state, receipts) == (whole, expected_receipts)


@given(journal=journals(), cut=st.integers(1, 12))
def test_a_cut_journal_with_adopted_receipts_repeats_none(journal: list[Fact], cut: int) -> None:
    whole, receipts = fold_all(journal)
    state, _ = fold_all(journal[:cut])
    for receipt in newest(receipts).values():
        state = adopt(state, receipt)
        assert adopt(state, receipt) == state
    totals = {node: (tally.count, tally.total_score) for node, tally in state.nodes.items()}
    assert totals == {node: (each.count, each.total_score) for node, each in whole.nodes.items()}
    again, repeated_receipts = fold_all(journal[cut:], state)
    assert repeated_receipts == []
    assert again.total_score == whole.total_score


@given(journal=journals())
def test_adopting_in_any_order_gives_the_same_accounts(journal: list[Fact]) -> None:
    start, _ = fold_all(journal[:1])
    _, receipts = fold_all(journal)
    forwards = backwards = start
    for each in receipts:
        forwards = adopt(forwards, each.receipt)
    for each in reversed(receipts):
        backwards = adopt(backwards, each.receipt)
    assert forwards == backwards


def test_a_receipt_of_another_job_is_not_adopted() -> None:
    state, _ = fold_all([job_created()])
    _, receipts = fold_all([job_created(), round_measured(0, [(ONE, 10, 10_000)])])
    foreign = msgspec.structs.replace(receipts[0].receipt, job="ab" * 32)
    assert adopt(state, foreign) is state


@given(journal=journals(is_ended=False))
def test_epochs_end_in_order_and_all_with_the_job(journal: list[Fact]) -> None:
    state: LedgerState | None = None
    ended_epochs = 0
    for fact in [*journal, JobEndedEvent(phase="stopped", reason="")]:
        state = fold(state, fact).state
        assert state.ended_epochs >= ended_epochs
        ended_epochs = state.ended_epochs
    assert state is not None
    assert state.is_over
    assert state.ended_epochs == -(-(state.last_round + 1) // 3)


def test_a_node_counts_once_in_a_round() -> None:
    twice = round_measured(0, [(ONE, 10, 10_000), (ONE, 99, 10_000), (OTHER, 5, 5_000)])
    state, receipts = fold_all([job_created(), twice])
    assert [each.receipt.samples for each in receipts] == [10, 5]
    assert state.total_score == 10 * 10_000 + 5 * 5_000
    assert state.measured_samples == 114


def test_the_escrow_follows_the_jobs_settings_and_the_price_does_not() -> None:
    state, _ = fold_all([job_created(), parameters_changed(price=1, escrow=10**18)])
    assert (state.escrow, state.unit_price) == (10**18, 1_700_003)


def test_a_journal_without_its_beginning_is_refused() -> None:
    with pytest.raises(ValueError, match="creation"):
        fold(None, JobEndedEvent(phase="stopped", reason=""))


def test_the_coordinators_events_are_the_facts() -> None:
    fact, terms_fact = round_measured(4, [(ONE, 10, 9_000)]), job_created()
    at = Milliseconds(5)
    updates = tuple(
        MeasuredUpdate(
            work.contribution, work.signature, work.quality_bps, work.evaluator, work.reason
        )
        for work in fact.updates
    )
    events: list[tuple[Event, Fact | None]] = [
        (
            JobCreated(at_ms=at, job_id=JOB, spec=spec(), terms=terms_fact.terms),
            terms_fact,
        ),
        (RoundMeasured(at_ms=at, round=4, updates=updates), fact),
        (ParametersChanged(at_ms=at, spec=spec(escrow=7)), parameters_changed(escrow=7)),
        (
            JobEnded(at_ms=at, phase="stopped", reason="asked"),
            JobEndedEvent(phase="stopped", reason="asked"),
        ),
        (NodeLost(at_ms=at, node=ONE.node_id, reason="silent"), None),
    ]
    for event, expected_fact in events:
        assert decode(type(event).__name__, msgspec.json.encode(event)) == expected_fact
    with pytest.raises(ValueError, match="JobEnded cannot be read"):
        decode("JobEnded", b"{}")


amounts = st.integers(0, 2**96 - 1).map(Wei)
prices = st.integers(1, 10**24).map(Wei)


@given(
    price=prices,
    escrow=amounts,
    done=st.lists(st.tuples(st.integers(1, 10**6), st.integers(0, 10_000)), max_size=6),
    nodes=st.integers(1, 5),
)
def test_funded_samples_never_let_the_cost_exceed_the_escrow(
    price: Wei, escrow: Wei, done: list[tuple[int, int]], nodes: int
) -> None:
    totals = [0] * nodes
    for place, (samples, quality) in enumerate(done):
        totals[place % nodes] += samples * quality
    measured_samples = Samples(sum(samples for samples, _ in done))
    funded_count = funded_samples(escrow, price, sum(totals), measured_samples)
    spent_amount = sum(worth(price, total) for total in totals)
    left_samples = funded_count - measured_samples
    if spent_amount <= escrow and left_samples:
        totals[0] += left_samples * WHOLE_BPS
        assert sum(worth(price, total) for total in totals) <= escrow
