"""A device that plays a slower one: no inner step ends before its time."""

import time
from pathlib import Path
from typing import NamedTuple, SupportsFloat

import numpy as np
from numpy.typing import NDArray

from gpu_node.shell.worker.trainer.interface import Start, Trainer
from hypergpu.tensors.layout import Flat, Layout
from hypergpu.workloads.workload import Samples


class Pace(NamedTuple):
    """The least time of an inner step."""

    floor_s: float
    slowness_path: str = ""
    """A file with how many times as long steps take at the moment; none, or no number in it: 1."""

    @property
    def step_s(self) -> float:
        """At the moment."""
        if not self.slowness_path:
            return self.floor_s
        try:
            return self.floor_s * float(Path(self.slowness_path).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return self.floor_s


class PacedTrainer:
    """A trainer whose inner steps take a while at least; what they compute is the same.

    Args:
        trainer: Does the work.
        pace: Of a step with a full batch; one with less takes less.
        full_batch: Samples in it.
    """

    def __init__(self, trainer: Trainer, pace: Pace, full_batch: int) -> None:
        self._trainer = trainer
        self._pace = pace
        self._full_batch = full_batch

    @property
    def layout(self) -> Layout:
        """See `Trainer`."""
        return self._trainer.layout

    @property
    def samples(self) -> Samples:
        """See `Trainer`."""
        return self._trainer.samples

    def begin(self, start: Start) -> None:
        """See `Trainer`."""
        self._trainer.begin(start)

    def step(self, indices: NDArray[np.int64], learning_rate: float) -> SupportsFloat:
        """See `Trainer`. The device is waited for: its work is part of the step's time."""
        due_s = time.monotonic() + self._pace.step_s * len(indices) / self._full_batch
        loss = float(self._trainer.step(indices, learning_rate))
        time.sleep(max(0.0, due_s - time.monotonic()))
        return loss

    def store(self, out: Flat) -> None:
        """See `Trainer`."""
        self._trainer.store(out)

    def optimizer(self) -> dict[str, NDArray[np.float32]]:
        """See `Trainer`."""
        return self._trainer.optimizer()
