"""Evaluation of torch workloads."""

from collections.abc import Sequence

import torch

from coordinator.shell.evaluator.model_evaluator import batches, example_batch, workload_examples
from hypergpu.tensors.layout import Flat
from hypergpu.workloads.networks.task import (
    TorchWorkload,
    chosen_device,
    load_module,
    module_initial,
    module_layout,
)
from hypergpu.workloads.workload import Example, ExampleWorkload, Sums


class TorchEvaluator:
    """`ModelEvaluator` of torch workloads."""

    def __init__(self, workload: TorchWorkload, data_dir: str) -> None:
        self._workload = workload
        self._model = workload.model().eval()
        self.dataset = workload.load(data_dir)
        self.layout = module_layout(self._model)

    def initial(self, seed: int) -> Flat:
        """See `ModelEvaluator`."""
        return module_initial(self._workload.model, seed)

    def evaluate(self, model: Flat, samples_most: int = 0) -> Sums:
        """See `ModelEvaluator`."""
        device = torch.device(chosen_device().kind)
        load_module(self._model.to(device), self.layout, model)
        total = Sums(0.0, 0.0, 0)
        with torch.inference_mode():
            for batch in batches(self.dataset.test, samples_most):
                inputs, targets = (
                    torch.from_numpy(array).to(device) for array in self.dataset.test.batch(batch)
                )
                total = total.plus(self._workload.evaluate(self._model, inputs, targets))
        return total

    def examples(self) -> Sequence[Example]:
        """See `ModelEvaluator`."""
        return workload_examples(self._workload, self.dataset)

    def outputs(self, model: Flat) -> Sequence[int | str]:
        """See `ModelEvaluator`."""
        if not isinstance(self._workload, ExampleWorkload):
            return ()
        device = torch.device(chosen_device().kind)
        load_module(self._model.to(device), self.layout, model)
        inputs, _ = example_batch(self.dataset)
        with torch.inference_mode():
            return self._workload.outputs(self._model, torch.from_numpy(inputs).to(device))
