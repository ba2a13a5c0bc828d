"""A coordinator that may drive no more answers nobody, and sends nothing over open streams."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from coordinator.shell.service.calls import Caller
from coordinator.shell.service.gates import DrivingGate, OpenGate
from coordinator.shell.service.streams import CurrentAnswers
from coordinator.shell.store.journal.records import TenureLostError
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.v1 import node_pb2
from tests.calls_in_process import CallContext


class EndableTenure:
    """A tenure that is over when the test says so."""

    is_over = False

    def check(self) -> None:
        if self.is_over:
            raise TenureLostError("it slept")


async def test_nobody_is_admitted_once_another_one_may_drive() -> None:
    tenure = EndableTenure()
    gate = DrivingGate(tenure.check, OpenGate())
    await gate.admit(Caller(CallContext(()), "Check"))
    tenure.is_over = True
    with pytest.raises(HyperGPUError, match="drives no more: it slept") as failure:
        await gate.admit(Caller(CallContext(()), "Check"))
    assert failure.value.reason is Reason.NOT_READY


async def test_an_open_stream_sends_nothing_more() -> None:
    tenure = EndableTenure()
    outbox: asyncio.Queue[node_pb2.ControlResponse] = asyncio.Queue()

    async def answers() -> AsyncIterator[node_pb2.ControlResponse]:
        while True:
            yield await outbox.get()

    caller = Caller(CallContext(()), "Control")
    await DrivingGate(tenure.check, OpenGate()).admit(caller)
    stream = CurrentAnswers(answers(), caller)
    outbox.put_nowait(node_pb2.ControlResponse())
    assert await anext(stream) == node_pb2.ControlResponse()
    next_task = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    tenure.is_over = True
    outbox.put_nowait(node_pb2.ControlResponse())
    with pytest.raises(HyperGPUError):
        await next_task
