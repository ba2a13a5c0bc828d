"""A real model in three slices, hidden states coded at each cut, beside the whole model."""

import math
import textwrap
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from hypergpu.rings.layer_span import LayerSpan
from hypergpu.tensors.hidden_states import STATE_CODECS, StateCodec, state_codec
from hypergpu.workloads.slices.layer_slice import LayerSlice, layers_of, open_session
from hypergpu.workloads.slices.ragged_attention import SessionKeys, SessionSegment

_TEXT_TOKENS = 288
_NEW_TOKENS = 24
_PROMPT_TOKENS = 24
_TEXTS = ("argparse.py", "heapq.py", "statistics.py", "textwrap.py", "shutil.py", "bisect.py")
"""Modules of Python whose sources are read: they are everywhere and nobody's secret."""


class CutFigures(NamedTuple):
    """What a codec does to a model."""

    codec: str
    perplexity: float
    same_next: float
    """Share of next tokens that are those of the whole model."""
    same_prompts: float
    """Share of prompts whose greedy answers are those of the whole model."""


def three_slices(whole: Any) -> list[LayerSlice]:
    """A model in three slices of as many layers each, which share its weights."""
    layers, state, slices = layers_of(whole.config), whole.state_dict(), []
    for first, end in pairwise((0, layers // 3, 2 * layers // 3, layers)):
        layer_slice = LayerSlice(whole.config, LayerSpan(first, end))
        values = {name: state[full] for name, full in layer_slice.whole_names()}
        layer_slice.model.load_state_dict(values, assign=True)
        layer_slice.model.requires_grad_(requires_grad=False)
        slices.append(layer_slice)
    return slices


class _CodedRing:
    def __init__(self, whole: Any, codec: StateCodec) -> None:
        self._codec = codec
        self._slices = three_slices(whole)

    def open(self) -> list[SessionKeys]:
        return [open_session() for _ in self._slices]

    def logits(self, keys: list[SessionKeys], start: int, tokens: torch.Tensor) -> torch.Tensor:
        states = tokens
        for layer_slice, own_keys in zip(self._slices, keys, strict=True):
            segments = [SessionSegment(own_keys, start, len(tokens))]
            states = layer_slice.compute(states, segments)
            if not layer_slice.is_last:
                content = self._codec.encode(states.numpy())
                width = layer_slice.hidden_size
                states = torch.from_numpy(self._codec.decode(content, width))
        return states

    def greedy(self, prompt: torch.Tensor) -> list[int]:
        keys, tokens = self.open(), list[int]()
        piece, start = prompt, 0
        while len(tokens) < _NEW_TOKENS:
            tokens.append(int(self.logits(keys, start, piece)[-1].argmax()))
            start += len(piece)
            piece = torch.tensor(tokens[-1:])
        return tokens


def coded_figures(folder: Path, texts: int) -> list[CutFigures]:
    """Figures of each codec, float32 first.

    Args:
        folder: Of a causal language model.
        texts: How many texts are read, of `_TEXTS`.
    """
    torch.set_num_threads(1)
    whole: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    library = Path(textwrap.__file__).parent
    rows = [
        torch.tensor(tokenizer((library / name).read_text("utf-8"))["input_ids"][:_TEXT_TOKENS])
        for name in _TEXTS[:texts]
    ]
    return [_figures(whole, state_codec(name), rows) for name in STATE_CODECS]


@torch.inference_mode()
def _figures(whole: Any, codec: StateCodec, rows: Sequence[torch.Tensor]) -> CutFigures:
    ring = _CodedRing(whole, codec)
    loss, same, total, same_prompts, prompts = 0.0, 0, 0, 0, 0
    for row in rows:
        reference = whole(row[None]).logits[0]
        logits = ring.logits(ring.open(), 0, row)
        loss += float(cross_entropy(logits[:-1], row[1:], reduction="sum"))
        same += int((logits.argmax(-1) == reference.argmax(-1)).sum())
        total += len(row)
        for first in range(0, len(row) - _PROMPT_TOKENS, 3 * _PROMPT_TOKENS):
            prompt = row[first : first + _PROMPT_TOKENS]
            answer = whole.generate(
                prompt[None],
                attention_mask=torch.ones_like(prompt[None]),
                max_new_tokens=_NEW_TOKENS,
                min_new_tokens=_NEW_TOKENS,
                do_sample=False,
            )[0, _PROMPT_TOKENS:]
            prompts += 1
            same_prompts += ring.greedy(prompt) == answer.tolist()
    perplexity = math.exp(loss / (total - len(rows)))
    return CutFigures(codec.name, perplexity, same / total, same_prompts / prompts)
