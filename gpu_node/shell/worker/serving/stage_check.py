"""Computes again what another node's stage was given of a conversation, and compares.

All tokens are read as one prompt, a layer at a time where this node does not hold the stage in
memory, so that a check takes the memory of one layer. Honest nodes differ by rounding: what is told
is a distance, and whoever asked decides.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_node.shell.worker.serving.adapter_values import AdapterValues
from gpu_node.shell.worker.serving.answer_check import AnswerCheck
from gpu_node.shell.worker.serving.conversation import PIECE_TOKENS
from gpu_node.shell.worker.serving.engine import TextModel, UnanswerableCallError
from gpu_node.shell.worker.serving.loaded_stage import LoadedStage
from hypergpu.rings.layer_span import LayerSpan
from hypergpu.rings.state_digests import digest_of_rows, row_digests
from hypergpu.serving.calls import CheckFigures, CheckResult, ModelCall
from hypergpu.serving.check_messages import (
    DISTANCE_MOST_PPM,
    RecomputeStage,
    StageCompared,
    StageFigures,
    TakeAdapterValues,
    TakeStates,
)
from hypergpu.serving.stage_messages import StageRefused, StageReply, StageRows
from hypergpu.tensors.hidden_states import StatesError
from hypergpu.workloads.slices.layer_slice import LayerSlice, SliceError, open_session
from hypergpu.workloads.slices.ragged_attention import SessionSegment

ROWS_SHARE = 0.9
"""Share of the rows that do not exceed the distance that is told."""
_PPM = 1_000_000
_Distances = NDArray[np.float64]


class LayerSource(Protocol):
    """Layers of the model that a node can read."""

    def slices(self, span: LayerSpan) -> Iterator[LayerSlice]:
        """Layers of a span, one after another.

        Raises:
            SliceError: A file of them is absent.
        """
        ...

    def text(self) -> TextModel:
        """The model's tokens."""
        ...


def row_distances(given_rows: NDArray[np.float32], rows: NDArray[np.float32]) -> _Distances:
    """How far each row is: the length of its difference over the length of the right row.

    Args:
        given_rows: ``float32[rows, width]``, what is judged.
        rows: The same as computed here.
    """
    differences = np.linalg.norm(given_rows.astype(np.float64) - rows, axis=1)
    lengths = np.linalg.norm(rows.astype(np.float64), axis=1)
    distances: _Distances = differences / np.maximum(lengths, np.finfo(np.float32).tiny)
    return distances


def distance_ppm(distances: _Distances) -> int:
    """The distance that `ROWS_SHARE` of the rows do not exceed, in millionths."""
    place = math.ceil(ROWS_SHARE * len(distances)) - 1
    distance = float(np.sort(distances)[place])
    return min(DISTANCE_MOST_PPM, round(distance * _PPM))


class StageChecker:
    """The checks of one node, one at a time.

    Args:
        stage: What it holds in memory.
        layers: Reads what it does not.
        pause: Called between layers; may raise where the work is aborted.
    """

    def __init__(
        self, stage: LoadedStage, layers: LayerSource, pause: Callable[[], None] = lambda: None
    ) -> None:
        self._stage = stage
        self._layers = layers
        self._pause = pause
        settings = None if stage.training is None else stage.training.settings
        self._adapters = AdapterValues(settings, stage.layer_slice.layers_total)
        self._check = 0
        self._received, self._sent = bytearray(), bytearray()

    def take(self, request: TakeStates, states: bytes) -> StageReply:
        """Keep coded states of a check; those of an earlier one are dropped."""
        if request.check != self._check:
            self._forget(request.check)
        content = self._sent if request.is_output else self._received
        row_bytes = self._row_bytes
        is_next = len(content) == request.start * row_bytes
        is_whole = len(states) == request.count * row_bytes
        if not is_next or not is_whole or len(content) + len(states) > self._bytes_most:
            return StageRefused("states of a check come in order, as many rows as are told")
        content += states
        return StageRows()

    def take_adapter(self, request: TakeAdapterValues) -> StageReply:
        """Keep a part of the adapter of a layer for all checks to come."""
        fault = self._adapters.take(request)
        return StageRefused(fault) if fault else StageRows()

    def _forget(self, check: int) -> None:
        self._check, self._received, self._sent = check, bytearray(), bytearray()

    @property
    def _row_bytes(self) -> int:
        return self._stage.codec.row_bytes(self._stage.layer_slice.hidden_size)

    @property
    def _bytes_most(self) -> int:
        return self._stage.tokens_most * self._row_bytes

    def recompute(self, request: RecomputeStage) -> StageReply:
        """Compute what the states that came lead to, and compare."""
        if request.check != self._check:
            self._forget(request.check)
        try:
            return self._comparison(request)
        except (SliceError, StatesError, UnanswerableCallError) as error:
            return StageRefused(f"it cannot be computed again here: {error}", is_lasting=False)
        except (MemoryError, torch.OutOfMemoryError):
            return StageRefused("there is no memory left to compute it again", is_lasting=False)
        finally:
            self._forget(0)

    def _comparison(self, request: RecomputeStage) -> StageCompared:
        whole = self._stage.layer_slice.layers_total
        if request.span.end > whole or bool(request.tokens) != (request.span.first == 0):
            raise SliceError(f"{request.span} of {whole} layers were not given what they take")
        inputs = self._inputs(request)
        if (request.call is not None) != (request.span.end == whole):
            raise SliceError("the last stage is checked by its tokens, and no other one")
        if request.call is not None:
            scored_figures = self._score(request, inputs, request.call)
            figures = StageFigures(scored_figures.tokens, scored=scored_figures)
        else:
            sent_rows = self._rows(self._sent, request.count)
            for layer_slice in self._slices(request.span):
                inputs = self._pass(layer_slice, inputs)
            rows = inputs.float().cpu().numpy()
            if not np.isfinite(rows).all():
                raise StatesError("hidden states hold numbers that are not finite here, either")
            distances = row_distances(sent_rows, rows)
            figures = StageFigures(request.count, distance_ppm(distances))
        return StageCompared(
            figures,
            self._digest(self._received, request.count),
            self._digest(self._sent, request.count),
        )

    def _digest(self, content: bytearray, count: int) -> bytes:
        return digest_of_rows(row_digests(content, self._row_bytes), count)

    def _rows(self, content: bytearray, count: int) -> NDArray[np.float32]:
        rows = self._stage.codec.decode(bytes(content), self._stage.layer_slice.hidden_size)
        if len(rows) != count:
            raise StatesError(f"{len(rows)} rows for {count} tokens")
        return rows

    def _inputs(self, request: RecomputeStage) -> torch.Tensor:
        device = self._stage.device
        if request.tokens:
            vocabulary = self._stage.layer_slice.vocabulary
            if max(request.tokens) >= vocabulary or request.count > self._stage.tokens_most:
                raise StatesError(f"no {request.count} tokens of the model's {vocabulary}")
            return torch.tensor(request.tokens, device=device)
        rows = self._rows(self._received, request.count)
        return torch.from_numpy(np.ascontiguousarray(rows)).to(device, self._stage.dtype)

    def _slices(self, span: LayerSpan) -> Iterator[LayerSlice]:
        held_slice, training = self._stage.layer_slice, self._stage.training
        if span == held_slice.span:
            if training is not None:
                self._adapters.set_on(training.adapter, span)
            yield held_slice
            return
        for layer_slice in self._layers.slices(span):
            self._pause()
            self._adapters.add_to(layer_slice)
            yield layer_slice

    def _pass(self, layer_slice: LayerSlice, inputs: torch.Tensor) -> torch.Tensor:
        reader = _SliceReader(layer_slice, inputs)
        pieces = [reader.next_rows(PIECE_TOKENS) for _ in range(0, len(inputs), PIECE_TOKENS)]
        return torch.cat(pieces)

    def _score(
        self, request: RecomputeStage, inputs: torch.Tensor, call: ModelCall
    ) -> CheckFigures:
        """Score the tokens of the last stage; its last layers give logits piece by piece."""
        for layer_slice in self._slices(request.span):
            if not layer_slice.is_last:
                inputs = self._pass(layer_slice, inputs)
                continue
            text = self._stage.text or self._layers.text()
            reader = _SliceReader(layer_slice, inputs)
            check = AnswerCheck(_StatesModel(text, reader), call, self._stage.tokens_most)
            while not (parts := check.step()):
                self._pause()
            return next(part.figures for part in parts if isinstance(part, CheckResult))
        raise SliceError(f"{request.span} has no head")


class _SliceReader:
    """Rows as a slice reads them, a piece at a time.

    Args:
        layer_slice: Reads.
        inputs: All rows, or all tokens.
    """

    def __init__(self, layer_slice: LayerSlice, inputs: torch.Tensor) -> None:
        self._slice, self._inputs = layer_slice, inputs
        self._keys = open_session()
        self._read = 0

    def next_rows(self, count: int) -> torch.Tensor:
        """What the slice gives of the next rows; fewer at the end."""
        piece = self._inputs[self._read : self._read + count]
        segment = SessionSegment(self._keys, self._read, len(piece))
        self._read += len(piece)
        return self._slice.compute(piece, [segment])

    def read_each(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits after each token. The newest one has no row yet, and nothing follows it."""
        logits = self.next_rows(len(tokens)) if self._read < len(self._inputs) else None
        absent_rows = len(tokens) - (0 if logits is None else len(logits))
        blank = torch.zeros(absent_rows, self._slice.vocabulary)
        return blank if logits is None else torch.cat([logits.float().cpu(), blank])

    def read(self, tokens: Sequence[int]) -> torch.Tensor:
        """See `TokenReader.read`."""
        return self.read_each(tokens)[-1]

    def close(self) -> None:
        """See `TokenReader.close`."""


class _StatesModel:
    """The last layers as a model that scores, whose reader is given."""

    def __init__(self, text: TextModel, reader: _SliceReader) -> None:
        self._reader = reader
        self.vocabulary = text.vocabulary
        self.end_tokens = text.end_tokens
        self.encode, self.encode_chat, self.decode = text.encode, text.encode_chat, text.decode

    def open_reader(self, tokens_most: int) -> _SliceReader:
        """See `ReadingModel.open_reader`; rows are as many as there are."""
        del tokens_most
        return self._reader
