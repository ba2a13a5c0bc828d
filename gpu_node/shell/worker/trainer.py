"""The interface of a trainer, whatever its workload is written in."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol, SupportsFloat

import numpy as np
from numpy.typing import NDArray

from hypergpu.tensors.layout import Flat, Layout
from hypergpu.workloads.workload import Samples

OptimizerState = Mapping[str, NDArray[np.float32]]


class InitialState(NamedTuple):
    """Model and optimizer at the start of a round's training."""

    model: Flat
    seed: int
    optimizer: OptimizerState | None
    """None starts a fresh AdamW."""
    weight_decay: float


class Trainer(Protocol):
    """A model with an AdamW on one device. Each round begins it anew; it keeps nothing between."""

    layout: Layout
    """The model's tensors."""
    samples: Samples
    """The training data."""

    def begin(self, start: InitialState) -> None:
        """Take over a model and an optimizer state."""
        ...

    def step(self, indices: NDArray[np.int64], learning_rate: float) -> SupportsFloat:
        """Take one inner step; reading the loss (of before the step) may wait for the device."""
        ...

    def store(self, out: Flat) -> None:
        """Copy out parameters, statistics and integers as they are now."""
        ...

    def optimizer(self) -> dict[str, NDArray[np.float32]]:
        """The AdamW's state, for `InitialState.optimizer` of a later round."""
        ...
