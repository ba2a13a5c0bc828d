"""Which events a job accepts in which phase, and the words with which it refuses the others."""

from msgspec.structs import replace

from coordinator.core.job.events import (
    AggregateReady,
    DeadlineReached,
    EvaluationFailed,
    EvaluationReady,
    Event,
    FundingChanged,
    JobCreated,
    JobEnded,
    JobPaused,
    JobResumed,
    JobStopped,
    ModelInitialised,
    ModelLost,
    NodeDraining,
    NodeJoined,
    NodeLost,
    ParametersChanged,
    PreparationFailed,
    RoundMeasured,
    RoundPlanned,
    RoundRecorded,
    ShardHandedBack,
    UpdateReceived,
    UpdateRejected,
    UpdatesJudged,
)
from coordinator.core.job.state import ENDED, Job, Phase, WorkState
from coordinator.core.round.completion import is_done, work_samples

_LIVE = frozenset(Phase) - ENDED
_RUNNING = frozenset({Phase.WAITING, Phase.PLANNING, Phase.TRAINING, Phase.AGGREGATING})

LEGAL: dict[type, frozenset[Phase]] = {
    JobCreated: frozenset(),
    ModelInitialised: _LIVE,
    PreparationFailed: _LIVE,
    NodeJoined: _LIVE - {Phase.FINISHING},
    NodeLost: _LIVE,
    NodeDraining: _LIVE,
    RoundPlanned: frozenset({Phase.PLANNING}),
    UpdateReceived: frozenset({Phase.TRAINING, Phase.PAUSED}),
    UpdateRejected: frozenset(Phase),
    ShardHandedBack: frozenset({Phase.TRAINING, Phase.PAUSED}),
    DeadlineReached: frozenset({Phase.TRAINING}),
    AggregateReady: _LIVE,
    ModelLost: _LIVE - {Phase.PREPARING},
    EvaluationReady: frozenset(Phase),
    EvaluationFailed: frozenset(Phase),
    JobPaused: _RUNNING | {Phase.PREPARING},
    JobResumed: frozenset({Phase.PAUSED}),
    JobStopped: _LIVE,
    ParametersChanged: _LIVE - {Phase.FINISHING},
    FundingChanged: _LIVE,
    UpdatesJudged: frozenset(Phase),
    RoundRecorded: frozenset(Phase),
    RoundMeasured: frozenset(Phase),
    JobEnded: frozenset(Phase),
}
"""The phases in which an event may be legal at all. `refusal` adds what depends on the rest of the
state.
"""


_CANNOT: dict[type, str] = {
    JobPaused: "cannot be paused",
    JobResumed: "cannot be resumed",
    JobStopped: "cannot be stopped",
    ParametersChanged: "takes no new settings",
    FundingChanged: "needs no more funds",
    RoundPlanned: "plans no round now",
    UpdateReceived: "takes no updates now",
    NodeJoined: "takes no nodes now",
}


def refusal(job: Job, event: Event) -> str:
    """Why the job does not accept the event now; empty when it does."""
    if job.phase not in LEGAL[type(event)]:
        cannot = _CANNOT.get(type(event), f"has no place for {type(event).__name__}")
        return f"{job.job_id} is {job.phase.value} and {cannot}"
    match event:
        case NodeJoined() | NodeLost() | NodeDraining():
            return _membership_refusal(job, event)
        case UpdateReceived() | ShardHandedBack():
            return _work_refusal(job, event)
        case ModelInitialised() | PreparationFailed() | AggregateReady() | ModelLost():
            return _model_refusal(job, event)
        case RoundPlanned() | DeadlineReached():
            return _round_refusal(job, event)
        case ParametersChanged():
            return _parameters_refusal(job, event)
        case EvaluationReady() | EvaluationFailed() | UpdatesJudged():
            return _evaluation_refusal(job, event)
        case _:
            return ""


def _membership_refusal(job: Job, event: NodeJoined | NodeLost | NodeDraining) -> str:
    member = job.members.get(event.node)
    is_present = member is not None and member.is_present
    if isinstance(event, NodeJoined):
        return f"{event.node} is in {job.job_id} already" if is_present else ""
    if not is_present:
        return f"{event.node} is not in {job.job_id}"
    if isinstance(event, NodeDraining) and member is not None and member.is_leaving:
        return f"{event.node} is leaving {job.job_id} already"
    return ""


def _work_refusal(job: Job, event: UpdateReceived | ShardHandedBack) -> str:
    """The fence: only the newest lease of a pending participant of the open round."""
    if job.round is None or job.resume_to is Phase.AGGREGATING:
        return f"{job.job_id} has no open round"
    if event.round != job.round.number:
        return f"round {event.round} is not the open one; the job is in round {job.round.number}"
    participant = job.round.participants.get(event.node)
    if participant is None:
        return f"{event.node} has no part in round {event.round}"
    if event.lease != participant.lease:
        return f"lease {event.lease} is void; the current one is {participant.lease}"
    if participant.work is not WorkState.PENDING:
        return f"the work under lease {event.lease} is {participant.work.value} already"
    return ""


def _model_refusal(
    job: Job, event: ModelInitialised | PreparationFailed | AggregateReady | ModelLost
) -> str:
    is_preparing = Phase.PREPARING in (job.phase, job.resume_to)
    is_aggregating = Phase.AGGREGATING in (job.phase, job.resume_to)
    match event:
        case ModelInitialised() | PreparationFailed():
            is_remade = job.lost_model and job.model is not None and job.model.round == 0
            return "" if is_preparing or is_remade else f"{job.job_id} has its first model already"
        case ModelLost():
            needed = job.previous if job.lost_model else job.model
            is_needed = needed is not None and needed.blob.digest == event.model
            return "" if is_needed else "the job does not need this model now"
        case AggregateReady():
            if job.lost_model:
                is_remade = job.closed is not None and event.round == job.closed.number
                return "" if is_remade else "the damaged model is being made again first"
            is_due = is_aggregating and job.round is not None and event.round == job.round.number
            return "" if is_due else f"round {event.round} is not being aggregated"


def _evaluation_refusal(job: Job, event: EvaluationReady | EvaluationFailed | UpdatesJudged) -> str:
    if isinstance(event, UpdatesJudged):
        is_due = any(
            event.round == waiting.number and not waiting.is_ready for waiting in job.unmeasured
        )
        return "" if is_due else f"no updates of round {event.round} are to be judged"
    waiting = {model.round for model in job.evaluating}
    return "" if event.round in waiting else f"no evaluation of round {event.round} is due"


def _round_refusal(job: Job, event: RoundPlanned | DeadlineReached) -> str:
    if isinstance(event, DeadlineReached):
        return _deadline_refusal(job, event)
    number = job.model.round if job.model is not None else 0
    if event.plan.round != number:
        return f"round {event.plan.round} is not being planned; the job is in round {number}"
    return "" if event.plan.nodes else f"the plan of round {number} gives nobody work"


def _parameters_refusal(job: Job, event: ParametersChanged) -> str:
    """A job has a round to do, or it is over: rounds that are done cannot be taken back, nor can
    an escrow that nodes have worked for.
    """
    before = (job.next_spec or job.spec).escrow
    if event.spec.pay.unit_price and event.spec.escrow < before:
        return f"pay.escrow may only be raised, from {before}: what is left goes back at the end"
    if job.model is None or not is_done(replace(job, spec=event.spec)):
        return ""
    if event.spec.strategy == "aware":
        total = work_samples(event.spec)
        return (
            f"{job.tally.samples} samples are trained on, {total} would be all:"
            " training.rounds must be more, or stop the job"
        )
    done = job.model.round
    return f"{done} of its rounds are done: training.rounds must be more, or stop the job"


def _deadline_refusal(job: Job, event: DeadlineReached) -> str:
    round_ = job.round
    if round_ is None or event.round != round_.number or not round_.deadline_at_ms:
        return f"round {event.round} has no deadline now"
    if event.at_ms < round_.deadline_at_ms:
        return f"the deadline of round {event.round} is at {round_.deadline_at_ms} ms"
    if round_.is_overdue:
        return f"the deadline of round {event.round} has passed already"
    return ""
