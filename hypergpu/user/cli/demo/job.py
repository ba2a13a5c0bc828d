"""The demo's job, the accuracy that counts as learnt, and short jobs of other strategies beside
it.
"""

import importlib.util
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from hypergpu.jobfile.rules import checked_spec, with_strategy
from hypergpu.jobfile.spec import (
    Aware,
    Evaluation,
    Inner,
    JobSpec,
    OuterSettings,
    Pay,
    RoundRule,
    TrainingSettings,
    Trust,
)
from hypergpu.units import Milliseconds
from hypergpu.user.client.history import History, RoundPoint, target_reached_at
from hypergpu.user.terminal.output import span


class DemoPlan(NamedTuple):
    """A demo."""

    spec: JobSpec
    worker: str
    target: float
    """Least accuracy on the held-out digits."""
    sync_steps: int
    """Steps of every-step float32 training to the target, counted on a LAN; 0: not counted for so
    many nodes.
    """
    note: str
    metering: str
    """One of `METERINGS`."""
    is_short: bool
    is_fixed: bool
    """Nothing in it depends on time: the same model every time."""
    is_attacked: bool = False
    """The job is trained twice, at the second time with a node that lies."""
    blobs: str = "embedded"
    """What carries bulk bytes; `S3`: an object store."""


S3 = "s3"
EACH = "each"
METERINGS = ("batched", EACH)
"""Ways of receipts onto the chain, by the names of the coordinator's `--metering`."""
_CONTRIBUTIONS_MIN = 175
"""Contributions of a job under `EACH`, more than the 100 transactions that its epoch is to have:
the node that is killed misses some, one that rests others.
"""
COUNTED_NODES = 5
"""Number of nodes for which the steps of `sync` were counted."""
PAY = Pay(unit_price=1_000_000, rounds_per_epoch=3)


class _Size(NamedTuple):
    spec: JobSpec
    target: float
    rounds_short: int
    sync_steps: int
    sync_steps_short: int


# Updates of this network are large enough to measure a line by; those of the regression are not, so
# that plans would guess at lines: diloco trains it. Steps of sync are those of hypergpu
# netsim run --lan --strategy sync with five nodes and this seed, evaluated after every five steps;
# other seeds take a fifth more.
_TORCH = _Size(
    JobSpec(
        workload="digits-cnn",
        name="demo",
        strategy="aware",
        options={"channels": 48},
        training=TrainingSettings(rounds=12, seed=7),
        inner=Inner(learning_rate=0.0007, schedule="cosine"),
        outer=OuterSettings(momentum=0.8),
        evaluation=Evaluation(every=2),
        pay=PAY,
    ),
    target=0.97,
    rounds_short=10,
    sync_steps=53,
    sync_steps_short=53,
)
_NUMPY = _Size(
    JobSpec(
        workload="digits-softmax",
        name="demo",
        strategy="diloco",
        training=TrainingSettings(rounds=40, seed=7),
        inner=Inner(learning_rate=0.01, schedule="cosine"),
        round=RoundRule(deadline_ms=30_000),
        evaluation=Evaluation(every=2),
        pay=PAY,
    ),
    target=0.93,
    rounds_short=30,
    sync_steps=241,
    sync_steps_short=261,
)


def plan(
    nodes: int,
    *,
    is_short: bool,
    worker: str = "",
    metering: str = METERINGS[0],
    is_fixed: bool = False,
    is_attacked: bool = False,
) -> DemoPlan:
    """The digits by a convolutional network, or without torch by softmax regression.

    Args:
        nodes: Number of nodes that train.
        is_short: Fewer rounds.
        worker: ``torch`` or ``numpy``; when empty, torch where it is installed.
        metering: One of `METERINGS`.
        is_fixed: With fixed steps and codec, no deadline and no pay, so that nothing depends on
            time.
        is_attacked: With fixed steps and codec, so that every node takes part in every round.
    """
    has_torch = importlib.util.find_spec("torch") is not None
    is_torch = (worker or ("torch" if has_torch else "numpy")) == "torch"
    size = _TORCH if is_torch else _NUMPY
    why = "as asked" if worker else "torch is not installed"
    note = f"{why}: softmax regression by the numpy worker, which reaches less accuracy"
    spec = size.spec
    rounds = size.rounds_short if is_short else spec.training.rounds
    spec = replace(spec, training=replace(spec.training, nodes=nodes, rounds=rounds))
    if metering == EACH:
        spec = _with_one_epoch(spec)
    if spec.strategy == "aware":
        # Else so short a job would be divided into rounds of a few steps each.
        spec = replace(spec, aware=Aware(rounds_min=spec.training.rounds))
    if is_fixed:
        spec = replace(_with_fixed_steps(spec), pay=Pay())
    if is_attacked:
        spec = _with_fixed_steps(spec)
    sync_steps = size.sync_steps_short if is_short else size.sync_steps
    return DemoPlan(
        checked_spec(spec),
        worker="torch" if is_torch else "numpy",
        target=size.target,
        sync_steps=sync_steps if nodes == COUNTED_NODES else 0,
        note="" if is_torch else note,
        metering=metering,
        is_short=is_short,
        is_fixed=is_fixed,
        is_attacked=is_attacked,
    )


def _with_fixed_steps(spec: JobSpec) -> JobSpec:
    """The same job with fixed steps, of all nodes in each round, whose models the seed decides."""
    rule, trust = RoundRule(quorum=1.0), Trust(duplicates="none")
    return replace(with_strategy(spec, "diloco"), round=rule, trust=trust)


def _with_one_epoch(spec: JobSpec) -> JobSpec:
    """The same work in one epoch of enough contributions: more rounds of fewer steps."""
    training = spec.training
    rounds = max(training.rounds, -(-_CONTRIBUTIONS_MIN // training.nodes))
    steps = -(-training.rounds * training.inner_steps // rounds)
    # Planned rounds may be more, and never more than steps: all of them are one epoch.
    pay = replace(spec.pay, rounds_per_epoch=rounds * steps)
    return replace(spec, training=replace(training, rounds=rounds, inner_steps=steps), pay=pay)


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
