"""Answering the evaluator's requests, and naming what went wrong."""

import math
import os
from pathlib import Path

import numpy as np
from blake3 import blake3

from coordinator.shell.evaluator.judge import Judge, NumpyJudge
from coordinator.shell.evaluator.messages import (
    Evaluate,
    Evaluated,
    Failed,
    Initialise,
    Initialised,
    JudgeUpdates,
    Reply,
    Request,
    UpdatesJudged,
)
from coordinator.shell.evaluator.single import Singles
from hypergpu.dataset.sampling import Sharding, partition_indices
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest
from hypergpu.tensors.layout import Flat, LayoutError
from hypergpu.units import Bytes, Samples
from hypergpu.workloads.entry import OptionError, Options, WorkloadEntry
from hypergpu.workloads.registry import BuilderMissingError, UnknownWorkloadError, build, find
from hypergpu.workloads.workload import DatasetError


class Evaluator:
    """Keeps the newest job's dataset and module between requests."""

    def __init__(self) -> None:
        self._key: tuple[object, ...] | None = None
        self._judge: Judge | None = None
        self._singles = Singles()

    def answer(self, request: Request) -> Reply:
        """Answer one request; whatever fails becomes a `Failed` with its reason."""
        try:
            if isinstance(request, Initialise):
                return self._initialise(request)
            if isinstance(request, JudgeUpdates):
                return self._judge_updates(request)
            return self._evaluate(request)
        except HyperGPUError as error:
            return Failed(reason=error.reason.name, detail=error.detail)
        except UnknownWorkloadError as error:
            return Failed(reason=Reason.WORKLOAD_UNKNOWN.name, detail=str(error))
        except BuilderMissingError as error:
            is_torch = error.module.partition(".")[0] in {"torch", "torchvision"}
            reason = Reason.TORCH_MISSING if is_torch else Reason.WORKLOAD_UNKNOWN
            return Failed(reason=reason.name, detail=str(error))
        except (OptionError, DatasetError, LayoutError, ValueError) as error:
            return Failed(reason=Reason.SPEC_INVALID.name, detail=str(error))
        except (MemoryError, RuntimeError, OSError) as error:
            return Failed(reason=Reason.NOT_READY.name, detail=f"{type(error).__name__}: {error}")

    def _initialise(self, request: Initialise) -> Initialised:
        entry = find(request.workload)
        judge = self._judge_of(entry, request)
        alpha = request.alpha if request.sharding == "dirichlet" else 0.0
        sharding = Sharding(request.partitions, alpha, request.seed)
        services = partition_indices(judge.dataset.train.labels, sharding)
        digest, size_bytes = _write_model(Path(request.model_path), judge.initial(request.seed))
        layout_json = judge.layout.to_json()
        _write_synced(Path(request.layout_path), [memoryview(layout_json)])
        return Initialised(
            digest=digest,
            size_bytes=size_bytes,
            layout_json=layout_json.decode(),
            partition_sizes=tuple(Samples(len(part)) for part in services),
            workload_version=entry.version,
        )

    def _evaluate(self, request: Evaluate) -> Evaluated:
        entry = find(request.workload)
        judge = self._judge_of(entry, request)
        _refuse_other_layout(judge, request)
        model = Flat.view(judge.layout, np.fromfile(request.model_path, np.uint8))
        sums = judge.evaluate(model)
        loss, metric = sums.loss / sums.samples, sums.metric(entry.metric)
        if not (math.isfinite(loss) and math.isfinite(metric)):
            raise HyperGPUError(
                Reason.UPDATE_NOT_FINITE, f"the model's loss on the held-out set is {loss}"
            )
        return Evaluated(loss=loss, metric=metric, metric_name=entry.metric)

    def _judge_updates(self, request: JudgeUpdates) -> UpdatesJudged:
        judge = self._judge_of(find(request.workload), request)
        _refuse_other_layout(judge, request)
        return self._singles.judged(judge, request)

    def _judge_of(self, entry: WorkloadEntry, request: Request) -> Judge:
        key = (entry.name, tuple(sorted(request.options.items())), request.data_dir)
        if self._judge is None or self._key != key:
            self._singles = Singles()
            self._judge = None  # frees the last job's data before the next takes memory
            self._judge = _judge_for(entry, request.options, request.data_dir)
            self._key = key
        return self._judge


def _refuse_other_layout(judge: Judge, request: Evaluate | JudgeUpdates) -> None:
    if judge.layout.digest != request.layout_digest:
        raise HyperGPUError(
            Reason.SPEC_INVALID,
            f"workload {request.workload} now makes another model than this job's:"
            " the installed version changed",
        )


def _judge_for(entry: WorkloadEntry, options: Options, data_dir: str) -> Judge:
    """Build a workload's judge; torch is imported only for torch workloads.

    Raises:
        OptionError: The options do not fit.
        BuilderMissingError: A Python module is not installed.
        DatasetError: The data cannot be used.
    """
    workload = build(entry, options)
    if entry.kind != "torch":
        return NumpyJudge(workload, data_dir)
    from coordinator.shell.evaluator.torch_judge import TorchJudge

    return TorchJudge(workload, data_dir)


def _write_model(path: Path, model: Flat) -> tuple[Digest, Bytes]:
    services = [vector.view(np.uint8).data for vector in model]
    _write_synced(path, services)
    running = blake3()
    for part in services:
        running.update(part)
    return Digest(running.hexdigest()), Bytes(sum(part.nbytes for part in services))


def _write_synced(path: Path, services: list[memoryview]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for part in services:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
