"""What lines and stages of a ring do, measured before it trains."""

from collections.abc import Mapping
from typing import NamedTuple

from coordinator.core.rings.training_ring import window_of
from coordinator.shell.kinds.serving.ring_orders import RingOrders
from coordinator.shell.kinds.serving.ring_parts import StageSeat
from coordinator.shell.nodes.fleet import Fleet
from hypergpu.clock import monotonic_ms
from hypergpu.rings.ring_training import RingTraining
from hypergpu.rings.stage_work import ModelCut
from hypergpu.rings.training_forecast import (
    FORWARD_PASSES,
    StageLine,
    TrainingForecast,
    sent_token_bytes,
    training_forecast,
)
from hypergpu.serving.training_messages import (
    AdapterKept,
    GiveAdapter,
    KeepAdapter,
    UseAdapter,
)

_MEASURED_BYTES_LEAST = 64 << 10
"""What a line is measured by: less says nothing of it."""


class RingLines(NamedTuple):
    """Measures the lines of a ring's stages."""

    fleet: Fleet
    orders: RingOrders

    async def forecast(
        self, seats: Mapping[int, StageSeat], cut: ModelCut, training: RingTraining
    ) -> TrainingForecast:
        """What lines and stages do, by the adapter of one layer from each node.

        Args:
            seats: All stages.
            cut: How the model is cut.
            training: Settings.
        """
        lines = []
        for stage, seat in sorted(seats.items()):
            up_bits = await self._up_bits_per_s(stage, seat)
            lines.append(StageLine(seat.node, seat.ready.token_us, up_bits))
        sizes = sent_token_bytes(len(lines), cut.hidden_size, cut.codec, training.gradient_codec)
        return training_forecast(lines, sizes)

    async def _up_bits_per_s(self, stage: int, seat: StageSeat) -> float:
        for request in (UseAdapter(0), KeepAdapter(0)):
            await self.orders.ask(stage, seat, request)
        began_ms = monotonic_ms()
        reply = await self.orders.ask(stage, seat, GiveAdapter(0, seat.span.first))
        took_ms = max(1.0, monotonic_ms() - began_ms - 2 * self._way_us(seat) / 1000)
        size_bytes = len(reply.content) if isinstance(reply, AdapterKept) else 0
        return 8_000 * size_bytes / took_ms if size_bytes >= _MEASURED_BYTES_LEAST else 0.0

    def window(self, seats: Mapping[int, StageSeat], tokens: float) -> int:
        """Micro-batches of so many tokens that keep all stages at work."""
        stages = [seat for _, seat in sorted(seats.items())]
        stage_us = [
            FORWARD_PASSES * (seat.ready.pass_us + tokens * seat.ready.token_us) for seat in stages
        ]
        return window_of(stage_us, [self._way_us(seat) for seat in stages])

    def _way_us(self, seat: StageSeat) -> float:
        """From the coordinator to a stage, or back."""
        return self.fleet.readings.reading(seat.node).round_trip_us.mean / 2
