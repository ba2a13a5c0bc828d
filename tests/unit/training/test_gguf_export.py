"""GGUF files that are written of models of transformers: the same tokens, the same numbers."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from gpu_node.shell.worker.serving.engine import TokenModel
from gpu_node.shell.worker.serving.gguf_model import GgufModel
from hypergpu.gguf.header import read_gguf_header
from hypergpu.workloads.gguf.__main__ import main
from hypergpu.workloads.gguf.refusal import GgufRefusalError
from hypergpu.workloads.gguf.vocabulary import vocabulary_of
from hypergpu.workloads.gguf.writing import write_gguf
from tests.tiny_bases import CHAT_TEMPLATE, TEXT, save_base, save_encoder, trained_tokenizer

TEXTS = [
    "number 12 comes before number 13",
    "  two spaces,\n\n\tlines and 123456 digits 7",
    "naïve «quoted» 数学 😀 e\u0301 it's WE'LL",
    "a<|end|>b <|user|>",
    "x",
]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def save_random_base(folder: Path, kind: str, **changes: Any) -> Path:
    """A model whose every number matters: none is 0 or 1, and outputs are far from even."""
    # Transformers adds marks to some kinds' tokenizers.
    base = save_base(folder, kind, vocab_size=400, **changes)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(base)
    return base


def perplexity_of(model: TokenModel, tokens: list[int]) -> float:
    reader = model.open_reader(len(tokens))
    losses = []
    for token, next_token in itertools.pairwise(tokens):
        logits = reader.read([token]).double()
        losses.append(float(torch.logsumexp(logits, 0) - logits[next_token]))
    reader.close()
    return math.exp(sum(losses) / len(losses))


def plain_perplexity(folder: Path, tokens: list[int]) -> float:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([tokens])).logits[0, :-1].double()
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]))
    return math.exp(float(loss))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "tie_word_embeddings": True}),
        ("llama", {"rope_parameters": LLAMA3_ROPE}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e3, "factor": 2.0}}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("gemma", {}),
        ("gpt2", {}),
    ],
)
def test_a_file_is_as_perplexed_as_its_model(
    tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    base = save_random_base(tmp_path, kind, **changes)
    written_file = write_gguf(base, tmp_path / "model.gguf")
    assert written_file.architecture == ("llama" if kind == "mistral" else kind)
    model = GgufModel(tmp_path / "model.gguf")
    tokens = model.encode("".join(TEXT[:6]))[:120]
    theirs = plain_perplexity(base, tokens)
    assert theirs > 2 * model.vocabulary or theirs < model.vocabulary / 2
    assert perplexity_of(model, tokens) == pytest.approx(theirs, rel=1e-3)
    header = read_gguf_header(tmp_path / "model.gguf")
    assert header.text("tokenizer.chat_template") == CHAT_TEMPLATE
    assert header.number("tokenizer.ggml.eos_token_id") == 4


def first_logits(path: Path) -> torch.Tensor:
    reader = GgufModel(path).open_reader(8)
    logits = reader.read([1, 2, 3]).clone()
    reader.close()
    return logits


@pytest.mark.parametrize("number_type", ["f16", "bf16", "q8_0"])
def test_numbers_may_be_rounded(tmp_path: Path, number_type: str) -> None:
    base = save_base(tmp_path)
    path, whole_path = tmp_path / "model.gguf", tmp_path / "whole.gguf"
    assert main([str(base), str(path), number_type]) == 0
    write_gguf(base, whole_path)
    assert path.stat().st_size < whole_path.stat().st_size
    logits, whole_logits = first_logits(path), first_logits(whole_path)
    error = float((logits - whole_logits).abs().max() / whole_logits.abs().max())
    assert 0 < error < 0.1


def bytes_tokenizer(*parts: Any) -> "transformers.PreTrainedTokenizerFast":
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(parts)) if len(parts) > 1 else parts[0]
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|eos|>", "<|end|>", "<|user|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*TEXT, *TEXTS], trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|eos|>")


def characters_tokenizer(*, prepends: bool) -> "transformers.PreTrainedTokenizerFast":
    """As Llama 2, Mistral and Gemma have it: characters, and bytes for those that are missing."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps: list[Any] = [normalizers.Prepend("▁")] if prepends else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    marks = ["<unk>", "<s>", "</s>", "<|end|>", "<|user|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=[*marks, *(f"<0x{value:02X}>" for value in range(256))],
        max_token_length=8,
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TOKENIZERS: dict[str, Callable[[], Any]] = {
    "gpt-2": trained_tokenizer,
    "smollm": lambda: bytes_tokenizer(
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ),
    "llama-bpe": lambda: bytes_tokenizer(pre_tokenizers.Split(Regex(LLAMA3), "isolated"), LEVEL),
    "qwen2": lambda: bytes_tokenizer(
        pre_tokenizers.Split(Regex(LLAMA3.replace("{1,3}", "")), "isolated"), LEVEL
    ),
    "characters after a space": lambda: characters_tokenizer(prepends=True),
    "characters": lambda: characters_tokenizer(prepends=False),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_text_has_the_tokens_of_transformers(tmp_path: Path, name: str) -> None:
    base = save_base(tmp_path, vocab_size=520)
    tokenizer = TOKENIZERS[name]()
    tokenizer.save_pretrained(base)
    write_gguf(base, tmp_path / "model.gguf")
    model = GgufModel(tmp_path / "model.gguf")
    for text in TEXTS:
        assert model.encode(text) == tokenizer(text)["input_ids"], text


def test_what_llama_cpp_would_compute_otherwise_is_refused_by_name(tmp_path: Path) -> None:
    for changes, reason in (
        ({"sliding_window": 16}, "sliding_window = 16"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu'"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_parameters",
        ),
    ):
        base = save_base(tmp_path / reason[:6], "mistral", **changes)
        with pytest.raises(GgufRefusalError, match=reason):
            write_gguf(base, tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()
    assert not [*tmp_path.glob(".*.part")]


def test_a_model_of_another_kind_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_encoder(tmp_path / "encoder")
    assert main([str(folder), str(tmp_path / "model.gguf")]) == 1
    assert (
        "of the kind 'bert' is not written as GGUF here: llama, mistral" in capsys.readouterr().err
    )
    assert main([str(folder)]) == 2


def test_a_tokenizer_that_llama_cpp_has_no_name_for_is_refused() -> None:
    odd = bytes_tokenizer(pre_tokenizers.Split(Regex(r"\p{L}+"), "isolated"), LEVEL)
    with pytest.raises(GgufRefusalError, match="splits texts by Split then ByteLevel has no name"):
        vocabulary_of(odd, 500)
    with pytest.raises(GgufRefusalError, match="the tokenizer has 384 tokens, and the model 300"):
        vocabulary_of(trained_tokenizer(), 300)
    lone_bytes = trained_tokenizer(261)
    with pytest.raises(GgufRefusalError, match="a tokenizer without merges"):
        vocabulary_of(lone_bytes, 500)
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel()))
    with pytest.raises(GgufRefusalError, match="of the kind WordLevel is not written"):
        vocabulary_of(words, 500)
