"""What stages of a ring that trains were asked and have not answered."""

import asyncio
from collections.abc import Callable

from coordinator.shell.kinds.serving.relay_sending import RelaySending
from coordinator.shell.kinds.serving.ring_parts import StageSeat
from hypergpu.clock import monotonic_ms
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.serving.stage_messages import (
    JoinRing,
    StageReply,
    StageRows,
    stage_message_parts,
    unpack_stage_reply,
)
from hypergpu.serving.training_messages import (
    WHOLE_BYTES_MOST,
    PieceJoiner,
    TrainBackward,
    TrainForward,
    TrainingPiece,
    TrainingRequest,
)
from hypergpu.v1 import work_pb2

SILENCE_MS_LEAST = 60_000
"""How long a stage with something to do may say nothing at least."""
_LOOK_S = 1.0


class _Order:
    """A request, and what has come of its answer."""

    def __init__(self, stage: int, answer: "asyncio.Future[StageReply]") -> None:
        self.stage = stage
        self.answer = answer
        self.joiner = PieceJoiner()


class RingOrders:
    """Sends requests to stages, and gives each its answer.

    Args:
        sending: Sends them.
        limit_ms: How long a stage may say nothing while so many of its requests are open.
        fault: Called with a stage that says nothing for longer.
    """

    def __init__(
        self,
        sending: RelaySending,
        limit_ms: Callable[[int, int], float],
        fault: Callable[[int, str], None],
    ) -> None:
        self._sending = sending
        self._limit_ms = limit_ms
        self._fault = fault
        self._orders: dict[int, _Order] = {}
        self._heard_ms: dict[int, int] = {}
        self._watch: asyncio.TimerHandle | None = None

    def ask(
        self, stage: int, seat: StageSeat, request: TrainingRequest | JoinRing
    ) -> "asyncio.Future[StageReply]":
        """Send a request; the answer is cancelled where the stage is lost."""
        answer: asyncio.Future[StageReply] = asyncio.get_running_loop().create_future()
        is_idle = all(each.stage != stage for each in self._orders.values())
        for body in stage_message_parts(request):
            relayed_bytes = len(body) if isinstance(request, TrainForward | TrainBackward) else 0
            call = self._sending.send(seat, body, relayed_bytes)
            self._orders[call.number] = _Order(stage, answer)
            if is_idle:
                self._heard_ms[stage] = call.due_ms
        if self._watch is None:
            self._watch = asyncio.get_running_loop().call_later(_LOOK_S, self._review_silence)
        return answer

    def stage_of(self, number: int) -> int | None:
        """The stage that was asked by this number; None: none was."""
        order = self._orders.get(number)
        return None if order is None else order.stage

    def take(self, output: work_pb2.WorkOutput) -> None:
        """Take in an answer, or a piece of it.

        Raises:
            HyperGPUError: REQUEST_INVALID, it is malformed or too large.
        """
        order = self._orders[output.call]
        self._heard_ms[order.stage] = monotonic_ms()
        reply = unpack_stage_reply(output.body)
        if isinstance(reply, TrainingPiece):
            self._check_room(order.stage, len(reply.content))
            content = order.joiner.add(reply)
            if content is None:
                return
            reply = unpack_stage_reply(content, is_joined=True)
        del self._orders[output.call]
        # Pieces of a request are answered one by one with nothing.
        if not isinstance(reply, StageRows) and not order.answer.done():
            order.answer.set_result(reply)

    def _check_room(self, stage: int, piece_bytes: int) -> None:
        """Refuse pieces of unfinished answers beyond the size of one: stages give them in turn."""
        orders = (each for each in self._orders.values() if each.stage == stage)
        if sum(each.joiner.size_bytes for each in orders) + piece_bytes > WHOLE_BYTES_MOST:
            detail = f"unfinished answers of a stage have more than {WHOLE_BYTES_MOST:,} bytes"
            raise HyperGPUError(Reason.REQUEST_INVALID, detail)

    def drop(self, stage: int) -> None:
        """A stage is lost: nothing that it was asked is answered."""
        for number, order in [*self._orders.items()]:
            if order.stage == stage:
                del self._orders[number]
                order.answer.cancel()

    def _review_silence(self) -> None:
        self._watch = None
        now_ms = monotonic_ms()
        for stage in sorted({each.stage for each in self._orders.values()}):
            count = sum(each.stage == stage for each in self._orders.values())
            silent_ms = now_ms - self._heard_ms.get(stage, now_ms)
            if silent_ms > max(SILENCE_MS_LEAST, self._limit_ms(stage, count)):
                self._fault(stage, f"it said nothing for {silent_ms} ms")
        if self._orders:
            self._watch = asyncio.get_running_loop().call_later(_LOOK_S, self._review_silence)
