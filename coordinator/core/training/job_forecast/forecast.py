"""What a job will take: several ways that it may go are rolled forward, and their middle is told.

Theory of operation. Each way runs the job's own round machine with its own plans, on nodes whose
work takes what is forecast of it, with chance around that. Nothing is assumed of rounds that the
machine does not do itself. A long job is rolled for some rounds only, and goes on as the later half
of them went.
"""

from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from coordinator.core.training.job.state import ENDED, Job, Phase
from coordinator.core.training.job_forecast.basis import (
    ForecastBasis,
    ForecastRange,
    JobForecast,
    RolloutPoint,
)
from coordinator.core.training.job_forecast.node_course import absence_rates
from coordinator.core.training.job_forecast.rollout import JobRollout
from hypergpu.jobfile.spec import JobSpec
from hypergpu.units import are, several

ROLLOUTS = 5
"""Ways that a job is rolled."""
ROUNDS_MOST = 16
"""Rounds of each of them; a longer job goes on as the later half of them went."""
_WORK_MOST = 1_200
"""Rounds times nodes of all ways together: large fleets are rolled less often, and less far."""
_ROLLOUTS_LEAST, _ROUNDS_LEAST = 2, 4
_LOW, _HIGH = 0.1, 0.9


class _JobCourse(NamedTuple):
    """What one way comes to."""

    left_ms: float
    bytes_up: float
    bytes_down: float
    paid_samples: float
    samples: float
    rounds: float


def forecast_job(basis: ForecastBasis, job: Job | None = None) -> JobForecast | str:
    """What a job will take until its end. Equal arguments give equal forecasts.

    Costs some milliseconds for each of at most `ROLLOUTS` times `ROUNDS_MOST` rounds.

    Args:
        basis: What is known.
        job: As it is now; None: a new one.

    Returns:
        The forecast, or why there is none, for people.
    """
    if why := _obstacle(basis, job):
        return why
    rollouts, rounds = _extent(len(basis.readings))
    rates = absence_rates(basis.readings, basis.now_ms)
    courses: list[_JobCourse] = []
    for number in range(rollouts):
        rollout = JobRollout(basis, str(number), rates, (number + 0.5) / rollouts)
        rollout.begin(job)
        if rollout.run(rounds):
            courses.append(_course(rollout, basis))
    if not courses:
        return "it does not get on with the nodes that are there"
    return _forecast(basis, courses)


def _obstacle(basis: ForecastBasis, job: Job | None) -> str:
    """Why nothing can be said of the job; empty: something can."""
    if job is not None and job.phase in ENDED:
        return f"it is {job.phase.value}"
    if job is not None and job.phase is Phase.PAUSED:
        return "it is paused"
    if not basis.readings:
        return "no node is there for it"
    is_begun = job is not None and job.model is not None and job.model.round > 0
    needed_nodes = 1 if is_begun else basis.spec.training.nodes
    if len(basis.readings) < needed_nodes:
        there = len(basis.readings)
        return f"{there} of {needed_nodes} nodes {are(there)} there for it"
    return ""


def _extent(nodes: int) -> tuple[int, int]:
    """Ways, and rounds of each."""
    rounds = max(_ROUNDS_LEAST, min(ROUNDS_MOST, _WORK_MOST // (ROLLOUTS * nodes)))
    return max(_ROLLOUTS_LEAST, min(ROLLOUTS, _WORK_MOST // (rounds * nodes))), rounds


def _course(rollout: JobRollout, basis: ForecastBasis) -> _JobCourse:
    job, tally = rollout.job, rollout.job.tally
    left_ms = rollout.at_ms - basis.now_ms
    if job.phase in ENDED or not rollout.points:
        return _JobCourse(
            left_ms,
            tally.bytes_up,
            tally.bytes_down,
            tally.samples + tally.samples_twice,
            tally.samples,
            job.model.round if job.model is not None else 0,
        )
    last = rollout.points[-1]
    first = rollout.points[len(rollout.points) // 2 - 1] if len(rollout.points) > 1 else last
    done_share = _progress(job.spec, last)
    gained_share = done_share - _progress(job.spec, first)
    times = max(0.0, 1 - done_share) / gained_share if gained_share > 0 else 0.0

    def at_end(value: Callable[[RolloutPoint], int]) -> float:
        return value(last) + times * (value(last) - value(first))

    twice = at_end(lambda point: point.samples_twice)
    samples = max(at_end(lambda point: point.samples), last.samples)
    return _JobCourse(
        left_ms + times * (last.at_ms - first.at_ms) + basis.times.evaluate_ms,
        at_end(lambda point: point.bytes_up),
        at_end(lambda point: point.bytes_down),
        samples + twice,
        samples,
        at_end(lambda point: point.rounds),
    )


def _progress(spec: JobSpec, point: RolloutPoint) -> float:
    """Part of the job that is done, by what ends it."""
    if spec.strategy == "aware":
        return point.samples / spec.stated_samples
    return point.rounds / spec.training.rounds


def _forecast(basis: ForecastBasis, found: Sequence[_JobCourse]) -> JobForecast:
    pay, spec = basis.spec.pay, basis.spec
    measured_nodes = sum(each.step_us.count > 0 for each in basis.readings.values())
    costs = [pay.most_for(round(each.paid_samples)) for each in found]
    escrow = spec.escrow if pay.unit_price else 0
    return JobForecast(
        left_ms=_range([each.left_ms for each in found]),
        bytes_up=_range([each.bytes_up for each in found]),
        bytes_down=_range([each.bytes_down for each in found]),
        cost=_range([min(escrow, each) for each in costs]),
        escrow=escrow,
        samples=round(median(each.samples for each in found)),
        rounds=round(median(each.rounds for each in found)),
        nodes=len(basis.readings),
        measured_nodes=measured_nodes,
        reason=_reason(len(basis.readings), measured_nodes),
    )


def _range(values: Sequence[float]) -> ForecastRange:
    return ForecastRange(*(round(_quantile(sorted(values), share)) for share in (_LOW, 0.5, _HIGH)))


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Quantile of values in order, each of which stands for an equal part of all cases."""
    place = min(max(share * len(ordered) - 0.5, 0), len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def _reason(nodes: int, measured: int) -> str:
    if measured == nodes:
        return f"by measurements of {'its' if nodes == 1 else 'all'} {several(nodes, 'node')}"
    if not measured:
        return "no node has trained here yet: their speed is assumed, and may be off by far"
    rest = nodes - measured
    return f"{measured} of {several(nodes, 'node')} {are(measured)} measured, {rest} by the median"
