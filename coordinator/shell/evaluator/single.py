"""Judging updates one by one: what each would have done to the model that it started from."""

import math
from pathlib import Path

import numpy as np

from coordinator.shell.evaluator.judge import Judge
from coordinator.shell.evaluator.messages import JudgeUpdates, UpdateFile, UpdatesJudged
from hypergpu.ids import Digest
from hypergpu.tensors.codec import decode_update
from hypergpu.tensors.layout import Flat, Octets

_KEPT = 2
"""A round's model is the base of the next one."""


class Singles:
    """Remembers the losses of the newest models, for one workload and its data."""

    def __init__(self) -> None:
        self._losses: dict[tuple[Digest, int], float | None] = {}

    def judged(self, judge: Judge, request: JudgeUpdates) -> UpdatesJudged:
        """Measure everything on the same samples.

        Raises:
            HyperGPUError: An update does not have the size of its scheme.
            OSError: A file cannot be read.
        """
        most = request.samples_most
        base = np.fromfile(request.base_path, np.uint8)
        base_loss = self._known_loss(judge, request.base_digest, Path(request.base_path), most)
        made_loss = self._known_loss(judge, request.made_digest, Path(request.made_path), most)
        losses = (
            _loss(judge, _with(judge, base.copy(), update), most) for update in request.updates
        )
        return UpdatesJudged(base_loss=base_loss, made_loss=made_loss, losses=tuple(losses))

    def _known_loss(self, judge: Judge, digest: Digest, path: Path, most: int) -> float | None:
        key = (digest, most)
        if key not in self._losses:
            model = Flat.view(judge.layout, np.fromfile(path, np.uint8))
            self._losses[key] = _loss(judge, model, most)
            while len(self._losses) > _KEPT:
                del self._losses[next(iter(self._losses))]
        return self._losses[key]


def _with(judge: Judge, base: Octets, update: UpdateFile) -> Flat:
    """The model with one update alone: parameters less the pseudo-gradient, its own statistics."""
    model = Flat.view(judge.layout, base)
    said = decode_update(judge.layout, update.scheme, Path(update.path).read_bytes())
    np.subtract(model.parameters, said.parameters, out=model.parameters)
    np.copyto(model.statistics, said.statistics)
    np.copyto(model.integers, said.integers)
    return model


def _loss(judge: Judge, model: Flat, most: int) -> float | None:
    with np.errstate(over="ignore", invalid="ignore"):  # A bad update may well overflow.
        sums = judge.evaluate(model, most)
    loss = sums.loss / sums.samples
    return loss if math.isfinite(loss) else None
