"""What layers of a model take, of its configuration alone: no weight is read."""

from math import prod

import torch
from transformers import PreTrainedConfig

from hypergpu.rings.layer_span import LayerSpan
from hypergpu.rings.stage_work import CutSizes
from hypergpu.workloads.slices.layer_slice import LayerSlice, layers_of


def model_sizes(config: PreTrainedConfig, dtype: str) -> CutSizes:
    """Sizes of a model whose parameters are held as a type.

    Raises:
        SliceError: It cannot be cut.
    """
    number_bytes = torch.empty((), dtype=getattr(torch, dtype)).element_size()
    layers = layers_of(config)
    layer_sizes, end_sizes = [], [0]
    for layer in range(layers):
        layer_slice = LayerSlice(config, LayerSpan(layer, layer + 1))
        own, other = 0, 0
        for name, tensor in layer_slice.model.state_dict().items():
            size = prod(tensor.shape) * number_bytes
            is_of_layer = name.startswith(layer_slice.layer_prefix)
            own, other = (own + size, other) if is_of_layer else (own, other + size)
        layer_sizes.append(own)
        end_sizes.append(other)
    return CutSizes(
        kind=config.model_type,
        layers=layers,
        hidden_size=int(config.hidden_size),
        layer_bytes=max(layer_sizes),
        end_bytes=max(end_sizes),
        total_bytes=sum(layer_sizes) + sum(end_sizes),
        token_bytes=_token_numbers(config) * number_bytes,
    )


def _token_numbers(config: PreTrainedConfig) -> int:
    """Numbers of a token's keys and values in one layer."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * int(heads) * int(width)
