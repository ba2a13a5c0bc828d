"""What stages of one ring were told and have not answered."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from coordinator.core.rings.ring_state import StagePace
from coordinator.shell.kinds.serving.relay_sending import RelaySending
from coordinator.shell.kinds.serving.ring_parts import PendingRequest, StageSeat
from hypergpu.clock import monotonic_ms
from hypergpu.ids import NodeId
from hypergpu.serving.check_messages import HandStates
from hypergpu.serving.stage_messages import (
    MESSAGE_BYTES_MOST,
    ComputePass,
    ReplayRows,
    StageRequest,
    frame_bytes_most,
    pack_stage_message,
)

_SILENCE_MS_LEAST = 10_000
_SILENCE_FACTOR = 3
"""A stage that takes so many times what its passes should take is taken to be gone."""
_LOOK_S = 1.0
_UNASKED_BYTES_MOST = 16 * MESSAGE_BYTES_MOST
"""What a stage may give that nobody asked for, or not any more."""


class StageRequests:
    """Requests to the stages of one ring. All calls are of the loop's thread.

    Args:
        sending: Sends them.
        pace_of: What a stage takes for a pass.
        report_fault: Called with a stage that takes far longer than it should, and the reason.
        row_bytes: Size of one row of hidden states.
    """

    def __init__(
        self,
        sending: RelaySending,
        *,
        pace_of: Callable[[int], StagePace],
        report_fault: Callable[[int, str], None],
        row_bytes: int,
    ) -> None:
        self._sending = sending
        self._pace_of = pace_of
        self._report_fault = report_fault
        self._row_bytes = row_bytes
        self._open: dict[int, PendingRequest] = {}
        self._unasked_bytes: Counter[NodeId] = Counter()
        self._watch: asyncio.TimerHandle | None = None

    def send(self, seat: StageSeat, request: PendingRequest) -> None:
        """Send a stage what it is to do, after all that was sent before.

        Raises:
            HyperGPUError: REQUEST_INVALID, it is too large for a message.
        """
        body = pack_stage_message(request.request)
        call = self._sending.send(seat, body, _relayed_bytes(request.request))
        self._open[call.number] = request._replace(
            sent_ms=call.due_ms, upload_bits_per_s=seat.upload_bits_per_s
        )
        if self._watch is None:
            self._watch = asyncio.get_running_loop().call_later(_LOOK_S, self._review_silence)

    def take(self, number: int) -> PendingRequest | None:
        """The request that is answered now, once; None: nobody has asked."""
        return self._open.pop(number, None)

    def size_fault(self, states: bytes, rows: int) -> str:
        """Why sealed states are more than a pass of so many rows may have; empty: they are not.

        Whether they are fewer, the stage says that opens them.
        """
        bytes_most = frame_bytes_most(rows, self._row_bytes) if rows else 0
        if len(states) <= bytes_most:
            return ""
        return f"it gave {len(states)} sealed bytes for {rows} tokens, and {bytes_most} at most"

    def unasked_fault(self, node: NodeId, size_bytes: int) -> str:
        """Why a node gave too much that nobody waited for; empty: it did not.

        A little comes late where a stage was lost, or this process began anew.
        """
        self._unasked_bytes[node] += size_bytes
        given_bytes = self._unasked_bytes[node]
        if given_bytes <= _UNASKED_BYTES_MOST:
            return ""
        del self._unasked_bytes[node]
        return f"it gave {given_bytes} bytes that nobody asked for, {_UNASKED_BYTES_MOST} at most"

    def drop_stage(self, stage: int) -> None:
        """Wait for nothing of a stage any more."""
        self._open = {number: each for number, each in self._open.items() if each.stage != stage}

    def clear(self) -> None:
        """Wait for nothing any more."""
        self._open.clear()

    def _review_silence(self) -> None:
        """Report a stage that takes far longer than its passes should."""
        self._watch = None
        now_ms = monotonic_ms()
        for stage in sorted({each.stage for each in self._open.values()}):
            requests = [each for each in self._open.values() if each.stage == stage]
            silent_ms = now_ms - min((each.sent_ms for each in requests), default=now_ms)
            if silent_ms > self.silence_limit_ms(stage, requests):
                self._report_fault(stage, f"it said nothing for {silent_ms} ms")
        if self._open:
            self._watch = asyncio.get_running_loop().call_later(_LOOK_S, self._review_silence)

    def silence_limit_ms(self, stage: int, requests: Sequence[PendingRequest]) -> float:
        """Time after which a stage that has answered none of some requests is at fault."""
        pace = self._pace_of(stage)
        forecast_us = 2 * pace.way_us
        for each in requests:
            if isinstance(each.request, ComputePass):
                forecast_us += pace.pass_time_us(each.request.rows)
            bits = 8 * _given_rows(each.request) * self._row_bytes
            # The owner's upload limit slows what the stage gives.
            forecast_us += 1e6 * bits / each.upload_bits_per_s if each.upload_bits_per_s else 0
        return max(_SILENCE_MS_LEAST, _SILENCE_FACTOR * forecast_us / 1000)


def _given_rows(request: StageRequest) -> int:
    """Rows of hidden states that the answer may have."""
    if isinstance(request, ComputePass):
        return request.rows
    return request.count if isinstance(request, ReplayRows | HandStates) else 0


def _relayed_bytes(request: StageRequest) -> int:
    """Bytes of another stage in a request."""
    return len(request.states) if isinstance(request, ComputePass) else 0
