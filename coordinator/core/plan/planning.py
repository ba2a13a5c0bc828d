"""A round's plan: one pure function of what was measured, asked and planned before.

The median node's work comes first: its codec's family, its inner steps, and with them the span that
the round is made for. Then each node gets the steps that fill that span, whoever cannot keep it
rests, and the deadline follows from when everybody's update is forecast to be in.
"""

from collections.abc import Mapping
from math import ceil
from typing import NamedTuple

from msgspec.structs import replace

from coordinator.core.measure.forecast import FinishForecast
from coordinator.core.measure.reading import NodeReading
from coordinator.core.plan.capacity import capacities, weighted_median
from coordinator.core.plan.codecs import (
    FINEST,
    CodecFamily,
    byte_budget,
    codec_for_span,
    delta_codec,
    node_codecs,
    round_family,
)
from coordinator.core.plan.decision import (
    MemoryFit,
    ModelSizes,
    NodeMemory,
    NodePlan,
    PlanMemory,
    PlanRequest,
    RoundPlan,
)
from coordinator.core.plan.long_work import ROUNDS_MOST, LongWork, WorkTimes, long_work
from coordinator.core.plan.median_node import (
    MedianNode,
    computing_beside,
    computing_for,
    most_inner_steps,
    node_reason,
    plan_median_node,
    resting_reason,
    round_reason,
)
from coordinator.core.plan.memory_fit import fit_plan
from coordinator.core.plan.node_work import (
    Batch,
    StepBounds,
    balanced_span_us,
    exchanges_each_step,
    fit_steps,
    held_batch,
    own_batch,
    own_bounds,
    own_steps,
    planned_prefetch,
    steady_span_us,
    step_bounds,
    strayed_rounds,
)
from coordinator.core.plan.participation import (
    LEAST_MS,
    NodeShare,
    Participation,
    UpdateArrival,
    absentees,
    candidate_memories,
    deadline,
    is_excluded,
    participations,
)
from coordinator.core.plan.speeds import (
    NodeSpeed,
    PlannedUpload,
    node_speeds,
    stated_connections,
    upload_delays,
)
from coordinator.core.plan.unmeasured import unmeasured_plan
from hypergpu.ids import NodeId
from hypergpu.jobfile.spec import JobSpec
from hypergpu.units import Bytes, Milliseconds, Samples

_UNMEASURED_SPANS = 2
"""A node that was never seen at work gets so many spans."""
_COMFORT = 4
"""Times the user's own H: beyond it the codec gives way before H does."""
_STRETCH = 1.15
"""A round is made so much longer for slow nodes before their batches become smaller."""
_OVERRUN = 1.5
"""A node whose line is worse than the middle one's takes fewer steps before a sparser codec."""
_LEAST_SPAN_US = 250_000
"""Nobody is too slow for a round of so little: opening and closing it take as long."""
_OF_STATED = 0.75
"""A round is made to take this much of a deadline that the job states."""


class CommonPlan(NamedTuple):
    """What holds for all nodes of the round."""

    family: CodecFamily
    down: str
    middle: MedianNode
    step_us: float
    """Of the middle node."""
    weights: Mapping[NodeId, float]
    """What each candidate can add, see `capacities`."""
    span_us: float
    """What the round is made to take, before it is stretched for anybody."""


class PlanInputs(NamedTuple):
    """What the plans of all nodes of the round are made of."""

    request: PlanRequest
    sizes: ModelSizes
    common: CommonPlan
    limits: StepBounds

    @property
    def stated_batch(self) -> int:
        """Samples in a step of the job's own batch."""
        return self.request.spec.training.batch_size


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
    long: LongWork | None = None
    """Its work where no round waits for it."""

    @property
    def least_us(self) -> float:
        """Time of the fewest steps that it may take, with moving."""
        least = max(self.bounds.least, min(self.prefetched, self.bounds.most))
        return least * self.step_us + self.moving_us


def plan_round(
    request: PlanRequest, readings: Mapping[NodeId, NodeReading], sizes: ModelSizes
) -> RoundPlan:
    """The plan of the round ``request.round``.

    Args:
        request: At least one candidate.
        readings: What is known of nodes; those of others than the candidates are ignored.
        sizes: Bytes of the model under each codec.

    Returns:
        A plan in which every candidate either takes part or rests with a reason, and at least
        one takes part. Equal arguments give equal plans.
    """
    plan = _candidates_plan(request, readings, sizes)
    paused = {node: resting_reason(why) for node, why in request.paused.items()}
    fitted = {
        node: fit_plan(part, request.fits.get(node, MemoryFit()), request.spec)
        for node, part in plan.nodes.items()
    }
    return replace(plan, nodes=fitted, resting={**plan.resting, **paused})


def _candidates_plan(
    request: PlanRequest, readings: Mapping[NodeId, NodeReading], sizes: ModelSizes
) -> RoundPlan:
    memories = candidate_memories(request)
    known = node_speeds(
        request.candidates,
        readings,
        size_bytes=sizes.update_bytes[FINEST],
        held={node: memory.connections for node, memory in memories.items()},
        stated=stated_connections(request.spec),
    )
    if not known:
        return unmeasured_plan(request, readings, sizes)
    common = _common_plan(request, known, memories, sizes)
    limits = step_bounds(
        common.middle.inner_steps,
        request.spec.aware.inner_steps_max,
        request.spec.data.sharding,
    )
    inputs = PlanInputs(request, sizes, common, limits)
    codecs = _codecs(inputs, known, memories)
    works = {
        node: _node_work(inputs, node, mine, memories[node], codecs[node])
        for node, mine in known.items()
    }
    found = participations(
        request,
        memories,
        {node: _share_of_middle(inputs, work) for node, work in works.items()},
        {node: mine.reading for node, mine in known.items()},
    )
    round_us = _round_us(inputs, works, found)
    works = {
        node: work
        if found[node].is_awaited
        else _with_long_work(inputs, work, memories[node], round_us)
        for node, work in works.items()
    }
    return _assemble_plan(inputs, works, found)


def _round_us(
    inputs: PlanInputs, works: Mapping[NodeId, NodeWork], found: Mapping[NodeId, Participation]
) -> float:
    """When the last of those whom the round waits for is forecast to be in."""
    awaited = {
        node: work
        for node, work in works.items()
        if found[node].is_awaited and found[node].is_taking_part
    }
    span_us = _stretched_us(inputs, awaited)
    return 1000.0 * max(
        _finish(inputs, work, _inner_steps(work, span_us, found[node].memory)).mean_ms
        for node, work in awaited.items()
    )


def _share_of_middle(inputs: PlanInputs, work: NodeWork) -> NodeShare:
    common = inputs.common
    middle_us = common.middle.inner_steps * work.known.step_us
    in_least = (max(_LEAST_SPAN_US, common.span_us) - work.moving_us) / middle_us
    is_measured = bool(work.known.reading.step_us.count)
    room_us = common.span_us - work.moving_us
    computing = max(room_us, _LEAST_SPAN_US - work.moving_us) / max(1.0, common.middle.computing_us)
    return NodeShare(room_us / middle_us, computing, is_measured, in_least)


def _with_long_work(
    inputs: PlanInputs, work: NodeWork, memory: NodeMemory, round_us: float
) -> NodeWork:
    """The work of a node that no round waits for: one step where nothing is known of its speed."""
    stated, known = inputs.stated_batch, work.known
    moving_us = work.moving_us + work.hidden_us
    if not known.reading.step_us.count:
        long = LongWork(1, Batch(stated), ROUNDS_MOST, 1)
    else:
        up_bytes = inputs.sizes.update_bytes[work.codec]
        forecast = known.finish(round_us / known.step_us, up_bytes, Bytes(0))
        spread_us = 1000.0 * forecast.deviation_ms
        times = WorkTimes(known.step_us, moving_us, spread_us, round_us)
        long = long_work(times, inputs.limits, stated, cut_rounds=memory.cut_rounds)
    return work._replace(
        moving_us=moving_us,
        hidden_us=0.0,
        batch=long.batch,
        step_us=known.step_us * long.batch.size / stated,
        prefetched=0,
        long=long,
    )


def _common_plan(
    request: PlanRequest,
    known: Mapping[NodeId, NodeSpeed],
    memories: Mapping[NodeId, NodeMemory],
    sizes: ModelSizes,
) -> CommonPlan:
    """The round as the middle one of those nodes sees it that are neither excluded nor on trial,
    where each counts by what it can add.
    """
    number, previous = request.round, request.previous
    known = {
        node: mine
        for node, mine in known.items()
        if node not in request.on_trial and not is_excluded(memories[node], number)
    } or known
    utilisation = request.spec.aware.utilisation
    dense_bytes = sizes.update_bytes[FINEST]
    dense_us = {node: mine.moving_us(dense_bytes, dense_bytes) for node, mine in known.items()}
    weights = capacities(known, dense_us, memories, request.spec.training.inner_steps)
    step_us = weighted_median({node: mine.step_us for node, mine in known.items()}, weights)
    most = most_inner_steps(request, known, step_us)
    comfortable_us = step_us * min(most, _COMFORT * request.spec.training.inner_steps)
    held_us = max(comfortable_us, step_us * (previous.inner_steps if previous is not None else 0))
    family = round_family(
        request.spec, previous, known, weights, sizes=sizes, computing_us=comfortable_us
    )
    down = request.spec.codec.down
    if not request.spec.aware.takes_as_stated("codec.down"):
        down = delta_codec(
            family,
            known,
            weights,
            sizes=sizes,
            allowed_us=(1 - utilisation) * comfortable_us,
            held=previous.down if previous is not None else "",
        )
    moving_us, computing_us = {}, {}
    for node, mine in known.items():
        codec = codec_for_span(
            family,
            memories[node],
            sizes,
            budget_bytes=byte_budget(mine, comfortable_us, utilisation),
            kept_bytes=byte_budget(mine, _OVERRUN * held_us, utilisation),
        )
        up_bytes = sizes.update_bytes[codec]
        moving_us[node] = mine.moving_us(up_bytes, sizes.update_bytes[down])
        computing_us[node] = _computing_us(request.spec, mine, moving_us[node], up_bytes)
    middle_ = plan_median_node(
        request,
        step_us=step_us,
        moving=weighted_median(moving_us, weights),
        dense=weighted_median(dense_us, weights),
        computing_us=weighted_median(computing_us, weights),
        most=most,
    )
    held_ms = previous.span_ms if previous is not None else 0
    span_us = middle_.span_us
    if exchanges_each_step(request.spec):
        steps_us = [mine.step_us for mine in known.values()]
        span_us = balanced_span_us(steps_us, tuple(moving_us.values()))
    span_us = steady_span_us(span_us, held_ms if _is_middle_kept(request, middle_) else 0)
    if stated_ms := request.spec.round.deadline_ms:
        span_us = min(span_us, _OF_STATED * stated_ms * 1000)
    return CommonPlan(family, down, middle_, step_us, weights, span_us)


def _computing_us(spec: JobSpec, mine: NodeSpeed, moving_us: float, up_bytes: Bytes) -> float:
    utilisation = spec.aware.utilisation
    if spec.round.overlap == "eager":
        return computing_beside(moving_us, utilisation)
    return computing_for(moving_us, mine.cautious_up_us(up_bytes), utilisation)


def _codecs(
    inputs: PlanInputs, known: Mapping[NodeId, NodeSpeed], memories: Mapping[NodeId, NodeMemory]
) -> dict[NodeId, tuple[str, int]]:
    """Each candidate's codec, and how many plans in a row have seen room for a finer one."""
    request, common = inputs.request, inputs.common
    computing_us = _OVERRUN * common.middle.computing_us
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
    batch = own_batch(
        request.spec,
        memory,
        fewest_us=inputs.limits.least * known.step_us,
        room_us=stretch * common.span_us - moved_us + hidden_us,
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
    )


def _assemble_plan(
    inputs: PlanInputs, works: Mapping[NodeId, NodeWork], found: Mapping[NodeId, Participation]
) -> RoundPlan:
    request, common = inputs.request, inputs.common
    working = {node: work for node, work in works.items() if found[node].is_taking_part}
    span_us = _stretched_us(inputs, working)
    asked, given, rounds_left = _steps_of(inputs, working, found, span_us)
    too_long = {n for n, w in working.items() if w.long and w.long.made_for > rounds_left}
    found = {
        node: part._replace(is_taking_part=False, reason=_JOB_ENDS) if node in too_long else part
        for node, part in found.items()
    }
    working = {node: work for node, work in working.items() if node not in too_long}
    plans = _node_plans(inputs, working, found, given=given, span_us=span_us)
    closes_ms = _deadline(inputs, plans, working, span_us)
    plans = {
        node: replace(
            plan,
            reason=node_reason(
                plan,
                up_bits_per_s=working[node].known.up_bits_per_s,
                deadline_ms=closes_ms,
                why=found[node].reason,
            ),
        )
        for node, plan in plans.items()
    }
    resting = {n: resting_reason(found[n].reason) for n in works if n not in working}
    codecs = [c for c in common.family.levels if any(p.codec == c for p in plans.values())]
    return RoundPlan(
        round=request.round,
        nodes=plans,
        resting=resting,
        deadline_ms=closes_ms,
        down=common.down,
        is_sparse=common.family.is_sparse,
        memory=_memory(inputs, works, found, asked=asked, plans=plans, span_us=span_us),
        reason=round_reason(
            common.middle,
            codecs=codecs,
            down=common.down,
            deadline_ms=closes_ms,
            resting=len(resting),
        ),
    )


_JOB_ENDS = "the job ends before its work would"


def _steps_of(
    inputs: PlanInputs,
    working: Mapping[NodeId, NodeWork],
    found: Mapping[NodeId, Participation],
    span_us: float,
) -> tuple[dict[NodeId, int], dict[NodeId, int], int]:
    """The steps that participants would take, those that the end of the job leaves them, and how
    many rounds like this one are left.
    """
    request = inputs.request
    asked = {
        node: work.long.inner_steps
        if work.long
        else _inner_steps(work, span_us, found[node].memory)
        for node, work in working.items()
    }
    awaited = {node: steps for node, steps in asked.items() if working[node].long is None}
    batches = {node: work.batch.size for node, work in working.items()}
    planned = sum(steps * batches[node] for node, steps in awaited.items())
    beside = sum(
        work.long.inner_steps * batches[node] / work.long.made_for
        for node, work in working.items()
        if work.long
    )
    left = request.samples_total - request.samples_done
    rounds_left = max(1, ceil(left / max(1.0, planned + beside)))
    fitted = fit_steps(awaited, batches, ceil(left * planned / max(1.0, planned + beside)))
    # What was prefetched is done, or nearly so: the end of the job does not cut it.
    given = {n: max(steps, min(asked[n], working[n].prefetched)) for n, steps in fitted.items()}
    return asked, {**asked, **given}, rounds_left


def _inner_steps(work: NodeWork, span_us: float, memory: NodeMemory) -> int:
    """The steps that fill the round, and no fewer than were prefetched."""
    if not work.is_batch_held:
        memory = replace(memory, inner_steps=0)
    steps = own_steps(work.step_us, work.moving_us, span_us, bounds_=work.bounds, memory=memory)
    return max(steps, min(work.prefetched, work.bounds.most))


def _is_middle_kept(request: PlanRequest, middle_: MedianNode) -> bool:
    return request.previous is not None and request.previous.inner_steps == middle_.inner_steps


def _stretched_us(inputs: PlanInputs, working: Mapping[NodeId, NodeWork]) -> float:
    """The round's span with what it is made longer by for those whom it waits for."""
    common, previous = inputs.common, inputs.request.previous
    stretches = [work.least_us for work in working.values() if work.long is None]
    span_us = max([common.span_us, *stretches])
    if previous is None or not _is_middle_kept(inputs.request, common.middle):
        return span_us
    return max(common.span_us, steady_span_us(span_us, previous.stretched_ms))


def _finish(inputs: PlanInputs, work: NodeWork, given: int) -> FinishForecast:
    """When a node is done with so many steps, less what it took ahead."""
    sizes = inputs.sizes.update_bytes
    steps = given * work.batch.size / inputs.stated_batch
    if given >= work.prefetched:
        steps = max(0.0, steps - work.hidden_us / work.known.step_us)
    return work.known.finish(steps, sizes[work.codec], sizes[inputs.common.down])


def _node_plans(
    inputs: PlanInputs,
    working: Mapping[NodeId, NodeWork],
    found: Mapping[NodeId, Participation],
    *,
    given: Mapping[NodeId, int],
    span_us: float,
) -> dict[NodeId, NodePlan]:
    """The participants' plans, most of their reasons still to be written."""
    stated, sizes, spec = inputs.stated_batch, inputs.sizes, inputs.request.spec
    finishes, uploads = {}, {}
    for node, work in working.items():
        size = sizes.update_bytes[work.codec]
        forecast = finishes[node] = _finish(inputs, work, given[node])
        ready_us = (forecast.mean_ms - forecast.parts.up_ms) * 1000
        if work.long is None:
            uploads[node] = PlannedUpload(ready_us, size, work.known.up_bits_per_s)
    delays = upload_delays(uploads, inputs.request.line_bits_per_s)
    return {
        node: NodePlan(
            inner_steps=given[node],
            codec=work.codec,
            forecast_ms=Milliseconds(
                max(1, finishes[node].mean_ms + delays.get(node, 0))
                if work.known.is_measured
                else 0
            ),
            spread_ms=finishes[node].deviation_ms,
            reason=work.batch.reason,
            upload_after_ms=delays.get(node, Milliseconds(0)),
            connections=work.known.connections,
            batch_size=work.batch.size if work.batch.size != stated else 0,
            prefetch_steps=0
            if work.long
            else planned_prefetch(spec, span_us, work.moving_us + work.hidden_us, work.step_us),
            rounds=work.long.rounds if work.long else 1,
            band=found[node].band,
            step_us=round(work.step_us) if work.known.is_measured else 0,
        )
        for node, work in working.items()
    }


def _deadline(
    inputs: PlanInputs,
    plans: Mapping[NodeId, NodePlan],
    working: Mapping[NodeId, NodeWork],
    span_us: float,
) -> Milliseconds:
    """When the round closes: as the job states, or so that it leaves twice the span to nodes that
    were never seen at work.
    """
    spec, stated = inputs.request.spec, inputs.stated_batch
    if spec.round.deadline_ms:
        return Milliseconds(spec.round.deadline_ms)
    awaited = {node for node, plan in plans.items() if plan.rounds == 1}
    quorum = max(1, ceil(spec.round.quorum * len(awaited) - 1e-9))
    arrivals = tuple(
        UpdateArrival(
            plan.forecast_ms, plan.spread_ms, Samples(plan.inner_steps * plan.batch(stated))
        )
        for node, plan in plans.items()
        if node in awaited and working[node].known.is_measured
    )
    latest = [one.late_ms for one in arrivals] if spec.data.sharding != "iid" else []
    if len(arrivals) < len(awaited):
        latest.append(Milliseconds(int(_UNMEASURED_SPANS * span_us / 1000)))
    if arrivals:
        latest.append(deadline(arrivals, quorum))
    return Milliseconds(max(LEAST_MS, *latest))


def _memory(
    inputs: PlanInputs,
    works: Mapping[NodeId, NodeWork],
    found: Mapping[NodeId, Participation],
    *,
    asked: Mapping[NodeId, int],
    plans: Mapping[NodeId, NodePlan],
    span_us: float,
) -> PlanMemory:
    common, nodes = inputs.common, absentees(inputs.request)
    middle_ = common.middle
    for node, work in works.items():
        memory = found[node].memory
        steps = asked.get(node, memory.inner_steps)
        nodes[node] = replace(
            memory,
            codec=work.codec,
            lighter_rounds=work.lighter_rounds,
            inner_steps=steps,
            strayed_rounds=0
            if work.long
            else strayed_rounds(work.step_us, work.moving_us, span_us, memory=memory, steps=steps),
            connections=plans[node].connections if node in plans else memory.connections,
            batch_size=plans[node].batch_size if node in plans else memory.batch_size,
        )
    return PlanMemory(
        inner_steps=middle_.inner_steps,
        changed_at_round=middle_.changed_at_round,
        is_sparse=common.family.is_sparse,
        nodes=nodes,
        crowded_rounds=middle_.drift.crowded_rounds,
        drift=middle_.drift.factor,
        span_ms=Milliseconds(max(1, round(common.span_us / 1000))),
        stretched_ms=Milliseconds(max(1, round(span_us / 1000))),
        dense_ms=Milliseconds(max(1, round(middle_.dense_at_change_us / 1000))),
        dense_rounds=common.family.dense_rounds,
        down=common.down,
    )
