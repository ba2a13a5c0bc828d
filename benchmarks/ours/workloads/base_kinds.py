"""Kinds of bases with random weights, small enough to train in a second: to try ``hf-*`` on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 400
_MARKS = ["<pad>", "<s>", "</s>"]
_SCALE = 3.0
"""Weights are made larger than they are drawn, so that rows which see each other differ clearly."""
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
_GROUPED: dict[str, Any] = {**_SIZES, "num_key_value_heads": 2}
_OLD: dict[str, Any] = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4}
_RECURRENT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
}


class BaseKind(NamedTuple):
    """A class of transformers with the settings of a small one."""

    name: str
    settings: Mapping[str, Any]
    model: str
    """Name of the class that makes the base."""
    config: str
    workload: str = "hf-causal-lm"

    def save(self, folder: Path) -> None:
        """Write a base with random weights and a tokenizer."""
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.settings)
        model = getattr(transformers, self.model)(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(_SCALE)
        model.save_pretrained(folder)
        if self.workload != "hf-image-classifier":
            word_tokenizer().save_pretrained(folder)


def word_tokenizer() -> "transformers.PreTrainedTokenizerFast":
    """Byte-level BPE that has a token for each of ``w0`` to ``w95``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=_MARKS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(f"w{number}" for number in range(96))] * 2, trainer)
    pad, start, end = _MARKS
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=start, eos_token=end
    )


def _causal(name: str, *, model: str = "", config: str = "", **settings: Any) -> BaseKind:
    all_settings = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **settings}
    return BaseKind(name, all_settings, model or f"{name}ForCausalLM", config or f"{name}Config")


def _text(name: str, model: str, config: str, **settings: Any) -> BaseKind:
    return BaseKind(name, {"pad_token_id": 0, **settings}, model, config, "hf-text-classifier")


def _image(name: str, model: str, config: str, **settings: Any) -> BaseKind:
    return BaseKind(name, settings, model, config, "hf-image-classifier")


_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts_per_tok": 2,
}
_LINEAR_ATTENTION: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_OPT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "ffn_dim": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "word_embed_proj_dim": 32,
}
_FALCON: dict[str, Any] = {**_RECURRENT, "num_attention_heads": 4}
_MAMBA_2: dict[str, Any] = {**_RECURRENT, "state_size": 8, "num_heads": 8, "head_dim": 8}

CAUSAL = (
    _causal("Llama", **_GROUPED),
    _causal("Llama, tied", model="LlamaForCausalLM", config="LlamaConfig", **_GROUPED)._replace(
        settings={**_GROUPED, "tie_word_embeddings": True, "pad_token_id": 0}
    ),
    _causal("Mistral", **_GROUPED, sliding_window=8),
    _causal("Qwen2", **_GROUPED),
    _causal("Qwen3", **_GROUPED, head_dim=8),
    _causal("Gemma", **_GROUPED, head_dim=8),
    _causal("Gemma2", **_GROUPED, head_dim=8, sliding_window=8),
    _causal("Gemma3", config="Gemma3TextConfig", **_GROUPED, head_dim=8, sliding_window=8),
    _causal("Phi", **_SIZES),
    _causal("Phi3", **_GROUPED),
    _causal("Mixtral", **_GROUPED, num_local_experts=4),
    _causal("Qwen2Moe", **_GROUPED, **_EXPERTS),
    _causal("GptOss", **_GROUPED, head_dim=8, num_local_experts=4, sliding_window=8),
    _causal("Olmo2", **_GROUPED),
    _causal("Granite", **_GROUPED),
    _causal("Cohere", **_GROUPED),
    _causal("Starcoder2", **_GROUPED),
    _causal("StableLm", **_GROUPED),
    _causal("GPT2", model="GPT2LMHeadModel", **_OLD),
    _causal("GPTNeoX", **_SIZES),
    _causal("GPTJ", **_OLD, rotary_dim=8),
    _causal(
        "GPTNeo",
        **_RECURRENT | {"num_layers": 2, "num_heads": 4, "window_size": 8},
        attention_types=[[["global", "local"], 1]],
    ),
    _causal("CodeGen", **_OLD, rotary_dim=4),
    _causal("GPTBigCode", **_OLD),
    _causal("OPT", **_OPT),
    _causal("Bloom", vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4),
    _causal("Mpt", vocab_size=VOCABULARY, d_model=32, n_layers=2, n_heads=4, max_seq_len=128),
    _causal("Falcon", **_FALCON),
    _causal(
        "Falcon, ALiBi", model="FalconForCausalLM", config="FalconConfig", **_FALCON, alibi=True
    ),
    _causal("Bert, decoder", model="BertLMHeadModel", config="BertConfig", **_SIZES)._replace(
        settings={**_SIZES, "is_decoder": True, "pad_token_id": 0}
    ),
    _causal(
        "XGLM",
        vocab_size=VOCABULARY,
        d_model=32,
        ffn_dim=64,
        num_layers=2,
        attention_heads=4,
    ),
    _causal("BioGpt", **_SIZES),
    _causal("Mamba", **_RECURRENT, state_size=8),
    _causal("Mamba2", **_MAMBA_2, n_groups=1),
    _causal("Rwkv", **_RECURRENT, attention_hidden_size=32),
    _causal(
        "Lfm2",
        **_GROUPED,
        layer_types=["conv", "full_attention"],
        block_auto_adjust_ff_dim=False,
    ),
    _causal("Qwen3Next", **_GROUPED, **_EXPERTS, **_LINEAR_ATTENTION, head_dim=8),
    _causal(
        "RecurrentGemma",
        **_GROUPED | {"num_hidden_layers": 3, "num_key_value_heads": 4},
        lru_width=32,
        attention_window_size=16,
    ),
    _causal(
        "Bamba",
        **_GROUPED,
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_n_groups=1,
        mamba_d_state=8,
        attn_layer_indices=[1],
    ),
)

_SMALL_CNN: dict[str, Any] = {"hidden_sizes": [16, 32], "depths": [1, 1]}
CLASSIFIERS = (
    _text("Bert", "BertModel", "BertConfig", **_SIZES),
    _text("Roberta", "RobertaModel", "RobertaConfig", **_SIZES),
    _text(
        "DistilBert", "DistilBertModel", "DistilBertConfig", vocab_size=VOCABULARY, dim=32
    )._replace(
        settings={
            "vocab_size": VOCABULARY,
            "dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 64,
            "max_position_embeddings": 128,
            "pad_token_id": 0,
        }
    ),
    _text("Electra", "ElectraModel", "ElectraConfig", **_SIZES, embedding_size=32),
    _text(
        "DebertaV2",
        "DebertaV2Model",
        "DebertaV2Config",
        **_SIZES,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
    ),
    _text(
        "Deberta",
        "DebertaModel",
        "DebertaConfig",
        **_SIZES,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
    ),
    _text("GPT2, classifier", "GPT2Model", "GPT2Config", **_OLD),
    _image(
        "ViT",
        "ViTModel",
        "ViTConfig",
        image_size=32,
        patch_size=8,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
    ),
    _image(
        "ResNet", "ResNetModel", "ResNetConfig", embedding_size=16, **_SMALL_CNN, layer_type="basic"
    ),
    _image(
        "ConvNextV2",
        "ConvNextV2Model",
        "ConvNextV2Config",
        num_stages=2,
        **_SMALL_CNN,
        image_size=32,
    ),
    _image(
        "Swin",
        "SwinModel",
        "SwinConfig",
        image_size=32,
        patch_size=4,
        embed_dim=16,
        depths=[1, 1],
        num_heads=[2, 4],
        window_size=4,
    ),
)
ALL = (*CAUSAL, *CLASSIFIERS)
