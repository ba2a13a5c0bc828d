"""A round's plan: one pure function of what was measured, asked and planned before.

The middle node's work comes first: its codec's family, its inner steps, and with them the span that
the round is made for. Then each node gets the steps that fill that span, whoever cannot keep it
rests, and the deadline follows from when everybody's update is forecast to be in.
"""

from collections.abc import Mapping
from math import ceil
from statistics import median
from typing import NamedTuple

from msgspec.structs import replace

from coordinator.core.measure.reading import NodeReading
from coordinator.core.plan.balance import least_share, own_batches
from coordinator.core.plan.deadline import Arrival, deadline
from coordinator.core.plan.decision import (
    NodeMemory,
    NodePlan,
    PlanMemory,
    PlanRequest,
    RoundPlan,
    Sizes,
)
from coordinator.core.plan.known import Known, known_nodes
from coordinator.core.plan.ladder import (
    FINEST,
    Family,
    byte_budget,
    down_level,
    family_of,
    level,
    outline_level,
)
from coordinator.core.plan.middle import (
    Middle,
    computing_beside,
    computing_for,
    middle,
    most_inner_steps,
)
from coordinator.core.plan.opening import opening_plan
from coordinator.core.plan.participation import (
    Part,
    absentees,
    candidate_memories,
    is_excluded,
    parts,
)
from coordinator.core.plan.spreading import (
    Bounds,
    bounds,
    fit_steps,
    kept_span_us,
    own_steps,
    planned_prefetch,
    rounds_apart,
)
from coordinator.core.plan.transfers import Upload, upload_delays
from coordinator.core.plan.wording import node_reason, round_reason
from hypergpu.ids import NodeId
from hypergpu.jobfile.spec import JobSpec
from hypergpu.units import Bytes, Milliseconds, Samples

_UNMEASURED_SPANS = 2
"""A node that was never seen at work gets so many spans."""
_COMFORT = 4
"""Times the user's own H: beyond it the codec gives way before H does."""
_OVERRUN = 1.5
"""A node whose line is worse than the middle one's takes fewer steps before a sparser codec."""


class Outline(NamedTuple):
    """What holds for all nodes of the round."""

    family: Family
    down: str
    middle: Middle
    span_us: float
    """What the round is made to take, before it is stretched for anybody."""


class Share(NamedTuple):
    """One node's work while the plan is made."""

    known: Known
    codec: str
    lighter_rounds: int
    moving_us: float
    """What it can only wait for."""
    hidden_us: float
    """What bytes move for besides, while it takes steps that it was granted."""
    least_us: float
    part: Part


def plan_round(
    request: PlanRequest, readings: Mapping[NodeId, NodeReading], sizes: Sizes
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
    memories = candidate_memories(request)
    known = known_nodes(
        request.candidates,
        readings,
        size_bytes=sizes.update_bytes[FINEST],
        held={node: memory.connections for node, memory in memories.items()},
    )
    if not known:
        return opening_plan(request, readings, sizes)
    outline = _outline(request, known, memories, sizes)
    limits = bounds(
        outline.middle.inner_steps,
        request.spec.aware.inner_steps_max,
        request.spec.data.sharding,
    )
    shares = _shares(request, known, memories, outline=outline, sizes=sizes, limits=limits)
    return _assemble_plan(request, shares, outline=outline, sizes=sizes, limits=limits)


def _outline(
    request: PlanRequest,
    known: Mapping[NodeId, Known],
    memories: Mapping[NodeId, NodeMemory],
    sizes: Sizes,
) -> Outline:
    """The round as the middle one of those nodes sees it that are not excluded."""
    number, previous = request.round, request.previous
    known = {n: mine for n, mine in known.items() if not is_excluded(memories[n], number)} or known
    utilisation = request.spec.aware.utilisation
    most = most_inner_steps(request, known)
    step_us = median(mine.step_us for mine in known.values())
    comfortable_us = step_us * min(most, _COMFORT * request.spec.training.inner_steps)
    held_us = max(comfortable_us, step_us * (previous.inner_steps if previous is not None else 0))
    family = family_of(request.spec, previous, known, sizes=sizes, computing_us=comfortable_us)
    down = down_level(
        family,
        known,
        sizes=sizes,
        allowed_us=(1 - utilisation) * comfortable_us,
        held=previous.down if previous is not None else "",
    )
    moving_us, computing_us, dense = {}, {}, sizes.update_bytes[FINEST]
    for node, mine in known.items():
        codec = outline_level(
            family,
            memories[node],
            sizes,
            budget_bytes=byte_budget(mine, comfortable_us, utilisation),
            kept_bytes=byte_budget(mine, _OVERRUN * held_us, utilisation),
        )
        up_bytes = sizes.update_bytes[codec]
        moving_us[node] = mine.moving_us(up_bytes, sizes.update_bytes[down])
        computing_us[node] = _computing_us(request.spec, mine, moving_us[node], up_bytes)
    middle_ = middle(
        request,
        known,
        moving_us=moving_us,
        dense_us={node: mine.moving_us(dense, dense) for node, mine in known.items()},
        computing_us=median(computing_us.values()),
        most=most,
    )
    held_ms = previous.span_ms if previous is not None else 0
    span_us = kept_span_us(middle_.span_us, held_ms if _is_middle_kept(request, middle_) else 0)
    return Outline(family, down, middle_, span_us)


def _computing_us(spec: JobSpec, mine: Known, moving_us: float, up_bytes: Bytes) -> float:
    utilisation = spec.aware.utilisation
    if spec.round.overlap == "eager":
        return computing_beside(moving_us, utilisation)
    return computing_for(moving_us, mine.cautious_up_us(up_bytes), utilisation)


def _shares(
    request: PlanRequest,
    known: Mapping[NodeId, Known],
    memories: Mapping[NodeId, NodeMemory],
    *,
    outline: Outline,
    sizes: Sizes,
    limits: Bounds,
) -> dict[NodeId, Share]:
    """Each candidate's codec, the least time that it needs, and whether it takes part."""
    computing_us = _OVERRUN * outline.middle.computing_us
    down_bytes = sizes.update_bytes[outline.down]
    codecs, moving_us, hidden_us, least = {}, {}, {}, {}
    for node, mine in known.items():
        budget = byte_budget(mine, computing_us, request.spec.aware.utilisation)
        codecs[node] = level(outline.family, memories[node], sizes, budget)
        moved_us = mine.moving_us(sizes.update_bytes[codecs[node][0]], down_bytes)
        hidden_us[node] = min(moved_us, request.prefetched.get(node, 0) * mine.step_us)
        moving_us[node] = moved_us - hidden_us[node]
        least_steps = limits.least * least_share(request.spec)
        least_steps = max(least_steps, min(request.prefetched.get(node, 0), limits.most))
        least[node] = least_steps * mine.step_us + moving_us[node]
    spans = {node: us / outline.span_us for node, us in least.items()}
    readings = {node: mine.reading for node, mine in known.items()}
    found = parts(request, memories, spans, readings)
    return {
        node: Share(mine, *codecs[node], moving_us[node], hidden_us[node], least[node], found[node])
        for node, mine in known.items()
    }


def _assemble_plan(
    request: PlanRequest,
    shares: Mapping[NodeId, Share],
    *,
    outline: Outline,
    sizes: Sizes,
    limits: Bounds,
) -> RoundPlan:
    working = {node: share for node, share in shares.items() if share.part.is_taking_part}
    span_us = _stretched_us(request, working, outline)
    asked = {
        node: _inner_steps(share, span_us, limits, request.prefetched.get(node, 0))
        for node, share in working.items()
    }
    left = request.samples_total - request.samples_done
    given = fit_steps(asked, request.spec.training.batch_size, left)
    # Prefetched steps are done, or nearly so: the end of the job does not cut them.
    given = {
        n: max(steps, min(asked[n], request.prefetched.get(n, 0))) for n, steps in given.items()
    }
    plans = _node_plans(
        request, working, given=given, outline=outline, sizes=sizes, span_us=span_us
    )
    closes_ms = _deadline(request, plans, working, span_us)
    plans = {
        node: replace(
            plan,
            reason=node_reason(
                plan,
                up_bits_per_s=working[node].known.up_bits_per_s,
                deadline_ms=closes_ms,
                why=working[node].part.reason,
            ),
        )
        for node, plan in plans.items()
    }
    resting = {n: share.part.reason for n, share in shares.items() if n not in working}
    codecs = [c for c in outline.family.levels if any(p.codec == c for p in plans.values())]
    return RoundPlan(
        round=request.round,
        nodes=plans,
        resting=resting,
        deadline_ms=closes_ms,
        down=outline.down,
        is_sparse=outline.family.is_sparse,
        memory=_memory(request, shares, asked, plans=plans, outline=outline, span_us=span_us),
        reason=round_reason(
            outline.middle,
            codecs=codecs,
            down=outline.down,
            deadline_ms=closes_ms,
            resting=len(resting),
        ),
    )


def _inner_steps(share: Share, span_us: float, limits: Bounds, prefetched: int) -> int:
    """Steps that fill the round, no fewer than were prefetched: that would not be done sooner."""
    memory = share.part.memory
    steps = own_steps(share.known, share.moving_us, span_us, bounds_=limits, memory=memory)
    return max(steps, min(prefetched, limits.most))


def _is_middle_kept(request: PlanRequest, middle_: Middle) -> bool:
    return request.previous is not None and request.previous.inner_steps == middle_.inner_steps


def _stretched_us(request: PlanRequest, working: Mapping[NodeId, Share], outline: Outline) -> float:
    """The round's span with what it is made longer by for those whom it waits for."""
    stretches = [share.least_us for share in working.values() if share.part.may_stretch]
    span_us = max([outline.span_us, *stretches])
    if request.previous is None or not _is_middle_kept(request, outline.middle):
        return span_us
    return max(outline.span_us, kept_span_us(span_us, request.previous.stretched_ms))


def _node_plans(
    request: PlanRequest,
    working: Mapping[NodeId, Share],
    *,
    given: Mapping[NodeId, int],
    outline: Outline,
    sizes: Sizes,
    span_us: float,
) -> dict[NodeId, NodePlan]:
    """The participants' plans, most of their reasons still to be written."""
    batches = own_batches(
        request.spec,
        {node: share.part.memory for node, share in working.items()},
        {node: share.known.reading for node, share in working.items()},
    )
    down_bytes = sizes.update_bytes[outline.down]
    finishes, uploads = {}, {}
    for node, share in working.items():
        size = sizes.update_bytes[share.codec]
        steps = given[node] * batches[node].share
        if given[node] >= request.prefetched.get(node, 0):
            steps = max(0.0, steps - share.hidden_us / share.known.step_us)
        forecast = finishes[node] = share.known.finish(steps, size, down_bytes)
        ready_us = (forecast.mean_ms - forecast.parts.up_ms) * 1000
        uploads[node] = Upload(ready_us, size, share.known.up_bits_per_s)
    delays = upload_delays(uploads, request.line_bits_per_s)
    return {
        node: NodePlan(
            inner_steps=given[node],
            codec=share.codec,
            forecast_ms=Milliseconds(
                max(1, finishes[node].mean_ms + delays[node]) if share.known.is_measured else 0
            ),
            spread_ms=finishes[node].deviation_ms,
            reason=batches[node].reason,
            upload_after_ms=delays[node],
            connections=share.known.connections,
            batch_size=batches[node].size,
            prefetch_steps=planned_prefetch(
                request.spec, span_us, share.moving_us + share.hidden_us, share.known.step_us
            ),
        )
        for node, share in working.items()
    }


def _deadline(
    request: PlanRequest,
    plans: Mapping[NodeId, NodePlan],
    working: Mapping[NodeId, Share],
    span_us: float,
) -> Milliseconds:
    """When the round closes: it leaves twice the span to nodes that were never seen at work.

    Nobody waits for those on trial, unless there is no quorum without them.
    """
    quorum = max(1, ceil(request.spec.round.quorum * len(plans) - 1e-9))
    awaited = {node for node in plans if working[node].part.may_stretch}
    awaited = awaited if len(awaited) >= quorum else set(plans)
    stated = request.spec.training.batch_size
    arrivals = tuple(
        Arrival(plan.forecast_ms, plan.spread_ms, Samples(plan.inner_steps * plan.batch(stated)))
        for node, plan in plans.items()
        if node in awaited and working[node].known.is_measured
    )
    latest = [one.late_ms for one in arrivals] if request.spec.data.sharding != "iid" else []
    if len(arrivals) < len(awaited):
        latest.append(Milliseconds(int(_UNMEASURED_SPANS * span_us / 1000)))
    if arrivals:
        latest.append(deadline(arrivals, quorum))
    return max(latest)


def _memory(
    request: PlanRequest,
    shares: Mapping[NodeId, Share],
    asked: Mapping[NodeId, int],
    *,
    plans: Mapping[NodeId, NodePlan],
    outline: Outline,
    span_us: float,
) -> PlanMemory:
    middle_, nodes = outline.middle, absentees(request)
    for node, share in shares.items():
        memory = share.part.memory
        nodes[node] = replace(
            memory,
            codec=share.codec,
            lighter_rounds=share.lighter_rounds,
            inner_steps=(steps := asked.get(node, memory.inner_steps)),
            strayed_rounds=rounds_apart(
                share.known, share.moving_us, span_us, memory=memory, steps=steps
            ),
            connections=plans[node].connections if node in plans else memory.connections,
            batch_size=plans[node].batch_size if node in plans else memory.batch_size,
        )
    return PlanMemory(
        inner_steps=middle_.inner_steps,
        changed_at_round=middle_.changed_at_round,
        is_sparse=outline.family.is_sparse,
        nodes=nodes,
        crowded_rounds=middle_.drift.crowded_rounds,
        drift=middle_.drift.factor,
        span_ms=Milliseconds(max(1, round(outline.span_us / 1000))),
        stretched_ms=Milliseconds(max(1, round(span_us / 1000))),
        dense_ms=Milliseconds(max(1, round(middle_.dense_at_change_us / 1000))),
        dense_rounds=outline.family.dense_rounds,
        down=outline.down,
    )
