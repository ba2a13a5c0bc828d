"""The configuration of transformers that a GGUF file states.

Of what a file states nothing is passed over in silence: what the configuration that was found would
be written as must be what the file has, and a setting that has no place in it refuses the file.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

from hypergpu.gguf.header import GgufHeader
from hypergpu.workloads.gguf.architectures import (
    ARCHITECTURES,
    Architecture,
    Tensors,
    rotary_factors,
)
from hypergpu.workloads.gguf.refusal import file_refusal

ROTARY_FACTORS = "rope_freqs.weight"
"""The only tensor of a file that no weight is made of."""
_KINDS = ("llama", "qwen2", "qwen3")
"""Architectures that are read. Of those whose settings transformers states otherwise none is."""
_NEUTRAL: Mapping[str, object] = {
    "attention.causal": True,
    "expert_count": 0,
    "expert_used_count": 0,
    "rope.scaling.type": "none",
    "tensor_data_layout": "Meta AI original pth",
}
"""Settings that change nothing where they have this value."""
_NEUTRAL_ALWAYS = frozenset({"rope.scaling.finetuned"})
_WHOLE_HEAD = "rope.dimension_count"
_KEY_WIDTH = "attention.key_length"
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_LENGTH = 1.0, 4.0, 8_192.0
"""Llama 3's frequencies, of which a file has the outcome alone."""
_NEAR = 1e-5


def architecture_of_file(header: GgufHeader) -> Architecture:
    """The architecture of a file.

    Raises:
        GgufRefusalError: It is none that is read here.
    """
    if header.architecture not in _KINDS:
        kinds = ", ".join(_KINDS)
        raise file_refusal(
            f"a GGUF file of the kind {header.architecture!r} is not read here: {kinds} are"
        )
    return ARCHITECTURES[header.architecture]


def config_of_file(header: GgufHeader, rotary: torch.Tensor | None) -> PreTrainedConfig:
    """The configuration of a file's model.

    Args:
        header: Of the file.
        rotary: Its factors of frequencies; None: it has none.

    Raises:
        GgufRefusalError: The file states what the configuration cannot.
    """
    architecture = architecture_of_file(header)
    names = {tensor.name for tensor in header.tensors}
    setting = _Settings(header)
    heads, width = setting.number("attention.head_count"), setting.number("embedding_length")
    head_width = setting.number(_KEY_WIDTH, setting.number(_WHOLE_HEAD, width // max(1, heads)))
    values: dict[str, Any] = {
        "vocab_size": setting.number("vocab_size", _vocabulary_size(header)),
        "hidden_size": width,
        "intermediate_size": setting.number("feed_forward_length"),
        "num_hidden_layers": setting.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": setting.number("attention.head_count_kv", heads),
        "max_position_embeddings": setting.number("context_length"),
        "rms_norm_eps": setting.real("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(setting, rotary, head_width),
        "tie_word_embeddings": "output.weight" not in names,
        "bos_token_id": header.number("tokenizer.ggml.bos_token_id"),
        "eos_token_id": header.number("tokenizer.ggml.eos_token_id"),
        "pad_token_id": None,
    }
    if header.architecture != "qwen2":  # whose heads always share the width
        values["head_dim"] = head_width
    if header.architecture == "llama":
        values["attention_bias"] = "blk.0.attn_output.bias" in names
        values["mlp_bias"] = "blk.0.ffn_up.bias" in names
    config: PreTrainedConfig = CONFIG_MAPPING[header.architecture](**values)
    config.architectures = [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]
    _check_settings(header, architecture.checked_settings(config), rotary_factors(config), rotary)
    return config


class _Settings:
    """Settings of a file's architecture, by their names without it."""

    def __init__(self, header: GgufHeader) -> None:
        self._header = header

    def _value(self, name: str) -> object:
        return self._header.metadata.get(f"{self._header.architecture}.{name}")

    def number(self, name: str, default: int | None = None) -> int:
        value = self._value(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
            raise file_refusal(f"{self._header.architecture}.{name} is {value!r}, no number")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        value = self._value(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, float) or not math.isfinite(value):
            raise file_refusal(f"{self._header.architecture}.{name} is {value!r}, no number")
        # Files have 32 bits of a number whose decimals are few: 0.00001, and not 0.0000099999997.
        return float(str(np.float32(value)))

    def text(self, name: str) -> str:
        value = self._value(name)
        return value if isinstance(value, str) else ""


def _vocabulary_size(header: GgufHeader) -> int:
    tensor = next((each for each in header.tensors if each.name == "token_embd.weight"), None)
    return tensor.shape[-1] if tensor is not None else 0


def _rope(setting: _Settings, rotary: torch.Tensor | None, head_width: int) -> dict[str, Any]:
    theta = setting.real("rope.freq_base", 10_000.0)
    kind = setting.text("rope.scaling.type")
    if rotary is not None:
        return _llama3_rope(theta, rotary, head_width)
    if kind == "linear":
        factor = setting.real("rope.scaling.factor")
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    return {"rope_type": "default", "rope_theta": theta}


def _llama3_rope(theta: float, rotary: torch.Tensor, head_width: int) -> dict[str, Any]:
    """What gives a file's factors by Llama 3's rule. Whether it does is checked afterwards."""
    factors = [float(each) for each in rotary.flatten()[: head_width // 2]]
    factor = max(factors, default=1.0)
    # Of waves that are slowed down in part, one tells the length; of others, what lies between.
    least, most = 0.0, math.inf
    for pair, value in enumerate(factors):
        wave = 2 * math.pi * theta ** (2 * pair / head_width)
        if value <= 1 + _NEAR:
            least = max(least, _LLAMA3_HIGH * wave)
        elif value >= factor - _NEAR:
            most = min(most, _LLAMA3_LOW * wave)
        else:
            smooth = (1 / value - 1 / factor) / (1 - 1 / factor)
            least = most = wave * (smooth * (_LLAMA3_HIGH - _LLAMA3_LOW) + _LLAMA3_LOW)
            break
    length: float = _LLAMA3_LENGTH
    if not least <= length <= most:
        length = least if least == most else math.sqrt(least * min(most, 4 * least + 1))
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": float(round(factor, 4)),
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": round(length),
    }


def _check_settings(
    header: GgufHeader,
    settings: Mapping[str, Any],
    factors: Tensors,
    rotary: torch.Tensor | None,
) -> None:
    """Hold what a configuration would be written as against what the file states."""
    prefix = f"{header.architecture}."
    for key, value in header.metadata.items():
        name = key.removeprefix(prefix)
        if name == key or name in _NEUTRAL_ALWAYS:
            continue
        is_neutral = name in _NEUTRAL and value == _NEUTRAL[name]
        if not is_neutral and not _is_same(value, settings.get(key)):
            raise file_refusal(f"it states {key} = {value!r}, which is not computed here")
    own_factors = factors.get(ROTARY_FACTORS)
    is_plain = rotary is None and own_factors is None
    if not is_plain and (
        rotary is None
        or own_factors is None
        or rotary.shape != own_factors.shape
        or not torch.allclose(rotary, own_factors, rtol=1e-4)
    ):
        raise file_refusal("its frequencies are scaled by another rule than Llama 3's")


def _is_same(value: object, own: object) -> bool:
    if isinstance(value, float) and isinstance(own, float):
        return math.isclose(value, own, rel_tol=1e-6)
    return type(value) is type(own) and value == own
