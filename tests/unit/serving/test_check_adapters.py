"""Adapters on their way to a checker: one part at a time, each layer once."""

import asyncio

import pytest

from coordinator.shell.kinds.serving.check_adapters import (
    PART_BYTES,
    AdapterGivingError,
    CheckAdapters,
)
from coordinator.shell.kinds.serving.relay_limit import RelayLimit
from coordinator.shell.kinds.serving.relay_sending import RelaySending
from coordinator.shell.kinds.serving.ring_parts import StageSeat
from hypergpu.ids import JobId
from hypergpu.rings.layer_span import LayerSpan
from hypergpu.serving.check_messages import TakeAdapterValues
from hypergpu.serving.stage_messages import (
    StageRefused,
    StageReply,
    StageRows,
    unpack_stage_request,
)
from tests.unit.serving.test_ring_requests import seat


class ScriptedChecker:
    """A node that stands by, and the adapters that it is given."""

    def __init__(self, values: dict[int, bytes]) -> None:
        self.seat: StageSeat = seat()
        relay = RelaySending(JobId("j"), RelayLimit())
        self.adapters = CheckAdapters(self.seat, relay, values.__getitem__)
        self.requests: list[TakeAdapterValues] = []

    async def answer(self, reply: StageReply | None) -> None:
        """Take in the next message, and answer it after a stranger's answer."""
        queued_message = await self.seat.stream.outbox.get()
        assert queued_message is not None
        call = queued_message.message.work_call
        request = unpack_stage_request(call.body)
        assert isinstance(request, TakeAdapterValues)
        self.requests.append(request)
        assert not self.seat.stream.outbox.messages  # What follows waits for the answer.
        self.adapters.hear(call.call + 1, StageRefused("of something else"))
        self.adapters.hear(call.call, reply)


async def test_a_checker_gets_each_layer_once_and_a_part_once_the_one_before_was_answered() -> None:
    values = {2: bytes(range(256)) * (PART_BYTES // 128), 3: b"1234"}
    checker = ScriptedChecker(values)
    delivery = asyncio.create_task(checker.adapters.give(LayerSpan(2, 4)))
    for _ in range(3):
        await checker.answer(StageRows())
    await delivery
    assert [(each.layer, each.start) for each in checker.requests] == [
        (2, 0),
        (2, PART_BYTES),
        (3, 0),
    ]
    parts = [each.values for each in checker.requests]
    assert (parts[0] + parts[1], parts[2]) == (values[2], values[3])
    await checker.adapters.give(LayerSpan(2, 4))
    assert not checker.seat.stream.outbox.messages


async def test_a_layer_of_which_a_part_is_missing_is_given_anew() -> None:
    checker = ScriptedChecker({0: bytes(2 * PART_BYTES)})
    delivery = asyncio.create_task(checker.adapters.give(LayerSpan(0, 1)))
    await checker.answer(StageRows())
    delivery.cancel()
    assert isinstance((await asyncio.gather(delivery, return_exceptions=True))[0], BaseException)
    second = asyncio.create_task(checker.adapters.give(LayerSpan(0, 1)))
    while checker.seat.stream.outbox.messages:
        await checker.seat.stream.outbox.get()  # The part that nobody waits for any more.
    await checker.answer(StageRows())
    await checker.answer(StageRows())
    await second
    assert [each.start for each in checker.requests] == [0, 0, PART_BYTES]


@pytest.mark.parametrize(
    ("reply", "reason"), [(StageRefused("no room"), "no room"), (None, "NoneType")]
)
async def test_a_checker_that_refuses_an_adapter_is_given_no_more_of_it(
    reply: StageReply | None, reason: str
) -> None:
    checker = ScriptedChecker({0: bytes(2 * PART_BYTES)})
    delivery = asyncio.create_task(checker.adapters.give(LayerSpan(0, 1)))
    await checker.answer(reply)
    with pytest.raises(AdapterGivingError, match=f"takes no adapter: {reason}"):
        await delivery


async def test_an_adapter_that_is_not_here_is_no_fault_of_the_checker() -> None:
    def values_of(_: int) -> bytes:
        raise FileNotFoundError("gone")

    relay = RelaySending(JobId("j"), RelayLimit())
    with pytest.raises(AdapterGivingError, match="layer 0 cannot be given: gone"):
        await CheckAdapters(seat(), relay, values_of).give(LayerSpan(0, 1))
