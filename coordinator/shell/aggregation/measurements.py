"""What the weighing of a round needs to be measured: begun early, awaited when the round closes."""

from asyncio import Task
from collections.abc import Set
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from coordinator.shell.aggregation.sketch import Sketch, Sketches, UpdateSketch
from hypergpu.ids import Digest


class HeldOutGradient(NamedTuple):
    """The gradient of the held-out loss at a model."""

    model: Digest
    loss: float | None
    """None: it is not finite."""
    sketch: Sketch | None
    """None where it is not finite."""


class OwnGradient(NamedTuple):
    """The gradient of the loss on secret samples of one shard, at the shard's own base."""

    layers: Sketches
    """Sketches of its groups of layers."""
    loss: float | None = None
    """The mean loss of the samples; None: it is not finite."""

    @property
    def is_finite(self) -> bool:
        """Whether anything can be held against it."""
        return bool(np.isfinite(self.layers).all())


class UpdateTrial(NamedTuple):
    """Losses of the secret samples of an update's own shard."""

    loss: float
    """At the shard's base."""
    loss_after: float
    """At the base less the update."""


@dataclass
class RoundMeasurements:
    """Measurements of one job, by the digest of the model or the update."""

    gradients: dict[Digest, "Task[HeldOutGradient | None]"] = field(default_factory=dict)
    sketches: dict[Digest, "Task[UpdateSketch]"] = field(default_factory=dict)
    own: dict[int, "Task[dict[int, OwnGradient]]"] = field(default_factory=dict)
    """By lease; one task measures several."""
    trials: "dict[tuple[int, Digest], Task[float | None]]" = field(default_factory=dict)
    """Losses after updates, by lease and update; None: one could not be measured."""
    own_round: int = -1
    """The newest round whose shards were begun with."""
    newest_gradient: HeldOutGradient | None = None
    gradient_failure: str = ""
    """Why the newest gradient could not be measured; empty: it could, or none was asked for."""
    is_evaluator_slow: bool = False
    """Whether the last fold waited for a gradient in vain: then the next one does not wait."""

    def keep_gradient(self, model: Digest) -> None:
        """Forget finished gradients of other models."""
        for digest in [each for each in self.gradients if each != model]:
            if self.gradients[digest].done():
                del self.gradients[digest]

    def keep_sketches(self, updates: frozenset[Digest]) -> None:
        """Forget finished sketches of other updates."""
        for digest in [each for each in self.sketches if each not in updates]:
            if self.sketches[digest].done():
                del self.sketches[digest]

    def keep_own(self, leases: Set[int]) -> None:
        """Forget finished gradients of other leases."""
        for lease in [each for each in self.own if each not in leases]:
            if self.own[lease].done():
                del self.own[lease]

    def keep_trials(self, updates: Set[tuple[int, Digest]]) -> None:
        """Forget finished trials of other updates."""
        for key in [each for each in self.trials if each not in updates]:
            if self.trials[key].done():
                del self.trials[key]

    @property
    def tasks(self) -> "tuple[Task[object], ...]":
        """All of them, done or under way."""
        tasks_by_key = (self.gradients, self.sketches, self.own, self.trials)
        return tuple(task for tasks in tasks_by_key for task in tasks.values())
