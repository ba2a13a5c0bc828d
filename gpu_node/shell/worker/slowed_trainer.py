"""A trainer that plays a slower device."""

import time
from pathlib import Path
from typing import NamedTuple, SupportsFloat

import numpy as np
from numpy.typing import NDArray

from gpu_node.shell.worker.trainer import DeviceMemory, InitialState, Trainer
from hypergpu.tensors.layout import Flat


class StepFloor(NamedTuple):
    """The least time of an inner step with a full batch."""

    floor_s: float
    slowness_path: str = ""
    """File with a factor by which steps take longer at the moment; none, or no number in it: 1."""

    @property
    def step_s(self) -> float:
        """The least time at the moment."""
        if not self.slowness_path:
            return self.floor_s
        try:
            return self.floor_s * float(Path(self.slowness_path).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return self.floor_s


class SlowedTrainer:
    """A trainer whose inner steps take a least time; their results are the same.

    Args:
        trainer: Does the work.
        floor: Least time of a step with a full batch; one with fewer samples takes less.
        full_batch: Samples in a full batch.
    """

    def __init__(self, trainer: Trainer, floor: StepFloor, full_batch: int) -> None:
        self._trainer = trainer
        self._floor = floor
        self._full_batch = full_batch
        self.layout, self.samples = trainer.layout, trainer.samples

    @property
    def memory(self) -> DeviceMemory:
        """See `Trainer`."""
        return self._trainer.memory

    def begin(self, start: InitialState) -> None:
        """See `Trainer`."""
        self._trainer.begin(start)

    def step(self, indices: NDArray[np.int64], learning_rate: float) -> SupportsFloat:
        """See `Trainer`. Waits for the device: its work is part of the step's time."""
        due_s = time.monotonic() + self._floor.step_s * len(indices) / self._full_batch
        loss = float(self._trainer.step(indices, learning_rate))
        time.sleep(max(0.0, due_s - time.monotonic()))
        return loss

    def store(self, out: Flat) -> None:
        """See `Trainer`."""
        self._trainer.store(out)

    def optimizer(self) -> dict[str, NDArray[np.float32]]:
        """See `Trainer`."""
        return self._trainer.optimizer()
