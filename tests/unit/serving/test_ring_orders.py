"""Requests to the stages of a ring that trains: their rate, and room for unfinished answers."""

import pytest

from coordinator.shell.kinds.serving.relay_limit import RelayLimit
from coordinator.shell.kinds.serving.relay_sending import RelaySending
from coordinator.shell.kinds.serving.ring_orders import RingOrders
from hypergpu.errors import HyperGPUError
from hypergpu.ids import JobId
from hypergpu.serving.stage_messages import pack_stage_message
from hypergpu.serving.training_messages import (
    PIECE_BYTES_MOST,
    WHOLE_BYTES_MOST,
    KeepAdapter,
    TrainBackward,
    TrainingPiece,
)
from hypergpu.v1 import work_pb2
from tests.unit.serving.test_ring_requests import seat


def orders(limit: RelayLimit) -> RingOrders:
    return RingOrders(RelaySending(JobId("j"), limit), lambda *_: 0.0, lambda *_: None)


async def test_gradients_wait_for_the_relay_s_rate_and_what_follows_waits_behind_them() -> None:
    # Eight seconds for each.
    ring_orders, stage = orders(RelayLimit(line_mbit_s=1, percent=1)), seat()
    for number in range(2):
        request = TrainBackward(micro_batch=number, states=bytes(10_000))
        ring_orders.ask(0, stage, request)
    ring_orders.ask(0, stage, KeepAdapter(1))
    assert stage.stream.outbox.messages == 1
    ring_orders.drop(0)


async def test_unfinished_answers_of_a_stage_have_no_more_than_one_message_may_have() -> None:
    ring_orders, stage = orders(RelayLimit()), seat()
    answers = [ring_orders.ask(0, stage, KeepAdapter(step)) for step in range(2)]
    queued_messages = [stage.stream.outbox.get_nowait() for _ in answers]
    calls = [each.message.work_call.call for each in queued_messages if each is not None]
    piece = pack_stage_message(TrainingPiece(bytes(PIECE_BYTES_MOST), is_last=False))
    for number in range(WHOLE_BYTES_MOST // PIECE_BYTES_MOST):
        ring_orders.take(work_pb2.WorkOutput(call=calls[number % 2], body=piece))
    with pytest.raises(HyperGPUError, match=f"more than {WHOLE_BYTES_MOST:,} bytes"):
        ring_orders.take(work_pb2.WorkOutput(call=calls[0], body=piece))
    ring_orders.drop(0)
    assert all(answer.cancelled() for answer in answers)
