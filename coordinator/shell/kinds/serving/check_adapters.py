"""Gives the node that stands by the adapters of the stages that it computes again.

Adapters of a ring that trained are blobs of its newest round. A checker is given the values of a
stage's layers the first time that it computes the stage, one part at a time: each goes once the one
before was answered, so that frames of conversations go between them and a slow line is not taken
for silence.
"""

import asyncio
from collections.abc import Callable

from coordinator.shell.kinds.serving.relay_sending import RelaySending
from coordinator.shell.kinds.serving.ring_parts import StageSeat
from hypergpu.errors import HyperGPUError
from hypergpu.rings.layer_span import LayerSpan
from hypergpu.serving.check_messages import TakeAdapterValues
from hypergpu.serving.stage_messages import StageReply, StageRows, pack_stage_message
from hypergpu.units import Bytes

PART_BYTES = Bytes(512 << 10)
"""Values in one message."""
PART_S = 120.0
"""How long a checker may take for one."""


class AdapterGivingError(Exception):
    """A checker does not get an adapter; its text says why."""


class CheckAdapters:
    """Adapters that one checker has. All calls are of the loop's thread.

    Args:
        seat: The checker.
        sending: Sends it messages.
        values_of: Values of a layer. Blocks.
    """

    def __init__(
        self, seat: StageSeat, sending: RelaySending, values_of: Callable[[int], bytes]
    ) -> None:
        self._seat, self._sending, self._values_of = seat, sending, values_of
        self._taken_layers: set[int] = set()
        self._call = 0
        self._answer: asyncio.Future[StageReply | None] | None = None

    async def give(self, span: LayerSpan) -> None:
        """Give the adapters of layers that the checker has not yet.

        Raises:
            AdapterGivingError: It refuses them, says nothing, or they are not here.
        """
        for layer in range(span.first, span.end):
            if layer not in self._taken_layers:
                await self._give_layer(layer)
                self._taken_layers.add(layer)

    async def _give_layer(self, layer: int) -> None:
        try:
            values = await asyncio.to_thread(self._values_of, layer)
            for start in range(0, max(1, len(values)), PART_BYTES):
                part = values[start : start + PART_BYTES]
                reply = await self._ask(TakeAdapterValues(layer, start, part))
                if not isinstance(reply, StageRows):
                    reason = getattr(reply, "reason", type(reply).__name__)
                    raise AdapterGivingError(f"{self._seat.node} takes no adapter: {reason}")
        except TimeoutError as error:
            detail = f"{self._seat.node} said nothing for {PART_S:g} s"
            raise AdapterGivingError(detail) from error
        except (OSError, ValueError, HyperGPUError) as error:
            detail = f"the adapter of layer {layer} cannot be given: {error}"
            raise AdapterGivingError(detail) from error

    async def _ask(self, request: TakeAdapterValues) -> StageReply | None:
        body = pack_stage_message(request)
        self._answer = asyncio.get_running_loop().create_future()
        self._call = self._sending.send(self._seat, body, len(request.values)).number
        async with asyncio.timeout(PART_S):
            return await self._answer

    def hear(self, call: int, reply: StageReply | None) -> None:
        """Take in what the checker says, if it says it to a part of an adapter."""
        if call == self._call and self._answer is not None and not self._answer.done():
            self._answer.set_result(reply)
