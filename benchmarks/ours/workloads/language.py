"""A small language model trained on Python's own source, and functions of other modules to
fine-tune it on.

Nothing is downloaded: the corpus is the standard library of the Python that runs this.
"""

import ast
import json
import sysconfig
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import ByteLevelBPETokenizer
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<|end|>"
VOCABULARY = 1024
LENGTH = 96
"""Tokens of a sample, for the base and for the adapter."""
_BASE_BATCH = 16
_BASE_RATE = 3e-3
_BASE_WARMUP = 20
_LEFT_OUT = ("site-packages", "dist-packages", "test", "encodings", "pydoc_data")
_FUNCTION_CHARACTERS = 600
_HELD_OUT_EVERY = 8


class BaseModel(NamedTuple):
    """A base in a folder, and what it has learned."""

    folder: Path
    loss_random: float
    """On held-out source, before the first step."""
    loss_trained: float


def library_sources() -> tuple[list[str], list[tuple[str, str]]]:
    """Texts of the library's modules, for the base; names and texts of those of its packages, for
    the adapter.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    modules = [path.read_text(encoding="utf-8") for path in sorted(library.glob("*.py"))]
    packages = [
        (str(path.relative_to(library)), path.read_text(encoding="utf-8"))
        for path in sorted(library.glob("*/*.py"))
        if path.relative_to(library).parts[0] not in _LEFT_OUT
    ]
    return modules, packages


def train_base(folder: Path, steps: int) -> BaseModel:
    """Train a Llama of 0.56M parameters and its tokenizer on Python's source, and save both."""
    texts, _ = library_sources()
    tokenizer = _trained_tokenizer(texts)
    tokenizer.save_pretrained(folder)
    end = tokenizer.eos_token_id
    ids = [token for text in texts for token in (*tokenizer.encode(text), end)]
    blocks = torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).view(-1, LENGTH)
    order = np.random.default_rng(0).permutation(len(blocks))
    held_out, train = blocks[order[:64]], blocks[order[64:]]
    torch.manual_seed(0)
    model = LlamaForCausalLM(_config(end))
    loss_random = _loss(model, held_out)
    optimizer = torch.optim.AdamW(model.parameters(), _BASE_RATE, weight_decay=0.1)
    draw = np.random.default_rng(1)
    for step in range(steps):
        progress = step / steps
        rate = _BASE_RATE * min(1.0, (step + 1) / _BASE_WARMUP) * (1 - 0.9 * progress)
        optimizer.param_groups[0]["lr"] = rate
        batch = train[draw.integers(0, len(train), _BASE_BATCH)]
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(*_predictions(model, batch))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.save_pretrained(folder)
    return BaseModel(folder, loss_random, _loss(model, held_out))


def write_rows(folder: Path) -> tuple[int, int]:
    """Write functions of other modules as prompts and completions; how many of each part.

    Whole modules are held out, so that no function of theirs was trained on.
    """
    _, modules = library_sources()
    parts: tuple[list[str], list[str]] = ([], [])
    for number, (name, text) in enumerate(modules):
        part = parts[number % _HELD_OUT_EVERY == 0]
        part.extend(json.dumps(row) for row in _function_rows(name, text))
    for name, rows in zip(("train.jsonl", "held_out.jsonl"), parts, strict=True):
        (folder / name).write_text("\n".join(rows) + "\n", encoding="utf-8")
    return len(parts[0]), len(parts[1])


def _function_rows(name: str, text: str) -> Iterator[dict[str, str]]:
    """Each short function with a docstring: from module, name and first line to the code."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef):
            continue
        docstring = ast.get_docstring(node)
        code = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        if docstring and len(code) <= _FUNCTION_CHARACTERS:
            first = docstring.strip().partition("\n")[0]
            yield {"prompt": f"# {name}\n# {node.name}: {first}\n", "completion": code}


def _trained_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, VOCABULARY, special_tokens=[END], show_progress=False)
    inner = tokenizer._tokenizer  # noqa: SLF001 - has no other name
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END)


def _config(end: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2 * LENGTH,
        tie_word_embeddings=True,
        bos_token_id=end,
        eos_token_id=end,
    )


def _predictions(
    model: LlamaForCausalLM, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(input_ids=tokens, use_cache=False).logits
    return logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()


def _loss(model: LlamaForCausalLM, tokens: torch.Tensor) -> float:
    with torch.inference_mode():
        return float(F.cross_entropy(*_predictions(model, tokens)))
