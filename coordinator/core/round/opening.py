"""Opens rounds: with every available node, or as planned, if enough nodes and funds are there."""

from msgspec.structs import replace

from coordinator.core.job.commands import PlanRound
from coordinator.core.job.state import Job, Participant, Phase, Round, WorkState
from coordinator.core.plan.decision import NodePlan, PlanMemory, RoundPlan
from coordinator.core.plan.node_steps import prefetch_limit
from coordinator.core.round.assigning import JobStep, assignment, deadline
from coordinator.core.round.completion import available_nodes, nodes_needed, plan_request
from coordinator.core.round.shards import deal_shards
from hypergpu.ids import NodeId
from hypergpu.jobfile.spec import SPARSE_SCHEMES
from hypergpu.units import Milliseconds, Samples


def open_round(job: Job) -> JobStep:
    """Open the next round, or have it planned, when enough nodes are there; else wait for them."""
    number = job.newest_model.round
    job = replace(job, spec=job.next_spec or job.spec, next_spec=None, round=None)
    nodes, needed = available_nodes(job), nodes_needed(job)
    if len(nodes) < needed:
        reason = f"{len(nodes)} of {needed} nodes are here"
        return JobStep(replace(job, phase=Phase.WAITING, reason=reason))
    if job.lost_model:
        return JobStep(replace(job, phase=Phase.WAITING))
    if job.spec.strategy == "aware":
        job = replace(job, phase=Phase.PLANNING, reason=f"round {number} is being planned")
        return JobStep(job, (PlanRound(plan_request(job)),))
    return _begin_round(job, _stated_plan(job, nodes))


def open_planned_round(job: Job, plan: RoundPlan) -> JobStep:
    """Open the round as planned, without the nodes that have gone since; if all have, plan again.

    A node that came since has no part in it, like any other that comes while a round is open.
    """
    available = available_nodes(job)
    nodes = {node: plan.nodes[node] for node in available if node in plan.nodes}
    if not nodes or len(available) < nodes_needed(job) or job.lost_model:
        return open_round(job)
    return _begin_round(replace(job, plan_memory=plan.memory), replace(plan, nodes=nodes))


def _begin_round(job: Job, plan: RoundPlan) -> JobStep:
    """Give every node of the plan its shard under a fresh lease, if the round is funded."""
    if why := _funding_gap(job, plan):
        return JobStep(replace(job, phase=Phase.WAITING, reason=why))
    total_samples = _total_samples(job, plan.round, len(plan.nodes))
    deal = deal_shards(job, plan, total_samples)
    participants = {
        node: Participant(
            slot=job.members[node].slot,
            lease=lease,
            shard=deal.shards[node],
            plan=part,
            assigned_at_ms=job.at_ms,
            prefetched=deal.prefetched.get(node),
        )
        for lease, (node, part) in enumerate(plan.nodes.items(), job.next_lease)
    }
    round_ = Round(
        number=plan.round,
        spec=job.spec,
        base_samples=job.tally.samples,
        total_samples=total_samples,
        opened_at_ms=job.at_ms,
        participants=participants,
        counts={WorkState.PENDING: len(participants)},
        inner_steps=plan.memory.inner_steps,
        down=plan.down,
        is_sparse=plan.is_sparse,
        resting=plan.resting,
        deadline_at_ms=Milliseconds(job.at_ms + plan.deadline_ms if plan.deadline_ms else 0),
    )
    job = replace(
        job,
        phase=Phase.TRAINING,
        reason=f"round {plan.round}: {plan.reason or f'{len(participants)} taking part'}",
        round=round_,
        members=deal.members,
        streams=deal.streams,
        next_lease=job.next_lease + len(participants),
    )
    return JobStep(job, (*deadline(job), *(assignment(job, node) for node in participants)))


def _funding_gap(job: Job, plan: RoundPlan) -> str:
    """Why the job's funding does not cover the round; empty if it does."""
    funding = job.funding
    if funding is None or funding.funded_samples is None:
        return ""
    batch = job.spec.training.batch_size
    samples = sum(part.inner_steps * part.batch(batch) for part in plan.nodes.values())
    left = max(0, funding.funded_samples - job.tally.samples)
    if samples <= left:
        return ""
    why = funding.reason or f"raise pay.escrow: hypergpu job set {job.job_id} pay.escrow=AMOUNT"
    return f"round {plan.round} has {samples} samples, {left} more are funded: {why}"


def _stated_plan(job: Job, nodes: list[NodeId]) -> RoundPlan:
    """The round as the job file has it, the same for every node, whatever was measured."""
    spec, steps = job.spec, job.spec.training.inner_steps
    each = NodePlan(
        inner_steps=steps,
        codec=spec.codec.up,
        forecast_ms=Milliseconds(0),
        spread_ms=Milliseconds(0),
        reason=f"H={steps}, {spec.codec.up}",
        connections=spec.round.connections,
        prefetch_steps=prefetch_limit(spec, steps),
    )
    is_sparse = spec.codec.up in SPARSE_SCHEMES
    return RoundPlan(
        round=job.newest_model.round,
        nodes=dict.fromkeys(nodes, each),
        resting={},
        deadline_ms=Milliseconds(spec.round.deadline_ms),
        down=spec.codec.down,
        is_sparse=is_sparse,
        memory=PlanMemory(steps, 0, is_sparse),
        reason="",
    )


def _total_samples(job: Job, number: int, participants: int) -> Samples:
    """Where schedules end: samples of the past, and of the rounds to come if all are like this."""
    training = job.spec.training
    if job.spec.strategy == "aware":
        return job.spec.stated_samples
    per_round = training.inner_steps * training.batch_size * participants
    return Samples(job.tally.samples + (training.rounds - number) * per_round)
