"""Evaluations batch by batch, with metrics that only all samples together give."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from hypergpu.partitions import Indices
from hypergpu.workloads.datasets import SampleSource

_BATCH = 256


class Sums(NamedTuple):
    """An evaluation, added up over samples (or tokens) so that batches of any size combine."""

    loss: float
    score: float
    samples: int
    """Or tokens."""
    metrics: Mapping[str, float] = MappingProxyType({})
    """Metrics by name, where a workload has several; the score is the first of them."""

    def plus(self, other: "Sums") -> "Sums":
        """Both together."""
        metrics = {
            name: self.metrics.get(name, 0.0) + other.metrics.get(name, 0.0)
            for name in {**self.metrics, **other.metrics}
        }
        loss, score = self.loss + other.loss, self.score + other.score
        return Sums(loss, score, self.samples + other.samples, metrics)

    def metric(self, name: str) -> float:
        """The value of a metric by its name: ``loss``, ``perplexity``, one of `metrics`, or the
        mean score under any other.
        """
        if name == "loss":
            return self.loss / self.samples
        if name == "perplexity" and name not in self.metrics:
            return math.exp(min(self.loss / self.samples, 700.0))
        return self.metrics.get(name, self.score) / self.samples


class MeasuredBatch(Protocol):
    """What a `WholeSetWorkload` gives of one batch."""

    @property
    def sums(self) -> Sums:
        """Loss and metrics that are means."""

    @property
    def outputs(self) -> Any:
        """What metrics over all samples are computed from."""


@runtime_checkable
class WholeSetWorkload(Protocol):
    """Optional part of a workload: metrics that are no means over samples, such as F1."""

    def measure_batch(self, model: Any, *fields: Any) -> MeasuredBatch:
        """As ``evaluate``, with outputs."""

    def measure_all(self, outputs: Any) -> Mapping[str, float]:
        """Metrics by name of all samples, from a list of the batches' outputs. They come before
        those that are means.
        """


@runtime_checkable
class BoundedWorkload(Protocol):
    """Optional part of a workload: whether an evaluation fits into memory is known before it."""

    def check_evaluation(self, most_bytes: int | None = None) -> None:
        """Refuse an evaluation that would take more. Raises `DatasetError`, whose text says what
        to do.

        Args:
            most_bytes: Memory for its results; None: this machine's.
        """


class EvaluationTotals:
    """Adds up an evaluation's batches.

    Args:
        workload: With ``evaluate``, see `NumpyWorkload`.
    """

    def __init__(self, workload: Any) -> None:
        self._workload = workload
        self._total = Sums(0.0, 0.0, 0)
        self._outputs: list[Any] = []

    def add(self, model: Any, *fields: Any) -> None:
        """Evaluate a batch."""
        if isinstance(self._workload, WholeSetWorkload):
            batch = self._workload.measure_batch(model, *fields)
            self._total = self._total.plus(batch.sums)
            self._outputs.append(batch.outputs)
        else:
            self._total = self._total.plus(self._workload.evaluate(model, *fields))

    def sums(self) -> Sums:
        """Loss and metrics of all that was added."""
        total = self._total
        if not isinstance(self._workload, WholeSetWorkload):
            return total
        whole = self._workload.measure_all(self._outputs)
        exact = {name: value * total.samples for name, value in whole.items()}
        return total._replace(metrics={**exact, **total.metrics})


def evaluation_batches(
    samples: SampleSource, samples_most: int = 0, batch: int = _BATCH
) -> list[Indices]:
    """Indices of all samples in order, or of so many at most, spread evenly; a batch at a time.

    Args:
        samples: Held-out samples.
        samples_most: 0: all.
        batch: Samples of a batch at most.
    """
    count = len(samples.labels)
    stride = max(1, -(-count // samples_most)) if samples_most else 1
    indices = np.arange(0, count, stride)
    return [indices[start : start + batch] for start in range(0, len(indices), batch)]
