"""Slices of many architectures against the whole model; layers as files."""

import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from hypergpu.rings.layer_span import LayerSpan
from hypergpu.rings.stage_work import span_blobs
from hypergpu.workloads.slices.architecture_check import check_architecture, check_slices
from hypergpu.workloads.slices.layer_blobs import (
    SourceTensors,
    load_blobs,
    read_header,
    write_blobs,
)
from hypergpu.workloads.slices.layer_slice import LayerSlice, SliceError, open_session
from hypergpu.workloads.slices.ragged_attention import SessionSegment

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
WINDOWS = ["sliding_attention", "full_attention"] * 3
CHANGES: dict[str, dict[str, Any]] = {
    "cohere2": {"sliding_window": 8},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 16},
    "gemma3_text": {"layer_types": WINDOWS, "sliding_window": 8},
    "glm4": {},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    # Of the real one: it scales embeddings in its forward, which a later slice must not do again.
    "granite": {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, **EXPERTS},
}
CUT = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3",
    "smollm3",
    "olmo2",
    "granite",
    "gemma",
    "gemma2",
    "gemma3_text",
    "cohere2",
    "mixtral",
    "qwen3_moe",
    "glm4",
    "gpt_oss",
    "gpt_neox",
]


def config_of(kind: str, **changes: Any) -> PreTrainedConfig:
    return CONFIG_MAPPING[kind](**{**SIZES, **CHANGES.get(kind, {}), **changes})


@pytest.mark.parametrize("kind", CUT)
def test_slices_give_what_the_whole_model_gives(kind: str) -> None:
    check = check_slices(config_of(kind))
    assert not check.reason
    assert check.difference < 1e-4


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_a_model_with_something_outside_its_layers_is_refused_with_the_reason(kind: str) -> None:
    sizes = {"n_embd": 64, "n_layer": 4, "n_head": 4} if kind == "gpt2" else SIZES
    config = CONFIG_MAPPING[kind](**{**sizes, "vocab_size": 128})
    assert check_architecture(config).reason


def test_a_large_model_is_checked_by_a_small_one_of_its_rules() -> None:
    config = transformers.LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, vocab_size=128_256, rope_theta=500_000.0,
    )  # fmt: skip
    check = check_architecture(config)
    assert not check.reason
    assert config.num_hidden_layers == 80


def test_sessions_of_one_pass_get_what_each_gets_alone() -> None:
    config = config_of("llama")
    layer_slice = loaded_slice(config, LayerSpan(0, 6))
    texts = [torch.arange(5) + 3, torch.arange(9) + 20, torch.arange(1) + 40]
    alone = [
        layer_slice.compute(text, [SessionSegment(open_session(), 0, len(text))]) for text in texts
    ]
    segments = [SessionSegment(open_session(), 0, len(text)) for text in texts]
    together = layer_slice.compute(torch.cat(texts), segments)
    assert torch.allclose(together, torch.cat(alone), atol=1e-5)


def test_a_position_is_overwritten_by_the_next_pass_that_has_it() -> None:
    layer_slice = loaded_slice(config_of("llama"), LayerSpan(0, 6))
    keys, other_keys = open_session(), open_session()
    text = torch.arange(8) + 3
    layer_slice.compute(text[:5], [SessionSegment(keys, 0, 5)])
    layer_slice.compute(
        torch.tensor([90, 91, 92]), [SessionSegment(keys, 5, 3)]
    )  # a rejected draft
    after = layer_slice.compute(text[5:], [SessionSegment(keys, 5, 3)])
    layer_slice.compute(text[:5], [SessionSegment(other_keys, 0, 5)])
    assert torch.equal(after, layer_slice.compute(text[5:], [SessionSegment(other_keys, 5, 3)]))


def loaded_slice(config: PreTrainedConfig, span: LayerSpan) -> LayerSlice:
    torch.manual_seed(1)
    whole: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    layer_slice = LayerSlice(config, span)
    state = {name: whole.state_dict()[full] for name, full in layer_slice.whole_names()}
    layer_slice.model.load_state_dict(state, assign=True)
    layer_slice.model.requires_grad_(requires_grad=False)
    return layer_slice


@pytest.mark.parametrize("kind", ["llama", "mixtral", "gpt_neox", "gemma"])
def test_files_of_layers_make_the_slices_of_a_saved_model(kind: str, tmp_path: Path) -> None:
    config = config_of(kind)
    torch.manual_seed(2)
    whole: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    whole.save_pretrained(tmp_path / "model", max_shard_size="100KB")
    (tmp_path / "blobs").mkdir()
    source = SourceTensors(sorted((tmp_path / "model").glob("*.safetensors")))
    paths = {path.name: path for path in write_blobs(config, source, tmp_path / "blobs")}
    assert set(paths) == set(span_blobs(LayerSpan(0, 6), 6))
    tokens = torch.arange(12) + 3
    states = tokens
    for first, end in ((0, 1), (1, 4), (4, 6)):
        layer_slice = LayerSlice(config, LayerSpan(first, end))
        own = {name: paths[name] for name in span_blobs(layer_slice.span, 6)}
        load_blobs(layer_slice, own, torch.float32, torch.device("cpu"))
        states = layer_slice.compute(states, [SessionSegment(open_session(), 0, 12)])
    with torch.inference_mode():
        whole_logits = whole(tokens[None]).logits[0]
    assert torch.allclose(states, whole_logits, atol=1e-5)


def test_a_file_that_is_not_what_a_slice_needs_is_refused(tmp_path: Path) -> None:
    config = config_of("llama")
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    (tmp_path / "blobs").mkdir()
    source = SourceTensors(sorted((tmp_path / "model").glob("*.safetensors")))
    paths = {path.name: path for path in write_blobs(config, source, tmp_path / "blobs")}
    wrong_paths = {**paths, "layer-001": paths["layer-002"]}
    with pytest.raises(SliceError, match="which is no part"):
        load_blobs(
            LayerSlice(config, LayerSpan(1, 2)), wrong_paths, torch.float32, torch.device("cpu")
        )
    del wrong_paths["layer-001"]
    with pytest.raises(SliceError, match="layer-001 is absent"):
        load_blobs(
            LayerSlice(config, LayerSpan(1, 2)), wrong_paths, torch.float32, torch.device("cpu")
        )


@pytest.mark.parametrize(
    "content",
    [
        b"",
        struct.pack("<Q", 1 << 40),
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 4) + b"{}\n\n" + b"more",
        struct.pack("<Q", 55) + b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}0000',
    ],
)
def test_a_header_that_states_what_is_not_there_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "layer-000"
    path.write_bytes(content)
    with pytest.raises(SliceError):
        read_header(path)
