"""Evidence about a closed round's updates, and their weighing: sketches of updates, measured as
they are accepted, and the gradient of the held-out loss, measured while nodes train. Both follow
from blobs that are kept and a secret, so that a restart finds the same again.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import structlog
from blake3 import blake3
from msgspec.structs import replace

from coordinator.core.training.job.commands import Aggregate, FoldedUpdate
from coordinator.core.training.job.state import Model
from coordinator.core.training.job.trust_memory import Weighing
from coordinator.core.training.trust.weights import NODES_LEAST, is_exploded
from coordinator.shell.aggregation.common_coordinates import UpdateFile, common_norms
from coordinator.shell.aggregation.evidence import (
    SketchedUpdate,
    agreement_of,
    weigh_rollback,
    weigh_sketched,
)
from coordinator.shell.aggregation.fold_request import BaseDamagedError, StoredBlob
from coordinator.shell.aggregation.layer_groups import layer_groups
from coordinator.shell.aggregation.measurements import HeldOutGradient
from coordinator.shell.aggregation.sketch import SketchKey, UpdateSketch, sketch_update
from coordinator.shell.engine.evaluation import Evaluators
from coordinator.shell.engine.heavy_work import HeavyWork
from coordinator.shell.evaluator.process import MeasureGradient
from coordinator.shell.kinds.training.data_folder import data_dir
from coordinator.shell.kinds.training.job_runtime import JobRuntime, evaluated_job
from coordinator.shell.kinds.training.own_gradients import OwnGradients
from coordinator.shell.kinds.training.update_trials import TriedUpdate, UpdateTrials
from coordinator.shell.store.blobs.store import BlobStore
from coordinator.shell.store.storage import Storage
from hypergpu.blobs import BlobRef
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId, NodeId
from hypergpu.jobfile.spec import SPARSE_CODECS, JobSpec
from hypergpu.workloads.registry import UnknownWorkloadError, find

log = structlog.get_logger()

_SAMPLES_MOST = 512
"""Held-out samples that a gradient is measured on."""
_BESIDE_OWN = 128
"""The same where samples of the shards are differentiated, too."""
_PATIENCE_S = 60.0
"""A fold waits so long for a gradient, once: later ones then use the newest that is there."""


class WeighedRound(NamedTuple):
    """Findings about a round's updates before they are folded."""

    weighing: Weighing
    agreement: float | None = None
    """See `PlanRequest.agreement`; None for less than two updates that count."""
    unreadable: tuple[tuple[NodeId, str], ...] = ()


@dataclass(frozen=True)
class UpdateWeighing:
    """Weighs updates of closed rounds, and prepares what that takes while nodes train."""

    storage: Storage
    evaluators: Evaluators
    heavy: HeavyWork
    secret: bytes
    """32 bytes that samples and the signs of all sketches follow from; nobody else may know
    them.
    """

    @property
    def _own(self) -> OwnGradients:
        return OwnGradients(self.storage, self.evaluators)

    def prepare_gradient(self, runtime: JobRuntime) -> None:
        """Begin to measure the gradient at the job's model, unless that is under way."""
        model = runtime.job.model
        if model is None or runtime.layout is None or not has_gradient(runtime.job.spec):
            return
        if runtime.job.lost_model:
            # It is measured once it is there again: a fold without its gradient is another one.
            return
        digest = model.blob.digest
        measurements = runtime.measurements
        measurements.keep_gradient(digest)
        if digest not in measurements.gradients:
            work = self._measure_gradient(runtime, model.blob)
            measurements.gradients[digest] = asyncio.create_task(work)

    @property
    def trials(self) -> UpdateTrials:
        """What tries updates on samples of their own shards."""
        return UpdateTrials(self.storage, self.evaluators)

    def prepare_own(self, runtime: JobRuntime) -> None:
        """Begin to measure the gradients of the open round's own samples, once."""
        self._own.prepare(runtime, self._job_secret(runtime.job.job_id))

    def prepare_trial(
        self,
        runtime: JobRuntime,
        node: NodeId,
        update: BlobRef,
        codec: str,
        experts: tuple[int, ...] = (),
    ) -> None:
        """Begin to try an accepted update on samples of its own shard, where that is to be done."""
        tried_update = TriedUpdate(update.digest, codec, experts)
        self.trials.prepare(runtime, node, tried_update, self._job_secret(runtime.job.job_id))

    def prepare_sketch(
        self, runtime: JobRuntime, update: BlobRef, codec: str, experts: tuple[int, ...] = ()
    ) -> None:
        """Begin to sketch an accepted update, unless that is under way. One that failed is tried
        again: the model that it was made from may have been away.
        """
        sketches = runtime.measurements.sketches
        sketch_task = sketches.get(update.digest)
        if sketch_task is None or (
            sketch_task.done() and (sketch_task.cancelled() or sketch_task.exception())
        ):
            sketch_work = self._sketch(runtime, update, codec, experts)
            sketches[update.digest] = asyncio.create_task(sketch_work)

    async def weigh_round(self, runtime: JobRuntime, command: Aggregate) -> WeighedRound:
        """Weigh the updates of a closed round, or roll back to the model before its base.

        Raises:
            BaseDamagedError: The base is missing.
        """
        gradient = await self._gradient(runtime, command.base)
        is_robust = command.spec.trust.rule == "robust"
        if is_robust and command.fallback is not None and gradient is not None:
            is_newest = gradient.model == command.base.blob.digest
            if is_newest and is_exploded(command.trust, gradient.loss):
                return await self._roll_back(runtime, command, gradient)
        sketches, unreadable = await self._sketches(runtime, command.updates)
        sketches = await self._with_common_norms(runtime, command.updates, sketches)
        secret = self._job_secret(runtime.job.job_id)
        own = await self._own.gradients(runtime, command, secret)
        updates = {each.node: each for each in command.updates}
        trials = await self.trials.trials(runtime, updates, own, secret)
        sketches = [
            each._replace(own=own.get(each.node), trial=trials.get(each.node)) for each in sketches
        ]
        earlier: dict[NodeId, SketchedUpdate] = {}
        for node, update in command.duplicates.earlier.items():
            earlier_sketches, _ = await self._sketches(runtime, (update,))
            earlier.update((node, each) for each in earlier_sketches)
        weighing = weigh_sketched(
            command.trust,
            command.spec.trust.rule,
            sketches,
            gradient,
            command.duplicates,
            earlier,
        )
        if gradient is None and has_gradient(command.spec):
            why = runtime.measurements.gradient_failure or "it was not measured in time"
            weighing = replace(weighing, no_evidence=why)
        if command.fallback is None:
            # A model that the job went back to was good before: it ends no row of rollbacks.
            memory = replace(weighing.memory, rollbacks=command.trust.rollbacks)
            weighing = replace(weighing, memory=memory)
        runtime.measurements.keep_sketches(frozenset(each.blob.digest for each in command.updates))
        return WeighedRound(weighing, agreement_of(sketches, weighing), unreadable)

    async def _roll_back(
        self, runtime: JobRuntime, command: Aggregate, gradient: HeldOutGradient
    ) -> WeighedRound:
        makers, _ = await self._sketches(runtime, command.makers)
        weighing = weigh_rollback(command.trust, makers, gradient, command.base.round)
        log.error(
            "a job goes back to the model before",
            job_id=runtime.job.job_id,
            reason=weighing.rollback,
        )
        return WeighedRound(weighing)

    def _job_secret(self, job_id: JobId) -> bytes:
        return blake3(job_id.encode(), key=self.secret).digest()

    def round_draw(self, job_id: JobId, number: int) -> str:
        """Draw of a round's duplicates, which nobody can tell before the round is about to open."""
        secret = self._job_secret(job_id)
        return blake3(f"duplicates/{number}".encode(), key=secret).hexdigest(16)

    async def _measure_gradient(
        self, runtime: JobRuntime, model: BlobRef
    ) -> HeldOutGradient | None:
        spec, by_own_samples = runtime.job.spec, runtime.job.trust.by_own_samples
        try:
            path = await asyncio.to_thread(self.storage.blobs.path, model.digest)
            measurement = await self.evaluators.measure_gradient(
                evaluated_job(runtime),
                MeasureGradient(
                    workload=spec.workload,
                    workload_version=runtime.job.workload_version,
                    options=spec.options,
                    data_dir=await data_dir(self.storage, runtime.job.manifest),
                    is_held_out=spec.data.stays_on_nodes,
                    model_path=str(path),
                    layout_digest=runtime.required_layout.digest,
                    samples_most=_BESIDE_OWN if by_own_samples else _SAMPLES_MOST,
                    sketch_secret=self._job_secret(runtime.job.job_id),
                    by_layers=by_own_samples,
                ),
            )
        except (HyperGPUError, OSError) as error:
            log.warning("no held-out gradient", job_id=runtime.job.job_id, reason=str(error))
            runtime.measurements.gradient_failure = (
                error.detail if isinstance(error, HyperGPUError) else str(error)
            )
            return None
        runtime.measurements.gradient_failure = ""
        sketch = np.frombuffer(measurement.sketch, np.float64)
        return HeldOutGradient(
            model.digest, measurement.loss, sketch if np.isfinite(sketch).all() else None
        )

    async def _gradient(self, runtime: JobRuntime, base: Model) -> HeldOutGradient | None:
        """The gradient at the base; where the evaluator is too slow, at the newest model it has."""
        self.prepare_gradient(runtime)
        measurements = runtime.measurements
        task = measurements.gradients.get(base.blob.digest)
        if task is None:
            return None
        patience_s = 0.0 if measurements.is_evaluator_slow else _PATIENCE_S
        done_tasks, _ = await asyncio.wait([task], timeout=patience_s)
        measurements.is_evaluator_slow = not done_tasks
        if done_tasks:
            measurements.newest_gradient = task.result()
        return measurements.newest_gradient

    async def _sketch(
        self, runtime: JobRuntime, update: BlobRef, codec: str, experts: tuple[int, ...]
    ) -> UpdateSketch:
        model = runtime.job.newest_model
        part = runtime.held_layout(experts) if experts else None

        def measure() -> UpdateSketch:
            key = SketchKey(self._job_secret(runtime.job.job_id))
            base = stored_base(self.storage.blobs, model.blob).path
            path, layout = self.storage.blobs.path(update.digest), runtime.required_layout
            groups = layer_groups(layout) if runtime.job.trust.by_own_samples else None
            return sketch_update(key, layout, codec, path, base, groups, part=part)

        return await self.heavy.run(measure)

    async def _with_common_norms(
        self,
        runtime: JobRuntime,
        updates: Sequence[FoldedUpdate],
        found: list[SketchedUpdate],
    ) -> list[SketchedUpdate]:
        """The same with what dense and sparse updates have in common, where one kind has too few of
        them to be compared by itself.
        """
        sparse = sum(each.is_sparse for each in found)
        if runtime.is_partial or not 0 < min(sparse, len(found) - sparse) < NODES_LEAST:
            return found
        sound = {each.node for each in found if each.measured.is_sound}
        layout = runtime.required_layout

        def measure() -> dict[NodeId, dict[NodeId, float]]:
            files = [
                UpdateFile(each.node, each.codec, self.storage.blobs.path(each.blob.digest))
                for each in updates
                if each.node in sound
            ]
            return common_norms(layout, files)

        try:
            norms = await self.heavy.run(measure)
        except (HyperGPUError, OSError):
            return found  # Lost since it was sketched: the fold finds out, and leaves it out.
        return [each._replace(common_norms=norms.get(each.node, {})) for each in found]

    async def _sketches(
        self, runtime: JobRuntime, updates: Sequence[FoldedUpdate]
    ) -> tuple[list[SketchedUpdate], tuple[tuple[NodeId, str], ...]]:
        """Sketches of the updates, and those that cannot be read, with the reason.

        Raises:
            BaseDamagedError: The model that they were made from is missing: no update is to blame.
        """
        for update in updates:
            self.prepare_sketch(runtime, update.blob, update.codec, update.experts)
        tasks = [runtime.measurements.sketches[update.blob.digest] for update in updates]
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        groups = layer_groups(runtime.required_layout)
        sketches: list[SketchedUpdate] = []
        unreadable: list[tuple[NodeId, str]] = []
        for update, answer in zip(updates, answers, strict=True):
            if isinstance(answer, UpdateSketch):
                is_sparse = update.codec in SPARSE_CODECS
                sketches.append(
                    SketchedUpdate(
                        update.node,
                        update.inner_steps,
                        answer,
                        is_sparse,
                        held=groups.held_by(update.experts),
                    )
                )
            else:
                runtime.measurements.sketches.pop(update.blob.digest, None)
                if not isinstance(answer, HyperGPUError | OSError):
                    raise answer
                unreadable.append((update.node, str(answer)))
        return sketches, tuple(unreadable)


def stored_base(blobs: BlobStore, blob: BlobRef) -> StoredBlob:
    """The file of a model, or of another blob that a fold begins from.

    Raises:
        BaseDamagedError: It is missing or damaged.
    """
    try:
        return StoredBlob(blobs.path(blob.digest), blob.digest)
    except HyperGPUError as error:
        if error.reason is not Reason.BLOB_UNKNOWN:
            raise
        stored_blob = StoredBlob(blobs.work_path(blob.digest), blob.digest)
        raise BaseDamagedError(stored_blob, error.detail) from error


def judges_own_samples(spec: JobSpec) -> bool:
    """Whether a new job's updates are judged by samples of their shards: there are some."""
    return has_gradient(spec) and not spec.data.stays_on_nodes


def has_gradient(spec: JobSpec) -> bool:
    """Whether the job's updates are held against one, and its workload has one."""
    if spec.trust.rule != "robust":
        return False
    try:
        return find(spec.workload).kind != "null"
    except UnknownWorkloadError:
        return False
