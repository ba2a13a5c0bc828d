"""What a stage that trains does next of what has arrived."""

from collections import deque

import pytest

from gpu_node.shell.worker.protocol import CallWork, CancelCall
from gpu_node.shell.worker.serving.stage_queue import StageQueue
from hypergpu.assignment import Lease
from hypergpu.errors import HyperGPUError
from hypergpu.ids import JobId
from hypergpu.serving.stage_messages import StageRequest, stage_message_parts
from hypergpu.serving.training_messages import (
    PIECE_BYTES_MOST,
    PieceJoiner,
    StepAdapter,
    TrainBackward,
    TrainForward,
    TrainingPiece,
)

LEASE = Lease(JobId("job"), 0, 1)


def forward(number: int, states: bytes = b"x") -> TrainForward:
    return TrainForward(micro_batch=number, lengths=(2,), states=states)


def backward(number: int) -> TrainBackward:
    return TrainBackward(micro_batch=number, states=b"y")


class QueuedCalls:
    """Calls in the order in which they came."""

    def __init__(self, *requests: StageRequest) -> None:
        bodies = [body for request in requests for body in stage_message_parts(request)]
        self.calls: deque[CallWork | CancelCall] = deque(
            CallWork(LEASE, number, body) for number, body in enumerate(bodies, start=1)
        )
        self.pieces: list[int] = []
        self.queue = StageQueue(self.take, self.pieces.append)

    def take(self, _: float) -> CallWork | CancelCall | None:
        return self.calls.popleft() if self.calls else None

    def requests(self) -> list[StageRequest]:
        requests = []
        while (arrival := self.queue.next(0.0)) is not None:
            requests.append(arrival.request)
        return requests


def test_gradients_go_before_activations_and_each_kind_in_its_order() -> None:
    arrivals = QueuedCalls(forward(3), backward(1), forward(4), backward(2))
    assert arrivals.requests() == [backward(1), backward(2), forward(3), forward(4)]


def test_nothing_goes_before_a_step() -> None:
    step = StepAdapter(0.1, 1.0)
    arrivals = QueuedCalls(backward(7), step, forward(0), backward(0))
    assert arrivals.requests() == [backward(7), step, backward(0), forward(0)]


def test_a_large_message_is_whole_again_once_its_last_piece_is_there() -> None:
    large = forward(0, bytes(range(256)) * (PIECE_BYTES_MOST // 100))
    arrivals = QueuedCalls(large, backward(5))
    assert arrivals.requests() == [backward(5), large]
    assert arrivals.pieces == [1, 2]


def test_pieces_without_an_end_are_refused() -> None:
    joiner = PieceJoiner(bytes_most=100)
    assert joiner.add(TrainingPiece(bytes(60), is_last=False)) is None
    with pytest.raises(HyperGPUError, match="more than 100 bytes"):
        joiner.add(TrainingPiece(bytes(60), is_last=False))


def test_a_malformed_call_is_refused_by_its_number() -> None:
    arrivals = QueuedCalls(forward(0))
    arrivals.calls.append(CallWork(LEASE, 9, b"no message"))
    with pytest.raises(HyperGPUError, match="malformed"):
        arrivals.queue.next(0.0)
    assert arrivals.queue.newest == 9
