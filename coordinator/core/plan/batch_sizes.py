"""The batch of each node: the job's own, unless the node's memory or speed does not bear it.

The learning rate of a step stays the job's own, whatever the batch, and its schedule counts
samples. A smaller batch so means noisier steps of the same length: a node that takes twice as many
steps of half the batch moves further on the same samples, by a factor between the square root of
two, where noise leads, and two. Updates are weighed by samples (`weights`).

Where every step is exchanged no node can take fewer steps. There the round's span is the one in
which the nodes' batches come to as many samples as the job's own would (LB-BSP): fast nodes share
what slow ones leave, so that neither the mean of the gradients nor the learning rate means
anything else.
"""

from collections.abc import Sequence
from typing import NamedTuple

from coordinator.core.plan.decision import NodeMemory
from hypergpu.jobfile.spec import JobSpec

_LEAST_SHARE, _MOST_SHARE = 1 / 8, 2
"""Smallest and largest part of the job's batch. Below the first a step is mostly noise; above the
second it asks for more memory than the job's user may have tried.
"""
_HOLD = 1.1
"""A batch is kept until the round asks for this much more or less: noise is no reason."""
_HALVINGS = 60


class Batch(NamedTuple):
    """Samples of each of a node's inner steps."""

    size: int
    reason: str = ""
    """``batch 16 of 32: a larger one ran out of memory``; empty for the job's own batch."""


def most_samples(spec: JobSpec, memory: NodeMemory) -> int:
    """Samples of the largest batch that the node may be given.

    What a sample takes of a device's memory is known only once it was tried. So a node begins with
    the job's batch, and each report of its worker that this was too much halves it, for the rest of
    the job: another try would cost a round.
    """
    stated = spec.training.batch_size
    most = _MOST_SHARE * stated if exchanges_each_step(spec) else stated
    return min(most, memory.batch_most or most)


def exchanges_each_step(spec: JobSpec) -> bool:
    """Whether every node takes one step a round, whatever is measured."""
    return spec.aware.inner_steps_max == 1


def held_batch(spec: JobSpec, memory: NodeMemory) -> Batch:
    """The batch that the node was given last, as far as its memory bears it."""
    stated = spec.training.batch_size
    size = min(memory.batch_size or stated, most_samples(spec, memory))
    return _explain_batch(size, stated, memory, "as before")


def own_batch(spec: JobSpec, memory: NodeMemory, *, fewest_us: float, room_us: float) -> Batch:
    """The batch with which the fewest inner steps fit into the round.

    A smaller batch is the last resort: a slow node takes fewer steps first, down to the fewest that
    the job's sharding allows. Where moving bytes alone fills the round no batch would help.

    Args:
        spec: The job's.
        memory: Each of the node's rounds in a row that closed without its update halves the room.
        fewest_us: Time of the fewest inner steps with the job's own batch.
        room_us: The round's span less the time for which the node moves bytes.
    """
    stated, most = spec.training.batch_size, most_samples(spec, memory)
    share = room_us / fewest_us / (1 << min(memory.cut_rounds, 16))
    fits = min(most, _clamp(share) * stated if share > 0 else stated)
    held = held_batch(spec, memory).size
    if fits < most and held / _HOLD <= fits <= held * _HOLD:
        fits = held
    why = f"a full one takes {1 / share:.1f} times the time there is" if share > 0 else ""
    return _explain_batch(max(1, round(fits)), stated, memory, why)


def balanced_span_us(steps_us: Sequence[float], moving_us: Sequence[float]) -> float:
    """The span in which the batches of all nodes come to as many samples as the job's own.

    Args:
        steps_us: Time of one step of each node, with the job's own batch.
        moving_us: Time for which each node moves bytes.
    """
    nodes = tuple(zip(steps_us, moving_us, strict=True))
    low, high = 0.0, max(moved_us + _MOST_SHARE * step_us for step_us, moved_us in nodes)
    for _ in range(_HALVINGS):
        span_us = (low + high) / 2
        together = sum(_clamp((span_us - moved_us) / step_us) for step_us, moved_us in nodes)
        low, high = (span_us, high) if together < len(nodes) else (low, span_us)
    return high


def _clamp(share: float) -> float:
    return min(_MOST_SHARE, max(_LEAST_SHARE, share))


def _explain_batch(size: int, stated: int, memory: NodeMemory, why: str) -> Batch:
    if size == stated:
        return Batch(size)
    if size == memory.batch_most:
        why = "a larger one ran out of memory"
    return Batch(size, f"batch {size} of {stated}" + (f": {why}" if why else ""))
