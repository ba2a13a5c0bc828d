"""The round machine: one job, advanced one event at a time.

Theory of operation. A job is prepared (the evaluator makes the first model), waits for its nodes,
and then repeats: a round opens and every present node gets a shard under a fresh lease; updates
arrive; the round closes; its updates are folded into the next model. A closing round never reopens.
With the strategy ``aware`` each round is planned first, outside of the machine, by what was
measured of its nodes; the plan comes back as an event, so that a replay needs no measurements.
After the last round the final model is evaluated and the job is finished.

Rules that hold in every phase:

- An event that is not legal changes nothing. `rejection` gives the reason, in the words that the
  sender, the log and the tests see.
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

from collections.abc import Callable

from msgspec.structs import replace

from coordinator.core.job import events
from coordinator.core.job.commands import InitialiseModel
from coordinator.core.job.events import Event
from coordinator.core.job.state import Job
from coordinator.core.quality.records import record_quality
from coordinator.core.round import control_events, model_events, node_events
from coordinator.core.round.assigning import JobStep
from coordinator.core.round.legality import rejection
from coordinator.core.round.opening import open_planned_round

__all__ = ["JobStep", "rejection", "transition"]


def _open_as_planned(job: Job, event: events.RoundPlanned) -> JobStep:
    return open_planned_round(job, event.plan)


_STEPS: dict[type, Callable[..., JobStep]] = {
    events.NodeJoined: node_events.add_node,
    events.NodeLost: node_events.lose_node,
    events.NodeDraining: node_events.drain_node,
    events.UpdateReceived: node_events.receive_update,
    events.UpdateRejected: node_events.count_rejection,
    events.ShardHandedBack: node_events.take_back_shard,
    events.DeadlineReached: control_events.note_deadline,
    events.JobPaused: control_events.pause_job,
    events.JobResumed: control_events.resume_job,
    events.JobStopped: control_events.stop_job,
    events.ParametersChanged: control_events.change_parameters,
    events.FundingChanged: control_events.change_funding,
    events.ModelInitialised: model_events.take_first_model,
    events.PreparationFailed: model_events.fail_preparation,
    events.AggregateReady: model_events.take_next_model,
    events.ModelLost: model_events.remake_model,
    events.EvaluationReady: model_events.keep_score,
    events.EvaluationFailed: model_events.skip_score,
    events.RoundPlanned: _open_as_planned,
}
"""The step of each event. Records, and findings of judges, change nothing but the quality."""


def transition(job: Job | None, event: Event) -> JobStep:
    """Advance the job by one event.

    Args:
        job: None only for `JobCreated`.
        event: The event, with ``at_ms`` no earlier than the job's.

    Returns:
        The next state and the commands to perform once the event is persisted. An illegal event
        gives the same state and no commands.

    Raises:
        ValueError: ``job`` is None and the event is not `JobCreated`.
    """
    if job is None:
        if not isinstance(event, events.JobCreated):
            raise ValueError(f"a journal begins with JobCreated, not {type(event).__name__}")
        return _create_job(event)
    if rejection(job, event):
        return JobStep(job)
    now = replace(job, at_ms=max(job.at_ms, event.at_ms))
    advance = _STEPS.get(type(event))
    step = advance(now, event) if advance else JobStep(now)
    after, records = record_quality(job, event, step.job)
    return JobStep(after, (*step.commands, *records))


def _create_job(event: events.JobCreated) -> JobStep:
    job = Job(
        job_id=event.job_id,
        spec=event.spec,
        manifest=event.manifest,
        terms=event.terms,
        at_ms=event.at_ms,
        funding=event.funding,
    )
    return JobStep(job, (InitialiseModel(job.job_id, job.spec, job.manifest),))
