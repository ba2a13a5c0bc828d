"""One point of a sweep: a whole training on this device, and its curve on held-out samples."""

import math
import shutil
import weakref
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from gpu_node.shell.worker.batches import Schedule, learning_rate
from gpu_node.shell.worker.numpy_trainer import NumpyTrainer
from gpu_node.shell.worker.torch_engine import TorchTrainer
from gpu_node.shell.worker.trainer import InitialState, ShardError, Trainer
from hypergpu.assignment import SampleRange
from hypergpu.farm.sweep_points import LOSS, SweepPoint, steps_of
from hypergpu.partitions import stream_indices
from hypergpu.tensors.layout import Flat
from hypergpu.units import Samples, several
from hypergpu.workloads.datasets import Dataset, DatasetError, SampleSource
from hypergpu.workloads.entry import OptionError, WorkloadEntry, trains_version
from hypergpu.workloads.evaluation import Sums
from hypergpu.workloads.layouts import numpy_initial
from hypergpu.workloads.networks.task import chosen_device, module_initial
from hypergpu.workloads.registry import (
    BuilderMissingError,
    UnknownWorkloadError,
    build_for_job,
    find,
)
from hypergpu.workloads.workload import MeasuredWorkload


class PointError(ValueError):
    """A point has no result, whatever node does it. The text says why."""


class MeasuredTrainer(Trainer, Protocol):
    """A trainer that can be measured between its steps."""

    def evaluate(self, samples: SampleSource, samples_most: int = 0) -> Sums:
        """Measure the model as it is now on samples that are held out."""
        ...


class TrainedPoint(NamedTuple):
    """What the training of a point came to."""

    metrics: Mapping[str, float]
    """By name, after the last step, on all held-out samples."""
    curve: tuple[tuple[int, float], ...]
    """Inner steps so far and the metric that is asked for, from before the first step on. Between
    the first and the last on as many held-out samples as the job says.
    """


class PointWorkload:
    """A workload with its data and first model, for points that share them.

    Args:
        point: Names workload, options and seed.
        folder: The job's data, which are removed with this; None: it has none.
    """

    def __init__(self, point: SweepPoint, folder: Path | None) -> None:
        if folder is not None:
            # Samples may be read from it as long as they are used.
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._entry = installed_entry(point)
        data_dir = str(folder or "")
        try:
            workload = build_for_job(self._entry, point.spec.options, data_dir)
            self._dataset: Dataset = workload.load(data_dir)
        except OptionError as error:
            raise PointError(str(error)) from error
        except (BuilderMissingError, DatasetError) as error:
            raise ShardError(str(error)) from error
        self._workload = workload
        self.metric = (
            workload.metric if isinstance(workload, MeasuredWorkload) else self._entry.metric
        )

    def train(self, point: SweepPoint, metric: str, go_on: Callable[[], None]) -> TrainedPoint:
        """Train a point from its first model.

        Args:
            point: With the workload, options and data of this one.
            metric: Name of the metric of the curve.
            go_on: Called between inner steps; may raise to end the training.

        Raises:
            PointError: The training left the finite numbers, or there is no such metric.
        """
        trainer = self._trainer()
        seed = point.spec.training.seed
        trainer.begin(InitialState(self._initial(seed), seed, None, point.spec.inner.rule))
        test, samples_most = self._dataset.test, point.spec.evaluation.samples
        sums = trainer.evaluate(test)
        curve = [(0, self._value(sums, metric, 0))]
        ends = [*range(0, point.steps, point.steps_between), point.steps]
        for start, end in pairwise(ends):
            self._take_steps(trainer, point, range(start, end), go_on)
            sums = trainer.evaluate(test, 0 if end == point.steps else samples_most)
            curve.append((end, self._value(sums, metric, end)))
        return TrainedPoint(self._metrics(sums), tuple(curve))

    def _trainer(self) -> MeasuredTrainer:
        train = self._dataset.train
        if self._entry.kind == "torch":
            return TorchTrainer(self._workload, chosen_device(), train)
        return NumpyTrainer(self._workload, train)

    def _initial(self, seed: int) -> Flat:
        if self._entry.kind == "torch":
            return module_initial(self._workload.model, seed)
        return numpy_initial(self._workload, seed)

    def _take_steps(
        self, trainer: Trainer, point: SweepPoint, steps: range, go_on: Callable[[], None]
    ) -> None:
        rule, batch = point.spec.inner, point.spec.training.batch_size
        schedule = Schedule(
            rule.learning_rate,
            rule.schedule,
            Samples(rule.warmup_steps * batch),
            Samples(steps_of(point.spec) * batch),
        )
        members = np.arange(len(trainer.samples.labels))
        run = SampleRange(steps.start * batch, Samples(len(steps) * batch))
        indices = stream_indices(members, 0, point.spec.training.seed, [run])
        loss: Any = 0.0
        for step in steps:
            go_on()
            first = (step - steps.start) * batch
            rate = learning_rate(schedule, Samples((step + 1) * batch))
            loss = trainer.step(indices[first : first + batch], rate)
        if not math.isfinite(float(loss)):
            raise _divergence("the loss", steps.stop)

    def _value(self, sums: Sums, metric: str, steps: int) -> float:
        names = {LOSS, self.metric, *sums.metrics}
        if metric not in names:
            raise PointError(
                f"there is no metric {metric!r}. Fix: take one of {', '.join(sorted(names))}"
            )
        value = sums.metric(metric)
        if not math.isfinite(value):
            raise _divergence(f"the held-out {metric}", steps)
        return value

    def _metrics(self, sums: Sums) -> dict[str, float]:
        values = {name: sums.metric(name) for name in (LOSS, self.metric, *sums.metrics)}
        return {name: value for name, value in values.items() if math.isfinite(value)}


def _divergence(subject: str, steps: int) -> PointError:
    return PointError(
        f"{subject} is no finite number after {several(steps, 'inner step')}."
        " Fix: lower inner.learning_rate, or look for huge values in the data"
    )


def installed_entry(point: SweepPoint) -> WorkloadEntry:
    """The entry of a point's workload, as it is installed here.

    Raises:
        PointError: It trains nothing.
        ShardError: It is not here, or of another version.
    """
    try:
        entry = find(point.spec.workload)
    except UnknownWorkloadError as error:
        raise ShardError(str(error)) from error
    if entry.kind not in {"torch", "numpy"}:
        raise PointError(f"workload {entry.name} trains nothing that could be compared")
    if not trains_version(entry, point.workload_version):
        raise ShardError(
            f"workload {entry.name} has version {entry.version} here and"
            f" {point.workload_version} in the sweep. Fix: upgrade the older side"
        )
    return entry
