"""Which models of transformers are written as GGUF, and how their weights and settings become
llama.cpp's.

An architecture names every tensor that it takes. One that is left over, a bias that llama.cpp has
no place for or a setting that it computes otherwise refuses the model: a file that loads and
answers wrongly is worth less than none.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from hypergpu.workloads.gguf.refusal import GgufRefusalError

Tensors = dict[str, torch.Tensor]


class WeightChange(NamedTuple):
    """How the numbers of a weight lie otherwise in a file. Both take its configuration, too."""

    write: Callable[[torch.Tensor, Any], torch.Tensor]
    """From transformers' order to the file's."""
    read: Callable[[torch.Tensor, Any], torch.Tensor]
    """And back."""


_LAYERS_NAME = "model.layers"
_LAYER = re.compile(r"(model\.layers|transformer\.h)\.(\d+)\.(.+)")
_FILE_LAYER = re.compile(r"blk\.(\d+)\.(.+)")


class Architecture(NamedTuple):
    """A kind of model."""

    name: str
    """As llama.cpp has it."""
    layers: Mapping[str, str]
    """Names of a layer's modules in transformers, with those in GGUF."""
    whole: Mapping[str, str]
    """The same for modules beside the layers."""
    settings: Callable[[Any], dict[str, Any]]
    """Metadata of a configuration, without the architecture's name before their keys."""
    changes: Mapping[str, WeightChange] = MappingProxyType({})
    """Changes of weights, by the names of their modules in transformers."""

    def checked_settings(self, config: Any) -> dict[str, Any]:
        """The metadata of a configuration under their whole keys.

        Raises:
            GgufRefusalError: A setting that llama.cpp computes otherwise.
        """
        return {f"{self.name}.{key}": value for key, value in self.settings(config).items()}

    def tensors(self, config: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> Tensors:
        """Weights under GGUF's names, in GGUF's order of numbers.

        Raises:
            GgufRefusalError: A weight has no place.
        """
        tensors: Tensors = {}
        is_tied = bool(getattr(config, "tie_word_embeddings", False))
        for name, tensor in weights:
            if name == "lm_head.weight" and is_tied:
                continue
            place, module = self._place(name)
            change = self.changes.get(module)
            tensors[place] = tensor if change is None else change.write(tensor, config)
        return tensors | rotary_factors(config)

    def source_name(self, name: str) -> str:
        """Transformers' name of a file's tensor; empty: it has no place in the model."""
        base, _, part = name.rpartition(".")
        match = _FILE_LAYER.fullmatch(base)
        inner = match.group(2) if match else base
        table = self.layers if match else self.whole
        module = next((module for module, place in table.items() if place == inner), "")
        if not module or part not in {"weight", "bias"}:
            return ""
        prefix = f"{_LAYERS_NAME}.{match.group(1)}." if match else ""
        return f"{prefix}{module}.{part}"

    def read_weight(self, name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
        """A weight by transformers' name, of the numbers of a file."""
        _, module = self._place(name)
        change = self.changes.get(module)
        return tensor if change is None else change.read(tensor, config)

    def _place(self, name: str) -> tuple[str, str]:
        """GGUF's name of a weight, and its module's in transformers."""
        match = _LAYER.fullmatch(name)
        inner = match.group(3) if match else name
        module, _, part = inner.rpartition(".")
        table = self.layers if match else self.whole
        if module not in table or part not in {"weight", "bias"}:
            raise GgufRefusalError(f"{self.name} has no place for the weight {name}")
        prefix = f"blk.{match.group(2)}." if match else ""
        return f"{prefix}{table[module]}.{part}", module


def rotary_factors(config: Any) -> Tensors:
    """The factors by which Llama 3 slows frequencies down."""
    rope = _rope(config)
    if rope.get("rope_type", "default") != "llama3":
        return {}
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    original = rope["original_max_position_embeddings"]
    width = _head_width(config)
    frequencies = rope["rope_theta"] ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    lengths = 2 * math.pi / frequencies
    smooth = ((original / lengths) - low) / (high - low)
    between = 1 / ((1 - smooth) / rope["factor"] + smooth)
    factors = torch.where(lengths > original / low, rope["factor"], between)
    factors = torch.where(lengths < original / high, 1.0, factors)
    return {"rope_freqs.weight": factors.float()}


def _rope(config: Any) -> Mapping[str, Any]:
    rope = getattr(config, "rope_parameters", None) or {}
    full_rope = rope.get("full_attention") if isinstance(rope, Mapping) else None
    return full_rope if isinstance(full_rope, Mapping) else rope


def _head_width(config: Any) -> int:
    width = getattr(config, "head_dim", None)
    return int(width or config.hidden_size // config.num_attention_heads)


def _require(*, is_right: bool, config: Any, setting: str) -> None:
    if not is_right:
        value = getattr(config, setting, None)
        detail = f"a {config.model_type} with {setting} = {value!r} is computed otherwise there"
        raise GgufRefusalError(f"{detail}: no GGUF is written of it")


def _usual_settings(config: Any) -> dict[str, Any]:
    """Metadata of models with rotary places and a norm by the mean square."""
    rope = _rope(config)
    kind = rope.get("rope_type", "default")
    _require(
        is_right=kind in {"default", "linear", "llama3"}, config=config, setting="rope_parameters"
    )
    _require(
        is_right=rope.get("partial_rotary_factor", 1.0) in {None, 1.0},
        config=config,
        setting="rope_parameters",
    )
    width = _head_width(config)
    settings: dict[str, Any] = {
        "context_length": int(config.max_position_embeddings),
        "embedding_length": int(config.hidden_size),
        "block_count": int(config.num_hidden_layers),
        "feed_forward_length": int(config.intermediate_size),
        "attention.head_count": int(config.num_attention_heads),
        "attention.head_count_kv": int(config.num_key_value_heads),
        "attention.key_length": width,
        "attention.value_length": width,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": width,
        "rope.freq_base": float(rope.get("rope_theta", 10_000.0)),
        "vocab_size": int(config.vocab_size),
    }
    if kind == "linear":
        settings["rope.scaling.type"] = "linear"
        settings["rope.scaling.factor"] = float(rope["factor"])
    return settings


def _silu_settings(config: Any) -> dict[str, Any]:
    _require(is_right=config.hidden_act == "silu", config=config, setting="hidden_act")
    window = getattr(config, "sliding_window", None)
    is_used = window is not None and getattr(config, "use_sliding_window", True)
    is_whole = not is_used or window >= config.max_position_embeddings
    _require(is_right=is_whole, config=config, setting="sliding_window")
    return _usual_settings(config)


def _gemma_settings(config: Any) -> dict[str, Any]:
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    is_right = activation in {"gelu_pytorch_tanh", "gelu"}
    # Under the name "gelu" the first Gemma always computed the tanh form.
    _require(is_right=is_right, config=config, setting="hidden_activation")
    return _usual_settings(config)


def _gpt2_settings(config: Any) -> dict[str, Any]:
    for setting, value in (
        ("activation_function", "gelu_new"),
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        _require(is_right=getattr(config, setting) == value, config=config, setting=setting)
    return {
        "context_length": int(config.n_positions),
        "embedding_length": int(config.n_embd),
        "block_count": int(config.n_layer),
        "feed_forward_length": int(config.n_inner or 4 * config.n_embd),
        "attention.head_count": int(config.n_head),
        "attention.layer_norm_epsilon": float(config.layer_norm_epsilon),
        "vocab_size": int(config.vocab_size),
    }


def _pairing(heads_setting: str) -> WeightChange:
    """Bring numbers that are turned together side by side: transformers has them half a head
    apart.
    """

    def split(tensor: torch.Tensor, config: Any, *sides: int) -> torch.Tensor:
        parts = tensor.reshape(getattr(config, heads_setting), *sides, *tensor.shape[1:])
        return parts.transpose(1, 2).reshape(tensor.shape)

    return WeightChange(
        lambda tensor, config: split(tensor, config, 2, -1),
        lambda tensor, config: split(tensor, config, -1, 2),
    )


_PLUS_ONE = WeightChange(lambda tensor, _: tensor + 1, lambda tensor, _: tensor - 1)
"""Gemma's norms multiply by one more than their weight."""


def _transpose(tensor: torch.Tensor, _: Any) -> torch.Tensor:
    return tensor.T if tensor.dim() == 2 else tensor


_TRANSPOSED = WeightChange(_transpose, _transpose)
_LAYERS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_PAIRED: Mapping[str, WeightChange] = {
    "self_attn.q_proj": _pairing("num_attention_heads"),
    "self_attn.k_proj": _pairing("num_key_value_heads"),
}
_HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_LLAMA = Architecture("llama", _LAYERS, _WHOLE, _silu_settings, _PAIRED)
_GPT2_LAYERS = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_GPT2_WHOLE = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
}
_GEMMA_NORMS = ("input_layernorm", "post_attention_layernorm", "model.norm")
ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": _LLAMA,
        "mistral": _LLAMA,
        "qwen2": Architecture("qwen2", _LAYERS, _WHOLE, _silu_settings),
        "qwen3": Architecture("qwen3", {**_LAYERS, **_HEAD_NORMS}, _WHOLE, _silu_settings),
        "gemma": Architecture(
            "gemma", _LAYERS, _WHOLE, _gemma_settings, dict.fromkeys(_GEMMA_NORMS, _PLUS_ONE)
        ),
        "gpt2": Architecture(
            "gpt2",
            _GPT2_LAYERS,
            _GPT2_WHOLE,
            _gpt2_settings,
            {name: _TRANSPOSED for name in _GPT2_LAYERS if "c_" in name},
        ),
    }
)
"""By `model_type` of transformers. SmolLM is a llama."""


def architecture_of(config: Any) -> Architecture:
    """The architecture of a configuration.

    Raises:
        GgufRefusalError: There is none.
    """
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None:
        kinds = ", ".join(ARCHITECTURES)
        raise GgufRefusalError(
            f"a model of the kind {config.model_type!r} is not written as GGUF here: {kinds} are."
            " Fix: take convert_hf_to_gguf.py of llama.cpp for it"
        )
    return architecture
