"""What the weighing of a round needs to be measured: begun early, awaited when the round closes."""

from asyncio import Task
from dataclasses import dataclass, field
from typing import NamedTuple

from coordinator.shell.aggregation.sketch import Sketch, UpdateSketch
from hypergpu.ids import Digest


class HeldOutGradient(NamedTuple):
    """The gradient of the held-out loss at a model."""

    model: Digest
    loss: float | None
    """None: it is not finite."""
    sketch: Sketch | None
    """None where it is not finite."""


@dataclass
class RoundMeasurements:
    """Measurements of one job, by the digest of the model or the update."""

    gradients: dict[Digest, "Task[HeldOutGradient | None]"] = field(default_factory=dict)
    sketches: dict[Digest, "Task[UpdateSketch]"] = field(default_factory=dict)
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

    @property
    def tasks(self) -> "tuple[Task[object], ...]":
        """All of them, done or under way."""
        return (*self.gradients.values(), *self.sketches.values())
