"""`EvaluateModel` and `JudgeUpdates`: measure models and updates on held-out data."""

import asyncio
import math

import structlog

from coordinator.core.job.commands import EvaluateModel, JudgeUpdates
from coordinator.core.job.events import EvaluationFailed, EvaluationReady, UpdatesJudged
from coordinator.shell.commands.preparation import data_dir
from coordinator.shell.evaluator import messages
from coordinator.shell.failpoints import failpoint
from coordinator.shell.runtime.job_runtime import JobRuntime
from coordinator.shell.runtime.services import Services
from hypergpu.errors import HyperGPUError
from hypergpu.units import Milliseconds

log = structlog.get_logger()

_LAYOUT_LOST = "the model's layout is lost"
_SAMPLES_MOST = 1_024
"""Enough to tell a useful update from a useless one, and cheap enough to do so each round."""


async def evaluate(services: Services, runtime: JobRuntime, command: EvaluateModel) -> None:
    """Answer the command with `EvaluationReady` or `EvaluationFailed`."""
    try:
        event = await _evaluate_model(services, runtime, command)
    except HyperGPUError as refused:
        log.warning("an evaluation failed", job_id=runtime.job.job_id, reason=str(refused))
        event = failed_evaluation(command.round, refused.message)
    failpoint("evaluate.done")
    await services.driver.report(runtime.job.job_id, event)


async def judge(services: Services, runtime: JobRuntime, command: JudgeUpdates) -> None:
    """Answer the command with `UpdatesJudged`, also when nothing can be measured."""
    try:
        event = await _judge_updates(services, runtime, command)
    except HyperGPUError as refused:
        log.warning("updates were not judged", job_id=runtime.job.job_id, reason=str(refused))
        event = failed_judgement(command.round, refused.message)
    failpoint("judge.done")
    await services.driver.report(runtime.job.job_id, event)


def failed_evaluation(round_number: int, reason: str) -> EvaluationFailed:
    """The answer where a model cannot be measured."""
    return EvaluationFailed(at_ms=Milliseconds(0), round=round_number, reason=reason)


def failed_judgement(round_number: int, reason: str) -> UpdatesJudged:
    """The answer where updates cannot be measured."""
    return UpdatesJudged(at_ms=Milliseconds(0), round=round_number, reason=reason)


async def _evaluate_model(
    services: Services, runtime: JobRuntime, command: EvaluateModel
) -> EvaluationReady | EvaluationFailed:
    if runtime.layout is None:
        return failed_evaluation(command.round, _LAYOUT_LOST)
    digest = command.model.blob.digest
    path = await asyncio.to_thread(services.blobs.path, digest)
    request = messages.Evaluate(
        workload=command.spec.workload,
        options=command.spec.options,
        data_dir=await data_dir(services, command.manifest),
        model_path=str(path),
        layout_digest=runtime.layout.digest,
    )
    measured = await services.evaluator.evaluate(request)
    # JSON has no NaN: a diverged model is a failed evaluation, which can be replayed.
    if not (math.isfinite(measured.loss) and math.isfinite(measured.metric)):
        return failed_evaluation(command.round, f"the model's loss is {measured.loss}")
    return EvaluationReady(
        at_ms=Milliseconds(0),
        round=command.round,
        model=digest,
        loss=measured.loss,
        metric=measured.metric,
        metric_name=measured.metric_name,
    )


async def _judge_updates(
    services: Services, runtime: JobRuntime, command: JudgeUpdates
) -> UpdatesJudged:
    if runtime.layout is None:
        return failed_judgement(command.round, _LAYOUT_LOST)
    blobs = (command.base, command.made, *(update.blob for update in command.updates))
    base, made, *paths = await asyncio.to_thread(
        lambda: [services.blobs.path(blob.digest) for blob in blobs]
    )
    found = await services.evaluator.measure_updates(
        messages.MeasureUpdates(
            workload=command.spec.workload,
            options=command.spec.options,
            data_dir=await data_dir(services, command.manifest),
            layout_digest=runtime.layout.digest,
            base_path=str(base),
            base_digest=command.base.digest,
            made_path=str(made),
            made_digest=command.made.digest,
            updates=tuple(
                messages.UpdateFile(str(path), update.scheme)
                for path, update in zip(paths, command.updates, strict=True)
            ),
            samples_most=_SAMPLES_MOST,
        )
    )
    losses = {
        update.node: loss
        for update, loss in zip(command.updates, found.losses, strict=True)
        if loss is not None
    }
    return UpdatesJudged(
        at_ms=Milliseconds(0),
        round=command.round,
        base_loss=found.base_loss,
        made_loss=found.made_loss,
        losses=losses,
        reason="" if found.base_loss is not None else "the loss of the round's base is not finite",
    )
