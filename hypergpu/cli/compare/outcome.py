"""What one strategy came to by one seed, out of netsim's reports. Pure."""

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from hypergpu.client.history import EvaluationPoint, Reached, RoundPoint
from hypergpu.units import Bytes, Microseconds, Milliseconds, Samples

MEASURED = "measured"
EXTRAPOLATED = "extrapolated"


class LinkVerdict(msgspec.Struct, frozen=True):
    """Whether a network was as asked."""

    is_valid: bool
    sentence: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that are used of `netsim run --json`."""

    world: str
    backend: str
    phase: str
    reason: str
    rounds: tuple[RoundPoint, ...]
    metric: float | None
    verdict: LinkVerdict
    metric_name: str
    target: float
    evaluations: tuple[EvaluationPoint, ...]
    to_target: Reached | None


class StrategyRun(msgspec.Struct, frozen=True, kw_only=True):
    """One strategy by one seed."""

    strategy: str
    seed: int
    how: str
    """``measured``; or ``extrapolated``: steps counted on a LAN, times the time one took here."""
    phase: str
    reason: str
    to_target: Reached | None
    metric: float | None
    """Metric of the last model."""
    samples: Samples
    bytes_up: Bytes
    bytes_down: Bytes
    ended_ms: Milliseconds
    step_us: Microseconds
    """What a step took over the links, where that was measured alone; else 0."""
    is_valid: bool
    verdict: str
    evaluations: tuple[EvaluationPoint, ...]


class UnmeasuredError(Exception):
    """A report has too little in it to tell anything."""


def outcome(strategy: str, seed: int, reports: Sequence[Report]) -> StrategyRun:
    """The one run, or `sync` out of two: on a LAN to the target, and a few steps in the world.

    Raises:
        UnmeasuredError: The few steps did not end.
    """
    first, *others = reports
    found = _measured_run(strategy, seed, first)
    return _stretch(found, others[0]) if others else found


def _measured_run(strategy: str, seed: int, report: Report) -> StrategyRun:
    return StrategyRun(
        strategy=strategy,
        seed=seed,
        how=MEASURED,
        phase=report.phase,
        reason=report.reason,
        to_target=report.to_target,
        metric=report.metric,
        samples=Samples(sum(each.samples for each in report.rounds)),
        bytes_up=Bytes(sum(each.bytes_up for each in report.rounds)),
        bytes_down=Bytes(sum(each.bytes_down for each in report.rounds)),
        ended_ms=report.rounds[-1].ended_ms if report.rounds else Milliseconds(0),
        step_us=Microseconds(0),
        is_valid=report.verdict.is_valid,
        verdict=report.verdict.sentence,
        evaluations=report.evaluations,
    )


def _stretch(near: StrategyRun, steps: Report) -> StrategyRun:
    """The same steps, each as long as one took in the world; they move the same bytes."""
    step_us = step_time_us(steps)

    def later(rounds: int) -> Milliseconds:
        return Milliseconds(rounds * step_us // 1000)

    there = near.to_target
    last = near.evaluations[-1].round if near.evaluations else 0
    return replace(
        near,
        how=EXTRAPOLATED,
        to_target=replace(there, at_ms=later(there.rounds)) if there else None,
        ended_ms=later(last),
        step_us=step_us,
        is_valid=near.is_valid and steps.verdict.is_valid,
        verdict=steps.verdict.sentence if near.is_valid else near.verdict,
        evaluations=tuple(replace(each, at_ms=later(each.round)) for each in near.evaluations),
    )


def step_time_us(report: Report) -> Microseconds:
    """Mean time of the rounds after the first.

    Raises:
        UnmeasuredError: There are none.
    """
    if len(report.rounds) < 2:
        raise UnmeasuredError(f"only {len(report.rounds)} of its rounds ended: {report.reason}")
    spent_ms = report.rounds[-1].ended_ms - report.rounds[0].ended_ms
    return Microseconds(1000 * spent_ms // (len(report.rounds) - 1))
