"""`EvaluateModel`: the evaluator measures a model on the held-out set."""

import asyncio
import math

import structlog

from coordinator.core.job.commands import EvaluateModel
from coordinator.core.job.events import EvaluationFailed, EvaluationReady
from coordinator.shell.commands.preparation import data_dir
from coordinator.shell.evaluator.messages import Evaluate
from coordinator.shell.failpoints import failpoint
from coordinator.shell.runtime.job_runtime import JobRuntime
from coordinator.shell.runtime.services import Services
from hypergpu.errors import HyperGPUError
from hypergpu.units import Milliseconds

log = structlog.get_logger()


async def evaluate(services: Services, runtime: JobRuntime, command: EvaluateModel) -> None:
    """Answer the command with `EvaluationReady` or `EvaluationFailed`."""
    try:
        event = await _measure_model(services, runtime, command)
    except HyperGPUError as refused:
        log.warning("an evaluation failed", job_id=runtime.job.job_id, reason=str(refused))
        event = _failed_evaluation(command, refused.message)
    failpoint("evaluate.done")
    reason = await services.driver.insist(runtime.job.job_id, event)
    if reason:
        log.info("an evaluation came too late", job_id=runtime.job.job_id, reason=reason)


async def _measure_model(
    services: Services, runtime: JobRuntime, command: EvaluateModel
) -> EvaluationReady | EvaluationFailed:
    if runtime.layout is None:
        return _failed_evaluation(command, "the model's layout is lost")
    digest = command.model.blob.digest
    path = await asyncio.to_thread(services.blobs.path, digest)
    request = Evaluate(
        workload=command.spec.workload,
        options=command.spec.options,
        data_dir=await data_dir(services, command.manifest),
        model_path=str(path),
        layout_digest=runtime.layout.digest,
    )
    measured = await services.evaluator.evaluate(request)
    # JSON has no NaN: a diverged model is a failed evaluation, which can be replayed.
    if not (math.isfinite(measured.loss) and math.isfinite(measured.metric)):
        return _failed_evaluation(command, f"the model's loss is {measured.loss}")
    return EvaluationReady(
        at_ms=Milliseconds(0),
        round=command.round,
        model=digest,
        loss=measured.loss,
        metric=measured.metric,
        metric_name=measured.metric_name,
    )


def _failed_evaluation(command: EvaluateModel, reason: str) -> EvaluationFailed:
    return EvaluationFailed(at_ms=Milliseconds(0), round=command.round, reason=reason)
