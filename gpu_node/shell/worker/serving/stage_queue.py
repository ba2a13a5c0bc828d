"""What a stage that trains is told, in the order in which it does it: gradients before activations,
as these free what is kept of a micro-batch and keep the stages before at work (1F1B by arrival).
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from gpu_node.shell.worker.protocol import CallWork, CancelCall
from hypergpu.serving.stage_messages import StageRequest, unpack_stage_request
from hypergpu.serving.training_messages import (
    PieceJoiner,
    TrainBackward,
    TrainForward,
    TrainingPiece,
)


class QueuedRequest(NamedTuple):
    """A request that has arrived."""

    number: int
    """Its call's."""
    request: StageRequest


class StageQueue:
    """Requests that have arrived.

    Args:
        next_call: Gives the next call, or None after so many seconds.
        note_piece: Called with the number of a call that brought a piece of a message.
    """

    def __init__(
        self,
        next_call: Callable[[float], CallWork | CancelCall | None],
        note_piece: Callable[[int], None],
    ) -> None:
        self._next_call = next_call
        self._note_piece = note_piece
        self._waiting: deque[QueuedRequest] = deque()
        self._joiner = PieceJoiner()
        self.newest = 0
        """Number of the call that was read last."""

    def next(self, wait_s: float) -> QueuedRequest | None:
        """The request that is to be done next; None: nothing came for so long.

        Raises:
            HyperGPUError: REQUEST_INVALID, the call `newest` is malformed.
        """
        wait_s = 0.0 if self._waiting else wait_s
        while (call := self._next_call(wait_s)) is not None:
            if isinstance(call, CallWork):
                self._accept(call)
            wait_s = 0.0
        if not self._waiting:
            return None
        place = self._place()
        arrival = self._waiting[place]
        del self._waiting[place]
        return arrival

    def _accept(self, call: CallWork) -> None:
        self.newest = call.call
        request = unpack_stage_request(call.body)
        if isinstance(request, TrainingPiece):
            content = self._joiner.add(request)
            if content is None:
                self._note_piece(call.call)
                return
            request = unpack_stage_request(content, is_joined=True)
        self._waiting.append(QueuedRequest(call.call, request))

    def _place(self) -> int:
        """The first gradients, unless something else than micro-batches stands before them."""
        for place, arrival in enumerate(self._waiting):
            if isinstance(arrival.request, TrainBackward):
                return place
            if not isinstance(arrival.request, TrainForward):
                break
        return 0
