"""Follows each step of the round machine and records the quality of updates in round order.

Theory of operation. When a round is folded, the quality of its updates is known but for a judge's
findings on held-out data, which training does not wait for. Such rounds queue in `Job.unmeasured`.
The front of the queue is recorded (`RoundMeasured`) as soon as its judgement is there or was given
up, together with the event that led to it: a replay gives the same records, each once. A job that
ends within a round measures what it had accepted of that round without folding it. `JobEnded`
follows the last record.
"""

from msgspec.structs import replace

from coordinator.core.job.commands import Command, WriteRecord
from coordinator.core.job.events import (
    AggregateReady,
    Event,
    JobEnded,
    MeasuredUpdate,
    RoundMeasured,
    UpdatesJudged,
)
from coordinator.core.job.state import (
    ENDED,
    DueUpdate,
    Job,
    Judgement,
    Round,
    UnmeasuredRound,
    WorkState,
)
from coordinator.core.quality.contributions import contribution
from coordinator.core.quality.judging import draw_judged, judging_commands
from coordinator.core.quality.measurement import add_trials, update_qualities
from hypergpu.ids import Digest, NodeId
from hypergpu.units import Milliseconds

QUEUE_MOST = 8
"""A judge that holds up so many rounds is not waited for any longer."""


def record_quality(before: Job, event: Event, job: Job) -> tuple[Job, tuple[Command, ...]]:
    """Queue what a step closed or a judge found, and record what is final.

    Args:
        before: The job before the event.
        event: A legal event.
        job: The job as the round machine left it.

    Returns:
        The job, with commands that judge updates or write records.
    """
    if job.is_over:
        return job, ()
    commands: tuple[Command, ...] = ()
    if isinstance(event, AggregateReady) and not before.lost_model:
        job = _queue_folded(job, event.agreements)
        commands = judging_commands(job)[-1:] if job.unmeasured[-1].judged else ()
    elif isinstance(event, UpdatesJudged):
        job = _add_judgement(job, event)
    if job.phase in ENDED and before.phase not in ENDED:
        job = _queue_open_round(job)
    job, records = _record_ready(job)
    if job.phase in ENDED and not job.unmeasured:
        end = JobEnded(at_ms=job.at_ms, phase=job.phase.value, reason=job.reason)
        records = (*records, WriteRecord(end))
        job = replace(job, is_over=True)
    return job, (*commands, *records)


def _queue_folded(job: Job, agreements: dict[NodeId, float]) -> Job:
    """Queue the round that has just become a model."""
    round_, base, made = job.closed, job.previous, job.model
    if round_ is None or base is None or made is None:
        raise AssertionError("a folded round has made a model")
    due = _due_updates(job, round_, base.blob.digest, agreements)
    judged = draw_judged(job, round_)
    waiting = UnmeasuredRound(round_.number, base.blob, made.blob, due, judged)
    return replace(job, unmeasured=(*job.unmeasured, waiting))


def _queue_open_round(job: Job) -> Job:
    """Queue what an ended job accepted in the round that it never folds."""
    round_, model = job.round, job.model
    if round_ is None or model is None:
        return job
    if not (due := _due_updates(job, round_, model.blob.digest, {})):
        return job
    waiting = UnmeasuredRound(round_.number, model.blob, model.blob, due)
    return replace(job, unmeasured=(*job.unmeasured, waiting))


def _add_judgement(job: Job, event: UpdatesJudged) -> Job:
    judgement = Judgement(event.base_loss, event.made_loss, event.losses)
    queue = tuple(
        replace(waiting, judgement=judgement) if waiting.number == event.round else waiting
        for waiting in job.unmeasured
    )
    return replace(job, unmeasured=queue)


def _record_ready(job: Job) -> tuple[Job, tuple[Command, ...]]:
    """Record rounds from the front of the queue until one waits for a judge."""
    queue, trials = job.unmeasured, job.trials
    records: list[Command] = []
    while queue and (queue[0].is_ready or len(queue) > QUEUE_MOST):
        waiting, queue = queue[0], queue[1:]
        trials = add_trials(trials, waiting)
        found = update_qualities(waiting, trials)
        updates = tuple(
            MeasuredUpdate(
                contribution=due.contribution,
                signature=due.signature,
                quality_bps=found[node].bps,
                evaluator=found[node].evaluator,
                reason=found[node].reason,
            )
            for node, due in waiting.due.items()
        )
        record = RoundMeasured(at_ms=job.at_ms, round=waiting.number, updates=updates)
        records.append(WriteRecord(record))
    return replace(job, unmeasured=queue, trials=trials), tuple(records)


def _due_updates(
    job: Job, round_: Round, base: Digest, agreements: dict[NodeId, float]
) -> dict[NodeId, DueUpdate]:
    received = [
        (participant.slot, node, participant, participant.update)
        for node, participant in round_.participants.items()
        if participant.work is WorkState.RECEIVED and participant.update is not None
    ]
    return {
        node: DueUpdate(
            contribution=contribution(job.terms, round_, base, node, update),
            signature=update.signature,
            took_ms=participant.took_ms,
            allowed_ms=_allowed_ms(round_, participant.assigned_at_ms),
            agreement=agreements.get(node),
        )
        for _, node, participant, update in sorted(received, key=lambda each: each[:2])
    }


def _allowed_ms(round_: Round, assigned_at_ms: Milliseconds) -> Milliseconds:
    return Milliseconds(max(0, round_.deadline_at_ms - assigned_at_ms))
