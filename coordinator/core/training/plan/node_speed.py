"""One node's speed, its line over the connections that it will use, and how far its own figures are
believed.

What was never measured of a node is taken from its fleet (`coordinator.core.network`).
"""

import msgspec
from msgspec.structs import replace

from coordinator.core.network.line import goodput_of
from coordinator.core.network.reading import NodeReading, TransferDirection
from coordinator.core.network.work_forecast import (
    FinishForecast,
    RoundWork,
    finish_forecast,
    transfer_forecast,
)
from coordinator.core.training.plan.decision import FINEST, ModelSizes, NodeMemory, PlanRequest
from hypergpu.units import Bytes

UNPROVEN_TIMES = 8
"""How many times as fast as the median one a node is believed to be before its first update: as
many as a plan gives it steps for.
"""
_MOVING_TIMES, _MOMENT_US = 2, 500_000
"""Time that moving bytes, in forecasts, and everything else may take of an update's time."""
_PROVEN_TIMES = 1.5
"""Steps may be stated as so much longer than the newest update shows, which may have been quick."""
_NOT_AS_STATED = "update was, and not as it says"
_STATED_TIMES = 2
"""Computing may take so many times what its node says."""
_QUARTILE = 0.84
"""Mean deviations between the mean and the lower quartile of a normal distribution."""


_LEAST, _LEAST_OF_FEW, _FEW = 0.25, 0.75, 3
"""The lower quartile's least share of the mean, after more than so many observations and before."""


class NodeSpeed(msgspec.Struct, frozen=True):
    """One node's speed and line. What its forecasts were off by is included."""

    reading: NodeReading
    typical: NodeReading
    """Median reading of its fleet."""
    connections: int
    step_us: float
    """With the job's own batch."""
    up_bits_per_s: float
    """Goodput over so many connections."""
    cautious_up_bits_per_s: float
    """The lower quartile: three of four uploads are faster."""
    is_measured: bool
    """Whether the node's own steps were measured, and where updates are large its own line too, or
    forecasts of it were compared.
    """
    reason: str = ""
    """Reason why the node's own figures are not believed; empty: they are."""

    def finish(self, inner_steps: float, up_bytes: Bytes, down_bytes: Bytes) -> FinishForecast:
        """When the node is done with a round's work, from its assignment on. Steps are those of the
        job's own batch; a step with half of that batch counts half.
        """
        work = RoundWork(
            inner_steps=inner_steps,
            up_bytes=up_bytes,
            down_bytes=down_bytes,
            connections=self.connections,
        )
        # Where nothing at all is known of a node the fleet says everything.
        own = finish_forecast(self.reading, work, self.typical)
        forecast = own or finish_forecast(self.typical, work, self.typical)
        if forecast is None:
            raise AssertionError("plans are made of fleets of which something is known")
        return forecast

    def moving_us(self, up_bytes: Bytes, down_bytes: Bytes) -> float:
        """Everything in a round that is not computing."""
        return self.finish(0, up_bytes, down_bytes).mean_ms * 1000.0

    def down_us(self, size_bytes: Bytes) -> float:
        """Time to download so many bytes."""
        span = transfer_forecast(
            self.reading,
            TransferDirection.DOWN,
            size_bytes,
            connections=self.connections,
            typical=self.typical,
        )
        return span.mean_us * self.reading.correction


def stated_speed(
    reading: NodeReading, typical: NodeReading, connections: int, *, needs_line: bool
) -> NodeSpeed:
    """Speed and line of a node by its reading.

    A line that never carried enough to be measured is taken for a slow one at home; forecast errors
    then correct it.

    Args:
        reading: Of the node.
        typical: Median reading of its fleet; steps of some node were measured.
        connections: Of the node.
        needs_line: Whether updates are so large that a line has to be measured.
    """
    up = goodput_of(reading, TransferDirection.UP, connections, typical.up_bits_per_s.mean)
    # A line that wanders by more than its mean is no line without bytes, and the deviation of a
    # line that was hardly measured says more of the measurement than of the line.
    least = _LEAST if up.count > _FEW else _LEAST_OF_FEW
    cautious = up.mean * max(least, 1 - _QUARTILE * up.deviation / up.mean)
    step = reading.step_us if reading.step_us.count else typical.step_us
    return NodeSpeed(
        reading=reading,
        typical=typical,
        connections=connections,
        # Steps are measured: a forecast that was too long was wrong about the line.
        step_us=max(1.0, step.mean * max(1.0, reading.correction)),
        up_bits_per_s=up.mean / reading.correction,
        cautious_up_bits_per_s=cautious / reading.correction,
        is_measured=bool(
            reading.step_us.count
            and (not needs_line or reading.up_bits_per_s.count or reading.forecast_error.count)
        ),
    )


def believed_speed(
    request: PlanRequest, speed: NodeSpeed, memory: NodeMemory, sizes: ModelSizes
) -> NodeSpeed:
    """The same speed as far as it is believed: the node itself times its steps.

    Before an update came it is at most `UNPROVEN_TIMES` the median node's. Afterwards no step takes
    more than the newest update did for each, if nothing was lost since and no step is taken ahead
    of its round. And it takes at least what is left of that time without twice the forecast
    transfer and half a second, where that is more than twice what the node states.

    Args:
        request: What is planned.
        speed: As the node's own figures have it.
        memory: Of the node, the round before included.
        sizes: Bytes of the model under each codec.
    """
    if not memory.proven_step_us:
        least_us = speed.typical.step_us.mean / UNPROVEN_TIMES
        reason = f"taken for {UNPROVEN_TIMES} times as fast as the median node until an update came"
        return speed if speed.step_us >= least_us else _with_step(speed, least_us, reason)
    if not memory.proven_steps:
        return speed
    # What came after the update and brought none may have been slower than it was.
    is_newest = not (memory.cut_rounds or request.spec.round.overlap == "eager")
    if is_newest and speed.step_us > _PROVEN_TIMES * memory.proven_step_us:
        return _with_step(speed, memory.proven_step_us, f"as fast as its newest {_NOT_AS_STATED}")
    moving_us = _moving_before_us(request, speed, memory, sizes)
    besides_us = (_MOVING_TIMES * moving_us + _MOMENT_US) / memory.proven_steps
    shown_us = memory.proven_step_us - besides_us
    if shown_us <= _STATED_TIMES * speed.step_us:
        return speed
    return _with_step(speed, shown_us, f"as slow as its newest {_NOT_AS_STATED}")


def _moving_before_us(
    request: PlanRequest, speed: NodeSpeed, memory: NodeMemory, sizes: ModelSizes
) -> float:
    """Time that a round like the node's last one is forecast to move bytes for."""
    down = request.previous.down if request.previous is not None else ""
    up_bytes, down_bytes = (sizes.update_bytes[codec or FINEST] for codec in (memory.codec, down))
    return speed.moving_us(up_bytes, down_bytes)


def _with_step(speed: NodeSpeed, step_us: float, reason: str) -> NodeSpeed:
    step = replace(speed.reading.step_us, mean=step_us, deviation=step_us / 4)
    reading = replace(speed.reading, step_us=step)
    return replace(speed, reading=reading, step_us=step_us, reason=reason)
