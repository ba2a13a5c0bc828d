"""Reports of netsim as one outcome a strategy and seed, side by side: `compare.json` and a
table. Pure.
"""

import statistics
from collections.abc import Iterable, Iterator, Sequence

import msgspec
from msgspec.structs import replace

from hypergpu.journal.text import score
from hypergpu.units import Bytes, Microseconds, Milliseconds, Samples
from hypergpu.user.client.history import EvaluationPoint, Reached
from hypergpu.user.terminal.output import Column, Table, numbers, size, span
from netsim.run.report import RunReport

MEASURED = "measured"
EXTRAPOLATED = "extrapolated"


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
    """Duration of a step over the links, where that was measured alone; else 0."""
    is_valid: bool
    verdict: str
    evaluations: tuple[EvaluationPoint, ...]


class UnmeasuredError(Exception):
    """A report is too short to measure a step by."""


def outcome(reports: Sequence[RunReport]) -> StrategyRun:
    """The one run, or `sync` out of two: on a LAN to the target, and a few steps in the world.

    Raises:
        UnmeasuredError: The few steps did not end.
    """
    first, *others = reports
    rounds = first.rounds
    run = StrategyRun(
        strategy=first.strategy,
        seed=first.seed,
        how=MEASURED,
        phase=first.phase,
        reason=first.reason,
        to_target=first.to_target,
        metric=first.metric,
        samples=Samples(sum(each.samples for each in rounds)),
        bytes_up=Bytes(sum(each.bytes_up for each in rounds)),
        bytes_down=Bytes(sum(each.bytes_down or 0 for each in rounds)),
        ended_ms=rounds[-1].ended_ms if rounds else Milliseconds(0),
        step_us=Microseconds(0),
        is_valid=first.verdict.is_valid,
        verdict=first.verdict.sentence,
        evaluations=first.evaluations,
    )
    return _extrapolate(run, others[0]) if others else run


def _extrapolate(near: StrategyRun, steps: RunReport) -> StrategyRun:
    """The same steps, each as long as one took in the world; they move the same bytes."""
    step_us = step_time_us(steps)

    def later(rounds: int) -> Milliseconds:
        return Milliseconds(rounds * step_us // 1000)

    there = near.to_target
    return replace(
        near,
        how=EXTRAPOLATED,
        to_target=replace(there, at_ms=later(there.rounds)) if there else None,
        ended_ms=later(near.evaluations[-1].round if near.evaluations else 0),
        step_us=step_us,
        is_valid=near.is_valid and steps.verdict.is_valid,
        verdict=steps.verdict.sentence if near.is_valid else near.verdict,
        evaluations=tuple(replace(each, at_ms=later(each.round)) for each in near.evaluations),
    )


def step_time_us(report: RunReport) -> Microseconds:
    """Mean time of the rounds after the first.

    Raises:
        UnmeasuredError: There are none.
    """
    if len(report.rounds) < 2:
        raise UnmeasuredError(f"only {len(report.rounds)} of its rounds ended: {report.reason}")
    spent_ms = report.rounds[-1].ended_ms - report.rounds[0].ended_ms
    return Microseconds(1000 * spent_ms // (len(report.rounds) - 1))


class SeedSpread(msgspec.Struct, frozen=True):
    """A number over several seeds."""

    median: int
    least: int
    most: int


class StrategyStanding(msgspec.Struct, frozen=True, kw_only=True):
    """A strategy over its seeds; amounts are those of the runs that reached the target."""

    strategy: str
    how: str
    runs: int
    runs_reached: int
    """Fewer than ``runs``: there is no ratio."""
    runs_invalid: int
    """Runs whose links differed from the profile, so that their times mean nothing."""
    time_ms: SeedSpread | None
    bytes_up: SeedSpread | None
    bytes_down: SeedSpread | None
    samples: SeedSpread | None
    metric: float | None
    """Median of the last models' metrics."""
    times_faster: float | None
    """Times faster than the baseline, by the medians."""
    times_fewer_bytes: float | None

    @property
    def median_ms(self) -> int:
        """Median of the times to the target; 0: never reached."""
        return self.time_ms.median if self.time_ms else 0

    @property
    def moved_bytes(self) -> int:
        """Median of the bytes up and down to the target; 0: never reached."""
        both = (self.bytes_up, self.bytes_down)
        return sum(each.median for each in both if each)


class Comparison(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag="hypergpu/compare/1"
):
    """`compare --json`."""

    job: str
    workload: str
    world: str
    backend: str
    metric_name: str
    target: float
    baseline: str
    strategies: list[StrategyStanding]
    outcomes: list[StrategyRun]

    @property
    def is_good(self) -> bool:
        """Whether every run reached the target over links that were as asked."""
        return all(each.to_target is not None and each.is_valid for each in self.outcomes)


def standings(
    strategies: Sequence[str], outcomes: Sequence[StrategyRun], baseline: str
) -> list[StrategyStanding]:
    """A standing a strategy, in their order."""
    alone = {
        name: _standing([each for each in outcomes if each.strategy == name]) for name in strategies
    }
    return [_with_ratios(each, alone[baseline]) for each in alone.values()]


def _standing(runs: Sequence[StrategyRun]) -> StrategyStanding:
    there = [run.to_target for run in runs if run.to_target is not None]
    metrics = [run.metric for run in runs if run.metric is not None]
    return StrategyStanding(
        strategy=runs[0].strategy,
        how=runs[0].how,
        runs=len(runs),
        runs_reached=len(there),
        runs_invalid=sum(not run.is_valid for run in runs),
        time_ms=_spread(each.at_ms for each in there),
        bytes_up=_spread(each.bytes_up for each in there),
        bytes_down=_spread(each.bytes_down for each in there),
        samples=_spread(each.samples for each in there),
        metric=statistics.median(metrics) if metrics else None,
        times_faster=None,
        times_fewer_bytes=None,
    )


def _spread(numbers: Iterable[int]) -> SeedSpread | None:
    ordered_numbers = sorted(numbers)
    if not ordered_numbers:
        return None
    return SeedSpread(
        round(statistics.median(ordered_numbers)), ordered_numbers[0], ordered_numbers[-1]
    )


def _with_ratios(one: StrategyStanding, baseline: StrategyStanding) -> StrategyStanding:
    if one.runs_reached < one.runs or baseline.runs_reached < baseline.runs:
        return one
    return replace(
        one,
        times_faster=_ratio(baseline.median_ms, one.median_ms),
        times_fewer_bytes=_ratio(baseline.moved_bytes, one.moved_bytes),
    )


def _ratio(amount: int, other: int) -> float | None:
    return amount / other if other else None


def standings_table(comparison: Comparison) -> Table:
    """Columns, and a row a strategy."""
    columns = (
        Column("strategy"),
        *numbers(f"to {comparison.metric_name} {comparison.target:g}", "least..most", "faster"),
        *numbers("up", "down", "fewer bytes", "samples", "final"),
        Column("how"),
    )
    return columns, [_row(each) for each in comparison.strategies]


def _row(each: StrategyStanding) -> tuple[str, ...]:
    time_ms = each.time_ms
    return (
        each.strategy,
        span(time_ms.median / 1000) if time_ms else "not reached",
        f"{span(time_ms.least / 1000)}..{span(time_ms.most / 1000)}" if time_ms else "-",
        times(each.times_faster),
        size(each.bytes_up.median) if each.bytes_up else "-",
        size(each.bytes_down.median) if each.bytes_down else "-",
        times(each.times_fewer_bytes),
        str(each.samples.median) if each.samples else "-",
        score(each.metric),
        _how(each),
    )


def times(ratio: float | None) -> str:
    """A ratio in three digits."""
    if ratio is None:
        return "-"
    return f"{ratio:.0f}x" if ratio >= 100 else f"{ratio:.3g}x"


def _how(each: StrategyStanding) -> str:
    words = [each.how]
    if each.runs_reached < each.runs:
        words.append(f"{each.runs_reached} of {each.runs} reached it")
    if each.runs_invalid:
        words.append(f"INVALID {each.runs_invalid} of {each.runs}")
    return ", ".join(words)


def footnotes(comparison: Comparison) -> Iterator[str]:
    """Sentences without which the table would be misread."""
    yield f"faster and fewer bytes: than {comparison.baseline}, by the medians of the seeds"
    if runs := [run for run in comparison.outcomes if run.how == EXTRAPOLATED]:
        each = ", ".join(f"{run.step_us / 1e6:.2f}" for run in runs)
        yield (
            f"{runs[0].strategy} is extrapolated: steps to the target counted on a LAN, times the"
            f" seconds that a step took in this world ({each}); --sync-steps 0 runs it whole"
        )
    goal = f"{comparison.metric_name} {comparison.target:g}"
    for run in comparison.outcomes:
        run_name = f"{run.strategy}, seed {run.seed}"
        if run.to_target is None:
            end = f"ended at {score(run.metric)} ({run.phase}: {run.reason})"
            yield f"{run_name}: never reached {goal}, {end}"
        if not run.is_valid:
            yield f"{run_name}: {run.verdict}"


def outcome_text(run: StrategyRun) -> str:
    """One run in a line, as soon as it is done."""
    doubt = "" if run.is_valid else "; INVALID"
    there = run.to_target
    if there is None:
        return f"target not reached, ended at {score(run.metric)}{doubt}"
    return (
        f"{span(there.at_ms / 1000)}, {there.samples} samples,"
        f" {size(there.bytes_up)} up, {size(there.bytes_down)} down{doubt}"
    )
