"""A causal language model with random weights, as large as a benchmark wants it."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 4_096
POSITIONS = 2_048


def save_random_gguf(folder: Path, *, width: int, layers: int) -> Path:
    """The same as a GGUF file, whose tokens are bytes."""
    from hypergpu.workloads.gguf.writing import write_gguf

    base = save_random_base(folder, width=width, layers=layers)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    space = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(" ")[0][0]
    letters = {letter: place for place, letter in enumerate([*alphabet, 2 * space])}
    tokenizer = Tokenizer(BPE(letters, [(space, space)]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # llama.cpp takes a token of its own choice where a file names no end.
    end_tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    end_tokenizer.save_pretrained(base)
    return write_gguf(base, folder / "model.gguf").path


def save_random_base(
    folder: Path, *, width: int, layers: int, vocabulary: int = VOCABULARY
) -> Path:
    """Save a model whose end token never comes by itself.

    Args:
        folder: Gets it.
        width: Numbers of a token's state, a multiple of 64.
        layers: Its depth.
        vocabulary: Tokens that it has.
    """
    words = {f"w{number}": number for number in range(vocabulary)}
    plain = Tokenizer(WordLevel(words, "w0"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain)
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        max_position_embeddings=POSITIONS,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
