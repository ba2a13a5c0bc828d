"""The fourth stage of a plan, the closing: when uploads begin, when the round closes, each node's
plan with its reason, and what the next plan is to remember.
"""

from coordinator.core.network.work_forecast import FinishForecast
from coordinator.core.training.plan.deadline import round_deadline_ms
from coordinator.core.training.plan.decision import NodePlan, RoundPlan, opening_quorum
from coordinator.core.training.plan.inner_steps import finish
from coordinator.core.training.plan.node_shares import NodeShares
from coordinator.core.training.plan.plan_memory import plan_memory
from coordinator.core.training.plan.prefetch import planned_prefetch
from coordinator.core.training.plan.reasons import round_reason, with_reason
from coordinator.core.training.plan.round_shape import RoundShape
from coordinator.core.training.plan.speeds import RoundSpeeds
from coordinator.core.training.plan.uploads import PlannedUpload, upload_delays
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds


def close_plan(speeds: RoundSpeeds, shape: RoundShape, shares: NodeShares) -> RoundPlan:
    """The plan of the round.

    Args:
        speeds: First stage.
        shape: Second stage.
        shares: Third stage.
    """
    request, working_shares = speeds.request, shares.working
    plans = _node_plans(speeds, shape, shares)
    quorum = opening_quorum(request, plans)
    deadline_ms = round_deadline_ms(request, shares, plans, quorum)
    plans = {
        node: with_reason(
            plan,
            up_bits_per_s=working_shares[node].speed.up_bits_per_s,
            deadline_ms=deadline_ms,
            why=shares.parts[node].reason,
        )
        for node, plan in plans.items()
    }
    resting_reasons = {
        node: shares.parts[node].reason for node in shares.works if node not in working_shares
    }
    family = shape.codecs.family
    codecs = [c for c in family.levels if any(p.codec == c for p in plans.values())]
    reason = round_reason(
        shape.middle,
        codecs=codecs,
        down=shape.codecs.down,
        deadline_ms=deadline_ms,
        resting=len(resting_reasons),
    )
    return RoundPlan(
        round=request.round,
        nodes=plans,
        resting=resting_reasons,
        deadline_ms=deadline_ms,
        down=shape.codecs.down,
        is_sparse=family.is_sparse,
        memory=plan_memory(speeds, shape, shares, plans),
        reason=reason,
        updates_needed=quorum,
    )


def _node_plans(
    speeds: RoundSpeeds, shape: RoundShape, shares: NodeShares
) -> dict[NodeId, NodePlan]:
    """The participants' plans, most of their reasons still to be written."""
    finishes, uploads = {}, {}
    for node, work in shares.working.items():
        forecast = finishes[node] = finish(speeds, shape, work, shares.steps[node])
        ready_us = (forecast.mean_ms - forecast.parts.up_ms) * 1000
        if work.long is None:
            size_bytes = speeds.sizes.update_bytes[work.codec]
            uploads[node] = PlannedUpload(ready_us, size_bytes, work.speed.up_bits_per_s)
    delays = upload_delays(uploads, speeds.request.line_bits_per_s)
    return {
        node: _node_plan(speeds, shares, node, finishes[node], delays.get(node, Milliseconds(0)))
        for node in shares.working
    }


def _node_plan(
    speeds: RoundSpeeds,
    shares: NodeShares,
    node: NodeId,
    forecast: FinishForecast,
    delay_ms: Milliseconds,
) -> NodePlan:
    spec, work = speeds.request.spec, shares.working[node]
    speed, batch, moved_us = work.speed, work.batch, work.moving_us + work.hidden_us
    return NodePlan(
        inner_steps=shares.steps[node],
        codec=work.codec,
        forecast_ms=Milliseconds(max(1, forecast.mean_ms + delay_ms) if speed.is_measured else 0),
        spread_ms=forecast.deviation_ms,
        reason="; ".join(filter(None, (batch.reason, speed.reason))),
        upload_after_ms=delay_ms,
        connections=speed.connections,
        batch_size=batch.size if batch.size != spec.training.batch_size else 0,
        learning_rate=batch.learning_rate,
        prefetch_steps=0
        if work.long
        else planned_prefetch(spec, shares.span_us, moved_us, work.step_us),
        rounds=work.long.rounds if work.long else 1,
        step_us=round(work.step_us) if speed.is_measured else 0,
    )
