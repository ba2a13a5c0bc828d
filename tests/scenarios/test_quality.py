"""The quality of a job's updates, step by step, and the funding that its rounds need."""

from collections.abc import Mapping

from msgspec.structs import replace

from coordinator.core.job import events
from coordinator.core.job.commands import Command, JudgeUpdates, WriteRecord
from coordinator.core.job.events import Event, JobEnded, RoundMeasured
from coordinator.core.job.state import AcceptedUpdate, Funding, Job, Phase
from coordinator.core.quality import QUEUE_MOST
from coordinator.core.round.lifecycle import outstanding
from coordinator.core.round.transition import rejection, transition
from hypergpu.ids import Address, JobId, NodeId
from hypergpu.jobfile.spec import JobSpec, Pay
from hypergpu.statements import Domain, terms_of
from tests.unit.job_states import (
    ALICE,
    AWARE,
    BOB,
    SPEC,
    after,
    at,
    evaluation_ready,
    model,
    node_plan,
    plan_event,
    update,
)

JOB = JobId("job-1")
TERMS = terms_of(Address("0x" + "c0" * 20), JOB, Domain())
FREE = replace(SPEC, pay=Pay(rounds_per_epoch=2))
PAID = replace(SPEC, pay=Pay(unit_price=1_000, rounds_per_epoch=2, judged=0))
"""A round is 8 samples of each of two nodes."""
JUDGED = replace(PAID, pay=replace(PAID.pay, judged=1))


def with_alice(spec: JobSpec, funding: Funding | None = None) -> Job:
    """A job that waits for its second node."""
    return after(
        None,
        events.JobCreated(at_ms=at(0), job_id=JOB, spec=spec, terms=TERMS, funding=funding),
        events.ModelInitialised(
            at_ms=at(10), model=model(0), partition_sizes=(SPEC.stated_samples,)
        ),
        events.NodeJoined(at_ms=at(20), node=ALICE),
    )


def training(spec: JobSpec, funding: Funding | None = None) -> Job:
    return after(with_alice(spec, funding), events.NodeJoined(at_ms=at(30), node=BOB))


def signed_update(node: NodeId, round_: int) -> AcceptedUpdate:
    """An update with its sender's signature and nonce."""
    return replace(update(f"update-{node}-{round_}"), nonce=round_ + 1, signature=node.encode())


def sent_update(job: Job, node: NodeId) -> Event:
    """The update that a participant owes."""
    assert job.round is not None
    number, lease = job.round.number, job.round.participants[node].lease
    return events.UpdateReceived(
        at_ms=at(50), node=node, round=number, lease=lease, update=signed_update(node, number)
    )


def fold_event(number: int, **agreements: float) -> Event:
    """A round's fold, with how far each node's update agrees with the others."""
    named = {NodeId(name): cosine for name, cosine in agreements.items()}
    return events.AggregateReady(
        at_ms=at(60), round=number, model=model(number + 1), agreements=named
    )


def with_both(job: Job) -> Job:
    """Both updates of the open round are in."""
    job = after(job, sent_update(job, ALICE))
    return after(job, sent_update(job, BOB))


def records_of(commands: tuple[Command, ...]) -> list[RoundMeasured | JobEnded]:
    return [
        command.record
        for command in commands
        if isinstance(command, WriteRecord) and isinstance(command.record, RoundMeasured | JobEnded)
    ]


def measured_of(commands: tuple[Command, ...]) -> list[RoundMeasured]:
    return [record for record in records_of(commands) if isinstance(record, RoundMeasured)]


def funding_event(samples: int | None, reason: str = "") -> Event:
    return events.FundingChanged(at_ms=at(90), funded_samples=samples, reason=reason)


def test_a_folded_round_records_each_update_with_what_its_node_signed() -> None:
    job = with_both(training(FREE))
    step = transition(job, fold_event(0, alice=0.5, bob=0.5))
    (record,) = measured_of(step.commands)
    assert (record.round, len(record.updates)) == (0, 2)
    assert [each.contribution.node for each in record.updates] == [ALICE, BOB]
    assert [each.quality_bps for each in record.updates] == [10_000, 10_000]
    first = record.updates[0]
    assert first.signature == b"alice"
    assert (first.contribution.lease, first.contribution.nonce) == (1, 1)
    assert (first.contribution.model, first.contribution.update) == ("model-0", "update-alice-0")
    assert (first.contribution.samples, first.contribution.inner_steps) == (8, 2)

    again = transition(with_both(step.job), fold_event(1, alice=0.5, bob=0.1))
    (later,) = measured_of(again.commands)
    assert later.round == 1
    assert later.updates[1].quality_bps < later.updates[0].quality_bps


def test_an_update_that_was_unreadable_is_not_recorded() -> None:
    job = with_both(training(FREE))
    ready = replace(fold_event(0, alice=0.5), omitted=((BOB, "damaged"),))
    (record,) = measured_of(transition(job, ready).commands)
    assert [each.contribution.node for each in record.updates] == [ALICE]


def test_an_update_of_a_later_round_belongs_to_its_epoch() -> None:
    job = training(FREE)
    for number in range(3):
        step = transition(with_both(job), fold_event(number))
        (record,) = measured_of(step.commands)
        assert {each.contribution.epoch for each in record.updates} == {number // 2}
        job = step.job


def test_a_job_that_has_ended_says_so_once_after_its_last_round() -> None:
    job = training(PAID)
    for number in range(3):
        job = after(with_both(job), fold_event(number))
    assert job.phase is Phase.FINISHING
    step = transition(after(job, evaluation_ready(2)), evaluation_ready(3))
    (end,) = records_of(step.commands)
    assert end == JobEnded(at_ms=at(90), phase="finished", reason="all rounds are done")
    assert step.job.is_over


def test_updates_that_a_stopped_job_accepted_and_never_folds_are_recorded_too() -> None:
    job = training(PAID)
    job = after(job, sent_update(job, ALICE))
    step = transition(job, events.JobStopped(at_ms=at(70)))
    record, end = records_of(step.commands)
    assert isinstance(record, RoundMeasured)
    assert [each.contribution.node for each in record.updates] == [ALICE]
    assert record.updates[0].evaluator == "quality/2 unmeasured"
    assert isinstance(end, JobEnded)
    assert end.phase == "stopped"


def test_a_job_stopped_before_any_work_only_ends() -> None:
    (end,) = records_of(transition(with_alice(PAID), events.JobStopped(at_ms=at(70))).commands)
    assert isinstance(end, JobEnded)


def test_the_next_round_does_not_wait_for_a_judge() -> None:
    step = transition(with_both(training(JUDGED)), fold_event(0, alice=0.5, bob=0.5))
    assert step.job.phase is Phase.TRAINING
    assert records_of(step.commands) == []
    (judge,) = [each for each in step.commands if isinstance(each, JudgeUpdates)]
    assert (judge.base, judge.made) == (model(0).blob, model(1).blob)
    assert len(judge.updates) == 1
    assert judge in outstanding(step.job)


def test_judged_updates_are_recorded_once_the_judge_has_answered() -> None:
    step = transition(with_both(training(JUDGED)), fold_event(0, alice=0.5, bob=0.5))
    (judge,) = [each for each in step.commands if isinstance(each, JudgeUpdates)]
    node = judge.updates[0].node
    answer = events.UpdatesJudged(
        at_ms=at(80), round=0, base_loss=1.0, made_loss=0.8, losses={node: 1.2}
    )
    found = transition(step.job, answer)
    (record,) = measured_of(found.commands)
    assert {each.evaluator for each in record.updates} == {"quality/2 agreement"}
    (trial,) = found.job.trials
    assert (trial.node, trial.part) == (node, 0.0)
    assert judge not in outstanding(found.job)
    assert rejection(found.job, answer) == "no updates of round 0 are to be judged"


def judged_rounds(count: int, own_loss: Mapping[NodeId, float]) -> list[RoundMeasured]:
    """Rounds that take the loss from 1.0 to 0.8, with each node's loss by its update alone."""
    training_ = replace(JUDGED.training, rounds=count + 1)
    job = training(replace(JUDGED, training=training_))
    records = []
    for number in range(count):
        step = transition(with_both(job), fold_event(number, alice=0.5, bob=0.5))
        (judge,) = [each for each in step.commands if isinstance(each, JudgeUpdates)]
        losses = {update.node: own_loss[update.node] for update in judge.updates}
        answer = events.UpdatesJudged(
            at_ms=at(80), round=number, base_loss=1.0, made_loss=0.8, losses=losses
        )
        step = transition(step.job, answer)
        job = step.job
        records += measured_of(step.commands)
    return records


def test_equals_have_equal_quality_in_every_round_whoever_of_them_is_judged() -> None:
    records = judged_rounds(8, {ALICE: 0.96, BOB: 0.96})
    assert len(records) == 8
    for record in records:
        assert [update.quality_bps for update in record.updates] == [10_000, 10_000]
    assert records[-1].updates[0].evaluator == "quality/2 agreement+held-out"


def test_a_node_that_a_judge_finds_worthless_has_less_in_unjudged_rounds_too() -> None:
    last = judged_rounds(12, {ALICE: 0.9, BOB: 1.0})[-1]
    quality = {each.contribution.node: each.quality_bps for each in last.updates}
    assert quality[BOB] < quality[ALICE] / 2


def test_a_judge_that_gives_up_leaves_what_else_is_known() -> None:
    job = after(with_both(training(JUDGED)), fold_event(0, alice=0.5, bob=0.5))
    gone = events.UpdatesJudged(at_ms=at(80), round=0, reason="the evaluator died")
    (record,) = measured_of(transition(job, gone).commands)
    assert {each.evaluator for each in record.updates} == {"quality/2 agreement"}


def test_rounds_are_recorded_in_order_whatever_the_order_of_the_judges_answers() -> None:
    job = training(JUDGED)
    for number in range(3):
        step = transition(with_both(job), fold_event(number, alice=0.5, bob=0.5))
        assert records_of(step.commands) == []
        job = step.job
    judging = [each.round for each in outstanding(job) if isinstance(each, JudgeUpdates)]
    assert judging == [0, 1]  # A judge that is behind leaves round 2 out.

    late = transition(job, events.UpdatesJudged(at_ms=at(80), round=1, reason="gone"))
    assert records_of(late.commands) == []
    step = transition(late.job, events.UpdatesJudged(at_ms=at(90), round=0, reason="gone"))
    assert [record.round for record in measured_of(step.commands)] == [0, 1, 2]


def test_a_judge_that_never_answers_is_not_waited_for_forever() -> None:
    training_ = replace(JUDGED.training, rounds=QUEUE_MOST + 2)
    job = training(replace(JUDGED, training=training_))
    recorded: list[int] = []
    for number in range(QUEUE_MOST + 1):
        step = transition(with_both(job), fold_event(number))
        job = step.job
        recorded += [record.round for record in measured_of(step.commands)]
    assert recorded == [0]
    late = events.UpdatesJudged(at_ms=at(80), round=0, base_loss=1.0)
    assert rejection(job, late) == "no updates of round 0 are to be judged"


def test_an_ended_job_waits_for_its_judge_before_it_is_over() -> None:
    job = after(with_both(training(JUDGED)), fold_event(0))
    stopped = transition(job, events.JobStopped(at_ms=at(70)))
    assert records_of(stopped.commands) == []
    gone = events.UpdatesJudged(at_ms=at(80), round=0, reason="gone")
    kinds = [type(each) for each in records_of(transition(stopped.job, gone).commands)]
    assert kinds == [RoundMeasured, JobEnded]


def test_a_paid_job_waits_until_its_first_round_is_funded() -> None:
    job = training(PAID, Funding(0, "the escrow is not on the ledger yet"))
    assert (job.phase, job.round) == (Phase.WAITING, None)
    assert job.reason == (
        "round 0 has 16 samples, 0 more are funded: the escrow is not on the ledger yet"
    )
    short = after(job, funding_event(15, "the escrow pays for 15 samples"))
    assert short.phase is Phase.WAITING
    assert short.reason.endswith("15 more are funded: the escrow pays for 15 samples")
    assert after(short, funding_event(16)).phase is Phase.TRAINING
    assert after(short, funding_event(None)).phase is Phase.TRAINING


def test_a_round_that_is_not_funded_waits_and_an_open_one_goes_on() -> None:
    job = after(training(PAID), funding_event(20, "the escrow is used up"))
    assert job.phase is Phase.TRAINING
    job = after(with_both(job), fold_event(0))
    assert job.phase is Phase.WAITING
    assert job.reason == "round 1 has 16 samples, 4 more are funded: the escrow is used up"
    again = after(job, events.JobPaused(at_ms=at(80)), events.JobResumed(at_ms=at(90)))
    assert again.phase is Phase.WAITING
    assert after(job, funding_event(32)).phase is Phase.TRAINING


def test_a_planned_round_that_is_not_funded_waits_too() -> None:
    spec = replace(AWARE, pay=PAID.pay)
    job = training(spec, Funding(3, "too little"))
    job = after(job, plan_event(0, {ALICE: node_plan(), BOB: node_plan()}))
    assert (job.phase, job.round) == (Phase.WAITING, None)
    assert after(job, funding_event(16)).phase is Phase.PLANNING


def test_an_ended_job_takes_no_funds() -> None:
    stopped = after(training(PAID), events.JobStopped(at_ms=at(70)))
    assert rejection(stopped, funding_event(10)) == "job-1 is stopped and needs no more funds"


def test_an_escrow_is_never_lowered() -> None:
    less = replace(PAID, pay=replace(PAID.pay, escrow=PAID.escrow - 1))
    change = events.ParametersChanged(at_ms=at(90), spec=less)
    assert rejection(training(PAID), change) == (
        "pay.escrow may only be raised, from 480: what is left goes back at the end"
    )
