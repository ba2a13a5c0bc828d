"""Workloads of torch: a module, a dataset, and how the one is measured on the other."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hypergpu.workloads.workload import Dataset, Sums, Workload


class TorchWorkload(Workload, Protocol):
    """A module whose gradient torch finds.

    Its floating-point parameters are trained; floating-point buffers are statistics, which nodes
    average; integer buffers are taken from the lowest slot.
    """

    def model(self) -> nn.Module:
        """A fresh module. Whatever it draws comes from torch's global generator, which the caller
        seeds.
        """

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean loss over the batch, with its graph."""

    def evaluate(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Sums:
        """Loss and score over the batch; called without a graph, in evaluation mode."""


class Classification(NamedTuple):
    """One label a sample: cross-entropy and correct predictions. Implements `TorchWorkload`."""

    make: Callable[[], nn.Module]
    read: Callable[[str], Dataset]
    prepare: Callable[[Tensor], Tensor] = torch.Tensor.float
    """Stored inputs to the model's."""
    augment: Callable[[Tensor], Tensor] | None = None
    """Random changes of prepared inputs, in training only."""

    def load(self, data_dir: str) -> Dataset:
        """See `Workload`."""
        return self.read(data_dir)

    def model(self) -> nn.Module:
        """See `TorchWorkload`."""
        return self.make()

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """See `TorchWorkload`."""
        prepared = self.prepare(inputs)
        if self.augment is not None:
            prepared = self.augment(prepared)
        return F.cross_entropy(model(prepared), targets)

    def evaluate(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Sums:
        """See `TorchWorkload`."""
        logits = model(self.prepare(inputs)).float()
        loss = F.cross_entropy(logits, targets, reduction="sum")
        hits = (logits.argmax(dim=1) == targets).sum()
        return Sums(float(loss), float(hits), len(targets))


class NextByte(NamedTuple):
    """The next byte at every place of a block: cross-entropy. Implements `TorchWorkload`."""

    make: Callable[[], nn.Module]
    read: Callable[[str], Dataset]

    def load(self, data_dir: str) -> Dataset:
        """See `Workload`."""
        return self.read(data_dir)

    def model(self) -> nn.Module:
        """See `TorchWorkload`."""
        return self.make()

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """See `TorchWorkload`."""
        logits = model(inputs.long())  # [b, t, 256]
        return F.cross_entropy(logits.flatten(0, 1), targets.long().flatten())

    def evaluate(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Sums:
        """See `TorchWorkload`."""
        logits = model(inputs.long()).float()
        wanted = targets.long()
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")
        hits = (logits.argmax(dim=2) == wanted).sum()
        return Sums(float(loss), float(hits), wanted.numel())
