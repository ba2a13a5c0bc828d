"""The round machine: one job, advanced one event at a time.

Theory of operation. A job is prepared (the evaluator makes the first model), waits for its nodes,
and then repeats: a round opens and every present node gets a shard under a fresh lease; updates
arrive; the round closes; its updates are folded into the next model. A closing round never reopens.
With the strategy ``aware`` each round is planned first, outside of the machine, by what was
measured of its nodes; the plan comes back as an event, so that a replay needs no measurements.
After the last round the final model is evaluated and the job is finished.

Rules that hold in every phase:

- An event that is not legal changes nothing. `refusal` says why, in the words that the sender, the
  log and the tests see.
- An update counts only under its participant's newest lease, so a shard that was given to somebody
  else cannot come back twice.
- A shard is either pending, covered by an accepted update, orphaned within its round, or back in
  its stream. Samples are never dropped.
- Members keep their slots for ever. Slots key data, seeds and the order of folding; node ids do
  not.
- Each accepted update is recorded with its quality once, in the order of rounds, after its round is
  folded; training does not wait for that.
- A round opens only if the job's funding covers it; else the job waits, with the reason.
- A pause voids nothing that was accepted: on resume the same shards go out again under new leases.
"""

from msgspec.structs import replace

from coordinator.core.job.commands import InitialiseModel
from coordinator.core.job.events import (
    AggregateReady,
    ControlEvent,
    DeadlineReached,
    EvaluationFailed,
    EvaluationReady,
    Event,
    FundingChanged,
    JobCreated,
    JobPaused,
    JobResumed,
    JobStopped,
    ModelEvent,
    ModelInitialised,
    ModelLost,
    NodeDraining,
    NodeEvent,
    NodeJoined,
    NodeLost,
    ParametersChanged,
    PreparationFailed,
    RoundPlanned,
    ShardHandedBack,
    UpdateReceived,
    UpdateRejected,
)
from coordinator.core.job.state import Job
from coordinator.core.quality.records import record_quality
from coordinator.core.round import control, membership, models
from coordinator.core.round.legality import refusal
from coordinator.core.round.rounds import JobStep, open_planned_round

__all__ = ["JobStep", "refusal", "transition"]


def transition(job: Job | None, event: Event) -> JobStep:
    """Advance the job by one event.

    Args:
        job: None only for `JobCreated`.
        event: What happened, with ``at_ms`` no earlier than the job's.

    Returns:
        The next state and the commands to perform once the event is persisted. An illegal event
        gives the same state and no commands.

    Raises:
        ValueError: ``job`` is None and the event is not `JobCreated`.
    """
    if job is None:
        if not isinstance(event, JobCreated):
            raise ValueError(f"a journal begins with JobCreated, not {type(event).__name__}")
        return _create_job(event)
    if refusal(job, event):
        return JobStep(job)
    step = _advance(replace(job, at_ms=max(job.at_ms, event.at_ms)), event)
    after, records = record_quality(job, event, step.job)
    return JobStep(after, (*step.commands, *records))


def _create_job(event: JobCreated) -> JobStep:
    job = Job(
        job_id=event.job_id,
        spec=event.spec,
        manifest=event.manifest,
        terms=event.terms,
        at_ms=event.at_ms,
        funding=event.funding,
    )
    return JobStep(job, (InitialiseModel(job.job_id, job.spec, job.manifest),))


def _advance(job: Job, event: Event) -> JobStep:
    if isinstance(event, NodeEvent):
        return _node_step(job, event)
    if isinstance(event, ControlEvent):
        return _control_step(job, event)
    if isinstance(event, ModelEvent):
        return _model_step(job, event)
    if isinstance(event, RoundPlanned):
        return open_planned_round(job, event.plan)
    return JobStep(job)


def _node_step(job: Job, event: NodeEvent) -> JobStep:
    match event:
        case NodeJoined():
            return membership.add_node(job, event)
        case NodeLost():
            return membership.lose_node(job, event)
        case NodeDraining():
            return membership.drain_node(job, event)
        case UpdateReceived():
            return membership.receive_update(job, event)
        case UpdateRejected():
            return membership.count_rejection(job)
        case ShardHandedBack():
            return membership.take_back_shard(job, event)


def _control_step(job: Job, event: ControlEvent) -> JobStep:
    match event:
        case DeadlineReached():
            return control.note_deadline(job)
        case JobPaused():
            return control.pause_job(job, event)
        case JobResumed():
            return control.resume_job(job)
        case JobStopped():
            return control.stop_job(job)
        case ParametersChanged():
            return control.change_parameters(job, event)
        case FundingChanged():
            return control.change_funding(job, event)


def _model_step(job: Job, event: ModelEvent) -> JobStep:
    match event:
        case ModelInitialised():
            return models.take_first_model(job, event)
        case PreparationFailed():
            return models.fail_preparation(job, event)
        case AggregateReady():
            return models.take_next_model(job, event)
        case ModelLost():
            return models.remake_model(job, event)
        case EvaluationReady():
            return models.keep_score(job, event)
        case EvaluationFailed():
            return models.skip_score(job, event)
