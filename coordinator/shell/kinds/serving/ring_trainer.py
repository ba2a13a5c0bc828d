"""Has a ring train an adapter before it answers: carries out what the machine of its training says.
Where a training has several rings, each has a trainer, and `FoldedRounds` has their rounds.

The driver holds rows of tokens and relays activations and gradients, which stages seal for each
other: it holds their size alone against what they may have, and computes nothing. Before
the first step it measures what each node's line sends and forecasts whether lines carry the
training. At the end of a round it stores the adapters of all layers as blobs, which the journal
names; a stage that has not what the ring goes on from gets it from there.
"""

import asyncio
from collections.abc import Mapping
from math import isfinite

import structlog
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
from coordinator.shell.kinds.serving.adapter_giving import AdapterGiving
from coordinator.shell.kinds.serving.folded_rounds import (
    MeasuredLoss,
    RingPart,
    TrainingParts,
    newest_step,
)
from coordinator.shell.kinds.serving.ring_lines import RingLines
from coordinator.shell.kinds.serving.ring_orders import RingOrders
from coordinator.shell.kinds.serving.ring_parts import StageSeat, membership_fault
from coordinator.shell.kinds.serving.round_losses import RoundLosses
from coordinator.shell.kinds.serving.round_storage import (
    READ_PER_TRAINED,
    plan_of,
    reason_of,
    round_event,
)
from coordinator.shell.kinds.serving.runtime import ServeRuntime
from coordinator.shell.kinds.serving.trained_stages import TrainedStages
from coordinator.shell.kinds.serving.training_batches import MicroBatch, TrainingRows
from coordinator.shell.kinds.serving.training_frames import TrainingFrames
from coordinator.shell.nodes.control_stream import ControlStream
from coordinator.shell.nodes.fleet import Fleet
from hypergpu.blobs import BlobRef
from hypergpu.rings.layer_span import LayerSpan
from hypergpu.rings.ring_training import RingTraining
from hypergpu.rings.stage_work import ModelCut
from hypergpu.rings.training_forecast import FORWARD_PASSES
from hypergpu.serving.stage_messages import (
    JoinRing,
    StageRefused,
    StageReply,
)
from hypergpu.serving.training_messages import (
    Activations,
    AdapterReady,
    Gradients,
    KeepAdapter,
    LossSum,
    StepAdapter,
    TrainBackward,
    TrainingRequest,
)
from hypergpu.v1 import work_pb2

log = structlog.get_logger(__name__)


class RingTrainer:
    """The training of one ring.

    Args:
        runtime: The job.
        fleet: Its nodes.
        stages: The driver of the ring.
        parts: What all rings of the training share.
        ring: The ring, from 0 on.
    """

    def __init__(
        self,
        runtime: ServeRuntime,
        fleet: Fleet,
        stages: TrainedStages,
        parts: TrainingParts,
        ring: int = 0,
    ) -> None:
        request = runtime.job.request
        if request.training is None or request.cut is None:
            raise ValueError(f"{runtime.job.job_id} trains nothing")
        self._training: RingTraining = request.training
        self._cut: ModelCut = request.cut
        self._runtime = runtime
        self._stages = stages
        self._number = ring
        self._rounds, self._folding = parts.rounds, parts.folding
        self._rows: TrainingRows | None = None
        self._spans: tuple[LayerSpan, ...] = ()
        self._seats: dict[int, StageSeat] = {}
        self._loaded: set[int] = set()
        """Stages that have the adapter of the last round."""
        self._ring = new_ring(RingPlan(1, 1, 1), 0)
        self._has_begun = False
        self._forecast = ""
        self._frames = TrainingFrames(self._cut, self._training)
        self._losses = RoundLosses()
        self._start, self._pause = parts.tasks.start, parts.tasks.pause
        self._orders = RingOrders(stages.sending, self._limit_ms, self._fault)
        self._lines = RingLines(fleet, self._orders)
        self._giving = AdapterGiving(self._orders, parts.rounds, parts.folding, ring)
        if parts.folding is not None:
            parts.folding.add(self)

    @property
    def is_done(self) -> bool:
        """Whether the last round is stored."""
        return not self._runtime.job.is_training

    @property
    def is_complete(self) -> bool:
        """Whether all stages have the adapter of the last round."""
        return self.is_done and len(self._loaded) == len(self._spans)

    def set_spans(self, spans: tuple[LayerSpan, ...]) -> None:
        """Layers are cut so from now on; no stage is there yet."""
        self._has_begun = False
        for stage in [*self._seats]:
            self._drop(stage)
        self._spans = spans
        self._loaded.clear()
        plan = plan_of(self._training)
        ring = new_ring(plan, len(spans), newest_step(self._runtime.job, self._folding))
        # What the stages before still answer is of no epoch of this ring.
        self._ring = replace(ring, epoch=self._ring.epoch + 1)

    def go_on(self, step: int) -> None:
        """See `FoldingRing.go_on`."""
        self._losses.forget_before(step)
        self._advance(RoundFolded(step))
        if self._has_begun:
            self._tell_members()

    def take_seat(self, seat: StageSeat) -> bool:
        """A node holds its layers; gives whether the stage may answer at once."""
        if seat.span not in self._spans:
            return False
        stage = self._spans.index(seat.span)
        self._seats[stage] = seat
        if self.is_done:
            self._start(self._load_last(stage, seat))
        elif self._has_begun:
            self._tell_members()
            self._advance(StageCame(stage))
        elif len(self._seats) == len(self._spans):
            self._start(self._begin())
        return False

    def _tell_members(self) -> None:
        """Once all stages are there, tell each who the others are in this epoch, before anything
        that is sealed in it.
        """
        if len(self._seats) < len(self._spans):
            return
        seats = sorted(self._seats.items())
        members = tuple(seat.member for _, seat in seats)
        for stage, seat in seats:
            request = JoinRing(self._ring.epoch, stage, members)
            self._start(self._join(stage, request, self._orders.ask(stage, seat, request)))

    async def _join(
        self, stage: int, request: JoinRing, answer: "asyncio.Future[StageReply]"
    ) -> None:
        if fault := membership_fault(request, await answer):
            self._fault(stage, fault)

    def lose_seat(self, seat: StageSeat) -> None:
        """A stage is gone."""
        for stage, other in [*self._seats.items()]:
            if other is seat:
                self._drop(stage)

    def _drop(self, stage: int) -> None:
        del self._seats[stage]
        self._loaded.discard(stage)
        self._orders.drop(stage)
        if self._has_begun and not self.is_done:
            self._advance(StageWent(stage))

    def hear(self, stream: ControlStream, output: work_pb2.WorkOutput) -> bool:
        """Take in what a stage says, if it says it to the trainer.

        Raises:
            HyperGPUError: REQUEST_INVALID, it is malformed.
        """
        stage = self._orders.stage_of(output.call)
        if stage is None:
            return False
        seat = self._seats.get(stage)
        if seat is None or (seat.node, seat.lease) != (stream.node, output.lease):
            return True
        if not output.body:
            self._stages.give_up_seat(seat)
        else:
            self._orders.take(output)
        return True

    def _fault(self, stage: int, reason: str) -> None:
        seat = self._seats.get(stage)
        if seat is not None:
            self._stages.give_up_seat(seat, reason)

    async def _begin(self) -> None:
        """Begin, if the lines of the nodes carry it."""
        if self._rows is None:
            read = self._rounds.read_rows
            self._rows = await asyncio.to_thread(read, self._training, self._number)
        if len(self._seats) < len(self._spans):
            return  # A stage was lost meanwhile: it begins once all are there again.
        forecast = await self._lines.forecast(self._seats, self._cut, self._training)
        self._forecast = forecast.summary
        job_id = self._runtime.job.job_id
        log.info("a ring trains", job=job_id, ring=self._number, forecast=forecast.summary)
        is_new = self._runtime.job.stored_round is None
        if is_new and forecast.refusal and not self._training.any_line:
            name = "" if self._folding is None else f"ring {self._number + 1}: "
            await self._pause(f"{name}{forecast.refusal}")
            return
        if len(self._seats) < len(self._spans) or self._has_begun:
            return
        window = self._lines.window(self._seats, self._rows.train.micro_tokens)
        plan = replace(self._ring.plan, held_out_batches=self._rows.held_out_batches)
        is_owed = self._folding is not None and self._folding.is_unmeasured
        self._ring = replace(self._ring, window=window, plan=plan, owes_evaluation=is_owed)
        self._has_begun = True
        self._tell_members()
        for stage in range(len(self._spans)):
            self._advance(StageCame(stage))
        if self._folding is not None:
            self._folding.note_begin(self._number)

    def _limit_ms(self, stage: int, open_orders: int) -> float:
        """How long a stage may say nothing while it has so much to do."""
        seat = self._seats.get(stage)
        if seat is None or self._rows is None:
            return 0.0
        ready = seat.ready
        pass_ms = (ready.pass_us + self._rows.train.micro_tokens * ready.token_us) / 1000
        return 3 * FORWARD_PASSES * pass_ms * open_orders

    def _advance(self, event: TrainingEvent) -> None:
        if training_rejection(self._ring, event):
            return
        epoch = self._ring.epoch
        self._ring, commands = advance_training(self._ring, event)
        if self._ring.epoch != epoch:
            self._frames.clear()
        for command in commands:
            self._perform(command)

    def _perform(self, command: TrainingCommand) -> None:
        """Send what a command says before anything else, so that stages get it in order."""
        if isinstance(command, StoreRound):
            keeps = [
                self._orders.ask(stage, seat, KeepAdapter(command.step))
                for stage, seat in sorted(self._seats.items())
            ]
            self._start(self._store(command, keeps))
            return
        if isinstance(command, TellHeldOut):
            self._tell_held_out(command.step)
            return
        seat = self._seats.get(command.stage)
        if seat is None:
            return
        match command:
            case TakeRound():
                self._start(self._take_round(command, seat))
            case SendForward(stage=stage, micro_batch=number, step=step):
                is_evaluation = command.is_evaluation
                micro_batch = self._micro_batch(step, number, is_evaluation=is_evaluation)
                request = micro_batch.forward(
                    self._frames.states_for(stage, number),
                    is_last=stage == len(self._spans) - 1,
                )
                self._start(self._forward(command, micro_batch, self._ask(stage, request)))
            case SendBackward(stage=stage, micro_batch=number):
                request_back = TrainBackward(
                    micro_batch=number,
                    states=self._frames.gradients_for(stage, number),
                    ends_step=number == self._training.micro_batches - 1,
                    step=self._ring.step,
                )
                micro_batch = self._micro_batch(self._ring.step, number)
                self._start(self._backward(command, micro_batch, self._ask(stage, request_back)))
            case TakeStep(stage=stage, step=step, scale=scale):
                step_request = StepAdapter(self._training.rate_of(step), scale)
                self._start(self._step(command, self._ask(stage, step_request)))

    def _ask(self, stage: int, request: TrainingRequest) -> "asyncio.Future[StageReply]":
        return self._orders.ask(stage, self._seats[stage], request)

    def _micro_batch(self, step: int, number: int, *, is_evaluation: bool = False) -> MicroBatch:
        if self._rows is None:
            raise ValueError("no rows were read")
        return self._rows.micro_batch(step, number, is_evaluation=is_evaluation)

    def _is_current(self, epoch: int) -> bool:
        return epoch == self._ring.epoch

    async def _take_round(self, command: TakeRound, seat: StageSeat) -> None:
        is_given = await self._give(command.stage, seat, command.step)
        if is_given and self._is_current(command.epoch):
            self._advance(AdapterTaken(command.stage, command.epoch))

    async def _give(self, stage: int, seat: StageSeat, step: int) -> bool:
        """Have a stage go on from a stored round; false: it is at fault, or the ring is elsewhere
        by now.
        """
        epoch = self._ring.epoch
        outcome = await self._giving.give(stage, seat, step, lambda: self._is_current(epoch))
        if outcome.fault:
            self._fault(stage, outcome.fault)
        return outcome.is_there

    async def _load_last(self, stage: int, seat: StageSeat) -> None:
        """Give a stage of a ring that has been trained its adapter, and let it answer."""
        if await self._give(stage, seat, self._training.steps) and self._seats.get(stage) is seat:
            self._loaded.add(stage)
            self._stages.join_seat(seat)

    def _tell_held_out(self, step: int) -> None:
        """Tell what this ring measured by the folded adapter."""
        if self._folding is None or self._rows is None:
            return
        totals = self._rows.held_out_totals
        loss = self._losses.held_out_mean(step, totals)
        if loss is not None:
            seats = [*self._seats.values()]
            self._folding.take_held_out(step, MeasuredLoss(loss, totals.tokens, seats))

    async def _forward(
        self,
        command: SendForward,
        micro_batch: MicroBatch,
        answer: "asyncio.Future[StageReply]",
    ) -> None:
        stage, number = command.stage, command.micro_batch
        reply = await answer
        if not self._is_current(command.epoch):
            return
        if stage == len(self._spans) - 1:
            await self._take_loss(command, micro_batch, reply)
            return
        if not isinstance(reply, Activations):
            self._blame(stage, stage - 1, reply)
            return
        if fault := self._frames.keep_states(stage, micro_batch, reply.states):
            self._fault(stage, fault)
            return
        self._advance(ForwardDone(stage, number, command.epoch))

    async def _take_loss(
        self, command: SendForward, micro_batch: MicroBatch, reply: StageReply
    ) -> None:
        """Take what the last stage gave of a micro-batch."""
        stage, number, step = command.stage, command.micro_batch, command.step
        if isinstance(reply, LossSum) and command.is_evaluation:
            if not isfinite(reply.loss):
                await self._pause_at(step, "the loss of rows that are held out is not finite")
                return
            self._losses.add_held_out(step, number, reply.loss)
            self._advance(LossMeasured(stage, number, command.epoch))
        elif isinstance(reply, Gradients) and not command.is_evaluation:
            self._losses.add(step, number, reply.loss)
            await self._take_gradients(stage, micro_batch, reply, command.epoch)
        else:
            self._blame(stage, stage - 1, reply)

    async def _pause_at(self, step: int, what: str) -> None:
        await self._pause(
            f"{what} in step {step}. Fix: stop it, and submit it with a lower inner.learning_rate"
            " or with a clip_norm"
        )

    async def _backward(
        self,
        command: SendBackward,
        micro_batch: MicroBatch,
        answer: "asyncio.Future[StageReply]",
    ) -> None:
        reply = await answer
        if not self._is_current(command.epoch):
            return
        if not isinstance(reply, Gradients):
            self._blame(command.stage, command.stage + 1, reply)
            return
        await self._take_gradients(command.stage, micro_batch, reply, command.epoch)

    async def _take_gradients(
        self, stage: int, micro_batch: MicroBatch, reply: Gradients, epoch: int
    ) -> None:
        event = BackwardDone(stage, micro_batch.number, epoch, reply.squares)
        if not isfinite(reply.loss) or not isfinite(reply.squares):
            await self._pause_at(self._ring.step + 1, "the loss or its gradient is not finite")
            return
        if fault := self._frames.keep_gradients(stage, micro_batch, reply.states):
            self._fault(stage, fault)
            return
        self._advance(event)

    def _blame(self, stage: int, neighbour: int, reply: StageReply) -> None:
        """Take the lease of a stage that computed nothing, or of the one that it names."""
        if isinstance(reply, StageRefused) and reply.blames_input and neighbour in self._seats:
            self._fault(neighbour, f"the stage beside it says: {reply.reason}")
            return
        self._fault(stage, f"it could not compute a micro-batch: {reason_of(reply)}")

    async def _step(self, command: TakeStep, answer: "asyncio.Future[StageReply]") -> None:
        reply = await answer
        if not self._is_current(command.epoch):
            return
        if reply != AdapterReady():
            self._fault(command.stage, f"it could not step: {reason_of(reply)}")
            return
        self._advance(AdapterStepped(command.stage, command.epoch))

    async def _store(self, command: StoreRound, keeps: "list[asyncio.Future[StageReply]]") -> None:
        """Store a round: adapters of all layers, and the journal's word for it."""
        await asyncio.gather(*keeps)
        seats, before = dict(self._seats), dict[str, BlobRef]()
        if self._folding is not None and not self._folding.newest_step:
            before = await self._stored_layers(seats, 0, command.step)
        adapter = await self._stored_layers(seats, command.step, command.step)
        is_whole = len(adapter) == self._cut.layers
        if self._rows is None or not is_whole or not self._is_current(command.epoch):
            return
        if self._folding is not None:
            steps = range(command.step - self._training.inner_steps, command.step)
            totals, loss = self._rows.train.totals(steps), self._losses.total(steps)
            part = RingPart(self._number, command.step, adapter, before, loss, totals)
            self._folding.take(part, [*seats.values()], self._forecast)
            return
        event = round_event(
            self._training, self._rows, command.step, self._losses, adapter, self._forecast
        )
        if reason := await self._rounds.report(event):
            log.warning("a round of a ring was rejected", reason=reason)
            return
        read_tokens = READ_PER_TRAINED * event.tokens + self._rows.held_out_totals.tokens
        self._rounds.count_tokens(seats.values(), read_tokens, command.step)
        self._losses.forget_before(command.step)
        self._advance(RoundStored(command.step))
        if self.is_done:
            self._let_answer()

    async def _stored_layers(
        self, seats: Mapping[int, StageSeat], kept_step: int, step: int
    ) -> dict[str, BlobRef]:
        """Store what stages kept after some steps; fewer than all layers: one is at fault."""
        layers = await self._rounds.store_layers(self._orders, seats, kept_step, step)
        if layers.faulty_stage is not None:
            self._fault(layers.faulty_stage, layers.fault)
        return layers.adapter

    def finish(self) -> None:
        """See `FoldingRing.finish`: stages of the ring that answers get the folded adapter."""
        self._has_begun = False
        self._ring = replace(self._ring, epoch=self._ring.epoch + 1)
        seats = sorted(self._seats.items()) if not self._number else []
        for stage, seat in seats:
            self._start(self._load_last(stage, seat))

    def _let_answer(self) -> None:
        """Let the ring answer: each stage has the adapter of the last step."""
        self._has_begun = False
        self._loaded = set(self._seats)
        for _, seat in sorted(self._seats.items()):
            self._stages.join_seat(seat)
