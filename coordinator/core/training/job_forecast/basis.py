"""What forecasts of jobs are made of, and what they say. Pure values."""

from collections.abc import Mapping

import msgspec

from coordinator.core.network.reading import NodeReading
from coordinator.core.training.plan.decision import ModelSizes
from hypergpu.ids import NodeId
from hypergpu.jobfile.spec import JobSpec
from hypergpu.units import Bytes, Milliseconds, Samples


class CoordinatorTimes(msgspec.Struct, frozen=True):
    """What the coordinator's own work for a job takes."""

    prepare_ms: Milliseconds = Milliseconds(2_000)
    """From a job's creation until its first model is there."""
    plan_ms: Milliseconds = Milliseconds(10)
    aggregate_ms: Milliseconds = Milliseconds(100)
    """From the close of a round until its model is there."""
    evaluate_ms: Milliseconds = Milliseconds(1_000)


class ForecastBasis(msgspec.Struct, frozen=True):
    """All that a forecast of a job depends on: what the coordinator knows."""

    spec: JobSpec
    readings: Mapping[NodeId, NodeReading]
    """Readings of the nodes that the job would get; their times are those of ``now_ms``."""
    sizes: ModelSizes
    times: CoordinatorTimes = CoordinatorTimes()
    now_ms: Milliseconds = Milliseconds(0)
    lost_after_ms: Milliseconds = Milliseconds(15_000)
    """Time after which a node that is not heard of loses its work."""
    line_bits_per_s: int = 0
    """What the coordinator's own line carries; 0: not known."""
    paused: dict[NodeId, str] = {}
    """Nodes that are paused, with the reason."""


class ForecastRange(msgspec.Struct, frozen=True):
    """A quantity that is not known exactly: one time in ten it is below ``low``, one time in ten
    above ``high``.
    """

    low: int
    middle: int
    high: int


class JobForecast(msgspec.Struct, frozen=True):
    """What a job will take from now on until its end."""

    left_ms: ForecastRange
    bytes_up: ForecastRange
    """From nodes, in all, what has been moved included."""
    bytes_down: ForecastRange
    cost: ForecastRange
    """In the smallest units of the ledger's token, at full quality, what is spent included; 0: it
    pays nothing.
    """
    escrow: int
    """Amount set aside; 0: it pays nothing."""
    samples: int
    """Accepted samples at its end."""
    rounds: int
    """Rounds at its end."""
    nodes: int
    """Nodes that it is made with."""
    measured_nodes: int
    """Nodes whose step time is measured; those of others are taken from the fleet, or assumed."""
    reason: str
    """What it is made of, for people."""


class RolloutPoint(msgspec.Struct, frozen=True):
    """How far a job is at a moment, by its own clock."""

    at_ms: Milliseconds
    samples: Samples
    samples_twice: Samples
    rounds: int
    bytes_up: Bytes
    bytes_down: Bytes
