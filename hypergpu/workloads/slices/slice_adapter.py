"""A LoRA adapter on a slice: the same numbers as on the whole model, however it is cut."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hypergpu.rings.ring_training import RingTraining
from hypergpu.workloads.datasets import DatasetError
from hypergpu.workloads.finetuning.adapters import (
    AdapterPlan,
    adapted_modules,
    add_adapter,
    uniform_numbers,
)
from hypergpu.workloads.slices.layer_slice import LayerSlice, SliceError

_PREFIX = "base_model.model."
"""What peft puts before names of a model's own."""


class AdapterTensor(NamedTuple):
    """A trained tensor."""

    name: str
    """As of the whole model with an adapter by peft."""
    parameter: nn.Parameter


class SliceAdapter:
    """The adapter of the layers of a slice, which is changed: its modules are wrapped by peft.

    Args:
        layer_slice: With its tensors.
        training: Settings.

    Raises:
        SliceError: The slice has no modules of the targets, or some outside its layers.
    """

    def __init__(self, layer_slice: LayerSlice, training: RingTraining) -> None:
        self._slice = layer_slice
        self._seed = training.adapter_seed
        plan = AdapterPlan(
            training.mode, training.rank, training.alpha, training.targets, training.adapter_seed
        )
        # A slice has each end as a tensor of its own, and peft would look for the embedding.
        layer_slice.model.config.tie_word_embeddings = False
        try:
            self.config = plan.peft_config(adapted_modules(layer_slice.model, plan))
            """As peft has it."""
            adapted_model: Any = add_adapter(layer_slice.model, self.config)
        except (DatasetError, ValueError) as error:
            raise SliceError(str(error)) from error
        self.layers: dict[int, list[AdapterTensor]] = {}
        """Trained tensors by layer of the whole model, in the order of their names."""
        self.frozen: list[AdapterTensor] = []
        """Tensors that keep the values that the seed says."""
        for name, parameter in adapted_model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.float()
                parameter.requires_grad = training.mode == "full" or "lora_B" in name
                self._place(name, parameter)
            else:
                parameter.requires_grad = False
        for tensors in self.layers.values():
            tensors.sort(key=lambda each: each.name)
        self.reset()

    def _place(self, name: str, parameter: nn.Parameter) -> None:
        own_name = name.removeprefix(_PREFIX)
        whole_name = self._slice.whole_name(own_name)
        if not own_name.startswith(self._slice.layer_prefix):
            raise SliceError(
                f"an adapter of {own_name} lies outside the layers."
                ' Fix: set options.targets = "all-linear"'
            )
        layer = int(whole_name.removeprefix(self._slice.layer_prefix).partition(".")[0])
        tensor = AdapterTensor(_PREFIX + whole_name, parameter)
        if parameter.requires_grad:
            self.layers.setdefault(layer, []).append(tensor)
        else:
            self.frozen.append(tensor)

    @property
    def tensors(self) -> list[AdapterTensor]:
        """All trained tensors, in the order of layers."""
        return [each for layer in sorted(self.layers) for each in self.layers[layer]]

    @torch.no_grad()
    def reset(self) -> None:
        """Set A to what the seed says for the whole model, and B to zeros."""
        for tensor in [*self.frozen, *self.tensors]:
            tensor.parameter.copy_(torch.from_numpy(self.first_value(tensor)))

    @torch.no_grad()
    def set_layer(self, layer: int, values: NDArray[np.float32]) -> None:
        """Give the trained tensors of a layer their values.

        Args:
            layer: Of the whole model.
            values: ``float32[n]``: the tensors one after another, in the order of their names.

        Raises:
            SliceError: There are more or fewer values, or some that are not finite.
        """
        tensors = self.layers.get(layer, [])
        count = sum(each.parameter.numel() for each in tensors)
        if len(values) != count:
            raise SliceError(f"the adapter of layer {layer} has {len(values)} values, not {count}")
        if not np.isfinite(values).all():
            raise SliceError(f"the adapter of layer {layer} is not finite")
        first = 0
        for tensor in tensors:
            end = first + tensor.parameter.numel()
            own_values = values[first:end].reshape(tuple(tensor.parameter.shape))
            tensor.parameter.copy_(torch.from_numpy(own_values.astype(np.float32)))
            first = end

    def first_value(self, tensor: AdapterTensor) -> NDArray[np.float32]:
        """What a tensor begins with."""
        name, shape = tensor.name, tuple(tensor.parameter.shape)
        if "lora_B" in name:
            return np.zeros(shape, np.float32)
        bound = np.float32(1 / np.sqrt(np.prod(shape[1:])))
        return uniform_numbers(self._seed, name, shape) * bound

    def squares(self) -> float:
        """Sum of squares of all gradients, in double precision and in the order of layers."""
        return sum(
            float(parameter.grad.double().square().sum())
            for _, parameter in self.tensors
            if parameter.grad is not None
        )
