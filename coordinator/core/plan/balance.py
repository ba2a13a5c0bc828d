"""What unequal nodes make necessary: weights of updates made with unequal steps, and, for jobs that
synchronise each step, batches of unequal size.
"""

from collections.abc import Mapping
from math import floor
from typing import NamedTuple

from coordinator.core.measure.reading import NodeReading
from coordinator.core.plan.decision import NodeMemory
from coordinator.core.plan.spreading import Bounds, bounds
from hypergpu.ids import NodeId
from hypergpu.jobfile.spec import JobSpec
from hypergpu.units import Samples

_CLAMP = 2.0
"""Steps count as between half and twice the mean: a handful of Adam's first steps, scaled up as
FedNova would, made jobs diverge.
"""
_SCALE_MOST = 1.25
_WEIGHT_ONE = 1_000_000
_GAIN = 0.5
_CHANGE_MOST = 0.25
_NEAR = 1.1
"""Of the mean: noise on a step's time is no reason for other batches."""
_BATCH_MOST = 2
_HALVINGS = 60


class Contribution(NamedTuple):
    """What an update was made with."""

    samples: Samples
    inner_steps: int


class Weights(NamedTuple):
    """The outer step's pseudo-gradient is ``scale * weighted mean``."""

    weights: dict[NodeId, int]
    scale: float


class Batch(NamedTuple):
    """Of a node's inner steps."""

    size: int = 0
    """Samples; 0: as the job states."""
    share: float = 1.0
    """Of the job's."""
    reason: str = ""
    """``batch 24 of 32: a full one takes it 1.4 times the mean``; empty for the job's own."""


def update_weights(contributions: Mapping[NodeId, Contribution], sharding: str) -> Weights:
    """How far each update counts.

    Where any node may train on any sample an update counts by its samples. Where labels are
    skewed it counts by its steps, whatever their batches, and is first divided by them, so that the
    model does not drift to where most steps were taken; the mean is scaled back (FedNova,
    arXiv:2007.07481), within limits.

    Args:
        contributions: Of each update that is folded, with at least one sample and one step.
        sharding: ``iid`` or ``dirichlet``, as the job says.

    Returns:
        Weights of at least 1, and a factor in [1, 1.25] for the weighted mean.
    """
    if not contributions or sharding == "iid":
        return Weights({node: int(one.samples) for node, one in contributions.items()}, 1.0)
    all_steps = sum(one.inner_steps for one in contributions.values())
    mean_steps = all_steps / len(contributions)
    steps = {
        node: min(_CLAMP * mean_steps, max(mean_steps / _CLAMP, one.inner_steps))
        for node, one in contributions.items()
    }
    # D = (sum p a) * sum p Delta / a = (sum p a) (sum p / a) * mean of Delta weighted with p / a.
    shares = {node: one.inner_steps / all_steps for node, one in contributions.items()}
    effective = sum(shares[node] * steps[node] for node in shares)
    scale = effective * sum(shares[node] / steps[node] for node in shares)
    weights = {
        node: max(1, round(_WEIGHT_ONE * shares[node] * mean_steps / steps[node]))
        for node in contributions
    }
    return Weights(weights, min(_SCALE_MOST, max(1.0, scale)))


def own_batches(
    spec: JobSpec, memories: Mapping[NodeId, NodeMemory], readings: Mapping[NodeId, NodeReading]
) -> dict[NodeId, Batch]:
    """Each participant's batch: its own in jobs that exchange after every step, else the job's.

    A node whose update was missing in the round before counts as twice as slow as it was seen.

    Args:
        spec: The job's.
        memories: Of the participants.
        readings: Their steps are those of the job's own batch.

    Returns:
        Batches within `batch_limits` that come to as many samples as the job's own would.
    """
    if not _is_balanced(spec):
        return dict.fromkeys(memories, Batch())
    stated, limits = spec.training.batch_size, batch_limits(spec)
    held = _largest_remainders(
        {node: memory.batch_size or stated for node, memory in memories.items()},
        stated * len(memories),
        limits,
    )
    full_us = {
        node: readings[node].step_us.mean
        for node in held
        if node in readings and readings[node].step_us.count
    }
    step_us = {
        node: took_us * held[node] / stated * (1 << min(memories[node].cut_rounds, 16))
        for node, took_us in full_us.items()
    }
    found = balanced_batches(held, step_us, limits)
    mean_us = sum(full_us.values()) / max(1, len(full_us))
    times = {node: took_us / mean_us for node, took_us in full_us.items()}
    return {
        node: Batch(size, size / stated, _reason(size, stated, times.get(node)))
        for node, size in found.items()
    }


def batch_limits(spec: JobSpec) -> Bounds:
    """As far as batches may stray from the job's: as inner steps may, but never above twice, since
    what a device's memory holds is not known.
    """
    stated = spec.training.batch_size
    return bounds(stated, _BATCH_MOST * stated, spec.data.sharding)


def least_share(spec: JobSpec) -> float:
    """The smallest part of the job's batch that a step of it may have, in (0, 1]."""
    return batch_limits(spec).least / spec.training.batch_size if _is_balanced(spec) else 1.0


def _reason(size: int, stated: int, times: float | None) -> str:
    if size == stated:
        return ""
    full = "" if times is None else f": a full one takes it {times:.1f} times the mean"
    return f"batch {size} of {stated}{full}"


def balanced_batches(
    batches: Mapping[NodeId, Samples], step_us: Mapping[NodeId, float], limits: Bounds
) -> dict[NodeId, Samples]:
    """Batches that let all nodes end a step together (LB-BSP), a little closer to it each time.

    Only for jobs with H = 1. There a slow node can be given less to do in no other way. With
    more steps a node's H does the same without touching what a batch means to the learning rate.

    Args:
        batches: Those of the last step, within the limits.
        step_us: How long each node's step takes; who is not in it keeps its batch.
        limits: The smallest and the largest batch.

    Returns:
        Batches of the same sum within the limits, changed by no more than a quarter, but for
        rounding; the same as before while no step takes a tenth longer than the mean.
    """
    timed = {node: step_us[node] for node in batches if step_us.get(node, 0) > 0}
    if len(timed) < 2:
        return dict(batches)
    mean_us = sum(timed.values()) / len(timed)
    if max(timed.values()) <= _NEAR * mean_us:
        return dict(batches)
    wanted = {}
    for node, took_us in timed.items():
        change = _GAIN * (mean_us - took_us) / mean_us
        wanted[node] = batches[node] * (1 + min(_CHANGE_MOST, max(-_CHANGE_MOST, change)))
    total = sum(batches[node] for node in timed)
    return {**batches, **_largest_remainders(wanted, total, limits)}


def _is_balanced(spec: JobSpec) -> bool:
    """Whether every node takes one step a round, whatever is measured: no other setting says so."""
    return spec.aware.inner_steps_max == 1


def _largest_remainders(
    wanted: Mapping[NodeId, float], total: int, limits: Bounds
) -> dict[NodeId, Samples]:
    """Whole numbers of the given sum, in proportion within the limits: largest remainders first."""
    low, high = 0.0, limits.most / min(wanted.values())
    for _ in range(_HALVINGS):
        scale = (low + high) / 2
        is_less = sum(_within(mine * scale, limits) for mine in wanted.values()) <= total
        low, high = (scale, high) if is_less else (low, scale)
    exact = {node: _within(mine * low, limits) for node, mine in wanted.items()}
    whole = {node: floor(mine) for node, mine in exact.items()}
    able = [node for node in exact if whole[node] < limits.most]
    able.sort(key=lambda node: (whole[node] - exact[node], node))
    for node in able[: max(0, total - sum(whole.values()))]:
        whole[node] += 1
    return {node: Samples(mine) for node, mine in whole.items()}


def _within(value: float, limits: Bounds) -> float:
    return min(float(limits.most), max(float(limits.least), value))
