"""A module where it is computed, and its tensors as flat vectors.

Small models are judged dozens of times a round: where their tensors are is found out once.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hypergpu.partitions import Indices
from hypergpu.tensors.layout import Flat, Float32s, Layout, TensorKind, TensorSpec
from hypergpu.workloads.datasets import SampleSource
from hypergpu.workloads.networks.task import chosen_device, named_tensors


class _PlacedTensor(NamedTuple):
    """One tensor of the layout."""

    spec: TensorSpec
    start: int
    """Its first element, counted within its kind."""
    tensor: Tensor
    parameter: nn.Parameter | None
    """None: nothing is differentiated by it."""
    values: npt.NDArray[Any] | None
    """The tensor's memory; None: it is on another device, or numpy has no such type."""

    @property
    def place(self) -> slice:
        """Its elements within its kind."""
        return slice(self.start, self.start + self.spec.count)


class PlacedModule:
    """A module on the device that it is computed on.

    Args:
        module: Moved there.
        layout: Of its tensors.
    """

    def __init__(self, module: nn.Module, layout: Layout) -> None:
        self.device = torch.device(chosen_device().kind)
        self._layout = layout
        tensors = named_tensors(module.to(self.device))
        parameters = dict(module.named_parameters())
        self._tensors = [
            _PlacedTensor(
                spec,
                start,
                tensors[spec.name][1],
                parameters.get(spec.name) if spec.kind is TensorKind.PARAMETER else None,
                _memory_of(spec, tensors[spec.name][1]),
            )
            for spec, start in zip(layout.tensors, layout.offsets, strict=True)
        ]

    def load(self, flat: Flat) -> None:
        """Copy a model into the module."""
        with torch.no_grad():
            for each in self._tensors:
                values = flat.of_kind(each.spec.kind)[each.place].reshape(each.spec.shape)
                if each.values is not None:
                    np.copyto(each.values, values)
                else:
                    # A copy, since torch warns of memory that it may not write to.
                    each.tensor.copy_(torch.from_numpy(values.copy()))

    def seed(self) -> None:
        """Seed all draws of the module. On a CPU without the search for other devices, which takes
        torch as long as a small model's gradient.
        """
        if self.device.type == "cpu":
            torch.default_generator.manual_seed(0)
        else:
            torch.manual_seed(0)

    def fields(self, samples: SampleSource, indices: Indices) -> list[Tensor]:
        """Inputs and targets of samples, on the device."""
        return [torch.from_numpy(array).to(self.device) for array in samples.batch(indices)]

    def gradient(self) -> Float32s:
        """The parameters' gradients, 0 where one has no part in the loss."""
        vector = np.zeros(self._layout.parameters_count, np.float32)
        for each in self._tensors:
            if each.parameter is not None and each.parameter.grad is not None:
                gradient = each.parameter.grad
                vector[each.place] = gradient.float().cpu().numpy().reshape(-1)
        return vector

    def forget_gradients(self) -> None:
        """Set none."""
        for each in self._tensors:
            if each.parameter is not None:
                each.parameter.grad = None


def _memory_of(spec: TensorSpec, tensor: Tensor) -> npt.NDArray[Any] | None:
    kind = torch.int64 if spec.kind is TensorKind.INTEGER else torch.float32
    return tensor.numpy() if tensor.device.type == "cpu" and tensor.dtype == kind else None
