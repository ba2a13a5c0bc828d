"""Stages of a tiny model that train in one process, for the machine of a ring in virtual time."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from msgspec.structs import replace

from gpu_node.shell.worker.serving.stage_training import StageTraining
from hypergpu.rings.layer_span import LayerSpan
from hypergpu.rings.ring_training import RingTraining
from hypergpu.rings.token_rows import IGNORED, LabelledRow
from hypergpu.serving.stage_messages import StageReply
from hypergpu.serving.training_messages import (
    Activations,
    AdapterKept,
    AdapterReady,
    GiveAdapter,
    Gradients,
    KeepAdapter,
    LossSum,
    StepAdapter,
    TakeAdapter,
    TrainBackward,
    TrainForward,
    TrainingRequest,
    UseAdapter,
)
from hypergpu.tensors.hidden_states import state_codec
from hypergpu.workloads.slices.layer_slice import LayerSlice

CPU = torch.device("cpu")
_Reply = TypeVar("_Reply", Activations, AdapterKept, Gradients, LossSum)


def random_rows(count: int, vocabulary: int) -> list[LabelledRow]:
    """Rows of 6 to 12 tokens of which the first do not count."""
    draws = np.random.default_rng(0)
    rows = []
    for _ in range(count):
        tokens = draws.integers(0, vocabulary, draws.integers(6, 13)).astype(np.int32)
        labels = np.where(np.arange(len(tokens)) < 3, np.int32(IGNORED), tokens)
        rows.append(LabelledRow(tokens, labels))
    return rows


def trained_stage(
    whole: Any, span: LayerSpan, training: RingTraining, codec: str = "float32"
) -> StageTraining:
    """A stage with layers of a model."""
    layer_slice = LayerSlice(whole.config, span)
    state = whole.state_dict()
    values = {name: state[full].clone() for name, full in layer_slice.whole_names()}
    layer_slice.model.load_state_dict(values, assign=True)
    layer_slice.model.requires_grad_(requires_grad=False)
    return StageTraining(layer_slice, CPU, state_codec(codec), training)


def forward_request(
    rows: Sequence[LabelledRow], number: int, training: RingTraining
) -> tuple[TrainForward, tuple[int, ...]]:
    """A micro-batch as the first stage is told of it, and the labels of the last one."""
    part = rows[number * training.micro_rows : (number + 1) * training.micro_rows]
    tokens = tuple(int(each) for row in part for each in row.tokens)
    labels = tuple(int(each) for row in part for each in row.labels)
    request = TrainForward(
        micro_batch=number,
        lengths=tuple(len(row.tokens) for row in part),
        tokens=tokens,
        weight=1 / sum(row.counted_tokens for row in rows),
        ends_step=number == training.micro_batches - 1,
    )
    return request, labels


def _of(kind: type[_Reply], reply: StageReply) -> _Reply:
    if not isinstance(reply, kind):
        raise TypeError(f"a stage gave {reply}, not {kind.__name__}")
    return reply


def _require_ready(reply: StageReply) -> None:
    if reply != AdapterReady():
        raise ValueError(f"a stage gave {reply}")


class TrainedRing:
    """Stages of a model, and the rows of each step. Implements `RingWork`."""

    def __init__(
        self,
        whole: Any,
        bounds: Sequence[int],
        training: RingTraining,
        rows: Callable[[int], Sequence[LabelledRow]],
        codec: str = "float32",
        held_out: Sequence[LabelledRow] = (),
    ) -> None:
        self._whole = whole
        self._training = training
        self._rows = rows
        self._held_out = held_out
        self._codec = codec
        self.spans = [LayerSpan(first, end) for first, end in pairwise(bounds)]
        self.stages = [trained_stage(whole, span, training, codec) for span in self.spans]
        self._states: dict[tuple[int, int], bytes] = {}
        self._gradients: dict[tuple[int, int], bytes] = {}
        self._squares = [0.0] * len(self.spans)
        self.stored: dict[int, dict[int, bytes]] = {}
        """What stages kept of each layer, after a number of steps."""
        self.losses: dict[int, float] = {}
        self.loss_sums: dict[int, float] = {}
        self.held_out_sums: dict[int, float] = {}
        """Loss of all rows that are held out, after a number of steps."""
        self._step = 0
        self.replies: list[StageReply] = []

    def ask(self, stage: int, request: TrainingRequest) -> StageReply:
        """What a stage answers."""
        reply = self.stages[stage].perform(request)
        self.replies.append(reply)
        return reply

    def take(self, stage: int, step: int) -> None:
        """See `RingWork`: what a stage does not have comes from what was stored."""
        reply = self.ask(stage, UseAdapter(step))
        if reply == AdapterReady(is_there=False):
            for layer, content in self.stored[step].items():
                if self.spans[stage].first <= layer < self.spans[stage].end:
                    reply = self.ask(stage, TakeAdapter(step, layer, content))
                    _require_ready(reply)
            _require_ready(self.ask(stage, UseAdapter(step)))

    def forward(self, stage: int, step: int, micro_batch: int) -> None:
        """See `RingWork`."""
        self._step = step
        request, reply = self._go_forward(stage, self._rows(step), micro_batch)
        if stage == len(self.stages) - 1:
            reply = _of(Gradients, reply)
            if not micro_batch:
                self.losses[step] = self.loss_sums[step] = 0.0
            self.losses[step] += reply.loss * request.weight
            self.loss_sums[step] += reply.loss
            self._take_gradients(stage, micro_batch, reply)
            return
        reply = _of(Activations, reply)
        self._states[stage + 1, micro_batch] = reply.states

    def _go_forward(
        self,
        stage: int,
        rows: Sequence[LabelledRow],
        micro_batch: int,
        *,
        is_evaluation: bool = False,
    ) -> tuple[TrainForward, StageReply]:
        request, labels = forward_request(rows, micro_batch, self._training)
        request = replace(
            request,
            tokens=() if stage else request.tokens,
            states=self._states.pop((stage, micro_batch), b""),
            labels=labels if stage == len(self.stages) - 1 else (),
            is_evaluation=is_evaluation,
        )
        return request, self.ask(stage, request)

    def evaluate(self, stage: int, step: int, micro_batch: int) -> None:
        """See `RingWork`."""
        rows = self._held_out
        _, reply = self._go_forward(stage, rows, micro_batch, is_evaluation=True)
        if stage < len(self.stages) - 1:
            self._states[stage + 1, micro_batch] = _of(Activations, reply).states
            return
        before = self.held_out_sums.get(step, 0.0) if micro_batch else 0.0
        self.held_out_sums[step] = before + _of(LossSum, reply).loss

    def _take_gradients(self, stage: int, micro_batch: int, reply: Gradients) -> None:
        self._squares[stage] = reply.squares
        if stage:
            self._gradients[stage - 1, micro_batch] = reply.states

    def backward(self, stage: int, micro_batch: int) -> None:
        """See `RingWork`."""
        request = TrainBackward(
            micro_batch=micro_batch,
            states=self._gradients.pop((stage, micro_batch)),
            ends_step=micro_batch == self._training.micro_batches - 1,
        )
        reply = self.ask(stage, request)
        reply = _of(Gradients, reply)
        self._take_gradients(stage, micro_batch, reply)

    def squares(self, stage: int) -> float:
        """See `RingWork`."""
        return self._squares[stage]

    def step(self, stage: int, step: int, scale: float) -> None:
        """See `RingWork`."""
        _require_ready(self.ask(stage, StepAdapter(self._training.rate_of(step), scale)))

    def keep(self, stage: int, step: int) -> None:
        """See `RingWork`."""
        _require_ready(self.ask(stage, KeepAdapter(step)))
        span = self.spans[stage]
        for layer in range(span.first, span.end):
            reply = self.ask(stage, GiveAdapter(step, layer))
            reply = _of(AdapterKept, reply)
            self.stored.setdefault(step, {})[layer] = reply.content

    def lose(self, stage: int) -> None:
        """See `RingWork`: another node holds the layers."""
        self.stages[stage] = trained_stage(
            self._whole, self.spans[stage], self._training, self._codec
        )

    def values(self) -> dict[str, torch.Tensor]:
        """Trained tensors of all stages by their names."""
        return {
            tensor.name: tensor.parameter.detach().clone()
            for stage in self.stages
            for tensor in stage.adapter.tensors
        }

    def gradients(self) -> dict[str, torch.Tensor]:
        """Their gradients, where they have some."""
        return {
            tensor.name: tensor.parameter.grad.clone()
            for stage in self.stages
            for tensor in stage.adapter.tensors
            if tensor.parameter.grad is not None
        }
