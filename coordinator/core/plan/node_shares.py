"""The third stage of a plan, the shares: each candidate's codec, batch and inner steps, who takes
part, and for whom the round waits.
"""

from collections.abc import Mapping
from math import ceil
from typing import NamedTuple

from msgspec.structs import replace

from coordinator.core.network.work_forecast import FinishForecast
from coordinator.core.plan.agreement import noise_share
from coordinator.core.plan.batches import (
    Batch,
    BatchBounds,
    batch_bounds,
    exchanges_each_step,
    explain_batch,
    growth_for_round,
    growth_reason,
    held_batch,
    own_batch,
)
from coordinator.core.plan.codecs import (
    byte_budget,
    node_codecs,
)
from coordinator.core.plan.decision import (
    BatchGrowth,
    MemoryFit,
    ModelSizes,
    NodeMemory,
    PlanRequest,
)
from coordinator.core.plan.long_work import ROUNDS_MOST, LongWork, WorkTimes, long_work
from coordinator.core.plan.node_work import (
    StepBounds,
    fit_steps,
    own_bounds,
    own_steps,
    prefetch_limit,
    steady_span_us,
)
from coordinator.core.plan.participation import (
    Participation,
    PartOfMiddle,
    candidate_memories,
    participations,
)
from coordinator.core.plan.round_shape import OVERRUN, RoundShape, is_middle_kept
from coordinator.core.plan.speeds import (
    NodeSpeed,
)
from hypergpu.ids import NodeId
from hypergpu.units import Bytes

_STRETCH = 1.15
"""A round is made so much longer for slow nodes before their batches become smaller."""
_LEAST_SPAN_US = 250_000
"""Nobody is too slow for a round of so little: opening and closing it take as long."""
_JOB_ENDS = "the job ends before its work would"


class PlanInputs(NamedTuple):
    """What the plans of all nodes of the round are made of."""

    request: PlanRequest
    sizes: ModelSizes
    common: RoundShape
    limits: StepBounds

    @property
    def stated_batch(self) -> int:
        """Samples in a step of the job's own batch."""
        return self.request.spec.training.batch_size

    def batch_bounds(self, node: NodeId) -> BatchBounds:
        """The smallest and the largest batch of a node."""
        return batch_bounds(self.request.spec, self.request.fits.get(node, MemoryFit()))

    def growth_for(self, node: NodeId, memory: NodeMemory, steps: float) -> BatchGrowth:
        """What a node keeps or tries of larger batches, of which so many steps fill the round."""
        if exchanges_each_step(self.request.spec):
            return memory.growth
        return growth_for_round(
            memory.growth,
            self.batch_bounds(node),
            self.stated_batch,
            number=self.request.round,
            steps=0.0 if memory.cut_rounds or node in self.request.on_trial else steps,
            noise_share=noise_share(self.request),
        )


class NodeWork(NamedTuple):
    """One node's work while the plan is made."""

    known: NodeSpeed
    codec: str
    lighter_rounds: int
    moving_us: float
    """Time that it can only wait for bytes."""
    hidden_us: float
    """Further time in which bytes move, while it takes steps that it was granted."""
    batch: Batch
    step_us: float
    """Time of a step with its own batch."""
    prefetched: int
    """Inner steps of this round that it may have taken already."""
    bounds: StepBounds
    is_batch_held: bool
    """Whether its steps before were of the same batch, so that their number may be kept."""
    growth: BatchGrowth
    """What it keeps or tries of larger batches."""
    long: LongWork | None = None
    """Its work where no round waits for it."""

    @property
    def least_us(self) -> float:
        """Time of the fewest steps that it may take, with moving."""
        least = max(self.bounds.least, min(self.prefetched, self.bounds.most))
        return least * self.step_us + self.moving_us


class NodeShares(NamedTuple):
    """What each candidate does in the round."""

    works: Mapping[NodeId, NodeWork]
    parts: Mapping[NodeId, Participation]
    asked: Mapping[NodeId, int]
    """Inner steps of participants that fill the round."""
    given: Mapping[NodeId, int]
    """The same, fewer where the job ends."""
    span_us: float
    """The round's span with what it is made longer by for those whom it waits for."""

    @property
    def working(self) -> dict[NodeId, NodeWork]:
        """Work of those who take part."""
        return {node: work for node, work in self.works.items() if self.parts[node].is_taking_part}


def node_shares(inputs: PlanInputs, known: Mapping[NodeId, NodeSpeed]) -> NodeShares:
    """Each candidate's work, and whether it takes part.

    Args:
        inputs: What holds for all of them.
        known: Speed of each candidate.
    """
    request = inputs.request
    memories = candidate_memories(request)
    codecs = _codecs(inputs, known, memories)
    works = {
        node: _node_work(inputs, node, mine, memories[node], codecs[node])
        for node, mine in known.items()
    }
    parts = participations(
        request,
        memories,
        {node: _part_of_middle(inputs, work) for node, work in works.items()},
        {node: mine.reading for node, mine in known.items()},
    )
    awaited = {
        node: work
        for node, work in works.items()
        if parts[node].is_awaited and parts[node].is_taking_part
    }
    round_us, rounds_left = _awaited_round(inputs, awaited, parts)
    works = {
        node: work
        if parts[node].is_awaited
        else _with_long_work(inputs, node, work, parts[node].memory, round_us, rounds_left)
        for node, work in works.items()
    }
    taking_part = {node: work for node, work in works.items() if parts[node].is_taking_part}
    span_us = _stretched_us(inputs, taking_part)
    asked = _asked_steps(taking_part, parts, span_us)
    rounds_left = _rounds_left(inputs, taking_part, asked)
    too_long = {n for n, w in taking_part.items() if w.long and w.long.made_for > rounds_left}
    parts = {
        node: part._replace(is_taking_part=False, reason=_JOB_ENDS) if node in too_long else part
        for node, part in parts.items()
    }
    working = {node: work for node, work in taking_part.items() if node not in too_long}
    return NodeShares(works, parts, asked, _given_steps(inputs, working, asked), span_us)


def _awaited_round(
    inputs: PlanInputs, awaited: Mapping[NodeId, NodeWork], parts: Mapping[NodeId, Participation]
) -> tuple[float, int]:
    """When the last of those whom the round waits for is forecast to be in, and how many rounds the
    job would last if they did all of it.
    """
    steps = _asked_steps(awaited, parts, _stretched_us(inputs, awaited))
    round_us = 1000.0 * max(
        finish(inputs, work, steps[node]).mean_ms for node, work in awaited.items()
    )
    return round_us, _rounds_left(inputs, awaited, steps)


def _part_of_middle(inputs: PlanInputs, work: NodeWork) -> PartOfMiddle:
    """What fits into a round, where the next one is begun while bytes move as far as the job lets
    it.
    """
    common, step_us = inputs.common, work.known.step_us
    middle_us = common.middle.inner_steps * step_us
    moved_us = work.moving_us + work.hidden_us
    begun = prefetch_limit(inputs.request.spec, common.middle.inner_steps)
    moving_us = moved_us - min(moved_us, begun * step_us)
    in_least = (max(_LEAST_SPAN_US, common.span_us) - moving_us) / middle_us
    is_measured = bool(work.known.reading.step_us.count)
    room_us = common.span_us - moving_us
    computing = max(room_us, _LEAST_SPAN_US - moving_us) / max(1.0, common.middle.computing_us)
    return PartOfMiddle(room_us / middle_us, computing, is_measured, in_least)


def _with_long_work(
    inputs: PlanInputs,
    node: NodeId,
    work: NodeWork,
    memory: NodeMemory,
    round_us: float,
    rounds_left: int,
) -> NodeWork:
    """The work of a node that no round waits for: one step where nothing is known of its speed, or
    what was known kept it from delivering until it was excluded.
    """
    stated, known = inputs.stated_batch, work.known
    moving_us, growth = work.moving_us + work.hidden_us, memory.growth
    if not known.reading.step_us.count or memory.retries:
        long, reason = LongWork(1, stated, ROUNDS_MOST, 1), ""
    else:
        up_bytes = inputs.sizes.update_bytes[work.codec]
        forecast = known.finish(round_us / known.step_us, up_bytes, Bytes(0))
        spread_us = 1000.0 * forecast.deviation_ms
        times = WorkTimes(known.step_us, moving_us, spread_us, round_us)
        bounds = inputs.batch_bounds(node)
        growth = inputs.growth_for(node, memory, 0.0)
        kept = bounds._replace(most=growth.size or stated)
        long = _long_work(inputs, times, kept, memory, rounds_left)
        steps = long.inner_steps * long.batch_size / kept.most
        growth = inputs.growth_for(node, memory, steps)
        if growth.trial:
            tried = bounds._replace(most=growth.trial)
            long = _long_work(inputs, times, tried, memory, rounds_left)
        growth = growth if long.batch_size == growth.trial else replace(growth, trial=0)
        is_grown = long.batch_size > stated
        reason = growth_reason(growth, long.batch_size) if is_grown else "as much as its time holds"
    return work._replace(
        moving_us=moving_us,
        hidden_us=0.0,
        batch=explain_batch(long.batch_size, stated, reason),
        step_us=known.step_us * long.batch_size / stated,
        prefetched=0,
        growth=growth,
        long=long,
    )


def _long_work(
    inputs: PlanInputs,
    times: WorkTimes,
    batches: BatchBounds,
    memory: NodeMemory,
    rounds_left: int,
) -> LongWork:
    """Work of batches up to the largest, whose time goes as their samples do."""
    times = times._replace(step_us=times.step_us * batches.most / inputs.stated_batch)
    return long_work(
        times, inputs.limits, batches, cut_rounds=memory.cut_rounds, rounds_most=rounds_left
    )


def _codecs(
    inputs: PlanInputs, known: Mapping[NodeId, NodeSpeed], memories: Mapping[NodeId, NodeMemory]
) -> dict[NodeId, tuple[str, int]]:
    """Each candidate's codec, and how many plans in a row have seen room for a finer one."""
    request, common = inputs.request, inputs.common
    computing_us = OVERRUN * common.middle.computing_us
    utilisation = request.spec.aware.utilisation
    budgets = {node: byte_budget(mine, computing_us, utilisation) for node, mine in known.items()}
    return node_codecs(common.family, memories, inputs.sizes, budgets, common.weights)


def _node_work(
    inputs: PlanInputs,
    node: NodeId,
    known: NodeSpeed,
    memory: NodeMemory,
    chosen: tuple[str, int],
) -> NodeWork:
    """A candidate's batch and least time: the steps follow when it is known who works."""
    request, sizes, common = inputs.request, inputs.sizes, inputs.common
    codec, lighter_rounds = chosen
    moved_us = known.moving_us(sizes.update_bytes[codec], sizes.update_bytes[common.down])
    stated, prefetched = inputs.stated_batch, request.prefetched.get(node, 0)
    held = held_batch(request.spec, memory)
    hidden_us = min(moved_us, prefetched * known.step_us * held.size / stated)
    stretch = 1.0 if exchanges_each_step(request.spec) else _STRETCH
    room_us = stretch * common.span_us - moved_us + hidden_us
    growth, bounds = memory.growth, inputs.batch_bounds(node)
    if not exchanges_each_step(request.spec):
        steps = room_us / known.step_us * stated / (growth.size or stated)
        growth = inputs.growth_for(node, memory, steps)
        bounds = bounds._replace(most=growth.trial or growth.size or stated)
    batch = own_batch(
        request.spec,
        replace(memory, growth=growth),
        bounds,
        fewest_us=inputs.limits.least * known.step_us,
        room_us=room_us,
    )
    if batch.size != (memory.batch_size or stated):
        # Steps that were taken with another batch begin no shard of this one.
        prefetched, hidden_us = 0, 0.0
    return NodeWork(
        known=known,
        codec=codec,
        lighter_rounds=lighter_rounds,
        moving_us=moved_us - hidden_us,
        hidden_us=hidden_us,
        batch=batch,
        step_us=known.step_us * batch.size / stated,
        prefetched=prefetched,
        bounds=own_bounds(inputs.limits, batch.size / stated, request.spec),
        is_batch_held=batch.size == (memory.batch_size or stated),
        growth=growth if batch.size == growth.trial else replace(growth, trial=0),
    )


def _asked_steps(
    works: Mapping[NodeId, NodeWork], parts: Mapping[NodeId, Participation], span_us: float
) -> dict[NodeId, int]:
    """The steps that participants would take if the job went on."""
    return {
        node: work.long.inner_steps
        if work.long
        else _inner_steps(work, span_us, parts[node].memory)
        for node, work in works.items()
    }


def _round_samples(
    works: Mapping[NodeId, NodeWork], steps: Mapping[NodeId, int]
) -> tuple[int, float]:
    """Samples of a round by those whom it waits for, and by everybody."""
    samples = {node: steps[node] * work.batch.size for node, work in works.items()}
    awaited = sum(samples[node] for node, work in works.items() if not work.long)
    beside = sum(samples[n] / work.long.made_for for n, work in works.items() if work.long)
    return awaited, max(1.0, awaited + beside)


def _rounds_left(
    inputs: PlanInputs, works: Mapping[NodeId, NodeWork], steps: Mapping[NodeId, int]
) -> int:
    """How many rounds like this one the job goes on for, at least one."""
    request = inputs.request
    left = request.samples_total - request.samples_done
    return max(1, ceil(left / _round_samples(works, steps)[1]))


def _given_steps(
    inputs: PlanInputs, works: Mapping[NodeId, NodeWork], asked: Mapping[NodeId, int]
) -> dict[NodeId, int]:
    """The steps that the end of the job leaves to those who take part."""
    request = inputs.request
    awaited = {node: asked[node] for node, work in works.items() if not work.long}
    batches = {node: work.batch.size for node, work in works.items()}
    planned, together = _round_samples(works, asked)
    left = request.samples_total - request.samples_done
    fitted = fit_steps(awaited, batches, ceil(left * planned / together))
    # What was prefetched is done, or nearly so: the end of the job does not cut it.
    given = {n: max(steps, min(asked[n], works[n].prefetched)) for n, steps in fitted.items()}
    return {**{node: asked[node] for node in works}, **given}


def _inner_steps(work: NodeWork, span_us: float, memory: NodeMemory) -> int:
    """The steps that fill the round, and no fewer than were prefetched."""
    if not work.is_batch_held:
        memory = replace(memory, inner_steps=0)
    steps = own_steps(work.step_us, work.moving_us, span_us, bounds_=work.bounds, memory=memory)
    return max(steps, min(work.prefetched, work.bounds.most))


def _stretched_us(inputs: PlanInputs, working: Mapping[NodeId, NodeWork]) -> float:
    """The round's span with what it is made longer by for those whom it waits for."""
    common, previous = inputs.common, inputs.request.previous
    stretches = [work.least_us for work in working.values() if work.long is None]
    span_us = max([common.span_us, *stretches])
    if previous is None or not is_middle_kept(inputs.request, common.middle):
        return span_us
    return max(common.span_us, steady_span_us(span_us, previous.stretched_ms))


def finish(inputs: PlanInputs, work: NodeWork, given: int) -> FinishForecast:
    """When a node is done with so many steps, less what it took ahead."""
    sizes = inputs.sizes.update_bytes
    steps = given * work.batch.size / inputs.stated_batch
    if given >= work.prefetched:
        steps = max(0.0, steps - work.hidden_us / work.known.step_us)
    return work.known.finish(steps, sizes[work.codec], sizes[inputs.common.down])
