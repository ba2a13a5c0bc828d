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
- A shard is either with a node, covered by an accepted update, orphaned within its round, or back
  in its stream. Samples are never dropped.
- Only updates that are in speak for a node. A round waits for nobody who is late, and for those who
  are on trial only while the job has patience; neither counts for a quorum (see `waiting`).
- No round waits for a lease over several rounds; the round that closes after its update came folds
  it (see `long_leases`).
- Members keep their slots for ever. Slots key data, seeds and the order of folding; node ids do
  not.
- Each accepted update is recorded with its quality once, in the order of rounds, after its round is
  folded.
- A round opens only if the job's funding covers it; else the job waits, with the reason.
- A pause voids nothing that was accepted: on resume the same shards go out again under new leases.
"""

from collections.abc import Callable

from msgspec.structs import replace

from coordinator.core.training import evaluation_steps, event_steps
from coordinator.core.training.assignment import JobStep, is_done
from coordinator.core.training.billing import epoch_rejection
from coordinator.core.training.job import events
from coordinator.core.training.job.events import Event
from coordinator.core.training.job.state import ENDED, Job, Participant, Phase
from coordinator.core.training.job.trust_memory import PayMemory, TrustMemory
from coordinator.core.training.lifecycle import open_planned_round, pause_job
from coordinator.core.training.outstanding import initialise_model
from coordinator.core.training.trust.quality import record_quality
from coordinator.core.work import work_events
from coordinator.core.work.leases import lease_rejection
from coordinator.core.work.members import membership_rejection
from hypergpu.units import round_text

_LIVE = frozenset(Phase) - ENDED
_WITH_WORK = frozenset({Phase.TRAINING, Phase.PAUSED})
_RUNNING = frozenset({Phase.WAITING, Phase.PLANNING, Phase.TRAINING, Phase.AGGREGATING})

LEGAL: dict[type, frozenset[Phase]] = {
    events.JobCreated: frozenset(),
    events.ModelInitialised: _LIVE,
    events.PreparationFailed: _LIVE,
    work_events.NodeJoined: _LIVE - {Phase.FINISHING},
    work_events.NodeLost: _LIVE,
    work_events.NodeDraining: _LIVE,
    work_events.NodePaused: _LIVE,
    work_events.NodeReadmitted: _LIVE,
    events.RoundPlanned: frozenset({Phase.PLANNING}),
    events.UpdateReceived: _RUNNING | {Phase.PAUSED},
    events.UpdateRejected: frozenset(Phase),
    events.ShardHandedBack: _RUNNING | {Phase.PAUSED},
    events.DeadlineReached: frozenset({Phase.TRAINING}),
    events.AggregateReady: _LIVE,
    events.ModelLost: _LIVE - {Phase.PREPARING},
    events.EvaluationReady: frozenset(Phase),
    events.EvaluationFailed: frozenset(Phase),
    work_events.JobPaused: _RUNNING | {Phase.PREPARING},
    work_events.JobResumed: frozenset({Phase.PAUSED}),
    work_events.JobStopped: _LIVE,
    events.ParametersChanged: _LIVE - {Phase.FINISHING},
    work_events.FundingChanged: _LIVE,
    work_events.CoordinatorChanged: _LIVE,
    events.MemoryFitted: frozenset(Phase),
    events.RoundRecorded: frozenset(Phase),
    events.RoundMeasured: frozenset(Phase),
    work_events.JobEnded: frozenset(Phase),
}
"""The phases in which an event may be legal at all. `rejection` looks at the rest of the state."""


_CANNOT: dict[type, str] = {
    work_events.JobPaused: "cannot be paused",
    work_events.JobResumed: "cannot be resumed",
    work_events.JobStopped: "cannot be stopped",
    events.ParametersChanged: "takes no new settings",
    work_events.FundingChanged: "needs no more funds",
    events.RoundPlanned: "plans no round now",
    events.UpdateReceived: "takes no updates now",
    work_events.NodeJoined: "takes no nodes now",
}


def rejection(job: Job, event: Event) -> str:
    """Why the job does not accept the event now; empty when it does."""
    if job.phase not in LEGAL[type(event)]:
        cannot = _CANNOT.get(type(event), f"has no place for {type(event).__name__}")
        return f"{job.job_id} is {job.phase.value} and {cannot}"
    match event:
        case (
            work_events.NodeJoined()
            | work_events.NodeLost()
            | work_events.NodeDraining()
            | work_events.NodePaused()
            | work_events.NodeReadmitted()
        ):
            return membership_rejection(job, event)
        case events.UpdateReceived() | events.ShardHandedBack():
            return _work_rejection(job, event)
        case (
            events.ModelInitialised()
            | events.PreparationFailed()
            | events.AggregateReady()
            | events.ModelLost()
        ):
            return _model_rejection(job, event)
        case events.RoundPlanned() | events.DeadlineReached():
            return _round_rejection(job, event)
        case events.ParametersChanged():
            return _parameters_rejection(job, event)
        case events.EvaluationReady() | events.EvaluationFailed():
            return _evaluation_rejection(job, event)
        case _:
            return ""


def _work_rejection(job: Job, event: events.UpdateReceived | events.ShardHandedBack) -> str:
    """The fence: only the newest lease of a participant of the open round whose work is open, or a
    lease over several rounds.
    """
    long_lease = job.long_leases.get(event.node)
    if (
        long_lease is not None
        and long_lease.base is not None
        and event.round == long_lease.base.round
    ):
        return _lease_rejection(job, long_lease, event)
    if job.phase not in _WITH_WORK:
        return f"{job.job_id} is {job.phase.value} and {_CANNOT[events.UpdateReceived]}"
    if job.round is None or job.resume_to is Phase.AGGREGATING:
        return f"{job.job_id} has no open round"
    if event.round != job.round.number:
        open_round = round_text(job.round.number)
        return f"{round_text(event.round)} is not the open one; the job is in {open_round}"
    participant = job.round.participants.get(event.node)
    if participant is None:
        return f"{event.node} has no part in {round_text(event.round)}"
    return _lease_rejection(job, participant, event)


def _lease_rejection(
    job: Job, participant: Participant, event: events.UpdateReceived | events.ShardHandedBack
) -> str:
    if reason := lease_rejection(participant, event.lease):
        return reason
    if isinstance(event, events.UpdateReceived):
        return epoch_rejection(job, participant, event.update)
    return ""


def _model_rejection(
    job: Job,
    event: events.ModelInitialised
    | events.PreparationFailed
    | events.AggregateReady
    | events.ModelLost,
) -> str:
    match event:
        case events.ModelInitialised() | events.PreparationFailed():
            is_remade = job.lost_model and job.model is not None and job.model.round == 0
            is_due = is_remade or job.active_phase is Phase.PREPARING
            return "" if is_due else f"{job.job_id} has its first model already"
        case events.ModelLost():
            needed_model = job.previous if job.lost_model else job.model
            is_needed = needed_model is not None and needed_model.blob.digest == event.model
            return "" if is_needed else "the job does not need this model now"
        case events.AggregateReady():
            if job.lost_model:
                is_remade = job.closed is not None and event.round == job.closed.number
                return "" if is_remade else "the damaged model is being made again first"
            is_aggregating = job.active_phase is Phase.AGGREGATING
            is_due = is_aggregating and event.round == job.open_round.number
            return "" if is_due else f"{round_text(event.round)} is not being aggregated"


def _evaluation_rejection(job: Job, event: events.EvaluationReady | events.EvaluationFailed) -> str:
    waiting_rounds = {model.round for model in job.evaluating}
    return "" if event.round in waiting_rounds else f"no evaluation of round {event.round} is due"


def _round_rejection(job: Job, event: events.RoundPlanned | events.DeadlineReached) -> str:
    if isinstance(event, events.DeadlineReached):
        return _deadline_rejection(job, event)
    number = job.model.round if job.model is not None else 0
    if event.plan.round != number:
        planned_round = round_text(event.plan.round)
        return f"{planned_round} is not being planned; the job is in {round_text(number)}"
    return "" if event.plan.nodes else f"the plan of {round_text(number)} gives nobody work"


def _parameters_rejection(job: Job, event: events.ParametersChanged) -> str:
    """A job has a round to do, or it is over: rounds that are done cannot be taken back, nor can
    an escrow that nodes have worked for.
    """
    before = (job.next_spec or job.spec).escrow
    if event.spec.pay.unit_price and event.spec.escrow < before:
        return f"pay.escrow may only be raised, from {before}: what is left goes back at the end"
    if job.model is None or not is_done(replace(job, spec=event.spec)):
        return ""
    if event.spec.strategy == "aware":
        total = event.spec.stated_samples
        return (
            f"{job.tally.samples} samples are trained on, {total} would be all:"
            " training.rounds must be more, or stop the job"
        )
    done_rounds = job.model.round
    return f"{done_rounds} of its rounds are done: training.rounds must be more, or stop the job"


def _deadline_rejection(job: Job, event: events.DeadlineReached) -> str:
    round_ = job.round
    if round_ is None or event.round != round_.number or not round_.timer_at_ms:
        return f"{round_text(event.round)} has no deadline now"
    if event.at_ms < round_.timer_at_ms:
        return f"the deadline of {round_text(event.round)} is at {round_.timer_at_ms} ms"
    return ""


_STEPS: dict[type, Callable[..., JobStep]] = {
    work_events.NodeJoined: event_steps.add_node,
    work_events.NodeLost: event_steps.lose_node,
    work_events.NodeDraining: event_steps.drain_node,
    work_events.NodePaused: event_steps.pause_node,
    work_events.NodeReadmitted: event_steps.readmit_node,
    events.UpdateReceived: event_steps.receive_update,
    events.UpdateRejected: event_steps.count_rejection,
    events.ShardHandedBack: event_steps.take_back_shard,
    events.DeadlineReached: event_steps.note_deadline,
    work_events.JobPaused: pause_job,
    work_events.JobResumed: event_steps.resume_job,
    work_events.JobStopped: event_steps.stop_job,
    events.ParametersChanged: event_steps.change_parameters,
    work_events.FundingChanged: event_steps.change_funding,
    work_events.CoordinatorChanged: event_steps.note_restart,
    events.ModelInitialised: event_steps.take_first_model,
    events.PreparationFailed: event_steps.fail_preparation,
    events.AggregateReady: event_steps.take_next_model,
    events.ModelLost: event_steps.remake_model,
    events.EvaluationReady: evaluation_steps.keep_score,
    events.EvaluationFailed: evaluation_steps.skip_score,
    events.RoundPlanned: lambda job, event: open_planned_round(job, event.plan),
}
"""The step of each event. Records change nothing."""


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
        weights=event.weights,
        terms=event.terms,
        owner=event.owner,
        at_ms=event.at_ms,
        funding=event.funding,
        trust=TrustMemory(
            by_own_samples=event.judges_own_samples,
            pay=PayMemory() if event.tries_updates else None,
            unseen={} if event.counts_looks else None,
            use_least=event.use_least,
        ),
    )
    return JobStep(job, (initialise_model(job),))
