"""Training numpy workloads; AdamW as in Loshchilov and Hutter 2019 (arXiv:1711.05101)."""

from typing import cast

import numpy as np
from numpy.typing import NDArray

from gpu_node.shell.worker.trainer import InitialState
from hypergpu.tensors.layout import Flat, unpack
from hypergpu.workloads.workload import NumpyWorkload, Parameters, Samples, numpy_layout

_BETA1 = 0.9
_BETA2 = 0.999
_EPSILON = 1e-8


class NumpyTrainer:
    """One flat parameter vector with its two moments. Implements `Trainer`."""

    def __init__(self, workload: NumpyWorkload, samples: Samples) -> None:
        self._workload = workload
        self.samples = samples
        self.layout = numpy_layout(workload)
        self._flat = Flat.empty(self.layout)
        self._gradient = Flat.empty(self.layout)
        self._mean = np.zeros(self.layout.parameters_count, np.float32)
        self._square = np.zeros(self.layout.parameters_count, np.float32)
        self._steps = 0
        self._weight_decay = 0.0

    def begin(self, start: InitialState) -> None:
        """See `Trainer`."""
        self._flat.parameters[:] = start.model.parameters
        self._weight_decay = start.weight_decay
        kept = start.optimizer
        self._mean[:] = 0 if kept is None else kept["mean"]
        self._square[:] = 0 if kept is None else kept["square"]
        self._steps = 0 if kept is None else int(kept["steps"][0])

    def step(self, indices: NDArray[np.int64], learning_rate: float) -> float:
        """See `Trainer`."""
        inputs, targets = self.samples.batch(indices)
        named = cast(Parameters, unpack(self.layout, self._flat))
        loss, gradients = self._workload.gradient(named, inputs, targets)
        flat = unpack(self.layout, self._gradient)
        for name, gradient in gradients.items():
            flat[name][...] = gradient
        self._descend(self._gradient.parameters, learning_rate)
        return loss

    def store(self, out: Flat) -> None:
        """See `Trainer`."""
        out.parameters[:] = self._flat.parameters

    def optimizer(self) -> dict[str, NDArray[np.float32]]:
        """See `Trainer`."""
        steps = np.array([self._steps], np.float32)  # exact up to 16 million
        return {"mean": self._mean, "square": self._square, "steps": steps}

    def _descend(self, gradient: NDArray[np.float32], learning_rate: float) -> None:
        self._steps += 1
        self._mean += np.float32(1 - _BETA1) * (gradient - self._mean)
        self._square += np.float32(1 - _BETA2) * (gradient * gradient - self._square)
        mean = self._mean / np.float32(1 - _BETA1**self._steps)
        root = np.sqrt(self._square / np.float32(1 - _BETA2**self._steps))
        parameters = self._flat.parameters
        parameters *= np.float32(1 - learning_rate * self._weight_decay)
        parameters -= np.float32(learning_rate) * mean / (root + np.float32(_EPSILON))
