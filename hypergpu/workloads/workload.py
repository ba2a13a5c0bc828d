"""Protocols of what builders return; worker and evaluator know workloads only through them."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hypergpu.tensors.layout import Flat, Layout, TensorSpec, layout_of, pack

Array = NDArray[Any]
Parameters = Mapping[str, NDArray[np.float32]]


class DatasetError(ValueError):
    """The data cannot be used. The text names the folder or file, what is wrong and the fix."""


class Samples(Protocol):
    """Labelled samples, in an order that is the same on every machine."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """``int64[n]``: what label skew divides by."""

    def batch(self, indices: NDArray[np.int64]) -> tuple[Array, Array]:
        """Inputs and targets of the samples, in the order of ``indices``."""


class ArraySamples(NamedTuple):
    """Samples that fit in memory."""

    inputs: Array  # [n, ...]
    targets: Array  # [n, ...]
    labels: NDArray[np.int64]  # [n]

    def batch(self, indices: NDArray[np.int64]) -> tuple[Array, Array]:
        """See `Samples`."""
        return self.inputs[indices], self.targets[indices]


class Dataset(NamedTuple):
    """Training samples and held-out samples."""

    train: Samples
    test: Samples


class Sums(NamedTuple):
    """An evaluation, added up over samples (or tokens) so that batches of any size combine."""

    loss: float
    score: float
    samples: int
    """Or tokens."""

    def plus(self, other: "Sums") -> "Sums":
        """Both together."""
        return Sums(self.loss + other.loss, self.score + other.score, self.samples + other.samples)

    def metric(self, name: str) -> float:
        """The value of a metric by its name: ``perplexity``, or the mean score under any other."""
        if name == "perplexity":
            return math.exp(min(self.loss / self.samples, 700.0))
        return self.score / self.samples


class Workload(Protocol):
    """A dataset and something that learns it."""

    def load(self, data_dir: str) -> Dataset:
        """Read the data. Raises `DatasetError`.

        Args:
            data_dir: The user's folder, or "" for the workload's own data.
        """


class NumpyWorkload(Workload, Protocol):
    """A model whose gradient is written by hand. Its tensors are all float32 parameters."""

    def initial(self, seed: int) -> dict[str, NDArray[np.float32]]:
        """Initial parameters by name; the same for the same seed."""

    def gradient(
        self, parameters: Parameters, inputs: Array, targets: Array
    ) -> tuple[float, dict[str, NDArray[np.float32]]]:
        """Mean loss over the batch and its gradient, by name."""

    def evaluate(self, parameters: Parameters, inputs: Array, targets: Array) -> Sums:
        """Loss and score over the batch."""


def numpy_layout(workload: NumpyWorkload) -> Layout:
    """The layout that node and coordinator derive alike."""
    tensors = workload.initial(0)
    return layout_of(TensorSpec(name, array.shape) for name, array in tensors.items())


def numpy_initial(workload: NumpyWorkload, seed: int) -> Flat:
    """The first model of a job with this seed, as node and coordinator draw it alike."""
    layout = numpy_layout(workload)
    flat = Flat.empty(layout)
    pack(layout, workload.initial(seed), flat)
    return flat
