"""Forecasts of jobs, from the wire."""

import msgspec

from hypergpu.v1 import forecast_pb2


class ForecastRangeView(msgspec.Struct, frozen=True):
    """A quantity that is not known exactly: one time in ten it is below ``low``, one time in ten
    above ``high``.
    """

    low: int
    middle: int
    high: int


class JobForecastView(
    msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/job-forecast/1"
):
    """`job submit --estimate`, and what is left of a running job."""

    left_ms: ForecastRangeView
    """From now until its end."""
    bytes_up: ForecastRangeView
    """From nodes, by the whole job."""
    bytes_down: ForecastRangeView
    cost: ForecastRangeView | None
    """In the smallest units of the ledger's token; null: it pays nothing."""
    escrow: int
    """Amount set aside for it."""
    samples: int
    """Accepted samples at its end."""
    rounds: int
    nodes: int
    measured_nodes: int
    """Nodes whose speed was measured."""
    reason: str
    """What it is based on."""


def forecast_view(found: forecast_pb2.JobForecast) -> JobForecastView:
    """A forecast from the wire."""
    cost = found.cost
    amounts = (int(each or "0") for each in (cost.low, cost.middle, cost.high))
    return JobForecastView(
        left_ms=_range_view(found.left_ms),
        bytes_up=_range_view(found.bytes_up),
        bytes_down=_range_view(found.bytes_down),
        cost=ForecastRangeView(*amounts) if found.HasField("cost") else None,
        escrow=int(cost.escrow or "0"),
        samples=found.samples,
        rounds=found.rounds,
        nodes=found.nodes,
        measured_nodes=found.measured_nodes,
        reason=found.reason,
    )


def _range_view(found: forecast_pb2.ForecastRange) -> ForecastRangeView:
    return ForecastRangeView(found.low, found.middle, found.high)
