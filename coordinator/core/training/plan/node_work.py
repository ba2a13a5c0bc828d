"""One node's work while the plan is made: its batch and how long its steps take. The steps follow
when it is known who works (`inner_steps`).
"""

from typing import NamedTuple

from msgspec.structs import replace

from coordinator.core.training.plan.batches import (
    Batch,
    held_batch,
    node_bounds,
    node_growth,
    own_batch,
)
from coordinator.core.training.plan.decision import BatchGrowth
from coordinator.core.training.plan.node_speed import NodeSpeed
from coordinator.core.training.plan.round_shape import RoundShape
from coordinator.core.training.plan.speeds import RoundSpeeds
from coordinator.core.training.plan.step_limits import StepBounds
from hypergpu.ids import NodeId
from hypergpu.jobfile.spec import JobSpec

_STRETCH = 1.15
"""A round is made so much longer for slow nodes before their batches become smaller."""


class LongWork(NamedTuple):
    """Work of a node that no round waits for."""

    inner_steps: int
    batch_size: int
    rounds: int
    """Rounds that its lease lasts at most, at least 2."""
    made_for: int
    """Rounds after which its update is forecast to be in."""


class NodeWork(NamedTuple):
    """One node's work while the plan is made."""

    speed: NodeSpeed
    codec: str
    lighter_rounds: int
    moving_us: float
    """Time that it can only wait for bytes."""
    hidden_us: float
    """Further time in which bytes move, while it takes steps that it was granted."""
    batch: Batch
    step_us: float
    """Time of a step with its own batch."""
    prefetched_steps: int
    """Inner steps of this round that it may have taken already."""
    bounds: StepBounds
    is_batch_held: bool
    """Whether the node's last steps had the same batch, so that their number may be kept."""
    growth: BatchGrowth
    """Larger batches that the node keeps or tries."""
    long: LongWork | None = None
    """Its work where no round waits for it."""


def node_work(
    speeds: RoundSpeeds, shape: RoundShape, node: NodeId, codec_choice: tuple[str, int]
) -> NodeWork:
    """A candidate's batch and the time of its steps.

    Args:
        speeds: Of all candidates.
        shape: Of the round.
        node: The candidate.
        codec_choice: Its codec, and how many plans in a row have seen room for a finer one.
    """
    request, spec, sizes = speeds.request, speeds.request.spec, speeds.sizes.update_bytes
    speed, memory = speeds.nodes[node], speeds.memories.candidates[node]
    codec, lighter_rounds = codec_choice
    moved_us = speed.moving_us(sizes[codec], sizes[shape.codecs.down])
    stated_batch, prefetched_steps = spec.training.batch_size, request.prefetched.get(node, 0)
    before = held_batch(spec, memory)
    hidden_us = min(moved_us, prefetched_steps * speed.step_us * before.size / stated_batch)
    stretch = 1.0 if spec.aware.exchanges_each_step else _STRETCH
    room_us = stretch * shape.span_us - moved_us + hidden_us
    growth, bounds = memory.growth, node_bounds(request, node)
    if not spec.aware.exchanges_each_step:
        steps = room_us / speed.step_us * stated_batch / (growth.size or stated_batch)
        growth = node_growth(
            request, node, memory, steps=steps, noise_share=speeds.agreement.noise_share
        )
        bounds = bounds._replace(most=growth.trial or growth.size or stated_batch)
    batch = own_batch(
        spec,
        replace(memory, growth=growth),
        bounds,
        fewest_us=shape.limits.least * speed.step_us,
        room_us=room_us,
    )
    if batch.size != (memory.batch_size or stated_batch):
        # Steps that were taken with another batch begin no shard of this one.
        prefetched_steps, hidden_us = 0, 0.0
    return NodeWork(
        speed=speed,
        codec=codec,
        lighter_rounds=lighter_rounds,
        moving_us=moved_us - hidden_us,
        hidden_us=hidden_us,
        batch=batch,
        step_us=speed.step_us * batch.size / stated_batch,
        prefetched_steps=prefetched_steps,
        bounds=_own_bounds(shape.limits, batch.size / stated_batch, spec),
        is_batch_held=batch.size == (memory.batch_size or stated_batch),
        growth=growth if batch.size == growth.trial else replace(growth, trial=0),
    )


def _own_bounds(limits: StepBounds, batch_share: float, spec: JobSpec) -> StepBounds:
    """The bounds of a node with another batch: more inner steps make up for a smaller one, and
    fewer are as much work of a larger one.

    Where nodes hold samples that others do not, updates count by their steps, and the bounds stay.
    """
    if not spec.data.is_common:
        return limits
    most = max(1, int(limits.most / batch_share))
    return StepBounds(limits.least, min(spec.aware.inner_steps_max, most))
