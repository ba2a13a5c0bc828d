"""The demo's strategy beside others on the same lines: who is at the target when. Pure."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from hypergpu.client.history import History, RoundPoint, reached
from hypergpu.terminal.figures import span
from hypergpu.terminal.output import Column
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


def extrapolated_sync(rounds: Sequence[RoundPoint], steps: int) -> Runner:
    """`sync` out of a few of its steps over these lines, and how many it takes on a LAN.

    The first step is counted once: in it everybody starts the job. How long the others take says
    how long all after the first would.

    Args:
        rounds: At least two of its steps.
        steps: That it takes to the target; 0: not known.
    """
    if not steps:
        return unknown_sync()
    if len(rounds) < 2:
        return Runner("sync", None, "not known: too few of its steps ended")
    first_ms, *later = (each.duration_ms for each in rounds)
    each_ms = statistics.fmean(later)
    how = (
        f"extrapolated: {steps} steps, the first {span(first_ms / 1000)} and each other"
        f" {span(each_ms / 1000)}, {_so_many(len(later))} here"
    )
    return Runner("sync", Milliseconds(round(first_ms + (steps - 1) * each_ms)), how)


def unknown_sync() -> Runner:
    """With another number of nodes it takes other steps, which nobody has counted."""
    return Runner("sync", None, "not known: its steps are counted for another number of nodes")


def _so_many(count: int) -> str:
    return "as one took" if count == 1 else f"as {count} took on average"


def footnotes(target: float, victim: str) -> tuple[str, ...]:
    """What must be known to read the table."""
    when = "time since a job's first round was opened, on the line between two evaluations"
    alone = f"the first row alone has the start of all workers in it, and {victim} killed half-way"
    counted = "how many it takes was counted once, on a LAN where nothing goes wrong"
    return (
        f"target: {target:.0%} of held-out digits; {when}",
        f"measured: trained here until then, over these lines; {alone}",
        f"extrapolated: a few steps are measured here; {counted}",
    )
