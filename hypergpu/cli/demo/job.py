"""The demo's job, and the accuracy that counts as having learnt it."""

import importlib.util
from typing import NamedTuple

from msgspec.structs import replace

from hypergpu.jobfile import checked_spec, with_strategy
from hypergpu.jobfile.spec import (
    Aware,
    Evaluation,
    Inner,
    JobSpec,
    Outer,
    Pay,
    RoundRule,
    TrainingSettings,
)


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


EACH = "each"
METERINGS = ("batched", EACH)
"""Ways of receipts onto the chain, by the names of the coordinator's `--metering`."""
_CONTRIBUTIONS_MIN = 175
"""Contributions of a job under `EACH`, more than the 100 transactions that its epoch is to have:
the node that is killed misses some, one that rests others.
"""
COUNTED_NODES = 5
"""Number of nodes for which the steps of `sync` were counted."""
_ROUNDS_PER_EPOCH = 3


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
        outer=Outer(momentum=0.8),
        evaluation=Evaluation(every=2),
        pay=Pay(unit_price=1_000_000, rounds_per_epoch=_ROUNDS_PER_EPOCH),
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
        training=TrainingSettings(rounds=40, seed=7),
        inner=Inner(learning_rate=0.01, schedule="cosine"),
        round=RoundRule(deadline_ms=30_000),
        evaluation=Evaluation(every=2),
        pay=Pay(unit_price=1_000_000, rounds_per_epoch=_ROUNDS_PER_EPOCH),
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
) -> DemoPlan:
    """The digits by a convolutional network, or without torch by softmax regression.

    Args:
        nodes: Number of nodes that train.
        is_short: Fewer rounds.
        worker: ``torch`` or ``numpy``; when empty, torch where it is installed.
        metering: One of `METERINGS`.
        is_fixed: With fixed steps and codec, no deadline and no pay, so that nothing depends on
            time.
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
        spec = replace(with_strategy(spec, "diloco"), round=RoundRule(quorum=1.0), pay=Pay())
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
    )


def _with_one_epoch(spec: JobSpec) -> JobSpec:
    """The same work in one epoch of enough contributions: more rounds of fewer steps."""
    training = spec.training
    rounds = max(training.rounds, -(-_CONTRIBUTIONS_MIN // training.nodes))
    steps = -(-training.rounds * training.inner_steps // rounds)
    # Planned rounds may be more, and never more than steps: all of them are one epoch.
    pay = replace(spec.pay, rounds_per_epoch=rounds * steps)
    return replace(spec, training=replace(training, rounds=rounds, inner_steps=steps), pay=pay)
