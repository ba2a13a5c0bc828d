"""What commands ask of the evaluator: the first model with its layout and the measure of
a model; and users' data as it reads them, a folder of hard links.
"""

import asyncio
import math
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

import structlog
from google.protobuf.message import DecodeError

from coordinator.core.training.job.commands import EvaluateModel, InitialiseModel
from coordinator.core.training.job.events import (
    EvaluationFailed,
    EvaluationReady,
    ModelInitialised,
    PreparationFailed,
)
from coordinator.core.training.job.state import InitialWeights, Model
from coordinator.shell.blobs.store import BlobStore
from coordinator.shell.blobs.writing import reject_when_full
from coordinator.shell.evaluator import process
from coordinator.shell.evaluator.process import Initialise, Initialised
from coordinator.shell.failpoints import failpoint
from coordinator.shell.runtime.driver import JobRuntime
from coordinator.shell.runtime.services import Services, evaluated_job
from hypergpu.crypto import digest_from_wire
from hypergpu.dataset import checked_paths
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest, JobId
from hypergpu.jobfile.spec import JobSpec
from hypergpu.statements import BlobRef
from hypergpu.streams import write_durably
from hypergpu.tensors.layout import Layout, LayoutError, layout_from_json
from hypergpu.units import Milliseconds
from hypergpu.v1 import tensor_pb2
from hypergpu.workloads.metrics import direction, target_mode

MANIFEST_BYTES_MAX = 3 << 20
"""A manifest travels in one message of `CreateJob`, which is capped at 4 MiB."""
_UNFINISHED = ".part"


def packed_manifest(manifest: tensor_pb2.Manifest) -> bytes:
    """A manifest's canonical bytes: entries by path, protobuf's deterministic encoding.

    Raises:
        HyperGPUError: MANIFEST_INVALID, its paths make no folder, or it is too large.
    """
    checked_paths(entry.path for entry in manifest.entries)
    entries = sorted(manifest.entries, key=lambda entry: entry.path)
    packed = tensor_pb2.Manifest(entries=entries).SerializeToString(deterministic=True)
    if len(packed) > MANIFEST_BYTES_MAX:
        detail = f"the manifest has {len(packed)} bytes, over the limit of {MANIFEST_BYTES_MAX}"
        raise HyperGPUError(Reason.MANIFEST_INVALID, detail)
    return packed


def manifest_digests(manifest: tensor_pb2.Manifest) -> frozenset[Digest]:
    """Digests of the files in a manifest.

    Raises:
        HyperGPUError: a digest is malformed.
    """
    return frozenset(digest_from_wire(entry.blob.digest.value) for entry in manifest.entries)


def stored_manifest(blobs: BlobStore, manifest: BlobRef) -> tensor_pb2.Manifest:
    """Read a manifest back. Blocks.

    Raises:
        HyperGPUError: BLOB_UNKNOWN, it is missing or damaged.
    """
    try:
        return tensor_pb2.Manifest.FromString(blobs.path(manifest.digest).read_bytes())
    except DecodeError:
        raise HyperGPUError(Reason.BLOB_UNKNOWN, f"{manifest.digest} is no manifest") from None


def lay_out_dataset(blobs: BlobStore, manifest: BlobRef, datasets_dir: Path) -> Path:
    """Make the folder that a manifest describes, unless it is there, and return it. Blocks.

    Several threads may make the same one at once: the first to finish gives it its name.

    Raises:
        HyperGPUError: BLOB_UNKNOWN, a file is missing or damaged; DISK_FULL; MANIFEST_INVALID, an
            earlier version took a manifest whose paths make no folder.
    """
    folder = datasets_dir / manifest.digest
    if folder.is_dir():
        return folder
    unfinished = _unfinished_folder(datasets_dir, manifest.digest)
    try:
        with reject_when_full(f"dataset {manifest.digest}"):
            unfinished.mkdir(parents=True)
            _link_files(blobs, stored_manifest(blobs, manifest), unfinished)
            _rename_finished(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def laid_out_manifests(datasets_dir: Path) -> tuple[Digest, ...]:
    """Digests of the manifests that have a folder. Blocks."""
    folders = datasets_dir.glob("*")
    return tuple(Digest(each.name) for each in folders if each.suffix != _UNFINISHED)


def remove_layout(datasets_dir: Path, manifest: Digest) -> None:
    """Remove a manifest's folder; at no moment does a part of it bear its name. Blocks."""
    renamed = _unfinished_folder(datasets_dir, manifest)
    with suppress(FileNotFoundError):
        (datasets_dir / manifest).rename(renamed)
    shutil.rmtree(renamed, ignore_errors=True)


def clear_unfinished(datasets_dir: Path) -> None:
    """Remove unfinished folders of an earlier process. Blocks."""
    for left in datasets_dir.glob(f"*{_UNFINISHED}"):
        shutil.rmtree(left, ignore_errors=True)


def _unfinished_folder(datasets_dir: Path, manifest: Digest) -> Path:
    return datasets_dir / f"{manifest}.{secrets.token_hex(4)}{_UNFINISHED}"


def _link_files(blobs: BlobStore, manifest: tensor_pb2.Manifest, folder: Path) -> None:
    paths = checked_paths(entry.path for entry in manifest.entries)
    for path, entry in zip(paths, manifest.entries, strict=True):
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        source = blobs.path(digest_from_wire(entry.blob.digest.value))
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)


def _rename_finished(unfinished: Path, folder: Path) -> None:
    try:
        unfinished.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


log = structlog.get_logger()

_RETRY_S = 5.0
_LAYOUT_SUFFIX = ".layout.json"


async def initialise(services: Services, runtime: JobRuntime, command: InitialiseModel) -> None:
    """Answer the command with `ModelInitialised` or `PreparationFailed`."""
    while True:
        try:
            return await _initialise(services, runtime, command)
        except HyperGPUError as refused:
            if refused.reason not in {Reason.DISK_FULL, Reason.STORE_UNREACHABLE}:
                event = PreparationFailed(at_ms=Milliseconds(0), reason=refused.message)
                await services.driver.insist(command.job_id, event)
                return None
            runtime.obstacle = str(refused)
            log.warning("a job waits to be prepared", job_id=command.job_id, reason=str(refused))
            await asyncio.sleep(_RETRY_S)


async def _initialise(services: Services, runtime: JobRuntime, command: InitialiseModel) -> None:
    made, model_path = await _make_model(services, runtime, command)
    failpoint("initialise.made")
    blob = BlobRef(made.digest, made.size_bytes)
    runtime.layout = await _store_layout(services, command.job_id, made)
    services.pins.add([blob.digest])
    try:
        await asyncio.to_thread(services.blobs.adopt, model_path, blob)
        failpoint("initialise.stored")
        if made.operators:
            # Members that cannot train it leave before its first round may open.
            runtime.operators = frozenset(made.operators)
            await services.allocator.settle()
        event = ModelInitialised(
            at_ms=Milliseconds(0),
            model=Model(0, blob),
            partition_sizes=made.partition_sizes,
            layout=runtime.layout.digest,
            workload_version=made.workload_version,
            can_checkpoint=made.can_checkpoint,
            operators=made.operators,
            examples=made.examples,
            target_mode=_target_mode(command.spec, made.metric_name),
            is_evaluated=True,
            notes=made.notes,
        )
        await services.driver.report(command.job_id, event)
    finally:
        services.pins.drop([blob.digest])


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


async def load_layout(services: Services, runtime: JobRuntime) -> None:
    """Find the layout of a job that has a model, or build it anew.

    Raises:
        HyperGPUError: It cannot be built, or not stored.
    """
    job = runtime.job
    if job.model is None or runtime.layout is not None:
        return
    runtime.layout = await asyncio.to_thread(
        stored_layout, services.job_dir(job.job_id)
    ) or await asyncio.to_thread(_kept_layout, services.blobs, job.layout)
    if runtime.layout is None:
        # Given weights would give the same layout.
        drawn = InitialiseModel(job.job_id, job.spec, job.manifest, weights=None)
        made, model_path = await _make_model(services, runtime, drawn)
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


def _kept_layout(blobs: BlobStore, digest: Digest) -> Layout | None:
    """A layout that is a blob; None: it is not."""
    try:
        return layout_from_json(blobs.path(digest).read_bytes())
    except (HyperGPUError, OSError, LayoutError):
        return None


async def _make_model(
    services: Services, runtime: JobRuntime, command: InitialiseModel
) -> tuple[Initialised, Path]:
    job_id, spec, weights = command.job_id, command.spec, command.weights
    model_path = services.blobs.work_path(f"{job_id}-initial")
    layout_path = services.blobs.work_path(f"{job_id}-layout")
    request = Initialise(
        workload=spec.workload,
        options=spec.options,
        seed=spec.training.seed,
        data_dir=await data_dir(services, command.manifest),
        is_held_out=spec.data.stays_on_nodes,
        weights_path=await _weights_path(services, weights),
        weights_layout=weights.layout if weights is not None else Digest(""),
        sharding=spec.data.sharding,
        alpha=spec.data.alpha if spec.data.sharding == "dirichlet" else 0.0,
        partitions=spec.data.partitions or spec.training.nodes,
        model_path=str(model_path),
        layout_path=str(layout_path),
    )
    made = await services.evaluator.initialise(evaluated_job(runtime), request)
    layout_path.unlink(missing_ok=True)
    return made, model_path


async def _weights_path(services: Services, weights: InitialWeights | None) -> str:
    if weights is None:
        return ""
    return str(await asyncio.to_thread(services.blobs.path, weights.blob.digest))


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
    if services.settings.takeover:
        await asyncio.to_thread(services.blobs.put, layout.to_json())
    return layout


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
