"""Answers the evaluator's requests, and names their errors: initial models, losses of models and
their gradients. Imports torch only for a torch workload.
"""

import importlib
import math
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

import numpy as np
from blake3 import blake3

from coordinator.shell.aggregation.layer_groups import layer_groups
from coordinator.shell.aggregation.sketch import SketchKey, sketch_rows, sketch_vector
from coordinator.shell.evaluator.examples import example_outputs, held_out_examples
from coordinator.shell.evaluator.model_evaluator import ModelEvaluator, NumpyEvaluator
from coordinator.shell.evaluator.process import (
    MEMORY_BYTES,
    Evaluate,
    Evaluated,
    EvaluatorFailure,
    EvaluatorReply,
    EvaluatorRequest,
    GradientMeasured,
    Initialise,
    Initialised,
    MeasureGradient,
    MeasureShards,
    ModelRequest,
    ShardSamples,
    ShardsMeasured,
    ShardsRequest,
    TryUpdate,
    UpdateTried,
    memory_error,
    work_name,
)
from coordinator.shell.evaluator.weights import read_model, read_named_tensors
from coordinator.shell.store.blobs.store import open_locked
from hypergpu.assignment import SampleRange
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest
from hypergpu.partitions import Indices, Sharding, partition_indices, stream_indices
from hypergpu.process import is_out_of_memory
from hypergpu.tensors.codec import decode_update
from hypergpu.tensors.layout import Flat, Layout
from hypergpu.tensors.partial import part_layout, spread_update
from hypergpu.units import Bytes, Samples
from hypergpu.workloads.built_in import BUILT_IN
from hypergpu.workloads.datasets import Dataset, all_finite
from hypergpu.workloads.entry import (
    OLDER_JOB_FIX,
    OptionError,
    WorkloadEntry,
    missing_modules,
    trains_version,
)
from hypergpu.workloads.evaluation import evaluation_batches
from hypergpu.workloads.node_data import held_out_dataset
from hypergpu.workloads.registry import (
    BuilderMissingError,
    UnknownWorkloadError,
    build_for_job,
    find,
)

_NOTES_MOST = 8
_NOTE_MOST = 600
"""Most notes, and characters of each, that a job's journal takes."""


_SHARDS_KEPT = 64
"""Shards whose samples are kept: those of a round's gradients serve its trials, too."""
_READ_BYTES_MOST = 1 << 20
"""A larger model is mapped, which takes as long as to read a few hundred kilobytes."""
_ROWS_BYTES = 32 << 20
"""Gradients of shards that are sketched at once take no more, unless one alone does."""


class _Division:
    """The training data's division into partitions, and the samples of the newest shards: a round's
    trials ask for both again and again.

    Args:
        dataset: None: there is none yet.
    """

    def __init__(self, dataset: Dataset | None = None) -> None:
        self._dataset = dataset
        self._sharding: Sharding | None = None
        self._partitions: list[Indices] = []
        self._indices: dict[ShardSamples, Indices] = {}

    def partitions(self, request: Initialise | ShardsRequest) -> list[Indices]:
        """Dataset indices of each partition."""
        alpha = request.alpha if request.sharding == "dirichlet" else 0.0
        sharding = Sharding(request.partitions, alpha, request.seed)
        if self._dataset is not None and self._sharding != sharding:
            self._partitions = partition_indices(self._dataset.train.labels, sharding)
            self._sharding = sharding
            self._indices.clear()
        return self._partitions

    def indices(self, request: ShardsRequest, shard: ShardSamples) -> Indices:
        """Dataset indices of some samples of a shard.

        Raises:
            HyperGPUError: SPEC_INVALID, there is no such partition.
        """
        partitions = self.partitions(request)
        if not 0 <= shard.partition < len(partitions):
            detail = f"partition {shard.partition} of {len(partitions)} does not exist"
            raise HyperGPUError(Reason.SPEC_INVALID, detail)
        if shard not in self._indices:
            if len(self._indices) >= _SHARDS_KEPT:
                del self._indices[next(iter(self._indices))]
            runs = [SampleRange(position, Samples(1)) for position in shard.positions]
            members = partitions[shard.partition]
            self._indices[shard] = stream_indices(members, shard.partition, request.seed, runs)
        return self._indices[shard]


class Evaluator:
    """Keeps the newest job's dataset and module between requests."""

    def __init__(self) -> None:
        self._key: tuple[object, ...] | None = None
        self._model: ModelEvaluator | None = None
        self._division = _Division()

    def answer(self, request: EvaluatorRequest) -> EvaluatorReply:
        """Answer one request; an error becomes a `EvaluatorFailure` with its reason."""
        try:
            entry = find(request.workload)
            _check_version(entry, request)
            model = self._open(entry, request)
            if isinstance(request, Initialise):
                return _initialise(entry, model, request, self._division)
            return _measure(entry, model, request, self._division)
        except HyperGPUError as error:
            return EvaluatorFailure(reason=error.reason.name, detail=error.detail, fix=error.fix)
        except UnknownWorkloadError as error:
            return EvaluatorFailure(reason=Reason.WORKLOAD_UNKNOWN.name, detail=str(error))
        except BuilderMissingError as error:
            is_torch = error.module.partition(".")[0] in {"torch", "torchvision"}
            reason = Reason.TORCH_MISSING if is_torch else Reason.WORKLOAD_UNKNOWN
            return EvaluatorFailure(reason=reason.name, detail=str(error))
        except ValueError as error:
            fix = error.fix if isinstance(error, OptionError) else ""
            return EvaluatorFailure(reason=Reason.SPEC_INVALID.name, detail=str(error), fix=fix)
        except Exception as error:  # noqa: BLE001 - a workload may raise anything, at its own cost
            return failure_of(error, request)

    def _open(self, entry: WorkloadEntry, request: EvaluatorRequest) -> ModelEvaluator:
        folder = (request.data_dir, request.is_held_out)
        key = (entry.name, tuple(sorted(request.options.items())), folder)
        if self._model is None or self._key != key:
            # Frees the last job's data before the next takes memory.
            self._model, self._division = None, _Division()
            self._model = _open_workload(entry, request)
            self._division = _Division(self._model.dataset)
            self._key = key
        return self._model


def import_builder(workload: str) -> None:
    """Import what builds and measures a built-in workload; nothing of other packages is imported
    before a job asks for it.
    """
    entry = next((each for each in BUILT_IN if each.name == workload), None)
    if entry is None or missing_modules(entry):
        return
    with suppress(ImportError):  # torch may be missing: a job will be told
        importlib.import_module(entry.builder.partition(":")[0])
        if entry.kind == "torch":
            importlib.import_module("coordinator.shell.evaluator.torch_evaluator")


def failure_of(error: Exception, request: EvaluatorRequest) -> EvaluatorFailure:
    """An error of a workload's code as an answer: one sentence for the owner of the job.

    The process stays as it is: it serves this job alone.
    """
    text = next(iter(str(error).splitlines()), "")
    if is_out_of_memory(error):
        memory_failure = memory_error(work_name(request), memory_limit())
        return EvaluatorFailure(
            reason=memory_failure.reason.name, detail=memory_failure.detail, fix=memory_failure.fix
        )
    traceback.print_exception(error)
    error_text = f"{type(error).__name__}: {_cut_text(text)}" if text else type(error).__name__
    if isinstance(error, OSError):
        fix = "see the whole error in the coordinator's log"
        return EvaluatorFailure(reason=Reason.NOT_READY.name, detail=error_text, fix=fix)
    detail = f"{work_name(request)} failed in the code of {request.workload}: {error_text}"
    return EvaluatorFailure(reason=Reason.PROGRAM_FAILED.name, detail=detail)


def memory_limit() -> int:
    """Most bytes that this process may take; 0: any."""
    return int(os.environ.get(MEMORY_BYTES, "0"))


def _cut_text(text: str) -> str:
    """A text of so many words as fit, with a sign that there were more."""
    if len(text) <= _TEXT_MOST:
        return text
    return text[:_TEXT_MOST].rpartition(" ")[0] + " ..."


_TEXT_MOST = 300


def _initialise(
    entry: WorkloadEntry, model: ModelEvaluator, request: Initialise, division: _Division
) -> Initialised:
    vectors = [vector.view(np.uint8).data for vector in _first_model(model, request)]
    hasher = blake3()
    for vector in vectors:
        hasher.update(vector)
    _write_synced(Path(request.model_path), vectors)
    layout_json = model.layout.to_json()
    _write_synced(Path(request.layout_path), [memoryview(layout_json)])
    return Initialised(
        digest=Digest(hasher.hexdigest()),
        size_bytes=Bytes(sum(vector.nbytes for vector in vectors)),
        layout_json=layout_json.decode(),
        partition_sizes=_partition_sizes(request, division),
        workload_version=model.version or entry.version,
        can_checkpoint=entry.can_checkpoint,
        operators=model.operators,
        examples=held_out_examples(model),
        metric_name=model.metric or entry.metric,
        mixture=model.mixture,
        notes=tuple(note[:_NOTE_MOST] for note in model.notes[:_NOTES_MOST]),
    )


def _partition_sizes(request: Initialise, division: _Division) -> tuple[Samples, ...]:
    """Samples of each partition; none where every node has its own, which nobody else counts."""
    if request.is_held_out:
        return ()
    return tuple(Samples(len(partition)) for partition in division.partitions(request))


def _first_model(model: ModelEvaluator, request: Initialise) -> Flat:
    if not request.weights_path:
        return model.initial(request.seed)
    path = Path(request.weights_path)
    if request.weights_layout:
        return read_model(path, model.layout, request.weights_layout)
    return read_named_tensors(path, model.layout)


def _measure(
    entry: WorkloadEntry, model: ModelEvaluator, request: ModelRequest, division: _Division
) -> Evaluated | GradientMeasured | ShardsMeasured | UpdateTried:
    _check_layout(model, request)
    match request:
        case MeasureGradient():
            return _measure_gradient(model, request)
        case MeasureShards():
            return _measure_shards(model, request, division)
        case TryUpdate():
            return _try_update(model, request, division)
        case Evaluate():
            return _evaluate(entry, model, request)


@contextmanager
def _mapped_model(layout: Layout, path: Path) -> Iterator[Flat]:
    """A model as it lies on disk: pages of a large one are read when they are used, and nobody
    writes over them meanwhile.
    """
    file = open_locked(path)
    if file is None:
        raise FileNotFoundError(f"the model {path.name} is gone")
    with file:
        is_small = layout.model_bytes <= _READ_BYTES_MOST
        octets = (
            np.frombuffer(file.read(), np.uint8)
            if is_small
            else np.asarray(np.memmap(file, np.uint8, mode="r"))
        )
        yield Flat.view(layout, octets)


def _evaluate(entry: WorkloadEntry, model: ModelEvaluator, request: Evaluate) -> Evaluated:
    with _mapped_model(model.layout, Path(request.model_path)) as flat:
        sums = model.evaluate(flat, request.samples_most)
        name = model.metric or entry.metric
        loss, metric = sums.loss / sums.samples, sums.metric(name)
        if math.isfinite(loss) and not math.isfinite(metric):
            detail = f"the metric {name} is {metric} of {sums.samples} held-out samples"
            fix = f"give a number for {name} whatever the samples are"
            raise HyperGPUError(Reason.UPDATE_NOT_FINITE, detail, fix=fix)
        if not math.isfinite(loss):
            cause = _source_of_nan(model, flat)
            detail = f"the model's loss on the held-out set is {loss}: {cause}"
            raise HyperGPUError(Reason.UPDATE_NOT_FINITE, detail)
        others = {other: sums.metric(other) for other in sums.metrics if other != name}
        return Evaluated(
            loss=loss,
            metric=metric,
            metric_name=name,
            metrics={other: value for other, value in others.items() if math.isfinite(value)},
            outputs=example_outputs(model, flat),
            samples=sum(map(len, evaluation_batches(model.dataset.test, request.samples_most))),
            samples_all=len(model.dataset.test.labels),
        )


def _measure_gradient(model: ModelEvaluator, request: MeasureGradient) -> GradientMeasured:
    with (
        _mapped_model(model.layout, Path(request.model_path)) as flat,
        np.errstate(over="ignore", invalid="ignore"),  # A bad model may well overflow.
    ):
        loss_gradient = model.gradient(flat, request.samples_most)
    key = SketchKey(request.sketch_secret)
    groups = layer_groups(model.layout) if request.by_layers else None
    return GradientMeasured(
        loss=_finite(loss_gradient.loss),
        sketch=sketch_vector(key, model.layout, loss_gradient.parameters, groups).tobytes(),
    )


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def _measure_shards(
    model: ModelEvaluator, request: MeasureShards, division: _Division
) -> ShardsMeasured:
    key, groups = SketchKey(request.sketch_secret), layer_groups(model.layout)
    sketches: list[bytes] = []
    losses: list[float | None] = []
    rows_most = max(1, _ROWS_BYTES // (4 * max(1, model.layout.parameters_count)))
    with (
        _mapped_model(model.layout, Path(request.model_path)) as flat,
        np.errstate(over="ignore", invalid="ignore"),
    ):
        shards = (division.indices(request, each) for each in request.shards)
        gradients = model.train_gradients(flat, shards)
        while batch := list(islice(gradients, rows_most)):
            vectors = [each.parameters for each in batch]
            rows = np.stack(vectors) if len(vectors) > 1 else vectors[0][None]
            layers = sketch_rows(key, model.layout, rows, groups)
            sketches += [each.tobytes() for each in layers]
            losses += [_finite(each.loss) for each in batch]
    return ShardsMeasured(sketches=tuple(sketches), losses=tuple(losses))


def _try_update(model: ModelEvaluator, request: TryUpdate, division: _Division) -> UpdateTried:
    indices = division.indices(request, request.shard)
    with (
        _mapped_model(model.layout, Path(request.model_path)) as flat,
        np.errstate(over="ignore", invalid="ignore"),  # An update may say anything.
    ):
        update = _whole_update(model.layout, request, flat)
        np.subtract(flat.parameters, update.parameters, out=update.parameters)
        return UpdateTried(loss=_finite(model.train_loss(update, indices)))


def _whole_update(layout: Layout, request: TryUpdate, base: Flat) -> Flat:
    """The update; one of some experts says of the others that nothing changed."""
    payload = Path(request.update_path).read_bytes()
    if not request.experts:
        return decode_update(layout, request.codec, payload)
    part = part_layout(layout, request.experts)
    return spread_update(layout, part, decode_update(part, request.codec, payload), base)


def _source_of_nan(model: ModelEvaluator, flat: Flat) -> str:
    """Where a loss that is not finite comes from."""
    if not (np.isfinite(flat.parameters).all() and np.isfinite(flat.statistics).all()):
        return "the model itself holds values that are not finite"
    if not all_finite(model.dataset.test, evaluation_batches(model.dataset.test)):
        return "the held-out data hold NaN or infinite values: remove them"
    return "the model's outputs are beyond what float32 can hold"


def _check_version(entry: WorkloadEntry, request: EvaluatorRequest) -> None:
    """Judge no model by code of another version than it is trained by."""
    job_version = request.workload_version
    if not job_version or trains_version(entry, job_version):
        return
    raise HyperGPUError(
        Reason.WORKLOAD_UNKNOWN,
        f"workload {entry.name} has version {entry.version} where the coordinator runs"
        f" and {job_version} in the job, whose models are judged by its own version alone",
        fix="upgrade the coordinator" if job_version > entry.version else OLDER_JOB_FIX,
    )


def _check_layout(model: ModelEvaluator, request: ModelRequest) -> None:
    if model.layout.digest != request.layout_digest:
        raise HyperGPUError(
            Reason.SPEC_INVALID,
            f"workload {request.workload} now makes another model than this job's:"
            " the installed version changed",
        )


def _open_workload(entry: WorkloadEntry, request: EvaluatorRequest) -> ModelEvaluator:
    """Build a workload with its data; torch is imported only for torch workloads.

    Raises:
        OptionError: The options do not fit.
        BuilderMissingError: A Python module is not installed.
        DatasetError: The data cannot be used.
    """
    data_dir = request.data_dir
    workload = build_for_job(entry, request.options, data_dir)
    held_out = held_out_dataset(workload, data_dir) if request.is_held_out else None
    if entry.kind != "torch":
        return NumpyEvaluator(workload, data_dir, held_out)
    from coordinator.shell.evaluator.torch_evaluator import TorchEvaluator

    return TorchEvaluator(workload, data_dir, held_out, memory_limit())


def _write_synced(path: Path, vectors: list[memoryview]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for vector in vectors:
            file.write(vector)
        file.flush()
        os.fsync(file.fileno())
