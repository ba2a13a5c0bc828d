"""What the demo trains, and what counts as having learnt it."""

import importlib.util
from typing import NamedTuple

from msgspec.structs import replace

from hypergpu.jobfile import parse_job, with_strategy
from hypergpu.jobfile.spec import JobSpec, Pay, RoundRule


class DemoPlan(NamedTuple):
    """A demo."""

    spec: JobSpec
    worker: str
    target: float
    """Least accuracy on the held-out digits."""
    sync_steps: int
    """That every-step float32 training of this job takes to the target, counted on a LAN; 0: not
    counted for so many nodes.
    """
    note: str
    metering: str
    """One of `METERINGS`."""
    is_short: bool
    is_fixed: bool
    """Nothing in it depends on time: the same model every time."""

    @property
    def is_paid(self) -> bool:
        """Whether its work earns something."""
        return self.spec.pay.unit_price > 0


_TEXT = """
workload = "{workload}"
name = "demo"
strategy = "{strategy}"
{options}

[training]
rounds = {rounds}
inner_steps = {inner_steps}
batch_size = {batch_size}
nodes = {nodes}
seed = 7

[inner]
learning_rate = {learning_rate}
schedule = "cosine"

[outer]
momentum = {momentum}

[round]
{deadline}
quorum = 0.6

[evaluation]
every = {every}

[pay]
unit_price = 1000000
rounds_per_epoch = {rounds_per_epoch}
{planned}
"""


class _Size(NamedTuple):
    workload: str
    strategy: str
    options: str
    batch_size: int
    learning_rate: float
    momentum: float
    rounds: int
    rounds_short: int
    sync_steps: int
    sync_steps_short: int


EACH = "each"
METERINGS = ("batched", EACH)
"""How receipts reach the chain: as the coordinator's `--metering` names it."""
TRANSACTIONS_AN_EPOCH = 100
"""That are made at least where each contribution has its own."""
_CONTRIBUTIONS_AN_EPOCH = 175
"""That such an epoch has room for: the node that is killed misses some, one that rests others."""
_INNER_STEPS = 20
_ROUNDS_PER_EPOCH = 3
COUNTED_NODES = 5
"""For so many the steps of `sync` were counted."""

# Updates of this network are large enough to measure a line by; those of the regression are not, so
# that plans would guess at lines: diloco trains it. Steps of sync are those of hypergpu
# netsim run --lan --strategy sync with five nodes and this seed, evaluated after every five steps;
# other seeds take a fifth more.
_TORCH = _Size(
    "digits-cnn",
    strategy="aware",
    options="[options]\nchannels = 48",
    batch_size=32,
    learning_rate=0.0007,
    momentum=0.8,
    rounds=12,
    rounds_short=10,
    sync_steps=53,
    sync_steps_short=53,
)
_NUMPY = _Size(
    "digits-softmax",
    strategy="diloco",
    options="",
    batch_size=32,
    learning_rate=0.01,
    momentum=0.9,
    rounds=40,
    rounds_short=30,
    sync_steps=241,
    sync_steps_short=261,
)


def plan(
    nodes: int,
    *,
    is_short: bool,
    worker: str = "",
    metering: str = "batched",
    is_fixed: bool = False,
) -> DemoPlan:
    """The digits by a convolutional network, or without torch by softmax regression.

    Where each contribution has a transaction of its own, one epoch is the whole job, in more rounds
    of fewer steps where there would be too few of them.

    Args:
        nodes: How many train.
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
    spec = _spec(size, _course(size, nodes, metering, is_short=is_short))
    if is_fixed:
        spec = replace(with_strategy(spec, "diloco"), round=RoundRule(quorum=1.0), pay=Pay())
    return DemoPlan(
        spec,
        worker="torch" if is_torch else "numpy",
        target=0.97 if is_torch else 0.93,
        sync_steps=_sync_steps(size, nodes, is_short=is_short),
        note="" if is_torch else note,
        metering=metering,
        is_short=is_short,
        is_fixed=is_fixed,
    )


def _sync_steps(of: _Size, nodes: int, *, is_short: bool) -> int:
    if nodes != COUNTED_NODES:
        return 0
    return of.sync_steps_short if is_short else of.sync_steps


class _Course(NamedTuple):
    nodes: int
    rounds: int
    inner_steps: int
    rounds_per_epoch: int


def _course(of: _Size, nodes: int, metering: str, *, is_short: bool) -> _Course:
    rounds = of.rounds_short if is_short else of.rounds
    if metering != EACH:
        return _Course(nodes, rounds, _INNER_STEPS, _ROUNDS_PER_EPOCH)
    more = max(rounds, -(-_CONTRIBUTIONS_AN_EPOCH // nodes))
    steps = -(-rounds * _INNER_STEPS // more)
    # Planned rounds may be more, and never more than steps: all of them are one epoch.
    return _Course(nodes, more, steps, more * steps)


def _spec(of: _Size, course: _Course) -> JobSpec:
    # Else so short a job would be divided into rounds of a few steps each.
    planned = f"[aware]\nrounds_min = {course.rounds}" if of.strategy == "aware" else ""
    text = _TEXT.format(
        workload=of.workload,
        strategy=of.strategy,
        options=of.options,
        deadline="" if of.strategy == "aware" else 'deadline = "30s"',
        rounds=course.rounds,
        inner_steps=course.inner_steps,
        rounds_per_epoch=course.rounds_per_epoch,
        planned=planned,
        nodes=course.nodes,
        batch_size=of.batch_size,
        learning_rate=of.learning_rate,
        momentum=of.momentum,
        every=2,
    )
    return parse_job(text, source="the demo's job")
