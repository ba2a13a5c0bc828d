"""Small models of transformers with random weights and tokenizers trained on the spot, saved as
people save them.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CHAT_TEMPLATE = (
    "{% for message in messages if message.role is not string %}"
    "{{ raise_exception('a role is a text') }}{% endfor %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXT = [
    f"number {number} comes before number {number + 1}, which is what counting means. "
    for number in range(300)
]


def trained_tokenizer(size: int = 384) -> "transformers.PreTrainedTokenizerFast":
    """Byte-level BPE of counting, with the marks of a chat."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|eos|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=marks,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|eos|>", chat_template=CHAT_TEMPLATE
    )


_ROTARY_CONFIGS = {
    "gemma": transformers.GemmaConfig,
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}


def tiny_config(kind: str, vocabulary: int, **changes: Any) -> "transformers.PreTrainedConfig":
    """Two layers of 32 numbers: a ``llama`` or a relative, or a ``gpt2``, whose layers are
    transposed.
    """
    marks: dict[str, Any] = {"bos_token_id": None, "eos_token_id": 4, "pad_token_id": None}
    if kind == "gpt2":
        sizes: dict[str, Any] = {"n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 4}
        return transformers.GPT2Config(
            vocab_size=vocabulary, resid_pdrop=0.0, **sizes, **marks, **changes
        )
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    if kind in {"gemma", "qwen3"}:
        sizes["head_dim"] = 8
    return _ROTARY_CONFIGS[kind](vocab_size=vocabulary, **{**sizes, **marks, **changes})


def save_base(folder: Path, kind: str = "llama", **changes: Any) -> Path:
    """Save a causal language model with its tokenizer below ``folder``."""
    tokenizer = trained_tokenizer()
    torch.manual_seed(3)
    size = changes.pop("vocab_size", len(tokenizer))
    config = tiny_config(kind, size, **changes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    return folder / "base"


def write_chats(folder: Path, count: int = 60) -> Path:
    """Save a chat set as JSON lines."""
    lines = [
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": f"what comes after {number}?"},
                    {"role": "assistant", "content": f"number {number + 1}"},
                ]
            }
        )
        for number in range(count)
    ]
    path = folder / "chats.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def save_encoder(folder: Path, *, labels: int = 0) -> Path:
    """Save a BERT of two layers of 32 numbers: of sentence-transformers, or a classifier."""
    plain = trained_tokenizer()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain.backend_tokenizer, pad_token="<|eos|>", model_max_length=64
    )
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=4,
        **({"num_labels": labels} if labels else {}),
    )
    torch.manual_seed(3)
    auto = transformers.AutoModelForSequenceClassification if labels else transformers.AutoModel
    auto.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if not labels:
        _write_sentence_modules(folder)
    return folder


def _write_sentence_modules(folder: Path) -> None:
    """Have the mean of tokens pooled and normalized, as sentence-transformers writes it."""
    names = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [
        {
            "idx": number,
            "name": str(number),
            "path": path,
            "type": f"sentence_transformers.models.{name}",
        }
        for number, (path, name) in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(modules), "utf-8")
    pooling_rule = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling_rule), "utf-8")
