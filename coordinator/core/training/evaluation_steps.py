"""The steps of evaluations: which models are due, what their scores decide."""

from msgspec.structs import replace

from coordinator.core.training.assignment import JobStep, is_done
from coordinator.core.training.job import events
from coordinator.core.training.job.state import ENDED, Job, Model, ModelScore, Phase
from coordinator.core.training.lifecycle import end_job, pause_job
from coordinator.core.training.outstanding import evaluation_command
from coordinator.core.work import work_events
from hypergpu.workloads.metrics import FALLS, has_reached, target_mode

_UNDER_WAY = frozenset(Phase) - ENDED - {Phase.PREPARING, Phase.FINISHING}
_EVALUATIONS_WAITING = 2  # a slow evaluator skips models rather than fall behind without end


def needs_evaluator(job: Job) -> bool:
    """Whether models of a job are still to be measured: of one that was stopped or failed, none."""
    if job.phase is Phase.FINISHED:
        return bool(job.evaluating)
    return job.phase not in ENDED


def keep_score(job: Job, event: events.EvaluationReady) -> JobStep:
    """Keep the score; the lowest loss names the best model.

    A target that is reached ends the job, once all held-out samples say so. One that the first
    model reaches pauses it: nothing was trained, or the metric goes the other way.
    """
    model = next(model for model in job.evaluating if model.round == event.round)
    is_reached = job.phase in _UNDER_WAY and not job.lost_model and _is_reached(job, event)
    if is_reached and event.samples < event.samples_all:
        job = replace(job, evaluating_whole=(*job.evaluating_whole, event.round))
        return JobStep(job, (evaluation_command(job, model),))
    scores = (event.loss, event.metric, event.metric_name, event.metrics)
    score = ModelScore(event.round, event.model, *scores, samples=event.samples)
    is_best = job.best is None or event.loss < job.best.loss
    job = replace(
        job,
        evaluating=_due_evaluations(job, event.round),
        evaluating_whole=_whole_evaluations(job, event.round),
        score=score if job.score is None or event.round >= job.score.round else job.score,
        best=score if is_best else job.best,
        best_model=model if is_best else job.best_model,
    )
    if is_reached and event.round == 0:
        return _pause_at_start(job, event)
    if is_reached:
        score_text = f"{event.metric_name} {event.metric:.4g} by the model of round {event.round}"
        return end_job(job, Phase.FINISHED, f"the target is reached: {score_text}")
    return _finish_if_due(job, event.round, "all rounds are done")


def _is_reached(job: Job, event: events.EvaluationReady) -> bool:
    rule = job.spec.evaluation
    mode = target_mode(rule.target_mode, job.target_mode)
    return has_reached(rule.target, event.metric, name=event.metric_name, mode=mode)


def _pause_at_start(job: Job, event: events.EvaluationReady) -> JobStep:
    """Pause a job whose target its first model has reached."""
    if job.phase is Phase.PAUSED:
        return JobStep(job)
    rule = job.spec.evaluation
    mode = target_mode(rule.target_mode, job.target_mode)
    side = "or less" if mode == FALLS else "or more"
    reason = (
        f"the target is reached before any training: {event.metric_name} is {event.metric:.4g}, and"
        f" the target is {rule.target:g} {side}; set evaluation.target with hypergpu job set, then"
        " resume the job"
    )
    return pause_job(job, work_events.JobPaused(at_ms=event.at_ms, reason=reason))


def skip_score(job: Job, event: events.EvaluationFailed) -> JobStep:
    """Go on without the score."""
    job = replace(
        job,
        evaluating=_due_evaluations(job, event.round),
        evaluating_whole=_whole_evaluations(job, event.round),
    )
    return _finish_if_due(job, event.round, f"all rounds are done; not evaluated: {event.reason}")


def _due_evaluations(job: Job, round_number: int) -> tuple[Model, ...]:
    return tuple(model for model in job.evaluating if model.round != round_number)


def _whole_evaluations(job: Job, round_number: int) -> tuple[int, ...]:
    return tuple(each for each in job.evaluating_whole if each != round_number)


def _finish_if_due(job: Job, round_number: int, reason: str) -> JobStep:
    is_last = job.model is not None and job.model.round == round_number
    if job.phase is Phase.FINISHING and is_last:
        return JobStep(replace(job, phase=Phase.FINISHED, reason=reason))
    return JobStep(job)


def evaluate_if_due(job: Job, model: Model) -> JobStep:
    """Have a round's model evaluated, where that is due and the evaluator is not behind."""
    is_last = is_done(job)
    is_due = is_last or model.round % job.spec.evaluation.every == 0
    if not is_due or (len(job.evaluating) >= _EVALUATIONS_WAITING and not is_last):
        return JobStep(job)
    job = replace(job, evaluating=(*job.evaluating, model))
    return JobStep(job, (evaluation_command(job, model),))
