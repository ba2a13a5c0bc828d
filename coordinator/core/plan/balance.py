"""What unequal nodes make necessary: weights of updates made with unequal steps, and, for jobs that
synchronise each step, batches of unequal size.
"""

from collections.abc import Mapping
from math import floor
from typing import NamedTuple

from hypergpu.ids import NodeId
from hypergpu.units import Samples

_CLAMP = 2.0
"""Steps count as between half and twice the mean: a handful of Adam's first steps, scaled up as
FedNova would, made jobs diverge.
"""
_SCALE_MOST = 1.25
_WEIGHT_ONE = 1_000_000
_GAIN = 0.5
_CHANGE_MOST = 0.25


class Contribution(NamedTuple):
    """What an update was made with."""

    samples: Samples
    inner_steps: int


class Weights(NamedTuple):
    """The outer step's pseudo-gradient is ``scale * weighted mean``."""

    weights: dict[NodeId, int]
    scale: float


def update_weights(contributions: Mapping[NodeId, Contribution], sharding: str) -> Weights:
    """How far each update counts.

    Where any node may train on any sample an update counts by its samples. Where labels are
    skewed it is first divided by its steps, so that the model does not drift to where most steps
    were taken, and the mean is scaled back (FedNova, arXiv:2007.07481), within limits.

    Args:
        contributions: Of each update that is folded, with at least one sample and one step.
        sharding: ``iid`` or ``dirichlet``, as the job says.

    Returns:
        Weights of at least 1, and a factor in [1, 1.25] for the weighted mean.
    """
    if not contributions or sharding == "iid":
        return Weights({node: int(one.samples) for node, one in contributions.items()}, 1.0)
    samples = sum(one.samples for one in contributions.values())
    mean_steps = sum(one.inner_steps for one in contributions.values()) / len(contributions)
    steps = {
        node: min(_CLAMP * mean_steps, max(mean_steps / _CLAMP, one.inner_steps))
        for node, one in contributions.items()
    }
    # D = (sum p a) * sum p Delta / a = (sum p a) (sum p / a) * mean of Delta weighted with p / a.
    shares = {node: one.samples / samples for node, one in contributions.items()}
    effective = sum(shares[node] * steps[node] for node in shares)
    scale = effective * sum(shares[node] / steps[node] for node in shares)
    weights = {
        node: max(1, round(_WEIGHT_ONE * shares[node] * mean_steps / steps[node]))
        for node in contributions
    }
    return Weights(weights, min(_SCALE_MOST, max(1.0, scale)))


def balanced_batches(
    batches: Mapping[NodeId, Samples], step_us: Mapping[NodeId, float]
) -> dict[NodeId, Samples]:
    """Batches that let all nodes end a step together (LB-BSP), a little closer to it each time.

    Only for jobs with H = 1. There a slow node can be given less to do in no other way. With
    more steps a node's H does the same without touching what a batch means to the learning rate.

    Args:
        batches: Those of the last step, at least 1 each.
        step_us: How long each node's step took; who is not in it keeps its batch.

    Returns:
        Batches of the same sum, at least 1 each and changed by no more than a quarter, but for
        rounding.
    """
    timed = {node: step_us[node] for node in batches if step_us.get(node, 0) > 0}
    if len(timed) < 2:
        return dict(batches)
    mean_us = sum(timed.values()) / len(timed)
    wanted = {}
    for node, took_us in timed.items():
        change = _GAIN * (mean_us - took_us) / mean_us
        wanted[node] = batches[node] * (1 + min(_CHANGE_MOST, max(-_CHANGE_MOST, change)))
    total = sum(batches[node] for node in timed)
    return {**batches, **_rounded(wanted, total)}


def _rounded(wanted: Mapping[NodeId, float], total: int) -> dict[NodeId, Samples]:
    """Whole numbers of the given sum, in proportion, at least 1 each: largest remainders first."""
    scale = total / sum(wanted.values())
    exact = {node: max(1.0, mine * scale) for node, mine in wanted.items()}
    whole = {node: floor(mine) for node, mine in exact.items()}
    order = sorted(exact, key=lambda node: (whole[node] - exact[node], node))
    for node in order[: max(0, total - sum(whole.values()))]:
        whole[node] += 1
    # What the least of 1 has added is taken from the largest.
    while sum(whole.values()) > total:
        largest = max(whole, key=lambda node: (whole[node], node))
        whole[largest] -= 1
    return {node: Samples(mine) for node, mine in whole.items()}
