"""A workload as the evaluator sees it: initial tensors, and sums over held-out samples."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, cast

import numpy as np

from hypergpu.experts import Mixture
from hypergpu.partitions import Indices, permutation
from hypergpu.tensors.layout import Flat, Float32s, Layout, pack, unpack
from hypergpu.workloads.datasets import Array, Dataset, SampleSource
from hypergpu.workloads.evaluation import Sums, evaluation_batches
from hypergpu.workloads.examples import Example
from hypergpu.workloads.layouts import numpy_initial, numpy_layout
from hypergpu.workloads.workload import ExampleWorkload, NumpyWorkload, Parameters

_EXAMPLE_SEED = 20_261_123
_DRAWN_FROM = 4_096
"""Examples are drawn from so many samples at most, spread evenly over a larger set."""
EXAMPLES_MOST = 8


class LossGradient(NamedTuple):
    """A mean loss and its gradient."""

    loss: float
    parameters: Float32s
    """In layout order."""


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

    @property
    def metric(self) -> str:
        """Name of the metric; empty: the one of the workload's entry."""
        ...

    @property
    def operators(self) -> tuple[str, ...]:
        """Operators of torch without which no node can train it."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of how data and model are used."""
        ...

    @property
    def mixture(self) -> Mixture | None:
        """The experts of the model; None: it is no mixture."""
        ...

    @property
    def version(self) -> int:
        """The least version of the workload that trains it; 0: the entry's."""
        ...

    def initial(self, seed: int) -> Flat:
        """The initial model; the same for the same seed."""
        ...

    def evaluate(self, model: Flat, samples_most: int = 0) -> Sums:
        """Measure a model on the held-out samples: all, or so many, spread evenly over them."""
        ...

    def gradient(self, model: Flat, samples_most: int) -> "LossGradient":
        """Differentiate the loss on so many held-out samples at most, spread evenly over them."""
        ...

    def train_gradients(self, model: Flat, shards: Iterable[Indices]) -> "Iterator[LossGradient]":
        """Differentiate the loss on some training samples of each shard, shard by shard."""
        ...

    def train_loss(self, model: Flat, indices: Indices) -> float:
        """Mean loss of as many of some training samples as `train_gradients` takes."""
        ...

    def examples(self) -> Sequence[Example]:
        """A few held-out samples for people; none where the workload shows none."""
        ...

    def outputs(self, model: Flat) -> Sequence[int | str]:
        """A model's output for each of the examples."""
        ...


class NumpyEvaluator:
    """`ModelEvaluator` of numpy workloads, and of the null one, without torch."""

    metric = ""
    operators: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    mixture: Mixture | None = None
    version = 0

    def __init__(
        self, workload: NumpyWorkload, data_dir: str, dataset: Dataset | None = None
    ) -> None:
        self._workload = workload
        self.dataset = dataset or workload.load(data_dir)
        self.layout = numpy_layout(workload)

    def initial(self, seed: int) -> Flat:
        """See `ModelEvaluator`."""
        return numpy_initial(self._workload, seed)

    def evaluate(self, model: Flat, samples_most: int = 0) -> Sums:
        """See `ModelEvaluator`."""
        parameters = cast(Parameters, unpack(self.layout, model))
        total = Sums(0.0, 0.0, 0)
        for batch in evaluation_batches(self.dataset.test, samples_most):
            inputs, targets = self.dataset.test.batch(batch)
            total = total.plus(self._workload.evaluate(parameters, inputs, targets))
        return total

    def gradient(self, model: Flat, samples_most: int) -> LossGradient:
        """See `ModelEvaluator`."""
        test = self.dataset.test
        return self._gradient(model, test, evaluation_batches(test, samples_most))

    def train_gradients(self, model: Flat, shards: Iterable[Indices]) -> Iterator[LossGradient]:
        """See `ModelEvaluator`."""
        for indices in shards:
            yield self._gradient(model, self.dataset.train, [indices])

    def train_loss(self, model: Flat, indices: Indices) -> float:
        """See `ModelEvaluator`."""
        parameters = cast(Parameters, unpack(self.layout, model))
        sums = self._workload.evaluate(parameters, *self.dataset.train.batch(indices))
        return sums.loss / sums.samples

    def _gradient(
        self, model: Flat, samples: SampleSource, batches: Sequence[Indices]
    ) -> LossGradient:
        parameters = cast(Parameters, unpack(self.layout, model))
        total, loss, count = np.zeros(self.layout.parameters_count, np.float32), 0.0, 0
        part = Flat.empty(self.layout)
        for batch in batches:
            mean_loss, tensors = self._workload.gradient(parameters, *samples.batch(batch))
            pack(self.layout, tensors, part)
            total += part.parameters * np.float32(len(batch))
            loss, count = loss + mean_loss * len(batch), count + len(batch)
        return LossGradient(loss / count, total / np.float32(count))

    def examples(self) -> Sequence[Example]:
        """See `ModelEvaluator`."""
        return workload_examples(self._workload, self.dataset)

    def outputs(self, model: Flat) -> Sequence[int | str]:
        """See `ModelEvaluator`."""
        if not isinstance(self._workload, ExampleWorkload):
            return ()
        parameters = cast(Parameters, unpack(self.layout, model))
        return self._workload.outputs(parameters, example_batch(self.dataset)[0])


def workload_examples(workload: object, dataset: Dataset) -> Sequence[Example]:
    """Examples of a workload that has the optional part."""
    if not isinstance(workload, ExampleWorkload):
        return ()
    return workload.examples(*example_batch(dataset))


def example_batch(dataset: Dataset) -> tuple[Array, ...]:
    """Inputs and targets of the held-out samples that are shown: the same each time, of as many
    labels as there are.
    """
    count = len(dataset.test.labels)
    drawn_from = min(count, _DRAWN_FROM)
    order = permutation(_EXAMPLE_SEED, 0, 0, drawn_from) * count // drawn_from
    _, firsts = np.unique(dataset.test.labels[order], return_index=True)
    others = np.setdiff1d(np.arange(drawn_from), firsts)
    chosen_places = np.concatenate([np.sort(firsts), others])[:EXAMPLES_MOST]
    return dataset.test.batch(order[chosen_places])
