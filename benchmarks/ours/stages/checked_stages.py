"""Stages of a model in one process, one of them checked by another one that computes it again."""

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from gpu_node.shell.worker.serving.engine import TextModel
from gpu_node.shell.worker.serving.loaded_stage import LoadedStage
from gpu_node.shell.worker.serving.stage_check import StageChecker
from hypergpu.ids import NodeId
from hypergpu.rings.layer_span import LayerSpan
from hypergpu.rings.ring_members import RingMember
from hypergpu.serving.check_messages import (
    RecomputeStage,
    StageCompared,
    StageFigures,
    TakeStates,
)
from hypergpu.serving.stage_messages import ComputePass, StageRows, StageSegment
from hypergpu.tensors.hidden_states import state_codec
from hypergpu.workloads.slices.layer_slice import LayerSlice, layers_of

CPU = torch.device("cpu")
TOKENS_MOST = 1_024
_SESSION, _CHECK = 1, 7
NOBODY = RingMember(NodeId("0x" + "0" * 40), 1, LayerSpan(0, 1), bytes(32), bytes(65))


class StageTraits(NamedTuple):
    """How a node computes its layers."""

    dtype: torch.dtype = torch.float32
    threads: int = 1
    skipped_layers: tuple[int, ...] = ()
    """Layers of the stage, from 0 on, that it leaves out."""


PLAIN = StageTraits()


class _Skipped(nn.Module):
    """A layer that gives what it is given."""

    def forward(self, states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return states


class SourceLayers:
    """Layers of a model that is in memory; see `LayerSource`."""

    def __init__(self, whole: Any, dtype: torch.dtype, text: TextModel | None = None) -> None:
        self._whole, self._dtype, self._text = whole, dtype, text
        self._state = whole.state_dict()

    def load(self, span: LayerSpan) -> LayerSlice:
        """Some layers, of the type of this node."""
        layer_slice = LayerSlice(self._whole.config, span)
        values = {
            name: self._state[full].to(self._dtype) for name, full in layer_slice.whole_names()
        }
        layer_slice.model.load_state_dict(values, assign=True)
        layer_slice.model.requires_grad_(requires_grad=False)
        return layer_slice

    def slices(self, span: LayerSpan) -> Iterator[LayerSlice]:
        """See `LayerSource.slices`."""
        for layer in range(span.first, span.end):
            yield self.load(LayerSpan(layer, layer + 1))

    def text(self) -> TextModel:
        """See `LayerSource.text`."""
        if self._text is None:
            raise ValueError("the model has no tokenizer")
        return self._text


class CheckedStages:
    """A model in stages of about as many layers each.

    Args:
        whole: A decoder of transformers.
        stages: How many.
        codec: How hidden states travel.
        text: Its tokens; None: nothing is answered.
    """

    def __init__(
        self, whole: Any, stages: int, codec: str = "float32", text: TextModel | None = None
    ) -> None:
        layers = layers_of(whole.config)
        cuts = [layers * place // stages for place in range(stages + 1)]
        self.spans = [LayerSpan(first, end) for first, end in pairwise(cuts)]
        self._whole, self._codec, self._text = whole, state_codec(codec), text

    def stage(self, place: int, traits: StageTraits = PLAIN) -> LoadedStage:
        """A node's stage."""
        layer_slice = SourceLayers(self._whole, traits.dtype).load(self.spans[place])
        layers = next(
            module
            for module in layer_slice.model.base_model.children()
            if isinstance(module, nn.ModuleList)
        )
        for layer in traits.skipped_layers:
            layers[layer] = _Skipped()
        text = self._text if layer_slice.is_last else None
        return LoadedStage(layer_slice, CPU, self._codec, text, TOKENS_MOST)

    def checker(self, held_place: int, traits: StageTraits = PLAIN) -> StageChecker:
        """A node that holds one stage and can read the layers of the others."""
        layers = SourceLayers(self._whole, traits.dtype, self._text)
        return StageChecker(self.stage(held_place, traits), layers)


def whole_model(folder: Path) -> Any:
    """A model of a folder, in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def conversation(draws: random.Random, vocabulary: int, prompt: int, answer: int) -> list[int]:
    """Tokens of a conversation whose answer is drawn, too: what is compared are states."""
    return [draws.randrange(vocabulary) for _ in range(prompt + answer)]


def given_rows(
    stage: LoadedStage, tokens: Sequence[int], states: bytes, prompt: int, threads: int = 1
) -> bytes:
    """What a stage gives of a conversation: the prompt at once, the answer token by token.

    Args:
        stage: Not the last one.
        tokens: Of the conversation.
        states: What the stage before gave; empty: it takes tokens.
        prompt: Tokens of the prompt.
        threads: Of torch.
    """
    torch.set_num_threads(threads)
    stage.forget(_SESSION)
    row_bytes = len(states) // len(tokens)
    rows = b""
    for start, end in pairwise([0, *range(prompt, len(tokens) + 1)]):
        request = ComputePass(
            segments=(StageSegment(_SESSION, start, end - start),),
            tokens=() if states else tuple(tokens[start:end]),
            states=states[start * row_bytes : end * row_bytes],
        )
        reply = stage.compute(request)
        if not isinstance(reply, StageRows):
            raise TypeError(f"a stage answered with {reply}")
        rows += reply.states
    return rows


def comparison(
    checker: StageChecker,
    span: LayerSpan,
    tokens: Sequence[int],
    received: bytes,
    sent: bytes,
    threads: int = 1,
) -> StageFigures:
    """How far what a stage gave is from what a checker computes of what it was given."""
    torch.set_num_threads(threads)
    for content, is_output in ((received, False), (sent, True)):
        if content:
            take = TakeStates(
                check=_CHECK,
                session=_SESSION,
                start=0,
                count=len(tokens),
                sender=NOBODY,
                checker=NOBODY,
                is_output=is_output,
                states=content,
            )
            checker.take(take, content)
    request = RecomputeStage(
        check=_CHECK, span=span, count=len(tokens), tokens=() if received else tuple(tokens)
    )
    reply = checker.recompute(request)
    if not isinstance(reply, StageCompared):
        raise TypeError(f"a checker answered with {reply}")
    return reply.figures
