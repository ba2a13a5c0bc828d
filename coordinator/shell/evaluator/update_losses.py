"""Losses of a model with single updates: the effect of each on the model that it started from."""

import math
from pathlib import Path

import numpy as np

from coordinator.shell.evaluator.messages import MeasureUpdates, UpdateFile, UpdatesMeasured
from coordinator.shell.evaluator.model_evaluator import ModelEvaluator
from hypergpu.ids import Digest
from hypergpu.tensors.codec import decode_update
from hypergpu.tensors.layout import Flat, Octets

_KEPT = 2
"""A round's model is the base of the next one."""


class UpdateLosses:
    """Measures updates, and remembers the losses of the newest models of one workload."""

    def __init__(self) -> None:
        self._losses: dict[tuple[Digest, int], float | None] = {}

    def measure(self, model: ModelEvaluator, request: MeasureUpdates) -> UpdatesMeasured:
        """Measure everything on the same samples.

        Raises:
            HyperGPUError: An update does not have the size of its scheme.
            OSError: A file cannot be read.
        """
        most = request.samples_most
        base = np.fromfile(request.base_path, np.uint8)
        return UpdatesMeasured(
            base_loss=self._known_loss(model, request.base_digest, request.base_path, most),
            made_loss=self._known_loss(model, request.made_digest, request.made_path, most),
            losses=tuple(
                _loss(model, _add_update(model, base.copy(), update), most)
                for update in request.updates
            ),
        )

    def _known_loss(
        self, model: ModelEvaluator, digest: Digest, path: str, most: int
    ) -> float | None:
        key = (digest, most)
        if key not in self._losses:
            flat = Flat.view(model.layout, np.fromfile(path, np.uint8))
            self._losses[key] = _loss(model, flat, most)
            while len(self._losses) > _KEPT:
                del self._losses[next(iter(self._losses))]
        return self._losses[key]


def _add_update(model: ModelEvaluator, base: Octets, update: UpdateFile) -> Flat:
    """The model with one update alone: parameters less the pseudo-gradient, its own statistics."""
    flat = Flat.view(model.layout, base)
    sent = decode_update(model.layout, update.scheme, Path(update.path).read_bytes())
    np.subtract(flat.parameters, sent.parameters, out=flat.parameters)
    np.copyto(flat.statistics, sent.statistics)
    np.copyto(flat.integers, sent.integers)
    return flat


def _loss(model: ModelEvaluator, flat: Flat, most: int) -> float | None:
    with np.errstate(over="ignore", invalid="ignore"):  # A bad update may well overflow.
        sums = model.evaluate(flat, most)
    loss = sums.loss / sums.samples
    return loss if math.isfinite(loss) else None
