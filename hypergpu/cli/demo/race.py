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
"""Trains a job to its end under a title; returns the history that its journal tells."""


class StrategyTime(NamedTuple):
    """Time of one strategy to the target; without one it is not known, or never got there."""

    strategy: str
    at_ms: Milliseconds | None
    how: str


def sync_ratio(times: Sequence[StrategyTime]) -> float | None:
    """How many times as long `sync` takes as the first."""
    ours_ms = times[0].at_ms
    for each in times:
        if each.strategy == "sync" and each.at_ms and ours_ms:
            return round(each.at_ms / ours_ms, 2)
    return None


def measured_time(strategy: str, history: History, target: float) -> StrategyTime:
    """Time of a job that was trained here."""
    there = target_reached_at(history.evaluations, target, history.metric_name)
    return StrategyTime(strategy, there.at_ms if there else None, "measured")


def extrapolated_sync(rounds: Sequence[RoundPoint], steps: int) -> StrategyTime:
    """`sync` out of a few of its steps over these lines, and their number on a LAN.

    The first step is counted once: in it everybody starts the job. The mean of the others is taken
    for all after the first.

    Args:
        rounds: Rounds of the few steps.
        steps: Steps to the target.
    """
    if len(rounds) < 2:
        return StrategyTime("sync", None, "not known: too few of its steps ended")
    first_ms, *later = (each.duration_ms for each in rounds)
    each_ms = statistics.fmean(later)
    basis = "as one took" if len(later) == 1 else f"as {len(later)} took on average"
    how = (
        f"extrapolated: {steps} steps, the first {span(first_ms / 1000)} and each other"
        f" {span(each_ms / 1000)}, {basis} here"
    )
    return StrategyTime("sync", Milliseconds(round(first_ms + (steps - 1) * each_ms)), how)


def race_strategies(chosen: DemoPlan, history: History, train: Train) -> tuple[StrategyTime, ...]:
    """Compare the demo's own job, which comes first, with the time that other strategies need.

    Args:
        chosen: The demo's job.
        history: History of that job.
        train: Trains on the same nodes over the same lines.
    """
    times = [measured_time(chosen.spec.strategy, history, chosen.target)]
    # They show how long it takes: the demo's own job shows how it is paid.
    free = replace(chosen.spec, pay=Pay())
    if free.strategy != "diloco":
        until = replace(free.evaluation, target=chosen.target)
        spec = replace(with_strategy(free, "diloco"), name="demo, diloco", evaluation=until)
        title = "the same job with fixed steps and codec (diloco), until it is at the target"
        times.append(measured_time("diloco", train(spec, title), chosen.target))
    if not chosen.sync_steps:
        how = "not known: its steps are counted for another number of nodes"
        return (*times, StrategyTime("sync", None, how))
    rounds = SYNC_ROUNDS_SHORT if chosen.is_short else SYNC_ROUNDS
    spec = with_strategy(free, "sync")
    training, evaluation = replace(spec.training, rounds=rounds), Evaluation(every=rounds)
    spec = replace(spec, name="demo, sync", training=training, evaluation=evaluation)
    title = f"{rounds} steps with every step synchronised (sync), for the time that one takes"
    return (*times, extrapolated_sync(train(spec, title).rounds, chosen.sync_steps))
