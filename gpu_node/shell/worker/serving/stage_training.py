"""A stage that trains: its part of the adapter, forward and backward, and what it keeps of both.

Only inputs are kept between forward and backward; activations are computed again. The last stage
computes both at once. Each stage adds the gradients of micro-batches in their order, so that in
float32 on a CPU all of them have the bits of one process.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import ParameterList
from torch.nn import functional as F

from gpu_node.shell.worker.torch_optimizer import TorchOptimizer
from hypergpu.rings.ring_training import RingTraining
from hypergpu.rings.token_rows import IGNORED
from hypergpu.serving.stage_messages import StageRefused, StageReply
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
    TrainingPiece,
    TrainingRequest,
    UseAdapter,
)
from hypergpu.tensors.hidden_states import StateCodec, StatesError, state_codec
from hypergpu.workloads.slices.layer_slice import LayerSlice
from hypergpu.workloads.slices.ragged_attention import PassingKeys, SessionSegment
from hypergpu.workloads.slices.slice_adapter import SliceAdapter

_KEPT_MOST = 2
_MOMENTS = ("exp_avg", "exp_avg_sq")


class BatchInputs:
    """Inputs of a micro-batch until its gradients are back."""

    def __init__(self, inputs: torch.Tensor, lengths: Sequence[int]) -> None:
        self.inputs = inputs
        self.lengths = lengths


class StageTraining:
    """Trains the adapter of a slice.

    Args:
        layer_slice: With its tensors; modules of it are wrapped.
        device: Where they are.
        codec: How activations travel.
        training: Settings.

    Raises:
        SliceError: The slice takes no such adapter.
    """

    def __init__(
        self,
        layer_slice: LayerSlice,
        device: torch.device,
        codec: StateCodec,
        training: RingTraining,
    ) -> None:
        self.settings = training
        """As the ring's owner states them."""
        self._slice = layer_slice
        self._device = device
        self._codec = codec
        self._gradient_codec = state_codec(training.gradient_codec)
        self._rule = training.rule
        self._dtype: torch.dtype = next(layer_slice.model.parameters()).dtype
        self.adapter = SliceAdapter(layer_slice, training)
        parameters = [each.parameter for each in self.adapter.tensors]
        self._numbers = {id(each): number for number, each in enumerate(parameters)}
        self._optimizer = TorchOptimizer(ParameterList(parameters), device)
        self._optimizer.begin(self._rule, None)
        self._kept: dict[int, BatchInputs] = {}
        self._snapshots: dict[int, dict[int, bytes]] = {}
        """Adapters by steps and layer."""

    def layer_bytes(self, layer: int) -> int:
        """Size of what is kept of a layer: its values, two moments, and the steps."""
        count = sum(each.parameter.numel() for each in self.adapter.layers.get(layer, ()))
        return 4 * (3 * count + 1)

    def perform(self, request: TrainingRequest) -> StageReply:
        """Do what the driver asks."""
        match request:
            case TrainForward():
                return self._forward(request)
            case TrainBackward():
                return self._backward(request)
            case StepAdapter():
                return self._step(request)
            case TrainingPiece():
                return StageRefused("a piece of a message stands alone")
            case _:
                return self._perform_on_adapter(request)

    def _perform_on_adapter(
        self, request: KeepAdapter | GiveAdapter | TakeAdapter | UseAdapter
    ) -> StageReply:
        match request:
            case KeepAdapter(step=step):
                self._snapshots[step] = {layer: self._content(layer) for layer in self._layers}
                self._forget_old(step)
                return AdapterReady()
            case GiveAdapter(step=step, layer=layer):
                return AdapterKept(self._snapshots.get(step, {}).get(layer, b""))
            case TakeAdapter():
                return self._take(request)
            case UseAdapter(step=step):
                return AdapterReady(self._use(step))

    @property
    def _layers(self) -> range:
        return range(self._slice.span.first, self._slice.span.end)

    def _forward(self, request: TrainForward) -> StageReply:
        try:
            batch = BatchInputs(self._inputs(request), request.lengths)
        except StatesError as error:
            return StageRefused(f"what came from the stage before: {error}", blames_input=True)
        try:
            if self._slice.is_last:
                return self._judge(request, batch)
            with torch.no_grad():
                states = self._compute(batch)
            if not request.is_evaluation:
                self._kept[request.micro_batch] = batch
            return Activations(self._codec.encode(_rows(states)))
        except StatesError as error:
            return StageRefused(f"micro-batch {request.micro_batch}: {error}")

    def _inputs(self, request: TrainForward) -> torch.Tensor:
        if bool(request.tokens) != self._slice.is_first:
            raise StatesError("the first stage takes tokens, and every other one activations")
        if bool(request.labels) != self._slice.is_last:
            raise StatesError("the last stage takes labels, and no other one")
        if request.tokens and max(request.tokens) >= self._slice.vocabulary:
            raise StatesError(f"the model knows {self._slice.vocabulary} tokens")
        if request.labels and max(request.labels) >= self._slice.vocabulary:
            raise StatesError(f"the model knows {self._slice.vocabulary} tokens")
        if self._slice.is_first:
            return torch.tensor(request.tokens, device=self._device)
        return self._read(request.states, self._codec, request.rows)

    def _read(self, content: bytes, codec: StateCodec, count: int) -> torch.Tensor:
        rows = codec.decode(content, self._slice.hidden_size)
        if len(rows) != count:
            raise StatesError(f"{len(rows)} rows for {count} tokens")
        return torch.from_numpy(np.ascontiguousarray(rows)).to(self._device, self._dtype)

    def _compute(self, batch: BatchInputs, logit_rows: Sequence[int] | None = None) -> torch.Tensor:
        segments = [SessionSegment(PassingKeys(), 0, count) for count in batch.lengths]
        return self._slice.compute_rows(batch.inputs, segments, logit_rows)

    def _with_gradients(self, batch: BatchInputs) -> None:
        if not self._slice.is_first:
            batch.inputs.requires_grad_()

    def _judge(self, request: TrainForward, batch: BatchInputs) -> StageReply:
        """Loss of a micro-batch, and its gradients unless its rows are held out."""
        if request.is_evaluation:
            with torch.no_grad():
                return LossSum(float(self._loss(request, batch)))
        self._with_gradients(batch)
        loss = self._loss(request, batch)
        (loss * request.weight).backward()  # type: ignore[no-untyped-call]
        return self._gradients(batch, ends_step=request.ends_step, loss=float(loss.detach()))

    def _loss(self, request: TrainForward, batch: BatchInputs) -> torch.Tensor:
        """Sum over tokens that count."""
        places, targets = _predictions(request)
        logits = self._compute(batch, places).float()
        target_tokens = torch.tensor(targets, device=self._device)
        return F.cross_entropy(logits, target_tokens, reduction="sum")

    def _backward(self, request: TrainBackward) -> StageReply:
        batch = self._kept.pop(request.micro_batch, None)
        if batch is None or self._slice.is_last:
            return StageRefused(f"micro-batch {request.micro_batch} is not here")
        try:
            gradients = self._read(request.states, self._gradient_codec, sum(batch.lengths))
        except StatesError as error:
            return StageRefused(f"what came from the stage behind: {error}", blames_input=True)
        self._with_gradients(batch)
        self._compute(batch).backward(gradients)  # type: ignore[no-untyped-call]
        try:
            return self._gradients(batch, ends_step=request.ends_step)
        except StatesError as error:
            return StageRefused(f"gradients of micro-batch {request.micro_batch}: {error}")

    def _gradients(self, batch: BatchInputs, *, ends_step: bool, loss: float = 0.0) -> Gradients:
        squares = self.adapter.squares() if ends_step else 0.0
        if not np.isfinite(loss) or not np.isfinite(squares):
            raise StatesError("the loss or the adapter's gradient is not finite")
        states = b""
        if batch.inputs.grad is not None:
            states = self._gradient_codec.encode(_rows(batch.inputs.grad))
        return Gradients(states=states, loss=loss, squares=squares)

    def _step(self, request: StepAdapter) -> StageReply:
        for _, parameter in self.adapter.tensors:
            if parameter.grad is not None and request.scale != 1.0:
                parameter.grad.mul_(request.scale)
        self._optimizer.step(request.rate)
        self._clear()
        return AdapterReady()

    def _clear(self) -> None:
        self._kept.clear()
        for _, parameter in self.adapter.tensors:
            parameter.grad = None

    def _content(self, layer: int) -> bytes:
        """Values, moments and steps of a layer as little-endian float32."""
        state = self._optimizer.state()
        tensors = self.adapter.layers.get(layer, [])
        numbers = [self._numbers[id(each.parameter)] for each in tensors]
        parts = [each.parameter.detach().cpu().numpy() for each in tensors]
        for moment in _MOMENTS:
            parts += [
                state.get(f"{moment}/{number}", np.zeros(tensor.parameter.shape, np.float32))
                for number, tensor in zip(numbers, tensors, strict=True)
            ]
        steps = (
            state.get(f"step/{numbers[0]}", np.zeros((), np.float32))
            if numbers
            else np.zeros((), np.float32)
        )
        parts.append(steps.reshape(1))
        return b"".join(part.astype("<f4", copy=False).tobytes() for part in parts)

    def _take(self, request: TakeAdapter) -> StageReply:
        if request.layer not in self._layers:
            return StageRefused(f"layer {request.layer} is not here")
        size_bytes = self.layer_bytes(request.layer)
        if len(request.content) != size_bytes:
            return StageRefused(
                f"the adapter of layer {request.layer} has {len(request.content)} bytes,"
                f" not {size_bytes}"
            )
        if not np.isfinite(np.frombuffer(request.content, "<f4")).all():
            return StageRefused(f"the adapter of layer {request.layer} is not finite")
        self._snapshots.setdefault(request.step, {})[request.layer] = request.content
        self._forget_old(request.step)
        return AdapterReady()

    def _forget_old(self, step: int) -> None:
        for old in sorted(set(self._snapshots) - {step})[: -(_KEPT_MOST - 1)]:
            del self._snapshots[old]

    @torch.no_grad()
    def _use(self, step: int) -> bool:
        """Go on from what was kept; false: it is not here."""
        snapshot = self._snapshots.get(step, {})
        if step and set(snapshot) != set(self._layers):
            return False
        self._clear()
        self._optimizer.begin(self._rule, None)
        if not step:
            self.adapter.reset()
            return True
        state: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]] = {}
        for layer in self._layers:
            self._read_layer(layer, np.frombuffer(snapshot[layer], "<f4").astype(np.float32), state)
        self._optimizer.begin(self._rule, state)
        return True

    def _read_layer(
        self,
        layer: int,
        values: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]",
        state: "dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]",
    ) -> None:
        tensors, place, steps = self.adapter.layers.get(layer, []), 0, values[-1]
        for part in ("", *_MOMENTS):
            for tensor in tensors:
                parameter = tensor.parameter
                own = values[place : place + parameter.numel()].reshape(parameter.shape)
                place += parameter.numel()
                number = self._numbers[id(parameter)]
                if part:
                    state[f"{part}/{number}"] = own.copy()
                    state[f"step/{number}"] = np.array(steps, np.float32)
                else:
                    parameter.copy_(torch.from_numpy(own.copy()))


def _rows(states: torch.Tensor) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
    rows: np.ndarray[tuple[int, ...], np.dtype[np.float32]] = states.detach().float().cpu().numpy()
    return rows


def _predictions(request: TrainForward) -> tuple[list[int], list[int]]:
    """Places whose next token counts, and these tokens."""
    places, targets, first = list[int](), list[int](), 0
    for length in request.lengths:
        labels = request.labels[first : first + length]
        for offset, label in enumerate(labels[1:]):
            if label != IGNORED:
                places.append(first + offset)
                targets.append(label)
        first += length
    return places, targets
