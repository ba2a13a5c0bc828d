"""Other strategies over the demo's own lines: short jobs on the nodes that are there anyway."""

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from hypergpu.cli.demo.job import DemoPlan
from hypergpu.client.history import History, RoundPoint, target_reached_at
from hypergpu.jobfile import with_strategy
from hypergpu.jobfile.spec import Evaluation, JobSpec, Pay
from hypergpu.terminal.figures import span
from hypergpu.units import Milliseconds

SYNC_ROUNDS = 4
SYNC_ROUNDS_SHORT = 2
Train = Callable[[JobSpec, str], History]
"""Train a job to its end under a title; what its journal told."""


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
        ours_ms = self.first.at_ms
        for each in self.runners:
            if each.strategy == "sync" and each.at_ms and ours_ms:
                return round(each.at_ms / ours_ms, 2)
        return None


def measured_runner(strategy: str, history: History, target: float) -> Runner:
    """Out of a job that was trained here."""
    there = target_reached_at(history.evaluations, target, history.metric_name)
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


def run_race(chosen: DemoPlan, history: History, train: Train) -> Race:
    """Compare the demo's own job with the time that other strategies need.

    Args:
        chosen: The demo's job.
        history: Of that job.
        train: Trains on the same nodes over the same lines.
    """
    own = measured_runner(chosen.spec.strategy, history, chosen.target)
    # They show how long it takes: the demo's own job shows how it is paid.
    chosen = chosen._replace(spec=replace(chosen.spec, pay=Pay()))
    others = []
    if chosen.spec.strategy != "diloco":
        others.append(_run_diloco(chosen, train))
    others.append(_every_step(chosen, train))
    return Race((own, *others))


def _run_diloco(chosen: DemoPlan, train: Train) -> Runner:
    spec = with_strategy(chosen.spec, "diloco")
    until = replace(spec.evaluation, target=chosen.target)
    spec = replace(spec, name="demo, diloco", evaluation=until)
    title = "the same job with fixed steps and codec (diloco), until it is at the target"
    return measured_runner("diloco", train(spec, title), chosen.target)


def _every_step(chosen: DemoPlan, train: Train) -> Runner:
    if not chosen.sync_steps:
        return unknown_sync()
    rounds = SYNC_ROUNDS_SHORT if chosen.is_short else SYNC_ROUNDS
    spec = with_strategy(chosen.spec, "sync")
    training = replace(spec.training, rounds=rounds)
    spec = replace(spec, name="demo, sync", training=training, evaluation=Evaluation(every=rounds))
    title = f"{rounds} steps with every step synchronised (sync), for the time that one takes"
    return extrapolated_sync(train(spec, title).rounds, chosen.sync_steps)
