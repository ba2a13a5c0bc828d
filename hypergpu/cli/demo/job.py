"""What the demo trains, and what counts as having learnt it."""

import importlib.util
from typing import NamedTuple

from hypergpu.jobfile import parse_job
from hypergpu.spec import JobSpec


class Plan(NamedTuple):
    """A demo."""

    spec: JobSpec
    worker: str
    target: float
    """Least accuracy on the held-out digits."""
    note: str


_TEXT = """
workload = "{workload}"
name = "demo"

[training]
rounds = {rounds}
inner_steps = 20
batch_size = {batch_size}
nodes = {nodes}
seed = 7

[inner]
learning_rate = {learning_rate}
schedule = "cosine"

[outer]
momentum = {momentum}

[round]
deadline = "30s"
quorum = 0.6

[evaluation]
every = {every}
"""


class _Size(NamedTuple):
    workload: str
    batch_size: int
    learning_rate: float
    momentum: float
    rounds: int
    rounds_short: int


# Over five seeds the network ends at 98.6 % or better after twelve rounds (98.0 % with the usual
# momentum of 0.9, which overshoots in so few), with this seed at 98.3 % after eight; the regression
# at 94 %.
_TORCH = _Size(
    "digits-cnn",
    batch_size=64,
    learning_rate=0.0007,
    momentum=0.8,
    rounds=20,
    rounds_short=8,
)
_NUMPY = _Size(
    "digits-softmax",
    batch_size=32,
    learning_rate=0.01,
    momentum=0.9,
    rounds=40,
    rounds_short=20,
)


def plan(nodes: int, *, is_short: bool, worker: str = "") -> Plan:
    """The digits by a convolutional network, or without torch by softmax regression.

    Args:
        nodes: How many train.
        is_short: Fewer rounds.
        worker: ``torch`` or ``numpy``; when empty, torch where it is installed.
    """
    has_torch = importlib.util.find_spec("torch") is not None
    if (worker or ("torch" if has_torch else "numpy")) == "torch":
        return Plan(_spec(_TORCH, nodes, is_short=is_short), "torch", 0.97, "")
    why = "as asked" if worker else "torch is not installed"
    note = f"{why}: softmax regression by the numpy worker, which reaches less accuracy"
    return Plan(_spec(_NUMPY, nodes, is_short=is_short), "numpy", 0.93, note)


def _spec(of: _Size, nodes: int, *, is_short: bool) -> JobSpec:
    text = _TEXT.format(
        workload=of.workload,
        rounds=of.rounds_short if is_short else of.rounds,
        nodes=nodes,
        batch_size=of.batch_size,
        learning_rate=of.learning_rate,
        momentum=of.momentum,
        every=2,
    )
    return parse_job(text, source="the demo's job")
