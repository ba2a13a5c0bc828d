"""Measures a model by the evaluator, as a command asks."""

import asyncio
import math

import structlog

from coordinator.core.training.job.commands import EvaluateModel
from coordinator.core.training.job.events import EvaluationFailed, EvaluationReady
from coordinator.shell.driver.job_runtime import JobRuntime
from coordinator.shell.evaluator import process
from coordinator.shell.failpoints import failpoint
from coordinator.shell.kinds.training.data_folder import data_dir
from coordinator.shell.services import Services, evaluated_job
from hypergpu.errors import HyperGPUError
from hypergpu.units import Milliseconds

log = structlog.get_logger()


_LAYOUT_LOST = "the model's layout is lost"


async def evaluate(services: Services, runtime: JobRuntime, command: EvaluateModel) -> None:
    """Answer the command with `EvaluationReady` or `EvaluationFailed`."""
    try:
        event = await _evaluate_model(services, runtime, command)
    except HyperGPUError as refused:
        log.warning("an evaluation failed", job_id=runtime.job.job_id, reason=str(refused))
        event = failed_evaluation(command.round, refused.message)
    failpoint("evaluate.done")
    await services.driver.report(runtime.job.job_id, event)


def failed_evaluation(round_number: int, reason: str) -> EvaluationFailed:
    """The answer where a model cannot be measured."""
    return EvaluationFailed(at_ms=Milliseconds(0), round=round_number, reason=reason)


async def _evaluate_model(
    services: Services, runtime: JobRuntime, command: EvaluateModel
) -> EvaluationReady | EvaluationFailed:
    if runtime.layout is None:
        return failed_evaluation(command.round, _LAYOUT_LOST)
    digest = command.model.blob.digest
    path = await asyncio.to_thread(services.blobs.path, digest)
    request = process.Evaluate(
        workload=command.spec.workload,
        workload_version=runtime.job.workload_version,
        options=command.spec.options,
        data_dir=await data_dir(services, command.manifest),
        is_held_out=command.spec.data.stays_on_nodes,
        model_path=str(path),
        layout_digest=runtime.layout.digest,
        samples_most=command.samples_most,
    )
    measured = await services.evaluator.evaluate(evaluated_job(runtime), request)
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
        metrics=measured.metrics,
        outputs=measured.outputs,
        samples=measured.samples,
        samples_all=measured.samples_all,
    )
