"""Datasets as workloads give them: samples in an order that is the same on every machine."""

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class DatasetError(ValueError):
    """The data cannot be used. The text names the folder or file, what is wrong and the fix."""


class NodeDataError(DatasetError):
    """A node's own data cannot be used. The text leaves the node: it names what the job asks for,
    and of the data no more than counts, shapes and types.
    """


class SampleSource(Protocol):
    """Labelled samples, in an order that is the same on every machine."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """``int64[n]``: what label skew divides by."""

    def batch(self, indices: NDArray[np.int64]) -> tuple[Array, ...]:
        """Inputs and targets of the samples, in the order of ``indices``; a program's samples have
        as many arrays as it has fields.
        """


def all_finite(samples: SampleSource, batches: Iterable[NDArray[np.int64]]) -> bool:
    """Whether no input or target of the samples is infinite or not a number. Loads all of them."""
    arrays = (array for indices in batches for array in samples.batch(indices))
    return all(
        bool(np.isfinite(array).all()) for array in arrays if np.issubdtype(array.dtype, np.inexact)
    )


class ArraySamples(NamedTuple):
    """Samples that fit in memory."""

    inputs: Array  # [n, ...]
    targets: Array  # [n, ...]
    labels: NDArray[np.int64]  # [n]

    def batch(self, indices: NDArray[np.int64]) -> tuple[Array, Array]:
        """See `SampleSource`."""
        return self.inputs[indices], self.targets[indices]


class Dataset(NamedTuple):
    """Training samples and held-out samples."""

    train: SampleSource
    test: SampleSource
    class_names: tuple[str, ...] = ()
    """Names of the classes in the order of their numbers, for people; empty: numbers are shown."""


NO_SAMPLES = ArraySamples(np.empty((0, 0)), np.empty((0, 0)), np.zeros(0, dtype=np.int64))
"""Training samples as the evaluator sees them where they stay on nodes."""
