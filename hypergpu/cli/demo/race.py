"""The demo's strategy beside others on the same lines: who is at the target when. Pure."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from hypergpu.cli.figures import span
from hypergpu.cli.output import Column
from hypergpu.cli.show.history import History, RoundPoint, reached
from hypergpu.spec import JobSpec
from hypergpu.units import Milliseconds

COLUMNS = (
    Column("strategy"),
    Column("to target", is_number=True),
    Column("as long", is_number=True),
    Column("how"),
)


class Runner(NamedTuple):
    """One strategy; without a time it is not known, or was never there."""

    strategy: str
    at_ms: Milliseconds | None
    how: str


class Race(NamedTuple):
    """The demo's own strategy first."""

    runners: tuple[Runner, ...]

    @property
    def first(self) -> Runner:
        """What the demo trained with."""
        return self.runners[0]

    @property
    def sync_ratio(self) -> float | None:
        """How many times as long `sync` takes as the first."""
        found = [ratio(each, self.first) for each in self.runners if each.strategy == "sync"]
        return found[0] if found else None


def ratio(one: Runner, to: Runner) -> float | None:
    """How many times as long one takes."""
    return round(one.at_ms / to.at_ms, 2) if one.at_ms and to.at_ms else None


def rows(race: Race) -> list[tuple[str, ...]]:
    """A row a runner."""
    found: list[tuple[str, ...]] = []
    for each in race.runners:
        times = ratio(each, race.first)
        at = "not reached" if each.at_ms is None else span(each.at_ms / 1000)
        found.append((each.strategy, at, "-" if times is None else f"{times:.3g}x", each.how))
    return found


def measured(strategy: str, history: History, target: float) -> Runner:
    """Out of a job that was trained here."""
    there = reached(history.evaluations, target, history.metric_name)
    return Runner(strategy, there.at_ms if there else None, "measured")


def estimated_fixed(history: History, spec: JobSpec, rounds: int) -> Runner:
    """`diloco` out of the rounds that were taken with its settings before anything was measured.

    Those are as its rounds are: the same steps and scheme for all, and everybody is waited for.

    Args:
        history: Of the demo's own job.
        spec: That job.
        rounds: That `diloco` takes to the target.
    """
    like_it = [each for each in history.rounds if _is_fixed(each, spec)]
    if not like_it:
        return Runner("diloco", None, "not known: no round was like its rounds")
    each_ms = statistics.fmean(each.duration_ms for each in like_it)
    how = f"estimated: {rounds} rounds of {span(each_ms / 1000)}, as the first {len(like_it)} here"
    return Runner("diloco", Milliseconds(round(rounds * each_ms)), how)


def _is_fixed(each: RoundPoint, spec: JobSpec) -> bool:
    return each.inner_steps == spec.training.inner_steps and set(each.codecs) <= {spec.codec.up}


def extrapolated_sync(rounds: Sequence[RoundPoint], steps: int) -> Runner:
    """`sync` out of a few of its steps over these lines, and how many it takes on a LAN."""
    if not rounds:
        return Runner("sync", None, "not known: none of its steps ended")
    each_ms = statistics.fmean(each.duration_ms for each in rounds)
    how = f"extrapolated: {steps} steps of {span(each_ms / 1000)}, mean of {len(rounds)} here"
    return Runner("sync", Milliseconds(round(steps * each_ms)), how)
