"""Requests to the stages of a ring: their order, and when a silent stage is at fault."""

from msgspec.structs import replace

from coordinator.core.rings.ring_state import StagePace
from coordinator.shell.kinds.serving.relay_limit import RelayLimit
from coordinator.shell.kinds.serving.relay_sending import RelaySending
from coordinator.shell.kinds.serving.ring_parts import PendingRequest, StageSeat
from coordinator.shell.kinds.serving.ring_requests import StageRequests
from coordinator.shell.nodes.control_stream import ControlStream
from coordinator.shell.translate import Capabilities
from hypergpu.ids import JobId, NodeId
from hypergpu.rings.layer_span import LayerSpan
from hypergpu.rings.stage_work import STAGE_KIND
from hypergpu.serving.serve_request import STAGE_VERSION
from hypergpu.serving.stage_messages import (
    ComputePass,
    ForgetSession,
    StageReady,
    StageRequest,
    StageSegment,
    unpack_stage_request,
)

READY = StageReady(
    tokens_most=64,
    fingerprint="f",
    device="cpu",
    pass_us=1.0,
    token_us=1.0,
    layer_us=1.0,
    weights_bytes=1,
    token_bytes=1,
    sessions_bytes=1,
)


def seat(
    upload_bits_per_s: int = 0, *, version: int = STAGE_VERSION, key: bytes = b""
) -> StageSeat:
    caps = {"upload_bits_per_s": upload_bits_per_s} if upload_bits_per_s else {}
    capabilities = Capabilities(workloads={STAGE_KIND: version}, caps=caps)
    stream = ControlStream(NodeId("0x1"), capabilities, "test")
    return StageSeat(NodeId("0x1"), 1, LayerSpan(0, 1), stream, replace(READY, key=key))


def requests(limit: RelayLimit) -> StageRequests:
    return StageRequests(
        RelaySending(JobId("j"), limit),
        pace_of=lambda _: StagePace(),
        report_fault=lambda *_: None,
        row_bytes=10_000,
    )


def states_of(session: int) -> ComputePass:
    return ComputePass(segments=(StageSegment(session, 0, 1),), states=bytes(10_000))


async def next_request(stage: StageSeat) -> StageRequest:
    queued_message = await stage.stream.outbox.get()
    assert queued_message is not None
    return unpack_stage_request(queued_message.message.work_call.body)


async def test_requests_keep_their_order_behind_states_that_wait() -> None:
    stage_requests, stage = requests(RelayLimit(line_mbit_s=8, percent=50)), seat()
    stage_messages: list[StageRequest] = [
        states_of(1),
        states_of(2),
        ForgetSession(2),
        states_of(3),
    ]
    for request in stage_messages:
        stage_requests.send(stage, PendingRequest(0, request, epoch=1))
    assert [await next_request(stage) for _ in stage_messages] == stage_messages
    stage_requests.clear()


async def test_states_wait_for_the_relay_s_rate_and_what_follows_waits_behind_them() -> None:
    # Eight seconds for each.
    stage_requests, stage = requests(RelayLimit(line_mbit_s=1, percent=1)), seat()
    for request in (states_of(1), states_of(2), ForgetSession(2)):
        stage_requests.send(stage, PendingRequest(0, request, epoch=1))
    assert stage.stream.outbox.messages == 1
    stage_requests.clear()


async def test_what_nobody_asked_for_is_nobodys_and_an_answer_counts_once() -> None:
    stage_requests, stage = requests(RelayLimit()), seat()
    stage_requests.send(stage, PendingRequest(0, states_of(1), epoch=1))
    queued_message = stage.stream.outbox.get_nowait()
    number = queued_message.message.work_call.call if queued_message is not None else 0
    assert stage_requests.take(number + 1) is None
    assert stage_requests.take(number) is not None
    assert stage_requests.take(number) is None


def test_who_floods_the_relay_with_what_nobody_asked_for_is_at_fault_with_the_figures() -> None:
    stage_requests, node = requests(RelayLimit()), NodeId("0x1")
    assert not stage_requests.unasked_fault(node, 16 << 20)
    assert "it gave 16777217 bytes that nobody asked for" in stage_requests.unasked_fault(node, 1)
    assert not stage_requests.unasked_fault(node, 1)


def test_a_stage_whose_owner_limits_its_upload_has_time_for_it() -> None:
    stage_requests = requests(RelayLimit())
    slow, quick = (
        stage_requests.silence_limit_ms(
            0, [PendingRequest(0, states_of(1), epoch=1, upload_bits_per_s=rate)]
        )
        for rate in (16_000, 0)
    )
    assert slow - 3 * 5_000 < 10
    assert quick == 10_000
