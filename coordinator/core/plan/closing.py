"""The fourth stage of a plan, the closing: when the round closes, each node's plan with its reason,
and what the next plan is to remember.
"""

from collections.abc import Mapping

from msgspec.structs import replace

from coordinator.core.plan.agreement import noise_share
from coordinator.core.plan.batches import batch_rate
from coordinator.core.plan.decision import (
    NodePlan,
    PlanMemory,
    RoundPlan,
    opening_quorum,
)
from coordinator.core.plan.median_node import (
    node_reason,
    round_reason,
)
from coordinator.core.plan.node_shares import NodeShares, NodeWork, PlanInputs, finish
from coordinator.core.plan.node_work import (
    planned_prefetch,
    strayed_rounds,
)
from coordinator.core.plan.participation import (
    LEAST_MS,
    UpdateArrival,
    absentees,
    deadline,
)
from coordinator.core.plan.speeds import (
    PlannedUpload,
    upload_delays,
)
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds, Samples

_UNMEASURED_SPANS = 2
"""A node that was never seen at work gets so many spans."""


def close_plan(inputs: PlanInputs, shares: NodeShares) -> RoundPlan:
    """The plan of the round.

    Args:
        inputs: What holds for all nodes.
        shares: What each candidate does.
    """
    request, common, working = inputs.request, inputs.common, shares.working
    plans = _node_plans(inputs, shares)
    closes_ms = _deadline(inputs, plans, working, shares.span_us)
    plans = {
        node: replace(
            plan,
            reason=node_reason(
                plan,
                up_bits_per_s=working[node].known.up_bits_per_s,
                deadline_ms=closes_ms,
                why=shares.parts[node].reason,
            ),
        )
        for node, plan in plans.items()
    }
    resting = {node: shares.parts[node].reason for node in shares.works if node not in working}
    codecs = [c for c in common.family.levels if any(p.codec == c for p in plans.values())]
    return RoundPlan(
        round=request.round,
        nodes=plans,
        resting=resting,
        deadline_ms=closes_ms,
        down=common.down,
        is_sparse=common.family.is_sparse,
        memory=_memory(inputs, shares, plans),
        reason=round_reason(
            common.middle,
            codecs=codecs,
            down=common.down,
            deadline_ms=closes_ms,
            resting=len(resting),
        ),
        updates_needed=opening_quorum(request, plans),
    )


def _node_plans(inputs: PlanInputs, shares: NodeShares) -> dict[NodeId, NodePlan]:
    """The participants' plans, most of their reasons still to be written."""
    stated, sizes, spec = inputs.stated_batch, inputs.sizes, inputs.request.spec
    working, given, span_us = shares.working, shares.given, shares.span_us
    finishes, uploads = {}, {}
    for node, work in working.items():
        size = sizes.update_bytes[work.codec]
        forecast = finishes[node] = finish(inputs, work, given[node])
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
            reason="; ".join(filter(None, (work.batch.reason, work.known.reason))),
            upload_after_ms=delays.get(node, Milliseconds(0)),
            connections=work.known.connections,
            batch_size=work.batch.size if work.batch.size != stated else 0,
            learning_rate=batch_rate(spec, work.batch.size),
            prefetch_steps=0
            if work.long
            else planned_prefetch(spec, span_us, work.moving_us + work.hidden_us, work.step_us),
            rounds=work.long.rounds if work.long else 1,
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
    were never seen at work; 0: by what its quorum takes, where no forecast of anybody was ever
    compared and the job begins, with programs and data to fetch that no forecast knows of.
    """
    spec, stated = inputs.request.spec, inputs.stated_batch
    readings = [work.known.reading for work in working.values()]
    is_compared = any(reading.forecast_error.count for reading in readings)
    if spec.round.deadline_ms or (inputs.request.previous is None and not is_compared):
        return Milliseconds(spec.round.deadline_ms)
    awaited = {node for node, plan in plans.items() if plan.rounds == 1}
    arrivals = tuple(
        UpdateArrival(
            plan.forecast_ms, plan.spread_ms, Samples(plan.inner_steps * plan.batch(stated))
        )
        for node, plan in plans.items()
        if node in awaited and working[node].known.is_measured
    )
    latest = [] if spec.data.is_common else [one.late_ms for one in arrivals]
    if len(arrivals) < len(awaited):
        latest.append(Milliseconds(int(_UNMEASURED_SPANS * span_us / 1000)))
    if arrivals:
        latest.append(deadline(arrivals, opening_quorum(inputs.request, plans)))
    return Milliseconds(max(LEAST_MS, *latest))


def _memory(inputs: PlanInputs, shares: NodeShares, plans: Mapping[NodeId, NodePlan]) -> PlanMemory:
    common, nodes = inputs.common, absentees(inputs.request)
    middle_, span_us = common.middle, shares.span_us
    for node, work in shares.works.items():
        memory = shares.parts[node].memory
        steps = shares.asked.get(node, memory.inner_steps)
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
            growth=work.growth if node in plans else memory.growth,
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
        noise_share=noise_share(inputs.request),
    )
