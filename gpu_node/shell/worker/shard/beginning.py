"""The first inner steps of a round, taken from this node's own end of the round before.

They need nothing of the round's model, so a worker takes them while the update before is on its
way. Whether it did or takes them once the round is open: they are the same steps from the same end
state, which lies on disk, so the round's update is the same. Nothing of them is kept but in memory.
"""

import math
import time
from collections.abc import Callable
from typing import NamedTuple, SupportsFloat

from msgspec.structs import replace

from gpu_node.shell.worker.messages import Train
from gpu_node.shell.worker.shard.batches import Batches
from gpu_node.shell.worker.shard.end_state import EndState
from gpu_node.shell.worker.trainer.interface import OptimizerState, Start, Trainer
from hypergpu.tensors.layout import Flat

_READ_INTERVAL_S = 0.25


def prefetch_request(request: Train) -> Train | None:
    """What the round after a request's may be begun with, as a request of its own."""
    if request.ahead is None:
        return None
    return _alone(replace(request, begun=request.ahead, resume_from=request.round))


def asked_for(request: Train) -> Train | None:
    """What a request's own round is to be begun with, in the same form."""
    begun, end = request.begun, request.resume_from
    return None if begun is None or end != begun.round - 1 else _alone(request)


def _alone(request: Train) -> Train:
    """The beginning and what decides it, without what it does not depend on."""
    begun = request.begun
    if begun is None:
        raise AssertionError("there is no beginning")
    return replace(
        request,
        round=begun.round,
        lease=0,
        inner_steps=begun.inner_steps,
        ranges=begun.ranges,
        seed=begun.seed,
        global_samples=begun.global_samples,
        total_samples=begun.total_samples,
        codec="",
        model_path="",
        update_path="",
        returns_update=False,
        begun=None,
        ahead=None,
    )


class Begun(NamedTuple):
    """What a beginning has come to."""

    start: Flat
    """Where it began: the end of the round before."""
    end: Flat
    optimizer: OptimizerState
    loss_first: float
    loss_last: float
    compute_s: float


class Beginning:
    """The steps of a beginning, as far as they have been taken.

    Args:
        request: As `granted` or `asked_for` have it.
        trainer: Nobody else may use it meanwhile.
        batches: Of the request.
        end: State of the round before, with its model.
    """

    def __init__(self, request: Train, trainer: Trainer, batches: Batches, end: EndState) -> None:
        if end.model is None:
            raise AssertionError("nothing can begin from an end without a model")
        self.request = request
        self._trainer = trainer
        self._batches = batches
        self._start = end.model
        self._losses: list[SupportsFloat] = []
        self._compute_s = 0.0
        self._read_at_s = time.monotonic() + _READ_INTERVAL_S
        self.steps_taken = 0
        trainer.begin(Start(end.model, request.seed, end.optimizer, request.weight_decay))

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to take."""
        return self.steps_taken == len(self._batches.indices)

    @property
    def loss(self) -> float:
        """Of the newest step; reading it waits for the device."""
        return float(self._losses[-1]) if self._losses else math.nan

    def advance(self) -> None:
        """Take one step."""
        self._time(self._step)

    def result(self) -> Begun:
        """What came of it, once it is done."""
        end = Flat.empty(self._trainer.layout)
        self._time(lambda: self._trainer.store(end))
        return Begun(
            start=self._start,
            end=end,
            optimizer=self._trainer.optimizer(),
            loss_first=float(self._losses[0]),
            loss_last=self.loss,
            compute_s=self._compute_s,
        )

    def _step(self) -> None:
        indices, rate = self._batches.at(self.steps_taken)
        loss = self._trainer.step(indices, rate)
        self._losses = [*self._losses[:1], loss]
        self.steps_taken += 1
        # Reading a loss waits for the device: seldom enough to keep it busy, often enough that it
        # is never far behind what the host has asked for, and that its time is counted.
        if self.is_done or time.monotonic() >= self._read_at_s:
            float(loss)
            self._read_at_s = time.monotonic() + _READ_INTERVAL_S

    def _time(self, work: Callable[[], None]) -> None:
        started_s = time.monotonic()
        work()
        self._compute_s += time.monotonic() - started_s
