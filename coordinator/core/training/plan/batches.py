"""Each node's batch: between an eighth of the stated one and four times it, and its learning rate.

Theory of operation. Fewer steps come before smaller batches: a batch shrinks where one step does
not fit into the time that there is, never below four samples, as batch norm needs several.

It grows where larger batches were measured to be faster by the sample, as on devices that a batch
does not fill. Nobody knows that without having tried: twice the batch is tried for two updates, and
kept where the slower of them took clearly less time a sample than the batch before. Then twice that
is tried; where it was no faster the node goes back, and tries again much later. Memory bounds it: a
batch in several passes is no faster. What was tried is journalled with the plan, so that a replay
tries nothing. And it grows only as far as noise leads in updates (`agreement`): beyond that fewer
steps are less progress by the sample.
"""

from math import ceil, sqrt
from typing import NamedTuple

from msgspec.structs import replace

from coordinator.core.training.plan.decision import (
    BatchGrowth,
    MemoryFit,
    NodeMemory,
    NodeResult,
    PlanRequest,
)
from hypergpu.ids import NodeId
from hypergpu.jobfile.spec import JobSpec

LEAST_SHARE, MOST_SHARE = 1 / 8, 4
"""Smallest and largest part of the job's batch. Below the first a step is mostly noise; above the
second too few steps are left.
"""
BALANCED_SHARE = 2
"""The largest where every step is exchanged."""
LEAST_SAMPLES = 4
"""Fewest samples of a batch, unless the job states fewer."""
_HOLD_BATCH = 1.1
"""A batch is kept until the round asks for this much more or less: noise is no reason."""
_TRIES = 2
"""Updates that a larger batch is tried with, and those with the batch before that it is held
against.
"""
_FASTER = 1.2
"""Samples a second have to rise by this much: steps that are saved cost some progress a sample."""
_HOLD_NOISE = 1.5
"""A batch that grew is kept until updates allow this much less."""
_STEPS_LEAST = 8
"""Steps in a round before its batch grows: four are left, at least."""
_LIKE_WORK = 1.5
"""Updates of so many times the samples say more of a batch than those before: what surrounds a
training is a smaller part of them.
"""
_NEWEST = 4
"""Updates that a mean goes over, about."""
_REST, _REST_MOST = 32, 256
"""Rounds before a batch that was no faster is tried again; each time in a row twice as many."""


class Batch(NamedTuple):
    """Batch of each of a node's inner steps."""

    size: int
    """Samples."""
    learning_rate: float = 0.0
    """Peak of the node's steps, see `batch_rate`; 0: as the job states."""
    reason: str = ""
    """``batch 16 of 32: a full one takes ...``; empty for the job's own batch."""


class BatchBounds(NamedTuple):
    """The smallest and the largest batch of a node."""

    least: int
    most: int


def most_samples(spec: JobSpec) -> int:
    """Samples of the largest batch that any node may be given. Where nodes hold samples that others
    do not, updates count by their steps, and no batch grows.
    """
    stated_batch = spec.training.batch_size
    if spec.aware.exchanges_each_step:
        return BALANCED_SHARE * stated_batch
    return MOST_SHARE * stated_batch if spec.data.is_common else stated_batch


def batch_bounds(spec: JobSpec, fit: MemoryFit) -> BatchBounds:
    """The bounds of a node whose memory takes so many samples at once."""
    stated_batch, most = spec.training.batch_size, most_samples(spec)
    least = min(stated_batch, max(ceil(LEAST_SHARE * stated_batch), LEAST_SAMPLES))
    at_once = [size for size in (fit.micro_batch, spec.inner.micro_batch) if size]
    return BatchBounds(least, max(stated_batch, min(most, *at_once)) if at_once else most)


def node_bounds(request: PlanRequest, node: NodeId) -> BatchBounds:
    """The bounds of a candidate."""
    return batch_bounds(request.spec, request.fits.get(node, MemoryFit()))


def held_batch(spec: JobSpec, memory: NodeMemory) -> Batch:
    """The batch that the node was given last, as far as the job still allows it."""
    stated_batch = spec.training.batch_size
    size = min(memory.batch_size or stated_batch, most_samples(spec))
    return explain_batch(spec, size, "as before")


def own_batch(
    spec: JobSpec,
    memory: NodeMemory,
    bounds: BatchBounds,
    *,
    fewest_us: float,
    room_us: float,
) -> Batch:
    """The batch with which the fewest inner steps fit into the round.

    A smaller batch is the last resort: a slow node takes fewer steps first, down to the fewest that
    the job's sharding allows. Where moving bytes alone fills the round no batch would help.

    Args:
        spec: The job's.
        memory: Each of the node's rounds in a row that closed without its update halves the room.
        bounds: The largest is what the node takes where there is time.
        fewest_us: Time of the fewest inner steps with the job's own batch.
        room_us: The round's span less the time for which the node moves bytes.
    """
    stated_batch = spec.training.batch_size
    share = room_us / fewest_us / (1 << min(memory.cut_rounds, 16))
    fits = float(bounds.most) if share > 0 else float(stated_batch)
    if share > 0:
        fits = min(bounds.most, max(bounds.least, share * stated_batch))
    before = held_batch(spec, memory).size
    if fits < bounds.most and before / _HOLD_BATCH <= fits <= before * _HOLD_BATCH:
        fits = min(before, bounds.most)
    size = max(1, round(fits))
    if size > stated_batch and not spec.aware.exchanges_each_step:
        return explain_batch(spec, size, growth_reason(memory.growth, size))
    why = f"a full one takes {1 / share:.1f} times the time there is" if share > 0 else ""
    return explain_batch(spec, size, why)


def explain_batch(spec: JobSpec, size: int, why: str) -> Batch:
    """A batch with its learning rate and its reason; the job's own needs neither."""
    stated_batch = spec.training.batch_size
    if size == stated_batch:
        return Batch(size)
    reason = f"batch {size} of {stated_batch}" + (f": {why}" if why else "")
    return Batch(size, batch_rate(spec, size), reason)


def growth_reason(growth: BatchGrowth, size: int) -> str:
    """Reason of a batch that is larger than the job's."""
    if size == growth.trial:
        return "on trial, whether it is faster by the sample"
    return "measured to be faster by the sample" if size == growth.size else "as before"


def growth_after(
    growth: BatchGrowth, result: NodeResult, stated_batch: int, number: int
) -> BatchGrowth:
    """The node's growth once an update of it is in, or missing.

    Args:
        growth: What was known before.
        result: Of the node in the round before ``number``.
        stated_batch: The job's.
        number: Of the round that is planned.
    """
    size, plan = growth.size or stated_batch, result.plan
    if result.took_ms <= 0:
        return _after_failure(growth, number) if growth.trial else growth
    batch = plan.batch(stated_batch)
    samples = plan.inner_steps * batch
    if result.compute_ms <= 0 or batch not in (size, growth.trial):
        return growth
    sample_us = 1000.0 * result.compute_ms / samples
    if batch == size:
        is_more = samples > _LIKE_WORK * growth.samples
        count = 1 if is_more else growth.updates + 1
        mean_us = growth.sample_us + (sample_us - growth.sample_us) / min(count, _NEWEST)
        return replace(growth, sample_us=mean_us, updates=count, samples=samples)
    tries_us = (*growth.tries_us, sample_us)
    if len(tries_us) < _TRIES:
        return replace(growth, tries_us=tries_us)
    if _FASTER * max(tries_us) > growth.sample_us:
        return _after_failure(growth, number)
    return BatchGrowth(
        size=batch, sample_us=sum(tries_us) / len(tries_us), updates=_TRIES, samples=samples
    )


def _after_failure(growth: BatchGrowth, number: int) -> BatchGrowth:
    rest = min(_REST_MOST, _REST << min(growth.failures, 8))
    return replace(
        growth,
        trial=0,
        tries_us=(),
        next_round=number + rest,
        failures=growth.failures + 1,
    )


def growth_for_round(
    growth: BatchGrowth,
    bounds: BatchBounds,
    stated_batch: int,
    *,
    number: int,
    steps: float,
    noise_share: float,
) -> BatchGrowth:
    """The growth with the batch that the node keeps or tries in a round, in ``size`` or ``trial``:
    the largest one that its work is made of.

    Args:
        growth: Of the node, the round before included.
        bounds: Of the node.
        stated_batch: The job's.
        number: Of the round.
        steps: Number of steps that fill the round with the batch that is kept.
        noise_share: Largest batch over the job's that costs next to no progress a sample.
    """
    size = growth.size or stated_batch
    most = min(bounds.most, int(_HOLD_NOISE * noise_share * stated_batch))
    if size > max(stated_batch, most):
        growth, size = BatchGrowth(next_round=growth.next_round), stated_batch
    if growth.trial:
        return growth if growth.trial <= most else _after_failure(growth, number)
    larger = min(2 * size, bounds.most)
    can_try = growth.updates >= _TRIES and number >= growth.next_round
    if not can_try or steps < _STEPS_LEAST or not size < larger <= noise_share * stated_batch:
        return growth
    return replace(growth, trial=larger, tries_us=())


def node_growth(
    request: PlanRequest, node: NodeId, memory: NodeMemory, *, steps: float, noise_share: float
) -> BatchGrowth:
    """Larger batches that a candidate keeps or tries in the round; other arguments as of
    `growth_for_round`.
    """
    if request.spec.aware.exchanges_each_step:
        return memory.growth
    return growth_for_round(
        memory.growth,
        node_bounds(request, node),
        request.spec.training.batch_size,
        number=request.round,
        steps=0.0 if memory.cut_rounds or node in request.on_trial else steps,
        noise_share=noise_share,
    )


def batch_rate(spec: JobSpec, size: int) -> float:
    """Learning rate of a node with a batch of its own, by the job's rule; 0: the job's.

    The square root of the batch's share for AdamW, whose steps are as long whatever the gradient,
    and the share itself for SGD.
    """
    stated_batch = spec.training.batch_size
    if size == stated_batch or spec.aware.batch_rate == "stated" or spec.aware.exchanges_each_step:
        return 0.0
    share = size / stated_batch
    return spec.inner.learning_rate * (share if spec.inner.optimizer == "sgd" else sqrt(share))
