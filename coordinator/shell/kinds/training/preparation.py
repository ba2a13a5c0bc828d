"""Makes a job's first model and its layout by the evaluator, as a command asks."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from coordinator.core.training.job.commands import InitialiseModel
from coordinator.core.training.job.events import ModelInitialised, PreparationFailed
from coordinator.core.training.job.state import InitialWeights, Model
from coordinator.shell.driver.driver import Driver
from coordinator.shell.engine.evaluation import Evaluators
from coordinator.shell.evaluator.process import Initialise, Initialised
from coordinator.shell.failpoints import failpoint
from coordinator.shell.kinds.training.data_folder import data_dir
from coordinator.shell.kinds.training.job_runtime import JobRuntime, evaluated_job
from coordinator.shell.kinds.training.part_folding import NO_PARTS, first_parts
from coordinator.shell.nodes.allocator import NodeAllocator
from coordinator.shell.store.layouts import layout_from_blob, save_layout, stored_layout
from coordinator.shell.store.storage import Storage
from hypergpu.blobs import BlobRef
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest, JobId
from hypergpu.jobfile.spec import JobSpec
from hypergpu.tensors.layout import Layout, LayoutError, layout_from_json
from hypergpu.units import Milliseconds
from hypergpu.workloads.metrics import direction, target_mode

log = structlog.get_logger()

_RETRY_S = 5.0


@dataclass(frozen=True)
class ModelPreparation:
    """Performs `InitialiseModel`, and finds the layouts of models again after a restart."""

    driver: Driver
    storage: Storage
    allocator: NodeAllocator
    evaluators: Evaluators
    shares_layouts: bool
    """Whether layouts are stored as blobs, too, for a coordinator that takes over."""

    async def initialise(self, runtime: JobRuntime, command: InitialiseModel) -> None:
        """Answer the command with `ModelInitialised` or `PreparationFailed`."""
        while True:
            try:
                return await self._initialise(runtime, command)
            except HyperGPUError as error:
                if error.reason not in {Reason.DISK_FULL, Reason.STORE_UNREACHABLE}:
                    event = PreparationFailed(at_ms=Milliseconds(0), reason=error.message)
                    await self.driver.insist(command.job_id, event)
                    return None
                runtime.obstacle = str(error)
                log.warning("a job waits to be prepared", job_id=command.job_id, reason=str(error))
                await asyncio.sleep(_RETRY_S)

    async def _initialise(self, runtime: JobRuntime, command: InitialiseModel) -> None:
        initial_model, model_path = await self._make_model(runtime, command)
        failpoint("initialise.made")
        blob = BlobRef(initial_model.digest, initial_model.size_bytes)
        runtime.layout = await self._store_layout(command.job_id, initial_model)
        mixture, parts = initial_model.mixture, NO_PARTS
        if mixture is not None:
            parts = await asyncio.to_thread(first_parts, mixture, model_path, runtime.layout)
        files = {file.path: BlobRef(file.digest, file.size_bytes) for file in parts.files}
        pinned_digests = [blob.digest, *(each.digest for each in files.values())]
        self.storage.pins.add(pinned_digests)
        try:
            for path, each in {**files, model_path: blob}.items():
                await asyncio.to_thread(self.storage.blobs.adopt, path, each)
            failpoint("initialise.stored")
            if parts.parts:
                # Members that cannot hold a part leave, as below.
                runtime.is_partial = True
                await self.allocator.settle()
            if initial_model.operators:
                # Members that cannot train it leave before its first round may open.
                runtime.operators = frozenset(initial_model.operators)
                await self.allocator.settle()
            event = ModelInitialised(
                at_ms=Milliseconds(0),
                model=Model(0, blob, parts=parts.parts or msgspec.UNSET),
                partition_sizes=initial_model.partition_sizes,
                layout=runtime.layout.digest,
                workload_version=initial_model.workload_version,
                can_checkpoint=initial_model.can_checkpoint,
                operators=initial_model.operators,
                examples=initial_model.examples,
                target_mode=_target_mode(command.spec, initial_model.metric_name),
                is_evaluated=True,
                notes=initial_model.notes,
                mixture=msgspec.UNSET if mixture is None else mixture,
            )
            await self.driver.report(command.job_id, event)
        finally:
            self.storage.pins.drop(pinned_digests)

    async def load_layout(self, runtime: JobRuntime) -> None:
        """Find the layout of a job that has a model, or build it anew.

        Raises:
            HyperGPUError: It cannot be built, or not stored.
        """
        job = runtime.job
        if job.model is None or runtime.layout is not None:
            return
        runtime.layout = await asyncio.to_thread(
            stored_layout, self.storage.job_dir(job.job_id)
        ) or await asyncio.to_thread(layout_from_blob, self.storage.blobs, job.layout)
        if runtime.layout is None:
            # Given weights would give the same layout.
            command = InitialiseModel(job.job_id, job.spec, job.manifest, weights=None)
            initial_model, model_path = await self._make_model(runtime, command)
            model_path.unlink(missing_ok=True)
            runtime.layout = await self._store_layout(job.job_id, initial_model)

    async def _make_model(
        self, runtime: JobRuntime, command: InitialiseModel
    ) -> tuple[Initialised, Path]:
        job_id, spec, weights = command.job_id, command.spec, command.weights
        model_path = self.storage.blobs.work_path(f"{job_id}-initial")
        layout_path = self.storage.blobs.work_path(f"{job_id}-layout")
        request = Initialise(
            workload=spec.workload,
            options=spec.options,
            seed=spec.training.seed,
            data_dir=await data_dir(self.storage, command.manifest),
            is_held_out=spec.data.stays_on_nodes,
            weights_path=await self._weights_path(weights),
            weights_layout=weights.layout if weights is not None else Digest(""),
            sharding=spec.data.sharding,
            alpha=spec.data.alpha if spec.data.sharding == "dirichlet" else 0.0,
            partitions=spec.data.partitions or spec.training.nodes,
            model_path=str(model_path),
            layout_path=str(layout_path),
        )
        initial_model = await self.evaluators.initialise(evaluated_job(runtime), request)
        layout_path.unlink(missing_ok=True)
        return initial_model, model_path

    async def _weights_path(self, weights: InitialWeights | None) -> str:
        if weights is None:
            return ""
        return str(await asyncio.to_thread(self.storage.blobs.path, weights.blob.digest))

    async def _store_layout(self, job_id: JobId, made: Initialised) -> Layout:
        try:
            layout = layout_from_json(made.layout_json)
        except LayoutError as error:
            raise HyperGPUError(
                Reason.WORKLOAD_UNKNOWN, f"its layout is unusable: {error}"
            ) from error
        await asyncio.to_thread(save_layout, self.storage.job_dir(job_id), layout)
        if self.shares_layouts:
            await asyncio.to_thread(self.storage.blobs.put, layout.to_json())
        return layout


def _target_mode(spec: JobSpec, metric: str) -> str:
    """Whether the metric falls or rises to the job's target.

    Raises:
        HyperGPUError: SPEC_INVALID, there is a target, and neither job nor name says so.
    """
    mode = target_mode(spec.evaluation.target_mode, direction(metric))
    if spec.evaluation.target and not mode:
        raise HyperGPUError(
            Reason.SPEC_INVALID,
            f"evaluation.target is {spec.evaluation.target:g}, and the name of the metric {metric}"
            " does not say whether it falls or rises",
            fix='set evaluation.target_mode to "min" where it falls, or to "max"',
        )
    return mode
