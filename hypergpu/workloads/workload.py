"""Protocols of what builders return. Worker and evaluator know workloads only through them.

Packages of users may import `ArraySamples`, `Dataset`, `DatasetError` and `Sums` from here.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from hypergpu.experts import Mixture
from hypergpu.workloads.datasets import (
    Array,
    ArraySamples,  # noqa: F401 - users' packages import it from here
    Dataset,
    DatasetError,  # noqa: F401 - as above
)
from hypergpu.workloads.evaluation import Sums
from hypergpu.workloads.examples import Example

Parameters = Mapping[str, NDArray[np.float32]]


class Workload(Protocol):
    """A dataset and something that learns it."""

    def load(self, data_dir: str) -> Dataset:
        """Read the data. Raises `DatasetError`.

        Args:
            data_dir: The user's folder, or "" for the workload's own data.
        """


@runtime_checkable
class JobWorkload(Protocol):
    """What a builder returns where the model too depends on a job's data."""

    def for_job(self, data_dir: str) -> Workload:
        """The workload of the job whose data are in the folder. Raises `DatasetError`."""


@runtime_checkable
class MeasuredWorkload(Protocol):
    """Optional part of a workload: a metric of its own, in place of its entry's."""

    @property
    def metric(self) -> str:
        """Its name; `hypergpu.workloads.metrics` says which names fall as a model learns."""


@runtime_checkable
class NotedWorkload(Protocol):
    """Optional part of a workload: what its user should know of its data and model."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences, once the data are read: what was left out, and what is done otherwise."""


@runtime_checkable
class CheckedWorkload(Protocol):
    """Optional part of a workload: its data are checked where they are sent from."""

    def check(self, data_dir: str, *, has_train: bool) -> None:
        """Check a job's folder without its weights. Raises `DatasetError`.

        Args:
            data_dir: The folder.
            has_train: Whether training samples are in it, rather than on nodes.
        """


@runtime_checkable
class OperatorWorkload(Protocol):
    """Optional part of a workload: operators of torch without which no node can train it."""

    @property
    def operators(self) -> tuple[str, ...]:
        """Their names, as programs have them."""


@runtime_checkable
class VersionedWorkload(Protocol):
    """Optional part of a workload: a version of its own, where its entry trains several."""

    @property
    def version(self) -> int:
        """The least version of the entry that trains it."""


@runtime_checkable
class MixtureWorkload(Protocol):
    """Optional part of a torch workload: its model is a mixture of experts, of which a node may
    hold some.

    Each expert has exactly one integer tensor of one element: how many tokens were sent to it in
    training. It counts from the value that it was given, and its updates are weighed by it.
    """

    @property
    def mixture(self) -> Mixture:
        """How many experts there are, and how many of them a node holds."""

    def expert_of(self, tensor: str) -> int | None:
        """The expert that a tensor belongs to, from 0; None: all experts share it."""

    def holding(self, experts: Sequence[int]) -> Workload:
        """The same workload with these experts only: its model has their tensors and the shared
        ones, under the same names, and sends tokens to no others.
        """


@runtime_checkable
class LargeSamplesWorkload(Protocol):
    """Optional part of a workload: samples so large that fewer are evaluated at once."""

    @property
    def evaluation_batch(self) -> int:
        """Samples that an evaluation puts through the model at once."""

    @property
    def gradient_samples_most(self) -> int:
        """Held-out samples that the gradient which weighs updates is measured on."""


@runtime_checkable
class ExampleWorkload(Protocol):
    """Optional part of a workload: what its model makes of a few held-out samples.

    Both are called with the same samples, eight at most, and may use fewer of them. They are pure:
    random draws come from a generator of their own with a fixed seed.
    """

    def examples(self, inputs: Array, targets: Array) -> Sequence[Example]:
        """Stored samples for people; none where the samples cannot be shown."""

    def outputs(self, model: Any, inputs: Any) -> Sequence[int | str]:
        """Class number or text for each of the examples, in their order.

        Args:
            model: As in ``evaluate``: a torch module in evaluation mode, or named arrays.
            inputs: As in ``evaluate``: a tensor on the module's device, or an array.
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
