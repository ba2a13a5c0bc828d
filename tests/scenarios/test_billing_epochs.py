"""Epochs that updates under leases over several rounds are billed in; each is paid once."""

from collections.abc import Iterator

import msgspec
import pytest
from msgspec.structs import replace

from coordinator.core.training.billing import billing_epoch, later_epoch
from coordinator.core.training.job import events
from coordinator.core.training.job.state import Job, Phase
from coordinator.core.training.plan.decision import NodePlan
from coordinator.core.training.transition import rejection, transition
from coordinator.core.work import work_events
from coordinator.core.work.work_commands import WriteRecord
from hypergpu.ids import NodeId
from hypergpu.jobfile.spec import Pay, TrainingSettings
from hypergpu.journal.events import RoundMeasuredEvent
from hypergpu.journal.measured_work import MeasuredWork
from hypergpu.journal.worth import worth
from hypergpu.units import Wei
from payments.core.ledger import Fact
from tests.properties.payments.paying_jobs import (
    INITIALISED,
    NODES,
    PRICE,
    LedgerModel,
    fold_all,
    job_created,
)
from tests.properties.payments.test_settlement import SimulatedSettlement
from tests.properties.statements import Work, contribution_of
from tests.unit.job_states import (
    ALICE,
    AWARE,
    BOB,
    after,
    at,
    fold_event,
    node_plan,
    plan_event,
    planning,
    update_event,
)

SPEC = replace(
    AWARE,
    training=TrainingSettings(rounds=12, inner_steps=2, batch_size=4, nodes=2),
    pay=Pay(rounds_per_epoch=3),
)


def open_round(number: int = 0, job: Job | None = None) -> Job:
    """A round of Alice; in round 0 Bob begins a lease over several rounds."""
    plans: dict[NodeId, NodePlan] = {ALICE: node_plan(2)}
    if number == 0:
        plans[BOB] = replace(node_plan(1), rounds=8)
    return after(job or planning(SPEC), plan_event(number, plans))


def close(job: Job) -> Job:
    """The open round with Alice's update in, being folded."""
    round_ = job.open_round
    lease = round_.participants[ALICE].lease
    event = update_event(ALICE, round_=round_.number, lease=lease, at_ms=job.at_ms + 10)
    return after(job, event)


def in_round(number: int) -> Job:
    """Bob at work under his lease of round 0 while this round is open."""
    job = open_round()
    for closed_number in range(number):
        job = after(close(job), fold_event(closed_number, at_ms=job.at_ms + 20))
        job = open_round(closed_number + 1, job)
    return job


def bobs_update(job: Job, epoch: int | None) -> events.UpdateReceived:
    """Bob's update as it comes now, signed for an epoch; None: he does not say for which."""
    event = update_event(BOB, round_=0, lease=2, at_ms=job.at_ms + 5)
    assert isinstance(event, events.UpdateReceived)
    return replace(event, update=replace(event.update, epoch=epoch))


def epoch_to_sign(job: Job, epoch: int | None) -> int | None:
    """The epoch that Bob is told to sign for instead."""
    return later_epoch(job, job.long_leases[BOB], bobs_update(job, epoch).update)


def record(job: Job) -> events.RoundMeasured:
    """What the fold of the closing round records."""
    step = transition(job, fold_event(job.open_round.number, at_ms=job.at_ms + 20))
    (measurement,) = (
        each.record
        for each in step.commands
        if isinstance(each, WriteRecord) and isinstance(each.record, events.RoundMeasured)
    )
    return measurement


def billed_epochs(job: Job) -> dict[NodeId, int]:
    """Epochs of the contributions that the fold of the closing round records."""
    return {each.contribution.node: each.contribution.epoch for each in record(job).updates}


def test_an_update_is_billed_in_the_epoch_of_the_round_that_folds_it() -> None:
    job = in_round(4)
    assert epoch_to_sign(job, 0) == 1
    assert "epoch 1 is open" in rejection(job, bobs_update(job, 0))
    job = after(job, bobs_update(job, 1))
    assert billed_epochs(close(job)) == {ALICE: 1, BOB: 1}


def test_one_that_comes_in_its_first_epoch_needs_no_other_signature() -> None:
    job = in_round(2)
    assert epoch_to_sign(job, 0) is None
    assert billed_epochs(close(after(job, bobs_update(job, 0)))) == {ALICE: 0, BOB: 0}


def test_one_that_comes_while_an_epochs_last_round_is_folded_is_of_the_next_epoch() -> None:
    job = close(in_round(2))
    assert job.phase is Phase.AGGREGATING
    assert epoch_to_sign(job, 0) == 1
    job = after(job, bobs_update(job, 1))
    assert billed_epochs(job) == {ALICE: 0}
    job = open_round(3, after(job, fold_event(2, at_ms=job.at_ms + 20)))
    assert billed_epochs(close(job)) == {ALICE: 1, BOB: 1}


@pytest.mark.parametrize("epoch", [2, 7, 2**32 - 1])
def test_no_epoch_ahead_of_the_open_one_is_taken(epoch: int) -> None:
    job = in_round(4)
    assert epoch_to_sign(job, epoch) is None
    assert "epoch 1 is open" in rejection(job, bobs_update(job, epoch))


def test_a_node_of_the_version_before_signs_for_the_epoch_that_its_lease_began_in() -> None:
    job = in_round(4)
    assert epoch_to_sign(job, None) is None
    assert billed_epochs(close(after(job, bobs_update(job, None)))) == {ALICE: 1, BOB: 0}


def test_an_update_of_the_open_round_is_of_its_epoch_alone() -> None:
    job = in_round(4)
    alice = job.open_round.participants[ALICE]
    assert billing_epoch(job, alice) == 1
    event = update_event(ALICE, round_=4, lease=alice.lease, at_ms=job.at_ms + 10)
    assert isinstance(event, events.UpdateReceived)
    early = replace(event, update=replace(event.update, epoch=0))
    assert later_epoch(job, alice, early.update) is None
    assert "epoch 1 is open" in rejection(job, early)


def test_a_job_that_stops_bills_what_had_come_in_the_epoch_that_was_signed_for() -> None:
    job = in_round(4)
    job = after(job, bobs_update(job, 1))
    step = transition(job, work_events.JobStopped(at_ms=at(job.at_ms + 10)))
    records = [each.record for each in step.commands if isinstance(each, WriteRecord)]
    (last,) = [each for each in records if isinstance(each, events.RoundMeasured)]
    assert [each.contribution.epoch for each in last.updates] == [1]


def test_an_update_that_was_journalled_without_an_epoch_is_read_as_before() -> None:
    job = in_round(1)
    body = msgspec.to_builtins(bobs_update(job, None))
    del body["update"]["epoch"]
    assert msgspec.convert(body, events.UpdateReceived) == bobs_update(job, None)


KEYS = {ALICE: NODES[0], BOB: NODES[1]}


def paid_facts(job: Job, bobs_epoch: int | None) -> Iterator[Fact]:
    """What pay sees of rounds 4 to 8, in the first of which Bob's update comes."""
    job = after(job, bobs_update(job, bobs_epoch))
    for number in range(4, 9):
        job = close(job)
        updates = tuple(
            MeasuredWork(
                # The same under keys that can sign.
                contribution_of(
                    KEYS[contribution.node],
                    Work(
                        contribution.round,
                        contribution.epoch,
                        contribution.samples,
                        each.quality_bps,
                    ),
                ),
                signature=b"signed",
                quality_bps=each.quality_bps,
                evaluator=each.evaluator,
            )
            for each in record(job).updates
            for contribution in (each.contribution,)
        )
        yield RoundMeasuredEvent(round=number, updates=updates)
        job = open_round(number + 1, after(job, fold_event(number, at_ms=job.at_ms + 20)))


@pytest.mark.parametrize("mode", ["batched", "each"])
@pytest.mark.parametrize("bobs_epoch", [1, None])
def test_whoever_comes_late_is_paid_once_and_in_the_epoch_that_is_open(
    bobs_epoch: int | None, mode: str
) -> None:
    state, _ = fold_all([job_created(), INITIALISED])
    ledger = LedgerModel(PRICE, tokens=10**20)
    settlement = SimulatedSettlement(ledger, state, mode == "each")
    for fact in paid_facts(in_round(4), bobs_epoch):
        settlement.fold(fact)
        settlement.plan()
        settlement.mine(len(settlement.queue))
    settlement.settle()
    (bobs,) = (e.receipt for e in settlement.receipts if e.receipt.node == KEYS[BOB].node_id)
    assert bobs.epoch == (0 if bobs_epoch is None else 1)
    for node, tally in settlement.state.nodes.items():
        assert tally.total_score
        assert (
            ledger.paid[node]
            == ledger.accounts[node].earned
            == worth(Wei(PRICE), tally.total_score)
        )
