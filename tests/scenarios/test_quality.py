"""The quality of a job's updates, step by step, and the funding that its rounds need."""

from msgspec.structs import replace

from coordinator.core.training.job import events
from coordinator.core.training.job.commands import Aggregate, AssignShard, Command
from coordinator.core.training.job.events import Event, RoundMeasured
from coordinator.core.training.job.state import AcceptedUpdate, Job, Phase
from coordinator.core.training.job.trust_memory import TrustMemory, Weighing
from coordinator.core.training.outstanding import outstanding
from coordinator.core.training.transition import rejection, transition
from coordinator.core.training.trust.quality import RULE
from coordinator.core.training.trust.weights import BAN_AFTER, NEWCOMER
from coordinator.core.work import work_events
from coordinator.core.work.funding import Funding
from coordinator.core.work.work_commands import WriteRecord
from coordinator.core.work.work_events import JobEnded
from hypergpu.ids import Address, JobId, NodeId
from hypergpu.jobfile.spec import JobSpec, Pay
from hypergpu.ledger_terms import Domain, terms_of
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
PAID = replace(SPEC, pay=Pay(unit_price=1_000, rounds_per_epoch=2))
"""A round is 8 samples of each of two nodes."""
DOUBTED = TrustMemory(weights={ALICE: 65_536, BOB: 0}, rounds=5)
"""Bob's updates have helped nobody."""


def with_alice(spec: JobSpec, funding: Funding | None = None) -> Job:
    """A job that waits for its second node."""
    return after(
        None,
        events.JobCreated(at_ms=at(0), job_id=JOB, spec=spec, terms=TERMS, funding=funding),
        events.ModelInitialised(
            at_ms=at(10), model=model(0), partition_sizes=(SPEC.stated_samples,)
        ),
        work_events.NodeJoined(at_ms=at(20), node=ALICE),
    )


def training(spec: JobSpec, funding: Funding | None = None) -> Job:
    return after(with_alice(spec, funding), work_events.NodeJoined(at_ms=at(30), node=BOB))


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


def fold_event(number: int, *, memory: TrustMemory | None = None, **votes: int) -> Event:
    """A round's fold, with votes in 1/65,536 of updates that did not count in full."""
    votes_by_node = {NodeId(name): vote for name, vote in votes.items()}
    weighing = Weighing(
        clips={},
        votes=votes_by_node,
        reasons=dict.fromkeys(votes_by_node, "it helped less"),
        memory=memory or TrustMemory(rounds=number + 1),
    )
    return events.AggregateReady(
        at_ms=at(60), round=number, model=model(number + 1), weighing=weighing
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
    return work_events.FundingChanged(at_ms=at(90), funded_units=samples, reason=reason)


def test_a_folded_round_records_each_update_with_what_its_node_signed() -> None:
    job = with_both(training(FREE))
    step = transition(job, fold_event(0))
    (record,) = measured_of(step.commands)
    assert (record.round, len(record.updates)) == (0, 2)
    assert [each.contribution.node for each in record.updates] == [ALICE, BOB]
    assert [each.quality_bps for each in record.updates] == [10_000, 10_000]
    first = record.updates[0]
    assert first.signature == b"alice"
    assert (first.contribution.lease, first.contribution.nonce) == (1, 1)
    assert (first.contribution.model, first.contribution.update) == ("model-0", "update-alice-0")
    assert (first.contribution.samples, first.contribution.inner_steps) == (8, 2)

    again = transition(with_both(step.job), fold_event(1, bob=16_384))
    (later,) = measured_of(again.commands)
    assert later.round == 1
    assert [each.quality_bps for each in later.updates] == [10_000, 2_500]
    assert [each.reason for each in later.updates] == ["it counted in full", "it helped less"]
    assert {each.evaluator for each in later.updates} == {RULE}


def test_an_update_that_was_unreadable_is_not_recorded() -> None:
    job = with_both(training(FREE))
    ready = replace(fold_event(0), omitted=((BOB, "damaged"),))
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


def test_an_update_that_came_late_earns_less_whatever_it_was_worth() -> None:
    job = with_both(training(FREE))
    assert job.round is not None
    allowed_ms = job.round.deadline_at_ms - job.round.participants[BOB].assigned_at_ms
    assert allowed_ms == 1_000
    late = replace(job.round.participants[BOB], took_ms=at(1_500))
    job = replace(job, round=replace(job.round, participants={**job.round.participants, BOB: late}))
    (record,) = measured_of(transition(job, fold_event(0, bob=32_768)).commands)
    assert [each.quality_bps for each in record.updates] == [10_000, 3_750]
    assert record.updates[1].reason == "it helped less; 500 ms after the deadline"


def test_a_round_is_recorded_once_also_when_its_model_is_made_again() -> None:
    step = transition(with_both(training(FREE)), fold_event(0))
    assert len(measured_of(step.commands)) == 1
    job = after(step.job, events.ModelLost(at_ms=at(70), model=model(1).blob.digest, reason="x"))
    (again,) = [each for each in outstanding(job) if isinstance(each, Aggregate)]
    assert job.closed is not None
    assert again.weighing == job.closed.weighing
    assert records_of(transition(job, fold_event(0)).commands) == []


def test_the_next_round_is_weighed_by_what_this_one_taught() -> None:
    job = after(with_both(training(FREE)), fold_event(0, memory=DOUBTED, bob=0))
    assert job.trust == DOUBTED
    assert job.closed is not None
    assert job.closed.weighing is not None
    assert job.closed.weighing.votes == {BOB: 0}
    step = transition(after(job, sent_update(job, ALICE)), sent_update(job, BOB))
    (fold,) = [each for each in step.commands if isinstance(each, Aggregate)]
    assert (fold.trust, fold.weighing) == (DOUBTED, None)
    assert (fold.fallback, [each.node for each in fold.makers]) == (model(0), [ALICE, BOB])


def test_a_model_that_the_job_went_back_to_has_neither_makers_nor_a_fallback() -> None:
    job = after(with_both(training(FREE)), fold_event(0))
    back = fold_event(1, bob=0)
    assert isinstance(back, events.AggregateReady)
    assert back.weighing is not None
    weighing = replace(back.weighing, rollback="the held-out loss is not finite")
    back = replace(back, weighing=weighing, model=replace(model(0), round=2))
    step = transition(with_both(job), back)
    (record,) = measured_of(step.commands)
    assert [each.quality_bps for each in record.updates] == [10_000, 0]
    assert (step.job.phase, step.job.newest_model.blob) == (Phase.TRAINING, model(0).blob)

    step = transition(after(step.job, sent_update(step.job, ALICE)), sent_update(step.job, BOB))
    (fold,) = [each for each in step.commands if isinstance(each, Aggregate)]
    assert (fold.base.round, fold.fallback, fold.makers) == (2, None, ())


def test_a_node_is_told_with_its_next_work_how_its_update_was_judged() -> None:
    step = transition(with_both(training(FREE)), fold_event(0, bob=16_384))
    judgements = {
        each.node: each.assignment.judgement
        for each in step.commands
        if isinstance(each, AssignShard)
    }
    assert judgements == {
        ALICE: "",
        BOB: "round #1: counts 0.25 in the fold, is paid 0.25: it helped less",
    }
    step = transition(with_both(step.job), fold_event(1))
    assert {it.assignment.judgement for it in step.commands if isinstance(it, AssignShard)} == {""}


LONG = replace(FREE, training=replace(FREE.training, rounds=40))


def with_useless_rounds(job: Job, count: int) -> Job:
    """So many rounds in which Bob's update speaks clearly against him."""
    for _ in range(count):
        assert job.round is not None
        fold = fold_event(job.round.number, bob=0)
        assert isinstance(fold, events.AggregateReady)
        assert fold.weighing is not None
        weighing = replace(fold.weighing, useless=(BOB,))
        job = after(with_both(job), replace(fold, weighing=weighing))
    return job


def test_a_node_whose_updates_are_useless_again_and_again_is_banned_with_the_reason() -> None:
    before = with_useless_rounds(training(LONG), BAN_AFTER - 1)
    assert not before.members[BOB].ban
    job = with_useless_rounds(before, 1)
    assert "it helped less" in job.members[BOB].ban
    assert job.round is not None
    assert set(job.round.participants) == {ALICE}
    assert job.round.resting[BOB] == job.members[BOB].ban


def test_a_low_vote_alone_bans_nobody_and_one_useful_update_starts_the_count_anew() -> None:
    job = with_useless_rounds(training(LONG), BAN_AFTER - 1)
    assert job.round is not None
    job = after(with_both(job), fold_event(job.round.number, bob=0))
    assert job.members[BOB].useless == 0
    assert not with_useless_rounds(job, BAN_AFTER - 1).members[BOB].ban


def test_a_banned_node_that_is_readmitted_works_again_as_a_newcomer() -> None:
    banned_job = with_useless_rounds(training(LONG), BAN_AFTER)
    readmission = work_events.NodeReadmitted(at_ms=at(70), node=BOB)
    job = after(banned_job, readmission)
    assert job.trust.weights[BOB] == NEWCOMER
    assert rejection(job, readmission) == f"{BOB} is not banned from {job.job_id}"
    assert job.round is not None
    job = after(job, sent_update(job, ALICE))
    job = after(job, fold_event(job.newest_model.round))
    assert job.round is not None
    assert set(job.round.participants) == {ALICE, BOB}


def test_updates_that_a_stopped_job_accepted_and_never_folds_are_recorded_too() -> None:
    job = training(PAID)
    job = after(job, sent_update(job, ALICE))
    step = transition(job, work_events.JobStopped(at_ms=at(70)))
    record, end = records_of(step.commands)
    assert isinstance(record, RoundMeasured)
    assert [each.contribution.node for each in record.updates] == [ALICE]
    assert record.updates[0].quality_bps == 10_000
    assert isinstance(end, JobEnded)
    assert end.phase == "stopped"
    assert step.job.is_over


def test_an_open_round_that_is_never_folded_is_measured_by_what_is_known_of_its_nodes() -> None:
    job = after(with_both(training(PAID)), fold_event(0, memory=DOUBTED))
    step = transition(with_both(job), work_events.JobStopped(at_ms=at(70)))
    record, end = records_of(step.commands)
    assert isinstance(record, RoundMeasured)
    assert isinstance(end, JobEnded)
    assert [each.quality_bps for each in record.updates] == [10_000, 0]
    assert [each.reason for each in record.updates] == ["it counted in full", "its earlier updates"]


def test_a_job_stopped_before_any_work_only_ends() -> None:
    (end,) = records_of(transition(with_alice(PAID), work_events.JobStopped(at_ms=at(70))).commands)
    assert isinstance(end, JobEnded)


def test_a_paid_job_waits_until_its_first_round_is_funded() -> None:
    job = training(PAID, Funding(0, "the escrow is not on the ledger yet"))
    assert (job.phase, job.round) == (Phase.WAITING, None)
    assert job.reason == (
        "round #1 has 16 samples, 0 more are funded: the escrow is not on the ledger yet"
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
    assert job.reason == "round #2 has 16 samples, 4 more are funded: the escrow is used up"
    again = after(job, work_events.JobPaused(at_ms=at(80)), work_events.JobResumed(at_ms=at(90)))
    assert again.phase is Phase.WAITING
    assert after(job, funding_event(32)).phase is Phase.TRAINING


def test_a_planned_round_that_is_not_funded_waits_too() -> None:
    spec = replace(AWARE, pay=PAID.pay)
    job = training(spec, Funding(3, "too little"))
    job = after(job, plan_event(0, {ALICE: node_plan(), BOB: node_plan()}))
    assert (job.phase, job.round) == (Phase.WAITING, None)
    assert after(job, funding_event(16)).phase is Phase.PLANNING


def test_an_ended_job_takes_no_funds() -> None:
    stopped_job = after(training(PAID), work_events.JobStopped(at_ms=at(70)))
    assert rejection(stopped_job, funding_event(10)) == "job-1 is stopped and needs no more funds"


def test_an_escrow_is_never_lowered() -> None:
    less = replace(PAID, pay=replace(PAID.pay, escrow=PAID.escrow - 1))
    change = events.ParametersChanged(at_ms=at(90), spec=less)
    assert rejection(training(PAID), change) == (
        "pay.escrow may only be raised, from 480: what is left goes back at the end"
    )
