"""Receipts and pay of a job, step by step."""

from collections.abc import Mapping

from msgspec.structs import replace

from coordinator.core import events
from coordinator.core.commands import Command, JudgeUpdates, RecordPay
from coordinator.core.events import EpochEnded, Event, RoundMetered
from coordinator.core.job import Job, LedgerSays, Phase, Update
from coordinator.core.metering.accounts import (
    account_of,
    owed_at_most,
    owed_beyond,
    settled_at_most,
)
from coordinator.core.metering.budget import beyond_ledger, coming_cost, round_cost
from coordinator.core.round.outstanding import outstanding
from coordinator.core.transition import refusal, transition
from hypergpu.ids import Address, JobId, NodeId
from hypergpu.jobfile.spec import JobSpec, Pay
from hypergpu.ledger.terms import terms_of
from hypergpu.ledger.typed import Domain
from hypergpu.units import Wei
from tests.unit.job_states import ALICE, BOB, SPEC, after, at, evaluation_ready, model, update

JOB = JobId("job-1")
TERMS = terms_of(Address("0x" + "c0" * 20), JOB, Domain())
FREE = replace(SPEC, pay=Pay(rounds_per_epoch=2))
PAID = replace(SPEC, pay=Pay(unit_price=1_000, rounds_per_epoch=2, judged=0))
"""A round is 8 samples of each of two nodes: it costs 160 at most, and the job 480."""
JUDGED = replace(PAID, pay=replace(PAID.pay, judged=1))


def opened(spec: JobSpec) -> Job:
    """Round 0 with Alice under lease 1 and Bob under lease 2."""
    created = events.JobCreated(at_ms=at(0), job_id=JOB, spec=spec, terms=TERMS)
    return after(
        None,
        created,
        events.ModelInitialised(at_ms=at(10), model=model(0), partition_sizes=()),
    )


def with_alice(spec: JobSpec) -> Job:
    """A job that waits for its second node."""
    return after(
        None,
        events.JobCreated(at_ms=at(0), job_id=JOB, spec=spec, terms=TERMS),
        events.ModelInitialised(
            at_ms=at(10), model=model(0), partition_sizes=(SPEC.stated_samples,)
        ),
        events.NodeJoined(at_ms=at(20), node=ALICE),
    )


def training(spec: JobSpec) -> Job:
    return after(with_alice(spec), events.NodeJoined(at_ms=at(30), node=BOB))


def signed(node: NodeId, round_: int) -> Update:
    """An update with its sender's word, and its nonce."""
    return replace(update(f"update-{node}-{round_}"), nonce=round_ + 1, signature=node.encode())


def sent(job: Job, node: NodeId) -> Event:
    """The update that a participant owes."""
    assert job.round is not None
    number, lease = job.round.number, job.round.participants[node].lease
    return events.UpdateReceived(
        at_ms=at(50), node=node, round=number, lease=lease, update=signed(node, number)
    )


def folded(number: int, **agreements: float) -> Event:
    """A round's fold, with how far each node's update agrees with the others."""
    named = {NodeId(name): cosine for name, cosine in agreements.items()}
    return events.AggregateReady(
        at_ms=at(60), round=number, model=model(number + 1), agreements=named
    )


def with_both(job: Job) -> Job:
    """Both updates of the open round are in."""
    job = after(job, sent(job, ALICE))
    return after(job, sent(job, BOB))


def pay_of(commands: tuple[Command, ...]) -> list[RoundMetered | EpochEnded]:
    return [command.record for command in commands if isinstance(command, RecordPay)]


def test_a_folded_round_gives_each_update_the_next_receipt_of_its_node() -> None:
    job = with_both(training(FREE))
    step = transition(job, folded(0, alice=0.5, bob=0.5))
    (record,) = pay_of(step.commands)
    assert isinstance(record, RoundMetered)
    assert [each.due.contribution.node for each in record.updates] == [ALICE, BOB]
    assert [each.sequence for each in record.updates] == [0, 0]
    assert [each.quality_bps for each in record.updates] == [10_000, 10_000]
    first = record.updates[0].due
    assert first.signature == b"alice"
    assert (first.contribution.lease, first.contribution.nonce) == (1, 1)
    assert (first.contribution.model, first.contribution.update) == ("model-0", "update-alice-0")
    assert (first.contribution.samples, first.contribution.inner_steps) == (8, 2)

    again = transition(with_both(step.job), folded(1, alice=0.5, bob=0.1))
    later = pay_of(again.commands)[0]
    assert isinstance(later, RoundMetered)
    assert [each.sequence for each in later.updates] == [1, 1]
    assert later.updates[1].quality_bps < later.updates[0].quality_bps


def test_an_update_that_was_unreadable_has_no_receipt() -> None:
    job = with_both(training(FREE))
    ready = replace(folded(0, alice=0.5), refused=((BOB, "damaged"),))
    (record,) = pay_of(transition(job, ready).commands)
    assert isinstance(record, RoundMetered)
    assert [each.due.contribution.node for each in record.updates] == [ALICE]


def test_an_epoch_is_over_when_the_job_has_left_it() -> None:
    job = after(with_both(training(PAID)), folded(0, alice=0.5, bob=0.5))
    step = transition(with_both(job), folded(1, alice=0.5, bob=0.5))
    metered, ended = pay_of(step.commands)
    assert isinstance(metered, RoundMetered)
    assert isinstance(ended, EpochEnded)
    assert (ended.epoch, ended.is_last) == (0, False)
    assert ended.scores == {ALICE: 160_000, BOB: 160_000}
    assert (ended.pool, ended.rewards) == (320, {ALICE: 160, BOB: 160})
    assert step.job.metering.spent == 320
    assert account_of(step.job.metering, ALICE).vouched == 160


def test_the_end_of_a_job_ends_its_last_epoch() -> None:
    job = after(with_both(training(PAID)), folded(0), *())
    job = after(with_both(job), folded(1))
    step = transition(with_both(job), folded(2))
    assert step.job.phase is Phase.FINISHING
    _, ended = pay_of(step.commands)
    assert isinstance(ended, EpochEnded)
    assert (ended.epoch, ended.is_last) == (1, True)
    assert step.job.metering.is_over
    assert step.job.metering.spent == PAID.escrow
    done = after(step.job, evaluation_ready(2), evaluation_ready(3))
    assert done.metering == step.job.metering


def test_what_a_stopped_job_accepted_and_never_folds_is_owed_a_receipt_too() -> None:
    job = training(PAID)
    job = after(job, sent(job, ALICE))
    step = transition(job, events.JobStopped(at_ms=at(70)))
    metered, ended = pay_of(step.commands)
    assert isinstance(metered, RoundMetered)
    assert [each.due.contribution.node for each in metered.updates] == [ALICE]
    assert metered.updates[0].evaluator == "quality/2 unmeasured"
    assert isinstance(ended, EpochEnded)
    assert (ended.is_last, ended.rewards) == (True, {ALICE: 80})
    account = account_of(step.job.metering, ALICE)
    assert account.vouched == account.earned == owed_at_most(step.job) == 80


def test_a_job_stopped_before_any_work_ends_an_empty_epoch() -> None:
    (ended,) = pay_of(transition(opened(PAID), events.JobStopped(at_ms=at(70))).commands)
    assert isinstance(ended, EpochEnded)
    assert (ended.epoch, ended.is_last, ended.rewards) == (0, True, {})


def test_the_guaranteed_part_is_vouched_for_as_soon_as_an_update_is_in() -> None:
    job = training(PAID)
    job = after(job, sent(job, ALICE))
    assert account_of(job.metering, ALICE).vouched == 8
    assert account_of(job.metering, BOB).vouched == 0


def test_a_voucher_stands_still_where_the_quality_was_below_what_was_guaranteed() -> None:
    job = after(with_both(training(PAID)), folded(0, alice=0.0, bob=0.5))
    assert account_of(job.metering, ALICE).vouched == 8
    assert account_of(job.metering, ALICE).receipts == 1
    job = after(job, sent(job, ALICE))
    assert account_of(job.metering, ALICE).vouched == 8


def test_the_next_round_does_not_wait_for_a_judge() -> None:
    step = transition(with_both(training(JUDGED)), folded(0, alice=0.5, bob=0.5))
    assert step.job.phase is Phase.TRAINING
    assert pay_of(step.commands) == []
    (judge,) = [each for each in step.commands if isinstance(each, JudgeUpdates)]
    assert (judge.base, judge.made) == (model(0).blob, model(1).blob)
    assert len(judge.updates) == 1
    assert judge in outstanding(step.job)


def test_judged_updates_have_their_receipts_once_the_judge_has_answered() -> None:
    step = transition(with_both(training(JUDGED)), folded(0, alice=0.5, bob=0.5))
    (judge,) = [each for each in step.commands if isinstance(each, JudgeUpdates)]
    node = judge.updates[0].node
    answer = events.UpdatesJudged(
        at_ms=at(80), round=0, base_loss=1.0, made_loss=0.8, losses={node: 1.2}
    )
    found = transition(step.job, answer)
    (record,) = pay_of(found.commands)
    assert isinstance(record, RoundMetered)
    assert {each.evaluator for each in record.updates} == {"quality/2 agreement"}
    (trial,) = found.job.metering.trials
    assert (trial.node, trial.part) == (node, 0.0)
    assert outstanding(found.job) == outstanding(after(found.job))
    assert refusal(found.job, answer) == "no updates of round 0 are to be judged"


def judged_rounds(count: int, own_loss: Mapping[NodeId, float]) -> list[RoundMetered]:
    """Rounds that take the loss from 1.0 to 0.8, what a node's update alone does given for each."""
    training_ = replace(JUDGED.training, rounds=count + 1)
    job = training(replace(JUDGED, training=training_))
    records = []
    for number in range(count):
        step = transition(with_both(job), folded(number, alice=0.5, bob=0.5))
        (judge,) = [each for each in step.commands if isinstance(each, JudgeUpdates)]
        losses = {update.node: own_loss[update.node] for update in judge.updates}
        answer = events.UpdatesJudged(
            at_ms=at(80), round=number, base_loss=1.0, made_loss=0.8, losses=losses
        )
        step = transition(step.job, answer)
        job = step.job
        records += [each for each in pay_of(step.commands) if isinstance(each, RoundMetered)]
    return records


def test_equals_have_equal_quality_in_every_round_whoever_of_them_is_judged() -> None:
    records = judged_rounds(8, {ALICE: 0.96, BOB: 0.96})
    assert len(records) == 8
    for record in records:
        assert [update.quality_bps for update in record.updates] == [10_000, 10_000]
    assert records[-1].updates[0].evaluator == "quality/2 agreement+held-out"


def test_whoever_a_judge_finds_worthless_has_less_in_rounds_too_in_which_nobody_looks() -> None:
    last = judged_rounds(12, {ALICE: 0.9, BOB: 1.0})[-1]
    quality = {each.due.contribution.node: each.quality_bps for each in last.updates}
    assert quality[BOB] < quality[ALICE] / 2


def test_a_judge_that_gives_up_leaves_what_else_is_known() -> None:
    job = after(with_both(training(JUDGED)), folded(0, alice=0.5, bob=0.5))
    gone = events.UpdatesJudged(at_ms=at(80), round=0, reason="the evaluator died")
    (record,) = pay_of(transition(job, gone).commands)
    assert isinstance(record, RoundMetered)
    assert {each.evaluator for each in record.updates} == {"quality/2 agreement"}


def test_a_judge_that_falls_behind_leaves_rounds_out_and_their_epoch_waits() -> None:
    job = after(with_both(training(JUDGED)), folded(0, alice=0.5, bob=0.5))
    job = after(with_both(job), folded(1, alice=0.5, bob=0.5))
    step = transition(with_both(job), folded(2, alice=0.5, bob=0.5))
    (record,) = pay_of(step.commands)
    assert isinstance(record, RoundMetered)
    assert record.round == 2
    assert [waiting.number for waiting in step.job.metering.unmeasured] == [0, 1]

    job = after(step.job, events.UpdatesJudged(at_ms=at(80), round=1, reason="gone"))
    ends = transition(job, events.UpdatesJudged(at_ms=at(90), round=0, reason="gone"))
    kinds = [(type(each).__name__, each.epoch) for each in pay_of(ends.commands)]
    assert kinds == [("RoundMetered", 0), ("EpochEnded", 0), ("EpochEnded", 1)]
    assert ends.job.metering.is_over


def test_a_round_that_the_escrow_might_not_cover_is_not_opened() -> None:
    spec = replace(PAID, pay=replace(PAID.pay, escrow=300))
    job = after(with_both(training(spec)), folded(0, alice=0.5, bob=0.5))
    assert job.phase is Phase.PAUSED
    assert job.reason == (
        "the escrow of 300 does not cover the next round: up to 160 is owed and the round may cost"
        " 160; raise it for all rounds that are left with as many nodes, hypergpu job set"
        " pay.escrow=480, and hypergpu job resume job-1"
    )
    raised = events.ParametersChanged(
        at_ms=at(90), spec=replace(spec, pay=replace(spec.pay, escrow=320))
    )
    job = after(job, raised, events.JobResumed(at_ms=at(95)))
    assert job.phase is Phase.TRAINING


def test_a_round_that_the_ledger_has_no_pay_for_is_not_opened() -> None:
    last = replace(folded(0, alice=0.5, bob=0.5), ledger=LedgerSays(left=Wei(160), height=7))
    assert after(with_both(training(PAID)), last).phase is Phase.TRAINING
    short = replace(last, ledger=LedgerSays(left=Wei(100), height=7))
    job = after(with_both(training(PAID)), short)
    assert job.phase is Phase.PAUSED
    assert job.reason == (
        "the escrow of job-1 has 100 left on the ledger (block 7), 60 less than the round may cost;"
        " raise it for all rounds that are left with as many nodes, hypergpu job set"
        " pay.escrow=700, and hypergpu job resume job-1"
    )
    again = events.JobResumed(at_ms=at(95), ledger=LedgerSays(left=Wei(160), height=9))
    assert after(job, again).phase is Phase.TRAINING


def test_a_job_that_nobody_is_going_to_pay_for_begins_no_round() -> None:
    shut = LedgerSays(closed="job-1 cannot be opened on the ledger")
    joined = events.NodeJoined(at_ms=at(30), node=BOB, ledger=shut)
    job = after(with_alice(PAID), joined)
    assert (job.phase, job.round) == (Phase.PAUSED, None)
    assert job.reason == "job-1 cannot be opened on the ledger"
    # Whoever resumes it before that is mended is told the same again.
    job = after(job, events.JobResumed(at_ms=at(40), ledger=shut))
    assert job.phase is Phase.PAUSED
    assert after(with_alice(FREE), joined).phase is Phase.TRAINING
    assert after(job, events.JobResumed(at_ms=at(50))).phase is Phase.TRAINING


def test_a_job_whose_end_is_announced_begins_no_round_and_ends_the_one_that_is_open() -> None:
    ending = LedgerSays(left=Wei(10**6), height=7, ending="the end of job-1 is announced")
    job = training(PAID)
    assert beyond_ledger(job, ending, coming_cost(job)) == ""
    job = after(with_both(job), replace(folded(0, alice=0.5, bob=0.5), ledger=ending))
    assert (job.phase, job.round) == (Phase.PAUSED, None)
    assert job.reason.endswith("the end of job-1 is announced")
    resumed = events.JobResumed(at_ms=at(95), ledger=ending)
    assert after(job, resumed).phase is Phase.PAUSED
    over = replace(ending, closed="job-1 has ended", ending="")
    open_round = training(PAID)
    assert beyond_ledger(open_round, over, coming_cost(open_round)) == "job-1 has ended"


def test_what_is_counted_of_a_node_is_off_what_it_is_owed_and_no_other() -> None:
    job = after(with_both(training(PAID)), folded(0, alice=0.5, bob=0.5))
    assert settled_at_most(job) == {ALICE: 80, BOB: 80}
    both = with_both(job)
    assert owed_at_most(both) == owed_beyond(both, {}) == 320
    assert owed_beyond(both, settled_at_most(job)) == 160
    # Alice has redeemed what was an advance on the open round.
    assert owed_beyond(both, {ALICE: 100, BOB: 80}) == 140
    assert owed_beyond(both, {ALICE: 500, BOB: 80}) == 80


def test_an_open_round_wants_pay_for_what_has_not_come_yet() -> None:
    job = training(PAID)
    assert coming_cost(job) == round_cost(job) == 160
    job = after(job, sent(job, ALICE))
    assert (coming_cost(job), round_cost(job)) == (80, 160)
    told = LedgerSays(left=Wei(50), height=7)
    assert beyond_ledger(job, told, coming_cost(job)).startswith(
        "the escrow of job-1 has 50 left on the ledger (block 7), 30 less than the round may cost"
    )
    assert beyond_ledger(with_both(training(PAID)), told, Wei(0)) == ""


def test_an_escrow_is_not_taken_back_once_it_is_owed() -> None:
    job = after(with_both(training(PAID)), folded(0, alice=0.5, bob=0.5))
    assert owed_at_most(job) == 160
    less = events.ParametersChanged(
        at_ms=at(90), spec=replace(PAID, pay=replace(PAID.pay, escrow=159))
    )
    assert refusal(job, less) == "up to 160 is owed already: pay.escrow must be that at least"


def test_a_job_that_an_older_version_created_has_no_receipts() -> None:
    job = replace(training(FREE), terms=None)
    assert pay_of(transition(with_both(job), folded(0)).commands) == []
