"""When a round closes without those who are late: at the moment that makes the most of it."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from coordinator.core.network.work_forecast import FinishForecast
from coordinator.core.training.plan.decision import NodePlan, PlanRequest
from coordinator.core.training.plan.node_shares import NodeShares
from coordinator.core.work.waiting import LEAST_MS
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds, Samples

_LEAST_SPREAD = 0.04
"""No finish is known better than to a twenty-fifth."""
_LEAST_SPREAD_MS = 40
"""A busy machine's scheduler is worth that much."""
_GRACE = 0.25
_MOMENTS = 64
"""Moments that are compared at most."""
_UNMEASURED_SPANS = 2
"""A node that was never seen at work gets so many spans."""


class UpdateArrival(NamedTuple):
    """When an update is forecast to be in, after the round's opening."""

    mean_ms: Milliseconds
    spread_ms: Milliseconds
    samples: Samples

    @property
    def forecast(self) -> FinishForecast:
        """The forecast of `measure`, never more certain than anything is."""
        spread = max(self.spread_ms, int(_LEAST_SPREAD * self.mean_ms), _LEAST_SPREAD_MS)
        return FinishForecast(self.mean_ms, Milliseconds(spread))

    @property
    def late_ms(self) -> Milliseconds:
        """Moment by which nine of ten such updates are in."""
        return self.forecast.quantile_ms(0.9)

    @property
    def safe_ms(self) -> Milliseconds:
        """Moment that hardly any is later than: the timer of RFC 6298, four mean deviations."""
        forecast = self.forecast
        return Milliseconds(forecast.mean_ms + 4 * forecast.deviation_ms)

    def chance_by(self, at_ms: int) -> float:
        """Probability that the update is in by then."""
        return self.forecast.chance_by(Milliseconds(at_ms))


def round_deadline_ms(
    request: PlanRequest, shares: NodeShares, plans: Mapping[NodeId, NodePlan], quorum: int
) -> Milliseconds:
    """When the round closes: as the job states, or so that it leaves twice the span to nodes that
    were never seen at work. 0: by the time that its quorum takes, where no forecast of anybody was
    ever compared and the job begins, with programs and data to fetch that no forecast knows of.

    Args:
        request: What is planned.
        shares: Of the candidates.
        plans: Of the participants.
        quorum: Updates that have to be in, at least one.
    """
    spec, working_shares = request.spec, shares.working
    is_compared = any(work.speed.reading.forecast_error.count for work in working_shares.values())
    if spec.round.deadline_ms or (request.previous is None and not is_compared):
        return Milliseconds(spec.round.deadline_ms)
    awaited_plans = {node: plan for node, plan in plans.items() if plan.rounds == 1}
    stated_batch = spec.training.batch_size
    arrivals = [
        UpdateArrival(
            plan.forecast_ms, plan.spread_ms, Samples(plan.inner_steps * plan.batch(stated_batch))
        )
        for node, plan in awaited_plans.items()
        if working_shares[node].speed.is_measured
    ]
    # Where nodes hold samples that others do not, nobody is to be late.
    latest = [] if spec.data.is_common else [arrival.late_ms for arrival in arrivals]
    if len(arrivals) < len(awaited_plans):
        latest.append(Milliseconds(int(_UNMEASURED_SPANS * shares.span_us / 1000)))
    if arrivals:
        latest.append(deadline(arrivals, quorum))
    return Milliseconds(max(LEAST_MS, *latest))


def deadline(arrivals: Sequence[UpdateArrival], quorum: int) -> Milliseconds:
    """The deadline that makes the most samples a second, and some grace.

    It is never before the quorum is likely. The grace is what makes even the latest one safe, up
    to a quarter of the deadline: a round closes as soon as everybody is in, so it costs only when
    somebody is missing.

    Args:
        arrivals: One for each participant that was ever measured, at least one.
        quorum: Updates that have to be in, at least one.

    Returns:
        Time after the round's opening, more than 0.
    """
    late = sorted(arrival.late_ms for arrival in arrivals)
    quorum_ms = late[min(len(late), quorum) - 1]
    moments = sorted({arrival.mean_ms for arrival in arrivals} | set(late))
    moments = [moment for moment in moments[:: len(moments) // _MOMENTS + 1] if moment >= quorum_ms]
    best = max([quorum_ms, *moments], key=lambda at_ms: (_goodput(arrivals, at_ms), -at_ms))
    safe = max(arrival.safe_ms for arrival in arrivals)
    grace = min(max(0, safe - best), int(_GRACE * best))
    return Milliseconds(max(LEAST_MS, best + grace))


def _goodput(arrivals: Sequence[UpdateArrival], at_ms: int) -> float:
    """Samples a second that are expected if a round always closes then."""
    expected_samples = sum(arrival.samples * arrival.chance_by(at_ms) for arrival in arrivals)
    return expected_samples / max(1, at_ms)
