"""Models of trainings as jobs that serve them need them."""

from collections.abc import Iterator

from coordinator.core.training.job.state import ENDED, Job, Model
from coordinator.shell.driver.kinds import TrainedModelFiles
from coordinator.shell.kinds.training.job_runtime import JobRuntime
from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.serving.tuned_model import (
    BEST,
    SERVED_WORKLOADS,
    ModelVersion,
    TuningSource,
    VersionDelta,
    untrained_adapter,
)
from hypergpu.units import Bytes


def trained_model(runtime: JobRuntime, source: TuningSource) -> TrainedModelFiles:
    """The model that a source names, as it is now.

    Raises:
        HyperGPUError: MODEL_MISSING, it is not kept, or not there yet; REQUEST_INVALID, models of
            the workload write no texts; NOT_READY, the job is being taken up again.
    """
    job = runtime.job
    if job.spec.workload not in SERVED_WORKLOADS:
        detail = f"models of workload {job.spec.workload} write no texts"
        fix = f"hypergpu predict {job.job_id} asks classifiers and programs"
        raise HyperGPUError(Reason.REQUEST_INVALID, detail, fix=fix)
    if runtime.layout is None:
        raise HyperGPUError(Reason.NOT_READY, f"the model of {job.job_id} is not known yet")
    if _is_base(job, source):
        blob = untrained_adapter(runtime.layout)
        return TrainedModelFiles(
            workload=job.spec.workload,
            options=job.spec.options,
            layout=runtime.layout,
            manifest=job.manifest,
            version=ModelVersion(0, BlobRef(digest_of(blob), Bytes(len(blob)))),
            has_ended=True,
            is_base=True,
        )
    model = kept_model(job, source)
    newest = model.deltas[-1] if model.deltas else None
    return TrainedModelFiles(
        workload=job.spec.workload,
        options=job.spec.options,
        layout=runtime.layout,
        manifest=job.manifest,
        version=ModelVersion(model.round, model.blob),
        delta=None if newest is None else VersionDelta(newest.base, newest.blob, newest.codec),
        has_ended=job.phase in ENDED,
    )


def _is_base(job: Job, source: TuningSource) -> bool:
    """Whether a source names the model before any training, and its blob is not kept."""
    return source.round == 0 and all(model.round for model in _kept_models(job))


def kept_model(job: Job, source: TuningSource) -> Model:
    """The model that a source names.

    Raises:
        HyperGPUError: MODEL_MISSING, it is not kept, or not there yet.
    """
    if source.round is not None:
        kept_models = {model.round: model for model in _kept_models(job)}
        if source.round in kept_models:
            return kept_models[source.round]
        rounds = ", ".join(map(str, sorted({0, *kept_models})))
        detail = f"{job.job_id} keeps no model after {source.round} rounds"
        fix = f"name one that is kept: {rounds}"
        raise HyperGPUError(Reason.MODEL_MISSING, detail, fix=fix)
    model = job.best_model if source.which == BEST else job.model
    if model is None:
        why = "no evaluated model yet" if source.which == BEST else "no model yet"
        detail = f"{job.job_id} has {why}"
        raise HyperGPUError(Reason.MODEL_MISSING, detail, fix="wait for its first round")
    return model


def _kept_models(job: Job) -> Iterator[Model]:
    """Models whose blobs are not removed while the job is there."""
    for model in (job.previous, job.best_model, *job.evaluating, job.model):
        if model is not None:
            yield model
