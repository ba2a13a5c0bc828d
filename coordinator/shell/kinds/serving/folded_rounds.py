"""Rounds of a training with several rings: takes what each ring trained of its rows, folds it, has
it journalled, and has all rings go on from it.

A round is folded once `fold_choice` says so. Rings then take the folded adapter at once and measure
rows that are held out by it; the loss that is there first goes into the round's event. Until that
is journalled the next round is trained already, and not folded. Whatever is not journalled is lost
with the process, and trained again with the same bits.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import structlog
from msgspec.structs import replace

from coordinator.core.rings.folded_round import (
    FoldChoice,
    OpenRound,
    fold_choice,
    with_finish,
    with_rings,
)
from coordinator.core.serving.events import RingRoundStored
from coordinator.core.serving.state import ServeJob, ServePhase
from coordinator.core.work.outer_step import PLAIN_STEP, OuterChoice, chosen_outer_step
from coordinator.shell.kinds.serving.ring_fold import LayerPart, fold_layer
from coordinator.shell.kinds.serving.ring_parts import StageSeat
from coordinator.shell.kinds.serving.round_storage import (
    READ_PER_TRAINED,
    RoundStorage,
    TrainerPorts,
)
from coordinator.shell.kinds.serving.runtime import ServeRuntime
from coordinator.shell.kinds.serving.token_counter import UnitTally
from coordinator.shell.kinds.serving.trainer_tasks import TrainerTasks
from coordinator.shell.kinds.serving.training_batches import StepTotals
from hypergpu.blobs import BlobRef
from hypergpu.clock import monotonic_ms
from hypergpu.ids import NodeId
from hypergpu.jobfile.spec import Outer, OuterSettings
from hypergpu.rings.layer_span import RingShare
from hypergpu.rings.ring_training import HELD_OUT_ROWS, RingTraining
from hypergpu.rings.stage_work import layer_blob
from hypergpu.units import Milliseconds

_NOW = Milliseconds(0)  # stamped by the driver
_LATER_S = 0.01
log = structlog.get_logger(__name__)
Layers = Mapping[str, BlobRef]
"""Adapters of all layers by the names of their files."""


class RingPart(NamedTuple):
    """What a ring trained in a round."""

    ring: int
    step: int
    """Steps so far."""
    adapter: Layers
    before: Layers
    """What it began the first round with; empty: rounds before are stored."""
    loss_sum: float
    """Sum over its tokens that count."""
    totals: StepTotals
    seats: Sequence[StageSeat] = ()
    """Its stages."""
    figures: str = ""
    """What it was forecast to do."""


class MeasuredLoss(NamedTuple):
    """What a ring measured of rows that are held out."""

    loss: float
    tokens: int
    """Tokens that went around."""
    seats: Sequence[StageSeat]


class FoldingRing(Protocol):
    """The trainer of one of the rings."""

    def go_on(self, step: int) -> None:
        """Go on from the folded round."""
        ...

    def finish(self) -> None:
        """The last round is journalled."""
        ...


class _Fold:
    """A round that is folded and not journalled."""

    def __init__(self, event: RingRoundStored, parts: Sequence[RingPart]) -> None:
        self.event = event
        self.parts = parts
        self.is_measured = False


class FoldedRounds:
    """The rounds of one training.

    Args:
        runtime: The job.
        training: Settings.
        storage: Of its rounds.
        tasks: Of the training.
    """

    def __init__(
        self,
        runtime: ServeRuntime,
        training: RingTraining,
        storage: RoundStorage,
        tasks: TrainerTasks,
    ) -> None:
        self._runtime = runtime
        self._training = training
        self._storage = storage
        self._tasks = tasks
        self._rings: list[FoldingRing] = []
        self._open: OpenRound | None = None
        self._parts: dict[int, RingPart] = {}
        self._fold: _Fold | None = None
        self._is_folding = False
        self._is_halted = False
        """Whether the job is paused, or over: nothing is folded, and no time runs."""
        self._look: asyncio.TimerHandle | None = None

    def add(self, ring: FoldingRing) -> None:
        """A ring trains along."""
        self._rings.append(ring)

    @property
    def newest_step(self) -> int:
        """Steps after which rings go on."""
        if self._fold is not None:
            return self._fold.event.step
        stored_round = self._runtime.job.stored_round
        return 0 if stored_round is None else stored_round.step

    def adapter_of(self, ring: int) -> Layers:
        """What a ring goes on from; empty: from the seed's adapter."""
        if self._fold is not None:
            event = self._fold.event
            return event.ring_adapters.get(ring, event.adapter)
        stored_round = self._runtime.job.stored_round
        return {} if stored_round is None else stored_round.adapter_of(ring)

    @property
    def is_unmeasured(self) -> bool:
        """Whether a ring that begins is to measure the adapter that it goes on from."""
        fold = self._fold
        return fold is not None and not fold.is_measured and self._has_held_out

    @property
    def _has_held_out(self) -> bool:
        return HELD_OUT_ROWS in self._runtime.job.request.files

    def review(self) -> None:
        """Look at the job anew: where it was paused and goes on, the round's time begins again."""
        if self._runtime.job.phase is not ServePhase.SERVING:
            self._is_halted = True
            self._stop_looking()
        elif self._is_halted:
            self._is_halted = False
            now_ms = Milliseconds(monotonic_ms())
            if self._open is not None:
                finished_ms = dict.fromkeys(self._parts, now_ms)
                self._open = replace(self._open, began_ms=now_ms, finished_ms=finished_ms)
            self._review()

    def note_begin(self, ring: int) -> None:
        """A ring begins to train."""
        if self._open is None:
            self._open = OpenRound(Milliseconds(monotonic_ms()), frozenset())
        self._open = with_rings(self._open, (ring,))
        self._review()

    def take(self, part: RingPart, seats: Sequence[StageSeat], figures: str) -> None:
        """A ring is through with a round.

        Args:
            part: What it trained.
            seats: Its stages.
            figures: What it was forecast to do.
        """
        if part.step <= self.newest_step or self._open is None:
            return  # It was folded without it meanwhile.
        self._parts[part.ring] = part._replace(seats=seats, figures=figures)
        self._open = with_finish(self._open, part.ring, Milliseconds(monotonic_ms()))
        self._review()

    def take_held_out(self, step: int, measured: MeasuredLoss) -> None:
        """A ring has measured the folded adapter: the first one counts."""
        fold = self._fold
        if fold is not None and fold.event.step == step and not fold.is_measured:
            fold.is_measured = True
            self._tasks.start(self._journal(fold, measured))

    def _review(self) -> None:
        """Fold the round, if it is time."""
        self._stop_looking()
        is_busy = self._fold is not None or self._is_folding
        if self._open is None or is_busy or self._is_halted:
            return
        self._open = with_rings(self._open, self._runtime.job.whole_rings)
        choice = fold_choice(self._open, Milliseconds(monotonic_ms()))
        if choice.rings:
            self._is_folding = True
            self._tasks.start(self._fold_round(choice))
        elif choice.look_ms is not None:
            delay_s = max(0.0, (choice.look_ms - monotonic_ms()) / 1000) + _LATER_S
            self._look = asyncio.get_running_loop().call_later(delay_s, self._review)

    def _stop_looking(self) -> None:
        if self._look is not None:
            self._look.cancel()
            self._look = None

    async def _fold_round(self, choice: FoldChoice) -> None:
        parts = [self._parts[ring] for ring in choice.rings]
        rounds = parts[0].step // self._training.inner_steps
        settings = OuterSettings(self._training.outer_learning_rate, self._training.outer_momentum)
        outer = chosen_outer_step(settings, round_number=rounds - 1, participants=len(parts))
        adapters, momentum = await asyncio.to_thread(self._fold_layers, parts, outer.step)
        first, *others = parts
        event = RingRoundStored(
            at_ms=_NOW,
            rounds=rounds,
            step=first.step,
            loss=_mean_loss(parts),
            tokens=sum(each.totals.tokens for each in parts),
            adapter=adapters[first.ring],
            figures="; ".join(f"ring {each.ring + 1}: {each.figures}" for each in parts),
            shares=tuple(
                RingShare(each.ring, _mean_loss([each]), each.totals.tokens) for each in parts
            ),
            ring_adapters={each.ring: adapters[each.ring] for each in others},
            momentum=momentum,
            outer=_outer_text(outer, len(parts)),
            left_out=choice.reason,
        )
        fold = self._fold = _Fold(event, parts)
        self._is_folding = False
        self._parts.clear()
        whole_rings = frozenset(self._runtime.job.whole_rings)
        self._open = OpenRound(Milliseconds(monotonic_ms()), whole_rings)
        if self._has_held_out:
            self._go_on(first.step)
        else:
            await self._journal(fold, None)

    def _fold_layers(
        self, parts: Sequence[RingPart], outer: Outer
    ) -> tuple[dict[int, dict[str, BlobRef]], dict[str, BlobRef]]:
        """Adapters of each ring, and the momentum. Blocks."""
        stored_round, step = self._runtime.job.stored_round, parts[0].step
        before = parts[0].before if stored_round is None else stored_round.adapter
        momentum = {} if stored_round is None else stored_round.momentum
        adapters: dict[int, dict[str, BlobRef]] = {each.ring: {} for each in parts}
        new_momentum = dict[str, BlobRef]()
        cut = self._runtime.job.request.cut
        for name in map(layer_blob, range(0 if cut is None else cut.layers)):
            layer = fold_layer(
                self._storage.read(before[name]),
                [
                    LayerPart(self._storage.read(each.adapter[name]), each.totals.counted_tokens)
                    for each in parts
                ],
                self._storage.read(momentum[name]) if name in momentum else b"",
                outer,
            )
            for each, content in zip(parts, layer.contents, strict=True):
                adapters[each.ring][name] = self._storage.put(content, step)
            if layer.momentum:
                new_momentum[name] = self._storage.put(layer.momentum, step)
        return adapters, new_momentum

    def _go_on(self, step: int) -> None:
        for ring in self._rings:
            ring.go_on(step)

    async def _journal(self, fold: _Fold, measured: MeasuredLoss | None) -> None:
        """Have a folded round decided on, and counted for the nodes of its rings."""
        loss = None if measured is None else measured.loss
        event = replace(fold.event, held_out_loss=loss)
        if reason := await self._storage.report(event):
            log.warning("a round of several rings was rejected", reason=reason)
            return
        self._fold = None
        tokens = dict[tuple[NodeId, int], int]()
        seats = dict[tuple[NodeId, int], StageSeat]()
        counted_tokens = [
            (seat, READ_PER_TRAINED * each.totals.tokens)
            for each in fold.parts
            for seat in each.seats
        ]
        if measured is not None:
            counted_tokens += [(seat, measured.tokens) for seat in measured.seats]
        for seat, count in counted_tokens:
            key = (seat.node, seat.lease)
            seats[key] = seat
            tokens[key] = tokens.get(key, 0) + count
        for key, seat in seats.items():
            self._storage.count_tokens([seat], tokens[key], event.step)
        if not self._runtime.job.is_training:
            for ring in self._rings:
                ring.finish()
            return
        if measured is None:
            self._go_on(event.step)
        self._review()


class TrainingParts(NamedTuple):
    """What all rings of a training share."""

    rounds: RoundStorage
    tasks: TrainerTasks
    folding: FoldedRounds | None
    """Rounds of several rings; None: the training has one."""


def training_parts(
    runtime: ServeRuntime, training: RingTraining, ports: TrainerPorts, tally: UnitTally
) -> TrainingParts:
    """What all rings of a training share.

    Args:
        runtime: The job.
        training: Settings.
        ports: Of the coordinator.
        tally: Units that are counted and not yet journalled.
    """
    rounds, tasks = RoundStorage(runtime, ports, tally), TrainerTasks(ports.report)
    is_folded = training.rings > 1
    return TrainingParts(
        rounds, tasks, FoldedRounds(runtime, training, rounds, tasks) if is_folded else None
    )


def newest_step(job: ServeJob, folding: FoldedRounds | None) -> int:
    """Steps after which the rings of a training go on."""
    if folding is not None:
        return folding.newest_step
    return 0 if job.stored_round is None else job.stored_round.step


def _mean_loss(parts: Sequence[RingPart]) -> float:
    counted_tokens = sum(each.totals.counted_tokens for each in parts)
    return sum(each.loss_sum for each in parts) / max(1, counted_tokens)


def _outer_text(outer: OuterChoice, rings: int) -> str:
    is_alone = rings == 1 and outer.step == PLAIN_STEP
    reason = "plain: one ring was in" if is_alone else outer.reason
    return f"rate {outer.step.learning_rate:.3g}, momentum {outer.step.momentum:.3g}: {reason}"
