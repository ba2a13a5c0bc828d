"""`InitialiseModel`: the evaluator makes the first model and the layout that names its numbers."""

import asyncio
from pathlib import Path

import structlog

from coordinator.core.job.commands import InitialiseModel
from coordinator.core.job.events import ModelInitialised, PreparationFailed
from coordinator.core.job.state import Model
from coordinator.shell.commands.datasets import lay_out_dataset
from coordinator.shell.evaluator.messages import Initialise, Initialised
from coordinator.shell.failpoints import failpoint
from coordinator.shell.runtime.job_runtime import JobRuntime
from coordinator.shell.runtime.services import Services
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.files import write_durably
from hypergpu.ids import JobId
from hypergpu.jobfile.spec import JobSpec
from hypergpu.statements.assignment import BlobRef
from hypergpu.tensors.layout import Layout, LayoutError, layout_from_json
from hypergpu.units import Milliseconds

log = structlog.get_logger()

_RETRY_S = 5.0
_LAYOUT_SUFFIX = ".layout.json"


async def initialise(services: Services, runtime: JobRuntime, command: InitialiseModel) -> None:
    """Answer the command with `ModelInitialised` or `PreparationFailed`."""
    while True:
        try:
            return await _initialise(services, runtime, command)
        except HyperGPUError as refused:
            if refused.reason is not Reason.DISK_FULL:
                event = PreparationFailed(at_ms=Milliseconds(0), reason=refused.message)
                await services.driver.insist(command.job_id, event)
                return None
            log.warning("a job waits to be prepared", job_id=command.job_id, reason=str(refused))
            await asyncio.sleep(_RETRY_S)


async def _initialise(services: Services, runtime: JobRuntime, command: InitialiseModel) -> None:
    made, model_path = await _make_model(services, command.job_id, command.spec, command.manifest)
    failpoint("initialise.made")
    blob = BlobRef(made.digest, made.size_bytes)
    runtime.layout = await _store_layout(services, command.job_id, made)
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
        await services.driver.report(command.job_id, event)
    finally:
        services.pins.drop([blob.digest])


async def load_layout(services: Services, runtime: JobRuntime) -> None:
    """Find the layout of a job that has a model, or build it anew.

    Raises:
        HyperGPUError: It cannot be built, or not stored.
    """
    job = runtime.job
    if job.model is None or runtime.layout is not None:
        return
    runtime.layout = await asyncio.to_thread(stored_layout, services.job_dir(job.job_id))
    if runtime.layout is None:
        made, model_path = await _make_model(services, job.job_id, job.spec, job.manifest)
        model_path.unlink(missing_ok=True)
        runtime.layout = await _store_layout(services, job.job_id, made)


def save_layout(job_dir: Path, layout: Layout) -> None:
    """Write a job's layout durably, named by its digest, replacing any other."""
    job_dir.mkdir(parents=True, exist_ok=True)
    target = job_dir / f"{layout.digest}{_LAYOUT_SUFFIX}"
    write_durably(target, layout.to_json())
    for other in job_dir.glob(f"*{_LAYOUT_SUFFIX}"):
        if other != target:
            other.unlink()


def stored_layout(job_dir: Path) -> Layout | None:
    """Read a job's layout back; None when it is missing or damaged."""
    for path in job_dir.glob(f"*{_LAYOUT_SUFFIX}"):
        try:
            layout = layout_from_json(path.read_bytes())
        except (OSError, LayoutError):
            continue
        if path.name == f"{layout.digest}{_LAYOUT_SUFFIX}":
            return layout
    return None


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
    return str(
        await asyncio.to_thread(lay_out_dataset, services.blobs, manifest, services.datasets_dir)
    )


async def _store_layout(services: Services, job_id: JobId, made: Initialised) -> Layout:
    try:
        layout = layout_from_json(made.layout_json)
    except LayoutError as error:
        raise HyperGPUError(Reason.WORKLOAD_UNKNOWN, f"its layout is unusable: {error}") from error
    await asyncio.to_thread(save_layout, services.job_dir(job_id), layout)
    return layout
