"""A training with several rings, computed ring after ring by one process that has all layers, and
folded by the formulas as they are written down: what real rings are held against.
"""

from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.ours.stages.trained_ring import TrainedRing
from coordinator.core.work.outer_step import chosen_outer_step
from coordinator.shell.kinds.serving.training_batches import TrainingBatches
from hypergpu.jobfile.spec import OuterSettings
from hypergpu.rings.ring_training import RingTraining
from hypergpu.rings.token_rows import LabelledRow
from hypergpu.serving.training_messages import TakeAdapter, UseAdapter
from hypergpu.tensors.layout import Float32s

_PARTS = 3
"""Values and two moments of a layer."""
LayerBytes = dict[int, bytes]
"""What stages keep of each layer."""


class RingsRound(NamedTuple):
    """A round of all rings."""

    loss: float
    """Mean of the tokens of all rings that count."""
    held_out_loss: float
    """Mean of the tokens of rows that are held out, by the folded adapter; 0: none are."""
    tokens: int
    layers: LayerBytes
    """The folded adapter, with the first ring's optimizer state."""


class _TrainedPart(NamedTuple):
    layers: LayerBytes
    loss_sum: float
    tokens: int
    counted_tokens: int


def values_of(content: bytes) -> Float32s:
    """Values of a layer."""
    return np.frombuffer(content, "<f4", (len(content) // 4 - 1) // _PARTS)


class RingsInOneProcess:
    """The rings of a training.

    Args:
        whole: The model.
        layers: Its layers.
        training: Settings.
        rows: The file of rows.
        held_out: Rows that are held out.
    """

    def __init__(
        self,
        whole: Any,
        layers: int,
        training: RingTraining,
        rows: Path,
        held_out: Sequence[LabelledRow] = (),
    ) -> None:
        self._training = training
        self._held_out = held_out
        self._batches = [TrainingBatches(rows, training, ring) for ring in range(training.rings)]
        self.rings = [
            TrainedRing(whole, (0, layers), training, each.rows_of, held_out=held_out)
            for each in self._batches
        ]

    def run(self, taking: Sequence[int] | None = None) -> list[RingsRound]:
        """Train to the end.

        Args:
            taking: Rings that take part; None: all.
        """
        taking = range(self._training.rings) if taking is None else taking
        before = self.rings[0]
        before.take(0, 0)
        before.keep(0, 0)
        contents = dict.fromkeys(taking, before.stored[0])
        momentum: dict[int, Float32s] = {}
        rounds = []
        for number in range(self._training.rounds):
            parts = [self._train(ring, number, contents[ring]) for ring in taking]
            contents = dict(zip(taking, self._fold(number, contents, parts, momentum), strict=True))
            layers = contents[taking[0]]
            counted_tokens = sum(each.counted_tokens for each in parts)
            loss = sum(each.loss_sum for each in parts) / counted_tokens
            tokens = sum(each.tokens for each in parts)
            held_out_loss = self._measure((number + 1) * self._training.inner_steps, layers)
            rounds.append(RingsRound(loss, held_out_loss, tokens, layers))
        return rounds

    def _train(self, ring: int, number: int, layers: LayerBytes) -> _TrainedPart:
        """One ring's part of a round."""
        training, work = self._training, self.rings[ring]
        first = number * training.inner_steps
        steps = range(first, first + training.inner_steps)
        self._take(ring, first, layers)
        for step in steps:
            for micro_batch in range(training.micro_batches):
                work.forward(0, step, micro_batch)
            norm, clip_norm = sqrt(work.squares(0)), training.clip_norm
            work.step(0, step, min(1.0, clip_norm / (norm + 1e-6)) if clip_norm else 1.0)
        work.keep(0, steps.stop)
        totals = self._batches[ring].totals(steps)
        loss_sum = sum(work.loss_sums[step] for step in steps)
        return _TrainedPart(work.stored[steps.stop], loss_sum, totals.tokens, totals.counted_tokens)

    def _take(self, ring: int, step: int, layers: LayerBytes) -> None:
        """Have a ring go on from somebody's adapter."""
        work = self.rings[ring]
        for layer, content in layers.items() if step else ():
            work.ask(0, TakeAdapter(step, layer, content))
        work.ask(0, UseAdapter(step))

    def _fold(
        self,
        number: int,
        contents: dict[int, LayerBytes],
        parts: Sequence[_TrainedPart],
        momentum: dict[int, Float32s],
    ) -> list[LayerBytes]:
        """``D = x - sum(w_r x_r)``, ``m <- mu m + D``, ``x <- x - lr (D + mu m)``."""
        training = self._training
        settings = OuterSettings(training.outer_learning_rate, training.outer_momentum)
        outer = chosen_outer_step(settings, round_number=number, participants=len(parts)).step
        rate, mu = np.float32(outer.learning_rate), np.float32(outer.momentum)
        total = sum(each.counted_tokens for each in parts)
        shares = [np.float32(each.counted_tokens / total) for each in parts]
        new_layers: list[LayerBytes] = [{} for _ in parts]
        for layer, content in next(iter(contents.values())).items():
            x = values_of(content)
            difference = x.copy()
            for each, share in zip(parts, shares, strict=True):
                difference = difference - share * values_of(each.layers[layer])
            momentum[layer] = mu * momentum.get(layer, np.float32(0)) + difference
            new = x - rate * (difference + mu * momentum[layer])
            if not mu:
                del momentum[layer]  # As of every training: none is kept where none is applied.
            for place, each in enumerate(parts):
                rest = each.layers[layer][4 * len(new) :]
                new_layers[place][layer] = new.astype("<f4").tobytes() + rest
        return new_layers

    def _measure(self, step: int, layers: LayerBytes) -> float:
        if not self._held_out:
            return 0.0
        work = self.rings[0]
        self._take(0, step, layers)
        micro_rows = self._training.micro_rows
        for micro_batch in range(-(-len(self._held_out) // micro_rows)):
            work.evaluate(0, step, micro_batch)
        counted_tokens = sum(row.counted_tokens for row in self._held_out)
        return work.held_out_sums[step] / counted_tokens
