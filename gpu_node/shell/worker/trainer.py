"""The interface of a trainer, whatever its workload is written in, and of the loop that it reports
to.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, SupportsFloat

import numpy as np
from numpy.typing import NDArray

from gpu_node.shell.worker.protocol import CallOutput, CallWork, CancelCall, ShardProgress
from hypergpu.optimizer import OptimizerRule
from hypergpu.tensors.layout import Flat, Layout
from hypergpu.units import Bytes
from hypergpu.workloads.datasets import SampleSource

OptimizerState = Mapping[str, NDArray[np.float32]]


class InitialState(NamedTuple):
    """Model and optimizer at the start of a round's training."""

    model: Flat
    seed: int
    optimizer: OptimizerState | None
    """None starts a fresh one."""
    rule: OptimizerRule


class DeviceMemory(NamedTuple):
    """What a first step took of a device's memory; 0: not measured, as on a CPU."""

    before_bytes: Bytes = Bytes(0)
    peak_bytes: Bytes = Bytes(0)


class Trainer(Protocol):
    """A model and its optimizer on one device. Each round begins it anew; nothing stays between."""

    layout: Layout
    """The model's tensors."""
    samples: SampleSource
    """The training data."""

    @property
    def memory(self) -> DeviceMemory:
        """Memory that the first step since it began took."""
        ...

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
        """The optimizer's state, for `InitialState.optimizer` of a later round."""
        ...


class ShardError(Exception):
    """The shard cannot be trained; the worker itself is well. The text says why."""


class ShardAbortedError(Exception):
    """The daemon does not want the shard any more."""


class ShardCallbacks(NamedTuple):
    """Functions that a training calls between inner steps."""

    raise_if_aborted: Callable[[], None]
    """Raises `ShardAbortedError` when the shard is not wanted any more."""
    report: Callable[[ShardProgress], None]
    log: Callable[[str], None]
    next_call: Callable[[float], CallWork | CancelCall | None] = lambda _: None
    """The next call to the work at hand, waited for so many seconds; None: there is none."""
    send_output: Callable[[CallOutput], None] = lambda _: None
    """Answers calls."""
