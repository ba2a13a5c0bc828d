"""R13: a hundred names of somebody who trains nothing, beside honest nodes."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from coordinator.core.training.job.trust_memory import TrustMemory
from coordinator.core.training.trust.weights import WHOLE
from coordinator.shell.aggregation.evidence import SketchedUpdate, weigh_sketched
from coordinator.shell.aggregation.measurements import HeldOutGradient
from coordinator.shell.aggregation.sketch import WIDTH, Sketch, UpdateSketch
from hypergpu.ids import Digest, NodeId

SYBILS = tuple(NodeId(f"{number:03d}") for number in range(100))
ROUNDS = 30
Sent = dict[NodeId, Sketch]
FreeRider = Callable[[Sent, Sent, int], Sketch]
"""What one name sends, of the honest updates of the round before and of this one."""


def zero(_before: Sent, _now: Sent, _number: int) -> Sketch:
    return np.zeros(WIDTH)


def echo(before: Sent, _now: Sent, _number: int) -> Sketch:
    """The last step of the model, which everybody knows."""
    return np.mean(list(before.values()), axis=0) if before else np.zeros(WIDTH)


def copy(_before: Sent, now: Sent, _number: int) -> Sketch:
    """What one accomplice trained."""
    return next(iter(now.values()))


def stale(before: Sent, _now: Sent, number: int) -> Sketch:
    """What an accomplice trained in the round before, another one for each name."""
    return list(before.values())[number % len(before)] if before else np.zeros(WIDTH)


@pytest.mark.parametrize(
    ("free_ride", "honest"), [(zero, 20), (echo, 20), (copy, 20), (stale, 120)]
)
def test_of_a_hundred_names_that_train_nothing_99_parts_of_a_hundred_are_not_paid(
    free_ride: FreeRider, honest: int
) -> None:
    draws, memory, votes = np.random.default_rng(13), TrustMemory(), 0
    now, paid_votes = Sent(), dict[NodeId, int]()
    for number in range(ROUNDS):
        before = now
        common = draws.normal(size=WIDTH)
        now = {
            NodeId(f"{each:03d}"): common + 2 * draws.normal(size=WIDTH)
            for each in range(100, 100 + honest)
        }
        lies = {node: free_ride(before, now, each) for each, node in enumerate(SYBILS)}
        gradient = HeldOutGradient(Digest(f"{number:064d}"), 1.0, common)
        weighing = weigh_sketched(memory, "robust", measure(now | lies), gradient)
        memory = weighing.memory
        paid_votes = {node: weighing.votes.get(node, WHOLE) for node in (*now, *SYBILS)}
        votes += sum(paid_votes[node] for node in SYBILS)
    assert votes <= 0.01 * WHOLE * ROUNDS * len(SYBILS)
    assert sum(paid_votes[node] for node in now) >= 0.9 * WHOLE * honest


def measure(sent: Mapping[NodeId, Sketch]) -> list[SketchedUpdate]:
    return [
        SketchedUpdate(node, 20, UpdateSketch(sketch, float(np.linalg.norm(sketch)), 0.0))
        for node, sketch in sent.items()
    ]
