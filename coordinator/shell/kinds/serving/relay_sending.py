"""Sends the stages of one ring what they are told: in order, at the rate of the relay."""

import asyncio
import itertools
import secrets
from collections import deque
from typing import NamedTuple

from coordinator.shell.kinds.serving.relay_limit import RelayLimit
from coordinator.shell.kinds.serving.ring_parts import StageSeat
from coordinator.shell.nodes.control_stream import ControlStream
from hypergpu.clock import monotonic_ms
from hypergpu.ids import JobId
from hypergpu.units import Milliseconds
from hypergpu.v1 import node_pb2, work_pb2

_NUMBER_BITS = 48


class SentCall(NamedTuple):
    """A message on its way to a stage."""

    number: int
    """By which the stage answers."""
    due_ms: int
    """When it goes, by the monotonic clock."""


class _QueuedCall(NamedTuple):
    """A message that waits for the relay's rate, or behind one that does."""

    due_ms: int
    stream: ControlStream
    message: node_pb2.ControlResponse


class RelaySending:
    """Messages to the stages of one ring. All calls are of the loop's thread.

    Args:
        job_id: The served model's.
        limit: Of the bytes that stages of all rings send each other.
    """

    def __init__(self, job_id: JobId, limit: RelayLimit) -> None:
        self._job_id = job_id
        self._limit = limit
        # What stages answer to a coordinator that was here before is nobody's.
        self._numbers = itertools.count(secrets.randbits(_NUMBER_BITS) + 1)
        self._queue: deque[_QueuedCall] = deque()
        self._sending: asyncio.TimerHandle | None = None

    @property
    def refusal(self) -> str:
        """Why the relay takes no further conversation now; empty: it does."""
        return self._limit.refusal(monotonic_ms())

    def send(self, seat: StageSeat, body: bytes, relayed_bytes: int) -> SentCall:
        """Send a stage a message, after all that was sent before.

        Args:
            seat: The stage.
            body: The packed message.
            relayed_bytes: What of it another stage gave: that is what the rate is of.
        """
        number, now_ms = next(self._numbers), monotonic_ms()
        due_ms = now_ms + self._limit.reserve_ms(relayed_bytes, now_ms)
        if self._queue:
            due_ms = Milliseconds(max(due_ms, self._queue[-1].due_ms))
        call = work_pb2.WorkCall(job_id=self._job_id, lease=seat.lease, call=number, body=body)
        message = node_pb2.ControlResponse(work_call=call)
        self._queue.append(_QueuedCall(due_ms, seat.stream, message))
        self._send_due()
        return SentCall(number, due_ms)

    def _send_due(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None
        now_ms = monotonic_ms()
        while self._queue and self._queue[0].due_ms <= now_ms:
            queued_call = self._queue.popleft()
            queued_call.stream.send(queued_call.message)
        if self._queue:
            delay_s = (self._queue[0].due_ms - now_ms) / 1000
            self._sending = asyncio.get_running_loop().call_later(delay_s, self._send_due)
