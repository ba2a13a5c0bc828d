"""Evaluations before, during and at the end of a job, and targets that they reach."""

from typing import Any

from msgspec.structs import replace

from coordinator.core.training.assignment import JobStep
from coordinator.core.training.evaluation_steps import needs_evaluator
from coordinator.core.training.job import events
from coordinator.core.training.job.commands import EvaluateModel
from coordinator.core.training.job.events import Event
from coordinator.core.training.job.state import Job, Phase
from coordinator.core.training.outstanding import outstanding
from coordinator.core.training.transition import transition
from coordinator.core.work import work_events
from hypergpu.ids import Digest
from hypergpu.jobfile.spec import Evaluation
from hypergpu.units import Samples
from tests.unit.job_states import (
    ALICE,
    BOB,
    SPEC,
    after,
    aggregating,
    at,
    fold_event,
    model,
    new_job,
    only,
)


def begin_job(**rule: Any) -> JobStep:
    """A job whose first model was just made by this version."""
    spec = replace(SPEC, evaluation=Evaluation(**rule))
    first = events.ModelInitialised(
        at_ms=at(10),
        model=model(0),
        partition_sizes=(Samples(100),),
        target_mode="max",
        is_evaluated=True,
        notes=("trained on rows.jsonl",),
    )
    return transition(new_job(spec), first)


def begin_training(job: Job) -> Job:
    """The job in its first round."""
    joins = (work_events.NodeJoined(at_ms=at(20), node=node) for node in (ALICE, BOB))
    return after(job, *joins)


def score(number: int, metric: float, name: str = "accuracy", *, of: int = 50) -> Event:
    return events.EvaluationReady(
        at_ms=at(200),
        round=number,
        model=Digest(f"model-{number}"),
        loss=1.0,
        metric=metric,
        metric_name=name,
        samples=min(of, 50),
        samples_all=of,
    )


def after_a_round(**rule: Any) -> Job:
    """A job whose first model is being evaluated."""
    spec = replace(SPEC, evaluation=Evaluation(every=1, **rule))
    return after(replace(aggregating(), spec=spec), fold_event(0))


def test_the_first_model_is_evaluated_whole_while_nodes_train() -> None:
    step = begin_job(every=2, samples=7)
    command = only(step.commands, EvaluateModel)
    assert (command.round, command.samples_most) == (0, 0)
    job = begin_training(step.job)
    assert job.phase is Phase.TRAINING
    assert only(outstanding(job), EvaluateModel) == command
    judged_job = after(job, score(0, 0.1))
    assert judged_job.best is not None
    assert (judged_job.best.round, judged_job.best.samples) == (0, 50)
    assert judged_job.notes == ("trained on rows.jsonl",)


def test_evaluations_between_the_first_and_the_last_measure_the_stated_samples() -> None:
    job = after_a_round(samples=7)
    assert only(outstanding(job), EvaluateModel).samples_most == 7
    last = replace(job, spec=replace(job.spec, training=replace(job.spec.training, rounds=1)))
    assert only(outstanding(last), EvaluateModel).samples_most == 0


def test_the_last_model_of_a_planned_job_is_measured_whole_whatever_its_round() -> None:
    job = after_a_round(samples=7)
    planned_job = replace(job, spec=replace(job.spec, strategy="aware"))
    stated_tally = replace(planned_job.tally, samples=planned_job.spec.stated_samples)
    assert (
        only(outstanding(replace(planned_job, tally=stated_tally)), EvaluateModel).samples_most == 0
    )
    one_round = replace(planned_job.spec, training=replace(planned_job.spec.training, rounds=1))
    short = replace(planned_job.tally, samples=Samples(0))
    early = replace(planned_job, spec=one_round, tally=short)
    assert only(outstanding(early), EvaluateModel).samples_most == 7


def test_a_target_that_the_first_model_reaches_pauses_the_job() -> None:
    job = begin_training(begin_job(every=1, target=1.0).job)
    step = transition(job, score(0, 41.9, "mae"))
    assert step.job.phase is Phase.PAUSED
    assert step.job.reason.startswith(
        "the target is reached before any training: mae is 41.9, and the target is 1 or more"
    )
    resumed_job = after(step.job, work_events.JobResumed(at_ms=at(300)))
    assert resumed_job.phase is Phase.TRAINING


def test_a_stated_mode_decides_what_reaches_a_target() -> None:
    job = after_a_round(target=1.0, target_mode="min")
    assert transition(job, score(1, 41.9, "cost")).job.phase is not Phase.FINISHED
    assert transition(job, score(1, 0.9, "cost")).job.phase is Phase.FINISHED


def test_jobs_of_older_versions_keep_the_rule_that_they_began_with() -> None:
    job = after_a_round(target=1.0)
    assert transition(job, score(1, 41.9, "mae")).job.phase is Phase.FINISHED
    falling_job = replace(job, target_mode="min")
    assert transition(falling_job, score(1, 41.9, "mae")).job.phase is not Phase.FINISHED


def test_a_target_that_some_samples_reach_is_confirmed_on_all() -> None:
    job = after_a_round(target=0.9, samples=50)
    step = transition(job, score(1, 0.95, of=400))
    assert step.job.phase is not Phase.FINISHED
    assert only(step.commands, EvaluateModel).samples_most == 0
    assert only(outstanding(step.job), EvaluateModel).samples_most == 0
    whole = replace(score(1, 0.85, of=400), samples=400)
    missed_job = after(step.job, whole)
    assert missed_job.phase is not Phase.FINISHED
    assert missed_job.score is not None
    assert (missed_job.score.metric, missed_job.evaluating_whole) == (0.85, ())
    good_score = replace(score(1, 0.92, of=400), samples=400)
    assert transition(step.job, good_score).job.phase is Phase.FINISHED


def test_a_finished_jobs_models_are_still_measured_and_a_stopped_jobs_are_not() -> None:
    job = after_a_round()
    (waiting_model,) = job.evaluating
    assert needs_evaluator(job)
    stopped_job = after(job, work_events.JobStopped(at_ms=at(300)))
    assert stopped_job.evaluating
    assert not needs_evaluator(stopped_job)
    finished_job = replace(job, phase=Phase.FINISHED)
    assert needs_evaluator(finished_job)
    assert not needs_evaluator(after(finished_job, score(waiting_model.round, 0.5)))
