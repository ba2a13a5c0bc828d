"""Outcomes side by side: `compare.json`. Pure."""

import statistics
from collections.abc import Callable, Iterable, Sequence

import msgspec

from hypergpu.cli.compare.outcome import StrategyRun


class Spread(msgspec.Struct, frozen=True):
    """Numbers of several seeds."""

    median: int
    least: int
    most: int


class StrategyStanding(msgspec.Struct, frozen=True, kw_only=True):
    """A strategy over its seeds; what it took is told of the runs that reached the target."""

    strategy: str
    how: str
    runs: int
    runs_reached: int
    """Fewer than ``runs``: there is no ratio to tell."""
    runs_invalid: int
    """Runs whose links differed from the profile, so that their times mean nothing."""
    time_ms: Spread | None
    bytes_up: Spread | None
    bytes_down: Spread | None
    samples: Spread | None
    metric: float | None
    """Median of the last models'."""
    times_faster: float | None
    """Than the baseline, by the medians."""
    times_fewer_bytes: float | None


class Comparison(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag="hypergpu/compare/1"
):
    """Everything that was found."""

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
    to = alone[baseline]
    return [_with_ratios(each, to) for each in alone.values()]


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


def _spread(numbers: Iterable[int]) -> Spread | None:
    found = sorted(numbers)
    if not found:
        return None
    return Spread(round(statistics.median(found)), found[0], found[-1])


def _with_ratios(one: StrategyStanding, to: StrategyStanding) -> StrategyStanding:
    return msgspec.structs.replace(
        one,
        times_faster=_ratio(one, to, lambda each: _middle(each.time_ms)),
        times_fewer_bytes=_ratio(
            one, to, lambda each: _middle(each.bytes_up) + _middle(each.bytes_down)
        ),
    )


def _middle(spread: Spread | None) -> int:
    return 0 if spread is None else spread.median


def _ratio(
    one: StrategyStanding, to: StrategyStanding, amount: Callable[[StrategyStanding], int]
) -> float | None:
    is_told = one.runs_reached == one.runs and to.runs_reached == to.runs
    return amount(to) / amount(one) if is_told and amount(one) else None
