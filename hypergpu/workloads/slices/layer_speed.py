"""How fast this machine computes layers of a model, of its configuration alone.

Weights are made up: the time of a pass follows from their shapes. Two layers and an end of the
model are in memory at most.
"""

import time
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from hypergpu.rings.layer_span import LayerSpan
from hypergpu.rings.stage_work import LayerSpeed, memory_for_models
from hypergpu.workloads.finetuning.base_model import load_config
from hypergpu.workloads.networks.task import chosen_device
from hypergpu.workloads.slices.layer_slice import LayerSlice, layers_of, open_session
from hypergpu.workloads.slices.ragged_attention import SessionSegment

_READ_TOKENS = 64
_TIMES = 3
_WEIGHT = 0.01
_STATE = 0.1


class _WeightsPlace:
    """Where, and as what, weights are held."""

    def __init__(self, dtype: str, device: str) -> None:
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.device = torch.device(device)

    def slice(self, config: PreTrainedConfig, span: LayerSpan) -> LayerSlice:
        """A slice with made-up weights."""
        layer_slice = LayerSlice(config, span)
        # Memory that nobody wrote to would be read from one page.
        state = {
            name: torch.full(tensor.shape, _WEIGHT, dtype=self.dtype, device=self.device)
            for name, tensor in layer_slice.model.state_dict().items()
        }
        layer_slice.model.load_state_dict(state, assign=True)
        layer_slice.model.to(self.device)
        return layer_slice

    def pass_us(self, layer_slice: LayerSlice, tokens: int) -> float:
        """The quickest of a few passes."""
        if layer_slice.is_first:
            inputs = torch.zeros(tokens, dtype=torch.int64, device=self.device)
        else:
            shape = tokens, layer_slice.hidden_size
            inputs = torch.full(shape, _STATE, dtype=self.dtype, device=self.device)
        times_s = []
        for _ in range(_TIMES):
            began_s = time.perf_counter()
            layer_slice.compute(inputs, [SessionSegment(open_session(), 0, tokens)]).cpu()
            times_s.append(time.perf_counter() - began_s)
        return min(times_s) * 1e6


def layer_speed(folder: Path, dtype: str) -> LayerSpeed:
    """Time passes of one token and of many through two layers, and through the last one.

    Args:
        folder: Holds the model's configuration.
        dtype: What parameters are held as.

    Raises:
        SliceError: The model cannot be cut.
        DatasetError: Its settings are none that may be loaded.
        RuntimeError: The device has no room for two layers and an end of the model.
    """
    config = load_config(folder)
    device = chosen_device()
    layers, place = layers_of(config), _WeightsPlace(dtype, device.kind)
    count = min(2, max(1, layers - 1))
    first = place.slice(config, LayerSpan(0, count))
    layer_us = place.pass_us(first, 1) / count
    read_us = place.pass_us(first, _READ_TOKENS) / count / _READ_TOKENS
    del first
    last = place.slice(config, LayerSpan(layers - 1, layers))
    end_us = max(0.0, place.pass_us(last, 1) - layer_us)
    memory_bytes = memory_for_models(device.kind, device.memory_bytes)
    return LayerSpeed(device.kind, memory_bytes, layer_us, end_us, read_us)
