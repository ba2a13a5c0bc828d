"""The trainer of workloads whose gradients are written by hand; it needs no torch."""

from typing import cast

import numpy as np
from numpy.typing import NDArray

from gpu_node.shell.worker.flat_optimizer import FlatOptimizer
from gpu_node.shell.worker.trainer import DeviceMemory, InitialState
from hypergpu.optimizer import pass_sizes
from hypergpu.tensors.layout import Flat, unpack
from hypergpu.workloads.datasets import SampleSource
from hypergpu.workloads.evaluation import Sums, evaluation_batches
from hypergpu.workloads.layouts import numpy_hidden_weights, numpy_layout
from hypergpu.workloads.workload import NumpyWorkload, Parameters


class NumpyTrainer:
    """One flat parameter vector and its optimizer. Implements `Trainer`."""

    def __init__(self, workload: NumpyWorkload, samples: SampleSource) -> None:
        self._workload = workload
        self.samples = samples
        self.memory = DeviceMemory()
        self.layout = numpy_layout(workload)
        self._flat = Flat.empty(self.layout)
        self._gradient = Flat.empty(self.layout)
        self._optimizer = FlatOptimizer(self.layout, numpy_hidden_weights(workload))
        self._micro_batch = 0

    def begin(self, start: InitialState) -> None:
        """See `Trainer`."""
        self._flat.parameters[:] = start.model.parameters
        self._micro_batch = start.rule.micro_batch
        self._optimizer.begin(start.rule, start.optimizer)

    def step(self, indices: NDArray[np.int64], learning_rate: float) -> float:
        """See `Trainer`."""
        loss, ends = 0.0, np.cumsum(pass_sizes(len(indices), self._micro_batch))
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            share = (end - start) / len(indices)
            loss += share * self._add_gradient(indices[start:end], share, is_first=not start)
        gradient = self._gradient.parameters
        self._optimizer.step(self._flat.parameters, gradient, learning_rate)
        return loss

    def store(self, out: Flat) -> None:
        """See `Trainer`."""
        out.parameters[:] = self._flat.parameters

    def optimizer(self) -> dict[str, NDArray[np.float32]]:
        """See `Trainer`."""
        return self._optimizer.state()

    def evaluate(self, samples: SampleSource, samples_most: int = 0) -> Sums:
        """Measure the model as it is now on samples that are held out."""
        parameters = cast(Parameters, unpack(self.layout, self._flat))
        total = Sums(0.0, 0.0, 0)
        for batch in evaluation_batches(samples, samples_most):
            total = total.plus(self._workload.evaluate(parameters, *samples.batch(batch)))
        return total

    def _add_gradient(self, indices: NDArray[np.int64], share: float, *, is_first: bool) -> float:
        """Add a part of the batch's gradient; the loss of that part."""
        inputs, targets = self.samples.batch(indices)
        parameters = cast(Parameters, unpack(self.layout, self._flat))
        loss, gradients = self._workload.gradient(parameters, inputs, targets)
        flat = unpack(self.layout, self._gradient)
        for name, gradient in gradients.items():
            if is_first:
                flat[name][...] = gradient if share == 1 else gradient * np.float32(share)
            else:
                np.add(flat[name], gradient * np.float32(share), out=flat[name])
        return loss
