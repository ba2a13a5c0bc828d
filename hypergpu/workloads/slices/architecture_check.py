"""Whether slices of an architecture give what its whole model gives.

Tried on a small model with random weights and every rule of the real one: its multipliers, caps,
windows and kinds of layers. What adds something between its layers, or beside them, is found here,
before a node holds any of it.
"""

import copy
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from hypergpu.rings.layer_span import LayerSpan
from hypergpu.workloads.finetuning.base_model import first_sentence
from hypergpu.workloads.slices.layer_slice import (
    LayerSlice,
    SliceError,
    layers_of,
    open_session,
)
from hypergpu.workloads.slices.ragged_attention import SessionSegment

CHECK_TOKENS = 20
DIFFERENCE_MOST = 1e-4
"""Largest difference of logits, relative to the largest one, that rounding of float32 explains."""
_LAYERS_MOST = 6
_PASSES = ((0, 9), (9, 10), (10, 14), (14, 20))
"""Positions of each pass: a prompt, a step, and drafts."""
_STEPS = ((0, 12), *((place, place + 1) for place in range(12, CHECK_TOKENS)))
_SIZES = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "vocab_size": 128,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
}
_WINDOW = 8


class SliceCheck(NamedTuple):
    """What came of a comparison."""

    difference: float
    """Largest difference of logits, relative to the largest logit."""
    reason: str
    """Why such models are not cut; empty: they may be."""


def check_architecture(config: PreTrainedConfig) -> SliceCheck:
    """Compare slices with the whole on a small model of the same rules.

    Args:
        config: Of the real model, of which nothing but numbers of its size is changed.
    """
    try:
        return check_slices(small_config(config))
    except SliceError as error:
        return SliceCheck(float("inf"), str(error))


def small_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration with every rule of the model, and sizes that take no time."""
    config = copy.deepcopy(config)
    layers = min(layers_of(config), _LAYERS_MOST)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for name in ("layer_types", "no_rope_layers", "mlp_layer_types"):
        entries = getattr(config, name, None)
        if isinstance(entries, list):
            setattr(config, name, entries[:layers])
    for name, size in _SIZES.items():
        real_size = getattr(config, name, None)
        if isinstance(real_size, int) and real_size > 0:
            setattr(config, name, min(real_size, size))
    if getattr(config, "sliding_window", None):
        config.sliding_window = _WINDOW
    config.num_hidden_layers = layers
    config.hidden_size = width * config.num_attention_heads
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, name, None)
    return config


def check_slices(config: PreTrainedConfig) -> SliceCheck:
    """Compare three slices, or as many as there are layers, with the whole of random weights.

    Args:
        config: Small: the whole model is made, in float32.

    Raises:
        SliceError: Slices cannot be made or computed.
    """
    generator = torch.Generator().manual_seed(0)
    torch_state = torch.random.get_rng_state()
    try:
        torch.manual_seed(0)
        whole: Any = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation="eager", dtype=torch.float32
        ).eval()
    except Exception as error:  # a class may raise anything over a configuration
        raise SliceError(
            f"a small {config.model_type} cannot be made: {first_sentence(error)}"
        ) from error
    finally:
        torch.random.set_rng_state(torch_state)
    vocabulary = int(config.vocab_size)
    tokens = torch.randint(3, vocabulary - 1, (CHECK_TOKENS,), generator=generator)
    with torch.inference_mode():
        whole_logits = whole(tokens[None]).logits[0]
    slices = _slices_of(config, whole)
    largest = float(whole_logits.abs().max())
    difference = max(
        _difference(slices, tokens, whole_logits, passes) / largest for passes in (_PASSES, _STEPS)
    )
    if difference <= DIFFERENCE_MOST:
        return SliceCheck(difference, "")
    reason = (
        f"slices of a {config.model_type} give other numbers than the whole model"
        f" ({difference:.2g} relative): it adds something outside its layers."
        " Fix: serve it whole, on nodes that can hold it"
    )
    return SliceCheck(difference, reason)


def _slices_of(config: PreTrainedConfig, whole: Any) -> list[LayerSlice]:
    layers = layers_of(config)
    bounds = sorted({0, layers // 3, 2 * layers // 3, layers})
    state = whole.state_dict()
    slices = []
    for first, end in pairwise(bounds):
        layer_slice = LayerSlice(config, LayerSpan(first, end))
        values = {}
        for name, whole_name in layer_slice.whole_names():
            if whole_name not in state:
                raise SliceError(f"the whole model has no tensor {whole_name}")
            values[name] = nn.Parameter(state[whole_name], requires_grad=False)
        layer_slice.model.load_state_dict(values, assign=True)
        slices.append(layer_slice)
    return slices


def _difference(
    slices: list[LayerSlice],
    tokens: torch.Tensor,
    whole_logits: torch.Tensor,
    passes: tuple[tuple[int, int], ...],
) -> float:
    """Largest difference of logits where the slices take the tokens in several passes."""
    sessions = [open_session() for _ in slices]
    outputs = []
    try:
        for start, end in passes:
            states = tokens[start:end]
            for layer_slice, keys in zip(slices, sessions, strict=True):
                states = layer_slice.compute(states, [SessionSegment(keys, start, end - start)])
            outputs.append(states)
    except SliceError:
        raise
    except Exception as error:  # a model may raise anything over what it does not expect
        raise SliceError(f"a slice cannot be computed: {first_sentence(error)}") from error
    return float((torch.cat(outputs) - whole_logits).abs().max())
