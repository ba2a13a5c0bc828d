"""A workload as the evaluator sees it: initial tensors, and sums over held-out samples."""

from typing import Protocol, cast

import numpy as np

from hypergpu.tensors.layout import Flat, Layout, unpack
from hypergpu.workloads.workload import (
    Dataset,
    NumpyWorkload,
    Parameters,
    Samples,
    Sums,
    numpy_initial,
    numpy_layout,
)

_BATCH = 256


class ModelEvaluator(Protocol):
    """One workload with its options and data."""

    @property
    def dataset(self) -> Dataset:
        """Training and held-out samples."""
        ...

    @property
    def layout(self) -> Layout:
        """The model's tensors."""
        ...

    def initial(self, seed: int) -> Flat:
        """The initial model; the same for the same seed."""
        ...

    def evaluate(self, model: Flat, samples_most: int = 0) -> Sums:
        """Measure a model on the held-out samples: all, or so many, spread evenly over them."""
        ...


class NumpyEvaluator:
    """`ModelEvaluator` of numpy workloads, and of the null one, without torch."""

    def __init__(self, workload: NumpyWorkload, data_dir: str) -> None:
        self._workload = workload
        self.dataset = workload.load(data_dir)
        self.layout = numpy_layout(workload)

    def initial(self, seed: int) -> Flat:
        """See `ModelEvaluator`."""
        return numpy_initial(self._workload, seed)

    def evaluate(self, model: Flat, samples_most: int = 0) -> Sums:
        """See `ModelEvaluator`."""
        named = cast(Parameters, unpack(self.layout, model))
        total = Sums(0.0, 0.0, 0)
        for batch in batches(self.dataset.test, samples_most):
            inputs, targets = self.dataset.test.batch(batch)
            total = total.plus(self._workload.evaluate(named, inputs, targets))
        return total


def batches(
    samples: Samples, samples_most: int = 0
) -> list[np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Indices of all samples, or of so many at most, in order, a batch at a time."""
    count = len(samples.labels)
    stride = max(1, -(-count // samples_most)) if samples_most else 1
    indices = np.arange(0, count, stride)
    return [indices[start : start + _BATCH] for start in range(0, len(indices), _BATCH)]
