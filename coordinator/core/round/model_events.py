"""Events of the evaluator and the aggregation: models made, models lost, models measured."""

from collections import Counter

from msgspec.structs import replace

from coordinator.core.job import events
from coordinator.core.job.commands import EvaluateModel, WriteRecord
from coordinator.core.job.state import (
    ENDED,
    Job,
    Model,
    ModelScore,
    Participant,
    Phase,
    Round,
    Stream,
    WorkState,
)
from coordinator.core.round.assigning import JobStep, replace_participants
from coordinator.core.round.closing import close_if_due, end_job
from coordinator.core.round.completion import is_done
from coordinator.core.round.opening import open_round
from coordinator.core.round.outstanding import outstanding, remake
from coordinator.core.round.shards import return_samples
from hypergpu.units import Bytes, Milliseconds, Samples
from hypergpu.workloads.entry import has_reached

_UNDER_WAY = frozenset(Phase) - ENDED - {Phase.PREPARING, Phase.FINISHING}
_EVALUATIONS_WAITING = 2  # a slow evaluator skips models rather than fall behind without end


def take_first_model(job: Job, event: events.ModelInitialised) -> JobStep:
    """Take the first model over, or the first model made again after its bytes were lost."""
    if job.lost_model:
        return _restore_model(job, event.model)
    streams = tuple(Stream(size) for size in event.partition_sizes)
    job = replace(
        job,
        model=event.model,
        layout=event.layout,
        workload_version=event.workload_version,
        streams=streams,
    )
    if job.phase is Phase.PAUSED:
        return JobStep(replace(job, resume_to=Phase.WAITING))
    return open_round(job)


def fail_preparation(job: Job, event: events.PreparationFailed) -> JobStep:
    """End the job: nothing can be trained."""
    return end_job(job, Phase.FAILED, event.reason)


def take_next_model(job: Job, event: events.AggregateReady) -> JobStep:
    """Move on to the next model."""
    if job.lost_model:
        return _restore_model(job, event.model)
    round_ = _mark_unreadable(job.open_round, event)
    job = _refund_unreadable(job, round_, event)
    job = replace(
        job,
        previous=job.model,
        model=event.model,
        closed=round_,
        round=None,
        spec=job.next_spec or job.spec,
        next_spec=None,
        tally=replace(job.tally, bytes_down=Bytes(job.tally.bytes_down + event.bytes_down)),
    )
    record = WriteRecord(_figures(job, round_, event))
    evaluation = _evaluation(job, event.model)
    job = evaluation.job
    if is_done(job):
        reason = "all rounds are done; the final model is being evaluated"
        after = end_job(job, Phase.FINISHING, "all rounds are done", final_reason=reason)
    elif job.phase is Phase.PAUSED:
        after = JobStep(replace(job, resume_to=Phase.WAITING))
    else:
        after = open_round(job)
    return JobStep(after.job, (record, *evaluation.commands, *after.commands))


def remake_model(job: Job, event: events.ModelLost) -> JobStep:
    """Make the current model again: the same updates on the same base give the same bits.

    Without its base there is nothing left to make it of.
    """
    if job.lost_model:
        reason = f"the model and the one before it are damaged: {event.reason}"
        return end_job(job, Phase.FAILED, reason)
    job = replace(job, lost_model=True, reason=f"the model is made again: {event.reason}")
    return JobStep(job, (remake(job),))


def keep_score(job: Job, event: events.EvaluationReady) -> JobStep:
    """Keep the score; the lowest loss names the best model. A target that is reached ends it."""
    model = next(model for model in job.evaluating if model.round == event.round)
    score = ModelScore(event.round, event.model, event.loss, event.metric, event.metric_name)
    is_best = job.best is None or event.loss < job.best.loss
    is_newest = job.score is None or event.round >= job.score.round
    job = replace(
        job,
        evaluating=_due_evaluations(job, event.round),
        score=score if is_newest else job.score,
        best=score if is_best else job.best,
        best_model=model if is_best else job.best_model,
    )
    if job.phase in _UNDER_WAY and not job.lost_model and _is_reached(job, event):
        found = f"{event.metric_name} {event.metric:.4g} by the model of round {event.round}"
        return end_job(job, Phase.FINISHED, f"the target is reached: {found}")
    return _finish_if_due(job, event.round, "all rounds are done")


def _is_reached(job: Job, event: events.EvaluationReady) -> bool:
    return has_reached(job.spec.evaluation.target, event.metric, name=event.metric_name)


def skip_score(job: Job, event: events.EvaluationFailed) -> JobStep:
    """Go on without the score."""
    job = replace(job, evaluating=_due_evaluations(job, event.round))
    return _finish_if_due(job, event.round, f"all rounds are done; not evaluated: {event.reason}")


def _due_evaluations(job: Job, round_number: int) -> tuple[Model, ...]:
    return tuple(model for model in job.evaluating if model.round != round_number)


def _finish_if_due(job: Job, round_number: int, reason: str) -> JobStep:
    is_last = job.model is not None and job.model.round == round_number
    if job.phase is Phase.FINISHING and is_last:
        return JobStep(replace(job, phase=Phase.FINISHED, reason=reason))
    return JobStep(job)


def _evaluation(job: Job, model: Model) -> JobStep:
    is_last = is_done(job)
    is_due = is_last or model.round % job.spec.evaluation.every == 0
    if not is_due or (len(job.evaluating) >= _EVALUATIONS_WAITING and not is_last):
        return JobStep(job)
    job = replace(job, evaluating=(*job.evaluating, model))
    return JobStep(job, (EvaluateModel(model.round, model, job.spec, job.manifest),))


def _restore_model(job: Job, model: Model) -> JobStep:
    if job.model is None or model.blob.digest != job.model.blob.digest:
        reason = "the damaged model could not be made again bit for bit"
        return end_job(job, Phase.FAILED, reason)
    job = replace(job, lost_model=False, reason="the damaged model was made again")
    if job.phase is Phase.WAITING:
        return open_round(job)
    step = close_if_due(JobStep(job))
    is_closed = job.phase is Phase.TRAINING and step.job.phase is Phase.AGGREGATING
    return JobStep(step.job, step.commands if is_closed else outstanding(step.job))


def _mark_unreadable(round_: Round, event: events.AggregateReady) -> Round:
    """The closed round with the updates that were unreadable on disk marked as such."""
    refused = {
        node: replace(round_.participants[node], work=WorkState.UNREADABLE)
        for node, _ in event.omitted
    }
    return replace(replace_participants(round_, refused), agreement=event.agreement)


def _refund_unreadable(job: Job, round_: Round, event: events.AggregateReady) -> Job:
    """Put the samples of unreadable updates back, and forget that they were accepted."""
    members, streams, tally = dict(job.members), list(job.streams), job.tally
    for node, _reason in event.omitted:
        participant = round_.participants[node]
        return_samples(streams, participant.shard.partition, participant.shard.ranges)
        members[node] = replace(members[node], last_accepted=None)
        samples = participant.update.samples if participant.update else 0
        tally = replace(
            tally,
            samples=Samples(tally.samples - samples),
            updates_accepted=tally.updates_accepted - 1,
            updates_refused=tally.updates_refused + 1,
        )
    return replace(job, members=members, streams=tuple(streams), tally=tally)


def _figures(job: Job, round_: Round, event: events.AggregateReady) -> events.RoundRecorded:
    updates = [update for _, _, update in round_.accepted_updates]
    samples = sum(update.samples for update in updates)
    duration_ms = max(1, job.at_ms - round_.opened_at_ms)
    losses = [
        (update.loss_last, update.samples) for update in updates if update.loss_last is not None
    ]
    weight = sum(count for _, count in losses)
    return events.RoundRecorded(
        at_ms=job.at_ms,
        round=round_.number,
        participants=len(round_.participants),
        updates=len(updates),
        samples=Samples(samples),
        bytes_up=Bytes(sum(update.blob.size_bytes for update in updates)),
        bytes_down=event.bytes_down,
        duration_ms=Milliseconds(duration_ms),
        loss=sum(loss * count for loss, count in losses) / weight if weight else None,
        samples_per_s=samples * 1000 / duration_ms,
        reason=job.reason,
        inner_steps=round_.inner_steps,
        codecs=dict(Counter(part.codec for part in round_.participants.values())),
        resting=len(round_.resting),
        forecast_error=_forecast_error(round_),
    )


def _forecast_error(round_: Round) -> float | None:
    errors = [
        abs(part.plan.forecast_ms - took_ms) / took_ms
        for part in round_.participants.values()
        if part.plan.forecast_ms and (took_ms := _least_ms(round_, part))
    ]
    return sum(errors) / len(errors) if errors else None


def _least_ms(round_: Round, part: Participant) -> int:
    """Time that a participant took, or for one that was cut the least that it would have taken, if
    that is beyond its forecast; 0: not known.
    """
    if part.work is not WorkState.CUT:
        return part.took_ms
    least_ms = round_.deadline_at_ms - part.assigned_at_ms
    return least_ms if least_ms > part.plan.forecast_ms else 0
