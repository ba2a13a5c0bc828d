"""A ring that trains, in virtual time: the machine that coordinators run, over stages that take
time, and compute where they are given something to compute with.
"""

import heapq
import itertools
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from coordinator.core.rings.training_ring import (
    AdapterStepped,
    AdapterTaken,
    BackwardDone,
    ForwardDone,
    LossMeasured,
    RingPlan,
    RoundFolded,
    RoundStored,
    SendBackward,
    SendForward,
    StageCame,
    StageWent,
    StoreRound,
    TakeRound,
    TakeStep,
    TellHeldOut,
    TrainingCommand,
    TrainingEvent,
    advance_training,
    new_ring,
    training_rejection,
)


class RingWork(Protocol):
    """What stages compute. Each method is called when the stage comes to it."""

    def take(self, stage: int, step: int) -> None:
        """Take the adapter after a number of steps."""

    def forward(self, stage: int, step: int, micro_batch: int) -> None:
        """Compute a micro-batch."""

    def evaluate(self, stage: int, step: int, micro_batch: int) -> None:
        """Compute a micro-batch of rows that are held out, after so many steps."""

    def backward(self, stage: int, micro_batch: int) -> None:
        """Compute its gradients."""

    def squares(self, stage: int) -> float:
        """Sum of squares of the stage's gradient."""

    def step(self, stage: int, step: int, scale: float) -> None:
        """Step the adapter."""

    def keep(self, stage: int, step: int) -> None:
        """Keep the adapter."""

    def lose(self, stage: int) -> None:
        """The stage is gone, with all that it has."""


class NoWork:
    """Stages that only take time. Implements `RingWork`."""

    def take(self, stage: int, step: int) -> None:
        """See `RingWork`."""

    def forward(self, stage: int, step: int, micro_batch: int) -> None:
        """See `RingWork`."""

    def evaluate(self, stage: int, step: int, micro_batch: int) -> None:
        """See `RingWork`."""

    def backward(self, stage: int, micro_batch: int) -> None:
        """See `RingWork`."""

    def squares(self, stage: int) -> float:
        """See `RingWork`."""
        return float(stage + 1)

    def step(self, stage: int, step: int, scale: float) -> None:
        """See `RingWork`."""

    def keep(self, stage: int, step: int) -> None:
        """See `RingWork`."""

    def lose(self, stage: int) -> None:
        """See `RingWork`."""


class StageTimes(NamedTuple):
    """Times of each stage, and of the way between it and the driver."""

    forward_us: float
    backward_us: float
    way_us: float


class StageLoss(NamedTuple):
    """A stage that is lost for a while."""

    at_us: float
    stage: int
    back_us: float


class _Task(NamedTuple):
    """What a stage has been given."""

    command: TrainingCommand
    order: int


class VirtualTraining:
    """Drives a ring until its last round is stored; one of several is folded with nobody else.

    Args:
        plan: What is to be done.
        times: Of the stages.
        window: Micro-batches that are let in.
        work: What stages compute.
        store_us: Time until a round is stored.
    """

    def __init__(
        self,
        plan: RingPlan,
        times: Sequence[StageTimes],
        window: int,
        work: RingWork | None = None,
        store_us: float = 0.0,
    ) -> None:
        self.ring = replace(new_ring(plan, len(times)), window=window)
        self.now_us = 0.0
        self.replayed_steps = 0
        self.most_in_flight = 0
        self.measured_steps = list[int]()
        """Steps after which rows that are held out were measured by the folded adapter."""
        self._times = times
        self._work = work or NoWork()
        self._store_us = store_us
        self._queues: list[list[_Task]] = [[] for _ in times]
        self._is_busy = [False] * len(times)
        self._generations = [0] * len(times)
        self._heap: list[tuple[float, int, object]] = []
        self._numbers = itertools.count()

    def run(self, losses: Sequence[StageLoss] = ()) -> float:
        """Run to the end; gives the time that it took.

        Raises:
            AssertionError: The ring stands still before its end.
        """
        for stage in range(len(self._times)):
            self._plan(0.0, StageCame(stage))
        for loss in losses:
            self._plan(loss.at_us, StageWent(loss.stage))
            self._plan(loss.at_us + loss.back_us, StageCame(loss.stage))
        while self._heap:
            self.now_us, _, entry = heapq.heappop(self._heap)
            match entry:
                case (int() as stage, int() as generation, _Task() as task):
                    self._arrive(stage, generation, task)
                case (int() as stage, int() as generation):
                    if generation == self._generations[stage]:
                        self._is_busy[stage] = False
                        self._begin_next(stage)
                case _:
                    self._hear(entry)  # type: ignore[arg-type]
        if not self.ring.is_done:
            raise AssertionError(f"the ring stands still at step {self.ring.step}")
        return self.now_us

    def _plan(self, at_us: float, entry: object) -> None:
        heapq.heappush(self._heap, (at_us, next(self._numbers), entry))

    def _hear(self, event: TrainingEvent) -> None:
        if isinstance(event, StageWent):
            self._work.lose(event.stage)
            self._queues[event.stage].clear()
            self._generations[event.stage] += 1
            self._is_busy[event.stage] = False
        if training_rejection(self.ring, event):
            return
        before = self.ring.step
        step = advance_training(self.ring, event)
        self.ring = step.ring
        self.replayed_steps += max(0, before - self.ring.step)
        self.most_in_flight = max(self.most_in_flight, self.ring.admitted - self.ring.returned)
        for command in step.commands:
            self._perform(command)

    def _perform(self, command: TrainingCommand) -> None:
        if isinstance(command, StoreRound):
            for stage in range(len(self._times)):
                self._work.keep(stage, command.step)
            is_folded = self.ring.plan.is_folded
            event = RoundFolded(command.step) if is_folded else RoundStored(command.step)
            self._plan(self.now_us + self._store_us, event)
            return
        if isinstance(command, TellHeldOut):
            self.measured_steps.append(command.step)
            return
        stage = command.stage
        task = _Task(command, next(self._numbers))
        arrives_us = self.now_us + self._times[stage].way_us
        self._plan(arrives_us, (stage, self._generations[stage], task))

    def _arrive(self, stage: int, generation: int, task: _Task) -> None:
        if generation == self._generations[stage]:
            self._queues[stage].append(task)
            self._begin_next(stage)

    def _begin_next(self, stage: int) -> None:
        if self._is_busy[stage] or not self._queues[stage]:
            return
        commands = [task.command for task in self._queues[stage]]
        command = self._queues[stage].pop(next_place(commands)).command
        self._is_busy[stage] = True
        event, took_us = self._compute(stage, command)
        done_us = self.now_us + took_us
        self._plan(done_us, (stage, self._generations[stage]))
        self._plan(done_us + self._times[stage].way_us, event)

    def _compute(self, stage: int, command: TrainingCommand) -> tuple[TrainingEvent, float]:
        """What a stage gives, and the time that it takes; it computes nothing of another epoch."""
        times, epoch = self._times[stage], getattr(command, "epoch", 0)
        work = self._work if epoch == self.ring.epoch else NoWork()
        match command:
            case TakeRound(step=step):
                work.take(stage, step)
                return AdapterTaken(stage, epoch), 0.0
            case SendForward():
                return self._go_forward(command, work)
            case SendBackward(micro_batch=number):
                work.backward(stage, number)
                return BackwardDone(stage, number, epoch, work.squares(stage)), times.backward_us
            case TakeStep(step=step, scale=scale):
                work.step(stage, step, scale)
            case StoreRound() | TellHeldOut():
                pass
        return AdapterStepped(stage, epoch), 0.0

    def _go_forward(self, send: SendForward, work: RingWork) -> tuple[TrainingEvent, float]:
        stage, number, times = send.stage, send.micro_batch, self._times[send.stage]
        (work.evaluate if send.is_evaluation else work.forward)(stage, send.step, number)
        if stage < len(self._times) - 1:
            return ForwardDone(stage, number, send.epoch), times.forward_us
        if send.is_evaluation:
            return LossMeasured(stage, number, send.epoch), times.forward_us
        # It computes forward and backward at once, and nothing again.
        return BackwardDone(stage, number, send.epoch, work.squares(stage)), times.backward_us


def next_place(commands: Sequence[TrainingCommand]) -> int:
    """Which of what has arrived a stage does next: gradients before activations."""
    for place, command in enumerate(commands):
        if isinstance(command, SendBackward):
            return place
        if not isinstance(command, SendForward):
            break
    return 0
