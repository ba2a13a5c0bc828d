"""The machine of a ring that trains: which micro-batch goes where next, and when stages step.

Theory of operation. A *step* takes its micro-batches around the ring: forward from stage to stage,
and gradients back from the last one, which computes both at once. A stage does what has arrived,
gradients before activations (1F1B by arrival); this machine lets as many micro-batches in as keep
the slowest stage at work. Each stage adds gradients in the order of the micro-batches, as one
process does. Once all are back, the norm of the whole gradient is known from the stages' sums of
squares, and each stage steps its own part of the adapter.

At the end of a round rows that are held out go forward through the ring, whose last stage gives
their loss alone. Then all stages keep their adapters with the optimizer's state, and these are
stored while the next round begins. Where a stage is lost, the *epoch* goes up, so that answers that
are still on their way count for nothing; once another node holds the layers, all stages go back to
the newest stored round, and the same micro-batches go around again.

Where a training has several rings, what they trained is folded after each round: a ring that is
through waits for the fold, evaluates the folded adapter, and goes on from it. One that was not
through goes on from it, too.

References:
    Narayanan et al. 2019 (PipeDream, 1F1B); Hu et al. 2021, arXiv:2106.09685 (LoRA).
"""

from collections.abc import Callable, Mapping, Sequence
from math import ceil, inf, sqrt
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

_WINDOW_SLACK = 1.4


class RingPlan(msgspec.Struct, frozen=True):
    """Amount of work."""

    steps: int
    """In all."""
    micro_batches: int
    """Micro-batches of a step."""
    round_steps: int
    """Steps after which a checkpoint is stored."""
    clip_norm: float = 0.0
    """Longest gradient; 0: any."""
    held_out_batches: int = 0
    """Micro-batches of rows that are held out: their loss is measured after each round."""
    is_folded: bool = False
    """Whether rounds are folded with those of other rings."""


class TrainingStage(msgspec.Struct, frozen=True):
    """One stage."""

    is_there: bool = False
    has_adapter: bool = False
    """Whether it has the adapter that the ring goes on from."""
    has_stepped: bool = True
    """Whether it has taken the step before."""
    squares: float = 0.0
    """Sum of squares of its gradient of this step, once it is whole."""


class TrainingRing(msgspec.Struct, frozen=True):
    """A ring as its driver sees it."""

    plan: RingPlan
    stages: tuple[TrainingStage, ...]
    window: int = 1
    """Micro-batches that are let in at a time."""
    epoch: int = 1
    stored_step: int = 0
    """Steps after which the newest checkpoint is that is stored."""
    kept_step: int = 0
    """Steps after which stages kept theirs last: later than ``stored_step`` while that is stored.
    """
    step: int = 0
    """Steps that are done."""
    admitted: int = 0
    """Micro-batches of this step that were let in."""
    returned: int = 0
    """Micro-batches of it whose gradients the first stage has."""
    is_stepping: bool = False
    is_evaluating: bool = False
    """Whether micro-batches are those of rows that are held out, after the steps that are done."""
    owes_evaluation: bool = False
    """Whether the folded adapter is to be evaluated before the next step."""

    @property
    def is_whole(self) -> bool:
        """Whether all stages are there with the adapter that the ring goes on from."""
        return all(each.is_there and each.has_adapter for each in self.stages)

    @property
    def is_done(self) -> bool:
        """Whether the last checkpoint is stored."""
        return self.stored_step >= self.plan.steps and not self.owes_evaluation


class StageCame(msgspec.Struct, frozen=True):
    """A stage holds its layers."""

    stage: int


class StageWent(msgspec.Struct, frozen=True):
    """A stage is gone, with what it had not stored."""

    stage: int


class AdapterTaken(msgspec.Struct, frozen=True):
    """A stage has the adapter that it was to take."""

    stage: int
    epoch: int


class ForwardDone(msgspec.Struct, frozen=True):
    """A stage before the last gave activations."""

    stage: int
    micro_batch: int
    epoch: int


class BackwardDone(msgspec.Struct, frozen=True):
    """A stage gave gradients, or has added up those of the first one."""

    stage: int
    micro_batch: int
    epoch: int
    squares: float = 0.0
    """Sum of squares of the stage's gradient, with the last micro-batch of a step."""


class LossMeasured(msgspec.Struct, frozen=True):
    """The last stage gave the loss of rows that are held out."""

    stage: int
    micro_batch: int
    epoch: int


class AdapterStepped(msgspec.Struct, frozen=True):
    """A stage has stepped its part of the adapter."""

    stage: int
    epoch: int


class RoundStored(msgspec.Struct, frozen=True):
    """A checkpoint of all stages is stored."""

    step: int


class RoundFolded(msgspec.Struct, frozen=True):
    """A round of all rings is folded: this one goes on from it, wherever it is."""

    step: int


TrainingEvent = (
    StageCame
    | StageWent
    | AdapterTaken
    | ForwardDone
    | BackwardDone
    | LossMeasured
    | AdapterStepped
    | RoundStored
    | RoundFolded
)


class TakeRound(msgspec.Struct, frozen=True):
    """Give a stage the adapter after a number of steps: `AdapterTaken` answers."""

    stage: int
    step: int
    epoch: int


class SendForward(msgspec.Struct, frozen=True):
    """Give a stage a micro-batch, with the activations of the stage before."""

    stage: int
    micro_batch: int
    step: int
    epoch: int
    is_evaluation: bool = False
    """Whether its rows are held out."""


class SendBackward(msgspec.Struct, frozen=True):
    """Give a stage the gradients of the stage behind it."""

    stage: int
    micro_batch: int
    epoch: int


class TakeStep(msgspec.Struct, frozen=True):
    """Have a stage step: `AdapterStepped` answers."""

    stage: int
    step: int
    scale: float
    """What its gradients are multiplied by."""
    epoch: int


class StoreRound(msgspec.Struct, frozen=True):
    """Have all stages keep their adapters, and store them: `RoundStored` answers."""

    step: int
    epoch: int


class TellHeldOut(msgspec.Struct, frozen=True):
    """All rows that are held out went around by the folded adapter: their loss is known."""

    step: int
    epoch: int


TrainingCommand = TakeRound | SendForward | SendBackward | TakeStep | StoreRound | TellHeldOut


class TrainingStep(NamedTuple):
    """The effect of one event."""

    ring: TrainingRing
    commands: tuple[TrainingCommand, ...] = ()

    def then(self, after: "TrainingStep") -> "TrainingStep":
        """This step's commands before those of the next one, which began from its ring."""
        return TrainingStep(after.ring, (*self.commands, *after.commands))


def window_of(stage_us: Sequence[float], way_us: Sequence[float]) -> int:
    """Micro-batches that keep the slowest stage at work: a round trip over that stage's time.

    Four tenths more are let in, as what arrives waits for what a stage has begun: without them a
    ring of three stages behind 30 ms a leg gave 0.73 of its rate in virtual time, with them 0.9.

    Args:
        stage_us: Time of a micro-batch in each stage, forward and backward.
        way_us: From the driver to each stage, or back.
    """
    legs_us = 4 * sum(way_us) - 2 * way_us[-1]  # the last stage answers a forward with gradients
    round_trip_us = sum(stage_us) + legs_us
    return max(len(stage_us), ceil(_WINDOW_SLACK * round_trip_us / max(1.0, *stage_us))) + 1


def new_ring(plan: RingPlan, stages: int, stored_step: int = 0) -> TrainingRing:
    """A ring none of whose stages is there.

    Args:
        plan: What is to be done.
        stages: How many there are.
        stored_step: Steps after which a checkpoint is stored already.
    """
    return TrainingRing(
        plan,
        tuple(TrainingStage() for _ in range(stages)),
        stored_step=stored_step,
        kept_step=stored_step,
        step=stored_step,
    )


def training_rejection(ring: TrainingRing, event: TrainingEvent) -> str:
    """Why the ring does not accept the event now; empty: it does."""
    stage = getattr(event, "stage", 0)
    if not 0 <= stage < len(ring.stages):
        return f"the ring has no stage {stage}"
    epoch = getattr(event, "epoch", ring.epoch)
    if epoch != ring.epoch:
        return f"the ring is in epoch {ring.epoch}, not {epoch}"
    reject = _REJECTIONS.get(type(event))
    return reject(ring, event) if reject is not None else ""


def _coming_rejection(ring: TrainingRing, event: StageCame) -> str:
    return f"stage {event.stage} is there already" if ring.stages[event.stage].is_there else ""


def _going_rejection(ring: TrainingRing, event: StageWent) -> str:
    return "" if ring.stages[event.stage].is_there else f"stage {event.stage} is not there"


def _step_rejection(ring: TrainingRing, event: AdapterStepped) -> str:
    is_due = ring.is_stepping and not ring.stages[event.stage].has_stepped
    return "" if is_due else f"stage {event.stage} has no step to take"


def _storing_rejection(ring: TrainingRing, event: RoundStored) -> str:
    is_due = ring.stored_step < event.step <= ring.kept_step
    return "" if is_due else f"round of step {event.step} was not to be stored"


def _folding_rejection(ring: TrainingRing, event: RoundFolded) -> str:
    is_due = ring.plan.is_folded and event.step > ring.stored_step
    return "" if is_due else f"round of step {event.step} is not folded after {ring.stored_step}"


def _pass_rejection(ring: TrainingRing, event: ForwardDone | BackwardDone | LossMeasured) -> str:
    if not 0 <= event.micro_batch < ring.admitted:
        return f"micro-batch {event.micro_batch} is not under way"
    if not isinstance(event, ForwardDone):
        is_loss = isinstance(event, LossMeasured)
        if is_loss != ring.is_evaluating:
            return f"rows of the micro-batch are {'not ' if is_loss else ''}held out"
    is_finite = 0 <= getattr(event, "squares", 0.0) < inf
    return "" if is_finite else "its gradients are not finite"


_REJECTIONS: Mapping[type, Callable[..., str]] = {
    StageCame: _coming_rejection,
    StageWent: _going_rejection,
    ForwardDone: _pass_rejection,
    BackwardDone: _pass_rejection,
    LossMeasured: _pass_rejection,
    AdapterStepped: _step_rejection,
    RoundStored: _storing_rejection,
    RoundFolded: _folding_rejection,
}


def advance_training(ring: TrainingRing, event: TrainingEvent) -> TrainingStep:
    """Advance the ring by one event; one that is rejected changes nothing."""
    if training_rejection(ring, event):
        return TrainingStep(ring)
    step: TrainingStep = _STEPS[type(event)](ring, event)
    return step


def _add_stage(ring: TrainingRing, event: StageCame) -> TrainingStep:
    ring = _with_stage(ring, event.stage, TrainingStage(is_there=True))
    return TrainingStep(ring, (TakeRound(event.stage, ring.step, ring.epoch),))


def _take_adapter(ring: TrainingRing, event: AdapterTaken) -> TrainingStep:
    stage = replace(ring.stages[event.stage], has_adapter=True)
    return _with_micro_batches(_with_stage(ring, event.stage, stage))


def _take_forward(ring: TrainingRing, event: ForwardDone) -> TrainingStep:
    send = SendForward(
        event.stage + 1, event.micro_batch, ring.step, ring.epoch, ring.is_evaluating
    )
    return TrainingStep(ring, (send,))


def _take_loss(ring: TrainingRing, _: LossMeasured) -> TrainingStep:
    ring = replace(ring, returned=ring.returned + 1)
    if ring.returned < ring.plan.held_out_batches:
        return _with_micro_batches(ring)
    ring = replace(ring, admitted=0, returned=0, is_evaluating=False)
    if not ring.plan.is_folded:
        return _end_round(ring)
    ring = replace(ring, owes_evaluation=False)
    tell = TrainingStep(ring, (TellHeldOut(ring.step, ring.epoch),))
    return tell.then(_with_micro_batches(ring))


def _take_storing(ring: TrainingRing, event: RoundStored) -> TrainingStep:
    return _with_micro_batches(replace(ring, stored_step=event.step))


def _with_stage(ring: TrainingRing, index: int, stage: TrainingStage) -> TrainingRing:
    stages = (*ring.stages[:index], stage, *ring.stages[index + 1 :])
    return replace(ring, stages=stages)


def _lose_stage(ring: TrainingRing, event: StageWent) -> TrainingStep:
    return _go_to_stored(_with_stage(ring, event.stage, TrainingStage()))


def _take_fold(ring: TrainingRing, event: RoundFolded) -> TrainingStep:
    is_owed = ring.plan.held_out_batches > 0
    return _go_to_stored(replace(ring, stored_step=event.step, owes_evaluation=is_owed))


def _go_to_stored(ring: TrainingRing) -> TrainingStep:
    """Have all stages that are there go on from the newest stored round."""
    stages = tuple(TrainingStage(is_there=each.is_there) for each in ring.stages)
    ring = replace(
        ring,
        stages=stages,
        epoch=ring.epoch + 1,
        step=ring.stored_step,
        kept_step=ring.stored_step,
        admitted=0,
        returned=0,
        is_stepping=False,
        is_evaluating=False,
    )
    takes = [
        TakeRound(index, ring.step, ring.epoch)
        for index, each in enumerate(stages)
        if each.is_there
    ]
    return TrainingStep(ring, tuple(takes))


def _with_micro_batches(ring: TrainingRing) -> TrainingStep:
    """Let micro-batches in, as many as there is room for."""
    if not ring.is_whole or ring.is_stepping:
        return TrainingStep(ring)
    if ring.plan.is_folded and ring.stored_step < ring.kept_step:
        return TrainingStep(ring)  # The other rings are waited for.
    ring = replace(ring, is_evaluating=ring.is_evaluating or ring.owes_evaluation)
    count = ring.plan.held_out_batches
    if not ring.is_evaluating:
        if ring.step >= ring.plan.steps:
            return TrainingStep(ring)
        if _ends_round(ring, ring.step + 1) and ring.stored_step < ring.kept_step:
            return TrainingStep(ring)  # Stages keep two rounds: the one before is stored first.
        count = ring.plan.micro_batches
    room = min(count, ring.returned + ring.window) - ring.admitted
    sends = tuple(
        SendForward(0, ring.admitted + offset, ring.step, ring.epoch, ring.is_evaluating)
        for offset in range(room)
    )
    return TrainingStep(replace(ring, admitted=ring.admitted + len(sends)), sends)


def _take_backward(ring: TrainingRing, event: BackwardDone) -> TrainingStep:
    stage, number = event.stage, event.micro_batch
    if number == ring.plan.micro_batches - 1:
        ring = _with_stage(ring, stage, replace(ring.stages[stage], squares=event.squares))
    if stage:
        return TrainingStep(ring, (SendBackward(stage - 1, number, ring.epoch),))
    ring = replace(ring, returned=ring.returned + 1)
    if ring.returned < ring.plan.micro_batches:
        return _with_micro_batches(ring)
    norm, clip_norm = sqrt(sum(each.squares for each in ring.stages)), ring.plan.clip_norm
    # As torch's clip_grad_norm_ has it.
    scale = min(1.0, clip_norm / (norm + 1e-6)) if clip_norm else 1.0
    stages = tuple(replace(each, has_stepped=False) for each in ring.stages)
    ring = replace(ring, stages=stages, is_stepping=True)
    steps = [TakeStep(index, ring.step, scale, ring.epoch) for index in range(len(stages))]
    return TrainingStep(ring, tuple(steps))


def _take_step(ring: TrainingRing, event: AdapterStepped) -> TrainingStep:
    stage = replace(ring.stages[event.stage], has_stepped=True)
    ring = _with_stage(ring, event.stage, stage)
    if not all(each.has_stepped for each in ring.stages):
        return TrainingStep(ring)
    ring = replace(ring, step=ring.step + 1, admitted=0, returned=0, is_stepping=False)
    if not _ends_round(ring, ring.step):
        return _with_micro_batches(ring)
    if ring.plan.held_out_batches and not ring.plan.is_folded:
        return _with_micro_batches(replace(ring, is_evaluating=True))
    return _end_round(ring)


def _end_round(ring: TrainingRing) -> TrainingStep:
    """Store a round that is over, and go on."""
    storing_step = TrainingStep(
        replace(ring, kept_step=ring.step), (StoreRound(ring.step, ring.epoch),)
    )
    return storing_step.then(_with_micro_batches(storing_step.ring))


def _ends_round(ring: TrainingRing, step: int) -> bool:
    return step % ring.plan.round_steps == 0 or step == ring.plan.steps


_STEPS: Mapping[type, Callable[..., TrainingStep]] = {
    StageCame: _add_stage,
    StageWent: _lose_stage,
    AdapterTaken: _take_adapter,
    ForwardDone: _take_forward,
    BackwardDone: _take_backward,
    LossMeasured: _take_loss,
    AdapterStepped: _take_step,
    RoundStored: _take_storing,
    RoundFolded: _take_fold,
}
