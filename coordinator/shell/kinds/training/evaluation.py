"""Measures a model by the evaluator, as a command asks."""

import asyncio
import math
from dataclasses import dataclass

import structlog

from coordinator.core.training.job.commands import EvaluateModel
from coordinator.core.training.job.events import EvaluationFailed, EvaluationReady
from coordinator.shell.driver.driver import Driver
from coordinator.shell.engine.evaluation import Evaluators
from coordinator.shell.evaluator import process
from coordinator.shell.failpoints import failpoint
from coordinator.shell.kinds.training.data_folder import data_dir
from coordinator.shell.kinds.training.job_runtime import JobRuntime, evaluated_job
from coordinator.shell.store.storage import Storage
from hypergpu.errors import HyperGPUError
from hypergpu.units import Milliseconds

log = structlog.get_logger()


_LAYOUT_LOST = "the model's layout is lost"


@dataclass(frozen=True)
class ModelEvaluation:
    """Performs `EvaluateModel`."""

    driver: Driver
    storage: Storage
    evaluators: Evaluators

    async def evaluate(self, runtime: JobRuntime, command: EvaluateModel) -> None:
        """Answer the command with `EvaluationReady` or `EvaluationFailed`."""
        try:
            event = await self._evaluate_model(runtime, command)
        except HyperGPUError as error:
            log.warning("an evaluation failed", job_id=runtime.job.job_id, reason=str(error))
            event = failed_evaluation(command.round, error.message)
        failpoint("evaluate.done")
        await self.driver.report(runtime.job.job_id, event)

    async def _evaluate_model(
        self, runtime: JobRuntime, command: EvaluateModel
    ) -> EvaluationReady | EvaluationFailed:
        if runtime.layout is None:
            return failed_evaluation(command.round, _LAYOUT_LOST)
        digest = command.model.blob.digest
        path = await asyncio.to_thread(self.storage.blobs.path, digest)
        request = process.Evaluate(
            workload=command.spec.workload,
            workload_version=runtime.job.workload_version,
            options=command.spec.options,
            data_dir=await data_dir(self.storage, command.manifest),
            is_held_out=command.spec.data.stays_on_nodes,
            model_path=str(path),
            layout_digest=runtime.layout.digest,
            samples_most=command.samples_most,
        )
        evaluation = await self.evaluators.evaluate(evaluated_job(runtime), request)
        # JSON has no NaN: a diverged model is a failed evaluation, which can be replayed.
        if not (math.isfinite(evaluation.loss) and math.isfinite(evaluation.metric)):
            return failed_evaluation(command.round, f"the model's loss is {evaluation.loss}")
        return EvaluationReady(
            at_ms=Milliseconds(0),
            round=command.round,
            model=digest,
            loss=evaluation.loss,
            metric=evaluation.metric,
            metric_name=evaluation.metric_name,
            metrics=evaluation.metrics,
            outputs=evaluation.outputs,
            samples=evaluation.samples,
            samples_all=evaluation.samples_all,
        )


def failed_evaluation(round_number: int, reason: str) -> EvaluationFailed:
    """The answer where a model cannot be measured."""
    return EvaluationFailed(at_ms=Milliseconds(0), round=round_number, reason=reason)
