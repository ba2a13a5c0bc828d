"""`InitialiseModel`: the evaluator makes the first model and the layout that names its numbers."""

import asyncio
from pathlib import Path

import structlog

from coordinator.core.job.commands import InitialiseModel
from coordinator.core.job.events import ModelInitialised, PreparationFailed
from coordinator.core.job.state import Job, Model
from coordinator.shell.commands.datasets import laid_out
from coordinator.shell.commands.layouts import save_layout
from coordinator.shell.evaluator.messages import Initialise, Initialised
from coordinator.shell.failpoints import failpoint
from coordinator.shell.runtime.job_runtime import JobRuntime
from coordinator.shell.runtime.services import Services
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId
from hypergpu.jobfile.spec import JobSpec
from hypergpu.statements.assignment import BlobRef
from hypergpu.tensors.layout import Layout, LayoutError, layout_from_json
from hypergpu.units import Milliseconds

log = structlog.get_logger()

_WAITED_OUT = frozenset({Reason.DISK_FULL})
"""Refusals that say nothing about the job."""
_RETRY_S = 5.0


async def initialise(services: Services, runtime: JobRuntime, command: InitialiseModel) -> None:
    """Answer the command with `ModelInitialised` or `PreparationFailed`."""
    while True:
        try:
            await _initialise(services, runtime, command)
        except HyperGPUError as refused:
            if refused.reason in _WAITED_OUT:
                log.warning(
                    "a job waits to be prepared", job_id=command.job_id, reason=str(refused)
                )
                await asyncio.sleep(_RETRY_S)
                continue
            event = PreparationFailed(at_ms=Milliseconds(0), reason=refused.message)
            await services.driver.insist(command.job_id, event)
        return


async def _initialise(services: Services, runtime: JobRuntime, command: InitialiseModel) -> None:
    made, model_path = await _make_model(services, command.job_id, command.spec, command.manifest)
    failpoint("initialise.made")
    blob = BlobRef(made.digest, made.size_bytes)
    runtime.layout = _layout(made)
    await asyncio.to_thread(save_layout, services.job_dir(command.job_id), runtime.layout)
    services.pins.add([blob.digest])
    try:
        await asyncio.to_thread(services.blobs.adopt, model_path, blob)
        failpoint("initialise.stored")
        event = ModelInitialised(
            at_ms=Milliseconds(0),
            model=Model(0, blob),
            partition_sizes=made.partition_sizes,
            layout=runtime.layout.digest,
            workload_version=made.workload_version,
        )
        reason = await services.driver.insist(command.job_id, event)
    finally:
        services.pins.drop([blob.digest])
    if reason:
        log.info("a first model came too late", job_id=command.job_id, reason=reason)


async def layout_made_again(services: Services, job: Job) -> Layout:
    """The layout of a job whose file is lost, built anew.

    Raises:
        HyperGPUError: It cannot be built, or not stored.
    """
    made, model_path = await _make_model(services, job.job_id, job.spec, job.manifest)
    model_path.unlink(missing_ok=True)
    layout = _layout(made)
    await asyncio.to_thread(save_layout, services.job_dir(job.job_id), layout)
    return layout


async def _make_model(
    services: Services, job_id: JobId, spec: JobSpec, manifest: BlobRef | None
) -> tuple[Initialised, Path]:
    model_path = services.blobs.work_path(f"{job_id}-initial")
    layout_path = services.blobs.work_path(f"{job_id}-layout")
    request = Initialise(
        workload=spec.workload,
        options=spec.options,
        seed=spec.training.seed,
        data_dir=await data_dir(services, manifest),
        sharding=spec.data.sharding,
        alpha=spec.data.alpha if spec.data.sharding == "dirichlet" else 0.0,
        partitions=spec.data.partitions or spec.training.nodes,
        model_path=str(model_path),
        layout_path=str(layout_path),
    )
    made = await services.evaluator.initialise(request)
    layout_path.unlink(missing_ok=True)
    return made, model_path


async def data_dir(services: Services, manifest: BlobRef | None) -> str:
    """The folder of the job's own data; empty when it has none.

    Raises:
        HyperGPUError: a file is missing or damaged.
    """
    if manifest is None:
        return ""
    return str(await asyncio.to_thread(laid_out, services.blobs, manifest, services.datasets_dir))


def _layout(made: Initialised) -> Layout:
    try:
        return layout_from_json(made.layout_json)
    except LayoutError as error:
        raise HyperGPUError(Reason.WORKLOAD_UNKNOWN, f"its layout is unusable: {error}") from error
