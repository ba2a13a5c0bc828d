"""Evaluation of torch workloads."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import psutil
import torch

from coordinator.shell.evaluator.model_evaluator import (
    LossGradient,
    example_batch,
    workload_examples,
)
from coordinator.shell.evaluator.placed_module import PlacedModule
from hypergpu.partitions import Indices
from hypergpu.tensors.layout import Flat
from hypergpu.workloads.datasets import Dataset, SampleSource
from hypergpu.workloads.evaluation import BoundedWorkload, Sums
from hypergpu.workloads.examples import Example
from hypergpu.workloads.networks.measuring import measure_module, measured_batches
from hypergpu.workloads.networks.task import (
    TorchWorkload,
    chosen_device,
    module_initial,
    workload_layout,
)
from hypergpu.workloads.workload import (
    ExampleWorkload,
    LargeSamplesWorkload,
    MeasuredWorkload,
    MixtureWorkload,
    NotedWorkload,
    OperatorWorkload,
    VersionedWorkload,
)


class TorchEvaluator:
    """`ModelEvaluator` of torch workloads.

    Args:
        workload: What it evaluates.
        data_dir: The user's folder; empty: the workload's own data.
        dataset: None: the workload reads it.
        memory_bytes: Most memory that this process may take; 0: any.

    Raises:
        DatasetError: The data cannot be used, or an evaluation would take more memory.
    """

    def __init__(
        self,
        workload: TorchWorkload,
        data_dir: str,
        dataset: Dataset | None = None,
        memory_bytes: int = 0,
    ) -> None:
        self._workload = workload
        self._model = workload.model().eval()
        self.dataset = dataset or workload.load(data_dir)
        self.layout = workload_layout(workload, self._model)
        self.mixture = workload.mixture if isinstance(workload, MixtureWorkload) else None
        self.metric = workload.metric if isinstance(workload, MeasuredWorkload) else ""
        self.operators = workload.operators if isinstance(workload, OperatorWorkload) else ()
        self.notes = workload.notes if isinstance(workload, NotedWorkload) else ()
        self.version = workload.version if isinstance(workload, VersionedWorkload) else 0
        self._large = workload if isinstance(workload, LargeSamplesWorkload) else None
        if isinstance(workload, BoundedWorkload):
            workload.check_evaluation(_remaining_bytes(memory_bytes))

    def initial(self, seed: int) -> Flat:
        """See `ModelEvaluator`."""
        return module_initial(self._workload.model, seed)

    def evaluate(self, model: Flat, samples_most: int = 0) -> Sums:
        """See `ModelEvaluator`."""
        self._module.load(model)
        return measure_module(self._workload, self._model, self.dataset.test, samples_most)

    def gradient(self, model: Flat, samples_most: int) -> LossGradient:
        """See `ModelEvaluator`. The module stays in evaluation mode: nothing is drawn at random."""
        if self._large is not None:
            samples_most = min(samples_most, self._large.gradient_samples_most)
        self._module.load(model)
        return self._gradient(self.dataset.test, self._batches(samples_most))

    def train_gradients(self, model: Flat, shards: Iterable[Indices]) -> Iterator[LossGradient]:
        """See `ModelEvaluator`."""
        self._module.load(model)
        for indices in shards:
            yield self._gradient(self.dataset.train, self._train_batches(indices))

    def train_loss(self, model: Flat, indices: Indices) -> float:
        """See `ModelEvaluator`. Nothing is drawn at random."""
        self._module.load(model)
        self._module.seed()
        batches = self._train_batches(indices)
        count, total = sum(len(batch) for batch in batches), 0.0
        with torch.inference_mode():
            for batch in batches:
                fields = self._module.fields(self.dataset.train, batch)
                total += float(self._workload.loss(self._model, *fields)) * (len(batch) / count)
        return total

    def _train_batches(self, indices: Indices) -> list[Indices]:
        if self._large is None:
            return [indices]
        indices = indices[: self._large.gradient_samples_most]
        batch = self._large.evaluation_batch
        return [indices[start : start + batch] for start in range(0, len(indices), batch)]

    def _gradient(self, samples: SampleSource, batches: Sequence[Indices]) -> LossGradient:
        """Differentiate the loss at the model that was loaded."""
        module = self._module
        module.forget_gradients()
        module.seed()  # A loss may augment its inputs at random.
        count, total = sum(len(batch) for batch in batches), 0.0
        for batch in batches:
            fields = module.fields(samples, batch)
            loss = self._workload.loss(self._model, *fields) * (len(batch) / count)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        gradient = module.gradient()
        module.forget_gradients()
        return LossGradient(total, gradient)

    @cached_property
    def _module(self) -> PlacedModule:
        return PlacedModule(self._model, self.layout)

    def _batches(self, samples_most: int) -> list[Indices]:
        return measured_batches(self._workload, self.dataset.test, samples_most)

    def examples(self) -> Sequence[Example]:
        """See `ModelEvaluator`."""
        return workload_examples(self._workload, self.dataset)

    def outputs(self, model: Flat) -> Sequence[int | str]:
        """See `ModelEvaluator`."""
        if not isinstance(self._workload, ExampleWorkload):
            return ()
        self._module.load(model)
        inputs = torch.from_numpy(example_batch(self.dataset)[0]).to(self._module.device)
        with torch.inference_mode():
            return self._workload.outputs(self._model, inputs)


def _remaining_bytes(memory_bytes: int) -> int | None:
    """Memory for results of an evaluation, of what this process may take; None: there is no limit
    but the machine's.
    """
    if not memory_bytes or chosen_device().kind != "cpu":
        return None
    return max(0, memory_bytes - psutil.Process().memory_info().rss)
