"""A workload that learns nothing, for measuring what everything but the training costs."""

import numpy as np
from numpy.typing import NDArray

from hypergpu.workloads.datasets import Array, ArraySamples, Dataset
from hypergpu.workloads.entry import Options
from hypergpu.workloads.evaluation import Sums
from hypergpu.workloads.workload import Parameters

SAMPLES = 1 << 16


class Null:
    """One tensor of a wanted size, zeros at first. Implements `NumpyWorkload`."""

    def __init__(self, parameters: int) -> None:
        self.parameters = parameters

    def load(self, data_dir: str) -> Dataset:
        """Samples that hold nothing."""
        return Dataset(_nothing(SAMPLES), _nothing(1))

    def initial(self, seed: int) -> dict[str, NDArray[np.float32]]:
        """Zeros."""
        return {"weight": np.zeros(self.parameters, dtype=np.float32)}

    def gradient(
        self, parameters: Parameters, inputs: Array, targets: Array
    ) -> tuple[float, dict[str, NDArray[np.float32]]]:
        """Zero."""
        return 0.0, self.initial(0)

    def evaluate(self, parameters: Parameters, inputs: Array, targets: Array) -> Sums:
        """Return no loss and no score."""
        return Sums(0.0, 0.0, len(targets))


def _nothing(count: int) -> ArraySamples:
    return ArraySamples(np.empty((count, 0)), np.empty((count, 0)), np.zeros(count, dtype=np.int64))


def null(options: Options) -> Null:
    """Builder of ``null``."""
    return Null(int(options["parameters"]))
