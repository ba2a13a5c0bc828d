"""Opening, staffing and closing a round. Pure functions on the job; the machine decides when."""

from math import ceil
from typing import NamedTuple

from msgspec.structs import replace

from coordinator.core.job.commands import (
    AssignShard,
    CancelShard,
    Command,
    PlanRound,
    SetDeadline,
)
from coordinator.core.job.deltas import initial_of
from coordinator.core.job.state import (
    Job,
    Member,
    Model,
    Participant,
    Phase,
    Round,
    Shard,
    Stream,
    WorkState,
)
from coordinator.core.plan.deadline import LEAST_MS
from coordinator.core.plan.decision import NodePlan, PlanMemory, RoundPlan
from coordinator.core.plan.spreading import prefetch_limit
from coordinator.core.round.completion import plan_request, work_samples
from coordinator.core.round.folding import aggregate
from coordinator.core.round.seeds import seed_for
from coordinator.core.round.shards import deal_shards
from coordinator.core.round.staff import nodes_needed, staff
from coordinator.core.round.streams import return_samples
from hypergpu.ids import NodeId
from hypergpu.jobfile.spec import SPARSE_SCHEMES
from hypergpu.statements.assignment import Assignment, InitialModel, Lease, Task
from hypergpu.units import Milliseconds, Samples

_ROUNDING = 1e-9  # 0.55 * 20 is a little more than 11 in floating point
_QUORUM_TIMES = 4
"""Of what its quorum took, until a round closes that was planned before anybody was measured. All
take as many steps in it, so that a node may be so many times slower than the middle one.
"""


class JobStep(NamedTuple):
    """What one event leads to: the next state, and what the shell is to do once it is persisted."""

    job: Job
    commands: tuple[Command, ...] = ()


def open_round(job: Job) -> JobStep:
    """Open the next round, or have it planned, when enough nodes are there; else wait for them."""
    if job.model is None:
        raise AssertionError("a round needs a model")
    number = job.model.round
    job = replace(job, spec=job.next_spec or job.spec, next_spec=None, round=None)
    nodes, needed = staff(job), nodes_needed(job)
    if len(nodes) < needed:
        reason = f"{len(nodes)} of {needed} nodes are here"
        return JobStep(replace(job, phase=Phase.WAITING, reason=reason))
    if job.lost_model:
        return JobStep(replace(job, phase=Phase.WAITING))
    if job.spec.strategy == "aware":
        job = replace(job, phase=Phase.PLANNING, reason=f"round {number} is being planned")
        return JobStep(job, (PlanRound(plan_request(job)),))
    return _begin_round(job, stated_plan(job, nodes))


def open_planned_round(job: Job, plan: RoundPlan) -> JobStep:
    """Open the round as planned, without the nodes that have gone since; if all have, plan again.

    A node that came since has no part in it, like any other that comes while a round is open.
    """
    nodes = {node: plan.nodes[node] for node in staff(job) if node in plan.nodes}
    if not nodes or len(staff(job)) < nodes_needed(job) or job.lost_model:
        return open_round(job)
    return _begin_round(replace(job, plan_memory=plan.memory), replace(plan, nodes=nodes))


def _begin_round(job: Job, plan: RoundPlan) -> JobStep:
    """Give every node of the plan its shard under a fresh lease, if the round is funded."""
    if why := _funding_gap(job, plan):
        return JobStep(replace(job, phase=Phase.WAITING, reason=why))
    total_samples = _total_samples(job, plan.round, len(plan.nodes))
    deal = deal_shards(job, plan, total_samples)
    participants: dict[NodeId, Participant] = {}
    lease = job.next_lease
    for node, part in plan.nodes.items():
        slot, shard, first = job.members[node].slot, deal.shards[node], deal.prefetched.get(node)
        participants[node] = Participant(slot, lease, shard, part, job.at_ms, first)
        lease += 1
    deadline_at_ms = job.at_ms + plan.deadline_ms if plan.deadline_ms else 0
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
        deadline_at_ms=Milliseconds(deadline_at_ms),
    )
    job = replace(
        job,
        phase=Phase.TRAINING,
        reason=f"round {plan.round}: {plan.reason or f'{len(participants)} taking part'}",
        round=round_,
        members=deal.members,
        streams=deal.streams,
        next_lease=lease,
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


def replace_participants(round_: Round, participants: dict[NodeId, Participant]) -> Round:
    """The round with these participants in place of what they were before."""
    counts = dict(round_.counts)
    for node, participant in participants.items():
        before = round_.participants.get(node)
        if before is not None:
            counts[before.work] -= 1
        counts[participant.work] = counts.get(participant.work, 0) + 1
    return replace(round_, participants={**round_.participants, **participants}, counts=counts)


def deadline(job: Job) -> tuple[SetDeadline, ...]:
    """The open round's deadline, if it has one that has not passed."""
    round_ = job.round
    if round_ is None or not round_.deadline_at_ms or round_.is_overdue:
        return ()
    return (SetDeadline(round_.number, round_.deadline_at_ms),)


def assignment(job: Job, node: NodeId) -> AssignShard:
    """Give a pending participant its work. The same state gives the same command."""
    round_, model = job.round, job.model
    if round_ is None or model is None:
        raise AssertionError("an assignment needs an open round")
    participant, member = round_.participants[node], job.members[node]
    initial = initial_of(model)
    work = Assignment(
        lease=Lease(job.job_id, round_.number, participant.lease),
        slot=participant.slot,
        task=_task(job, round_, model, participant),
        deltas=model.deltas,
        initial=None if initial is None else InitialModel(initial, round_.spec.training.seed),
        last_accepted=member.last_accepted,
        upload_after_ms=participant.plan.upload_after_ms,
        connections=participant.plan.connections,
        terms=job.terms,
        epoch=round_.epoch,
        prefetch=member.prefetch,
        reason=f"round {round_.number}, slot {participant.slot}: {participant.plan.reason}",
    )
    return AssignShard(node, work, round_.deadline_at_ms)


def _task(job: Job, round_: Round, model: Model, participant: Participant) -> Task:
    spec, plan, shard = round_.spec, participant.plan, participant.shard
    seed, batch_size = spec.training.seed, spec.training.batch_size
    return Task(
        workload=spec.workload,
        workload_version=job.workload_version,
        options=spec.options,
        inner_steps=plan.inner_steps,
        batch_size=plan.batch(batch_size),
        stated_batch_size=batch_size,
        learning_rate=spec.inner.learning_rate,
        weight_decay=spec.inner.weight_decay,
        warmup_steps=spec.inner.warmup_steps,
        schedule=spec.inner.schedule,
        codec=plan.codec,
        seed=seed_for(seed, "inner", participant.slot, round_.number),
        global_samples=round_.base_samples,
        total_samples=round_.total_samples,
        partition=shard.partition,
        partitions=len(job.streams),
        skew_alpha=spec.data.alpha if spec.data.sharding == "dirichlet" else 0.0,
        data_seed=seed,
        ranges=shard.ranges,
        model=model.blob,
        layout=job.layout,
        manifest=job.manifest,
        prefetched=participant.prefetched,
    )


def stated_plan(job: Job, nodes: list[NodeId]) -> RoundPlan:
    """The round as the job file has it, the same for every node, whatever was measured."""
    if job.model is None:
        raise AssertionError("a round needs a model")
    spec, steps = job.spec, job.spec.training.inner_steps
    none = Milliseconds(0)
    each = NodePlan(
        inner_steps=steps,
        codec=spec.codec.up,
        forecast_ms=none,
        spread_ms=none,
        reason=f"H={steps}, {spec.codec.up}",
        connections=spec.round.connections,
        prefetch_steps=prefetch_limit(spec, steps),
    )
    is_sparse = spec.codec.up in SPARSE_SCHEMES
    return RoundPlan(
        round=job.model.round,
        nodes=dict.fromkeys(nodes, each),
        resting={},
        deadline_ms=Milliseconds(spec.round.deadline_ms),
        down=spec.codec.down,
        is_sparse=is_sparse,
        memory=PlanMemory(steps, 0, is_sparse),
        reason="",
    )


def _total_samples(job: Job, number: int, participants: int) -> Samples:
    """Where schedules end: what was processed, and the rounds to come as if they were like this."""
    training = job.spec.training
    if job.spec.strategy == "aware":
        return work_samples(job.spec)
    per_round = training.inner_steps * training.batch_size * participants
    return Samples(job.tally.samples + (training.rounds - number) * per_round)


def vacate_shard(job: Job, node: NodeId, work: WorkState) -> JobStep:
    """Take a pending participant's shard away and give it to an idle node, if there is one."""
    round_ = job.round
    if round_ is None or (gone := round_.participants.get(node)) is None:
        return JobStep(job)
    if gone.work is WorkState.PENDING:
        round_ = replace(round_, orphans=(*round_.orphans, gone.shard))
    elif gone.work is not WorkState.HANDED_BACK:
        return JobStep(job)
    return reassign_orphans(
        replace(job, round=replace_participants(round_, {node: replace(gone, work=work)}))
    )


def reassign_orphans(job: Job) -> JobStep:
    """Give orphaned shards to nodes that have no part in the round yet, and lost nodes that are
    back.
    """
    round_ = job.round
    if round_ is None or not round_.orphans or job.phase is not Phase.TRAINING:
        return JobStep(job)
    orphans = list(round_.orphans)
    lease = job.next_lease
    started: dict[NodeId, Participant] = {}
    for node in _idle(job, round_):
        if not orphans:
            break
        before = round_.participants.get(node)
        own = before is not None and before.shard in orphans
        shard = orphans.pop(orphans.index(before.shard) if own and before else 0)
        plan = _inherited_plan(round_, shard)
        started[node] = Participant(job.members[node].slot, lease, shard, plan, job.at_ms)
        lease += 1
    round_ = replace_participants(replace(round_, orphans=tuple(orphans)), started)
    job = replace(job, round=round_, next_lease=lease)
    return JobStep(job, tuple(assignment(job, node) for node in started))


def _idle(job: Job, round_: Round) -> list[NodeId]:
    """Nodes that may take an orphan over; resting ones only when nobody else is there at all."""
    idle = [
        node
        for node in staff(job)
        if node not in round_.participants or round_.participants[node].work is WorkState.LOST
    ]
    awake = [node for node in idle if node not in round_.resting]
    is_manned = any(round_.counts.get(work, 0) for work in (WorkState.PENDING, WorkState.RECEIVED))
    return awake if awake or is_manned else idle


def _inherited_plan(round_: Round, shard: Shard) -> NodePlan:
    """The plan of the participant that left the shard behind, for a node nothing is forecast of."""
    plan = next(each.plan for each in round_.participants.values() if each.shard == shard)
    return NodePlan(
        inner_steps=plan.inner_steps,
        codec=plan.codec,
        forecast_ms=Milliseconds(0),
        spread_ms=Milliseconds(0),
        reason=f"H={plan.inner_steps}, {plan.codec}, taken over",
        connections=plan.connections,
        batch_size=plan.batch_size,
    )


def close_if_due(job: Job) -> JobStep:
    """Close the round if its rule says so; otherwise leave it open.

    It closes when no expected update is missing, or when its deadline has passed and a quorum is
    there. A round without a single update never closes. One that was planned without a deadline,
    since nothing was known of its nodes, has one as soon as its quorum is there.
    """
    round_ = job.round
    if round_ is None or job.phase is not Phase.TRAINING or job.lost_model:
        return JobStep(job)
    received, pending = (
        round_.counts.get(work, 0) for work in (WorkState.RECEIVED, WorkState.PENDING)
    )
    # Who is gone counts only as long as nobody has taken the shard over.
    assigned = received + pending + len(round_.orphans)
    quorum = max(1, ceil(round_.spec.round.quorum * assigned - _ROUNDING))
    if not received:
        has_handed_back = round_.counts.get(WorkState.HANDED_BACK, 0) > 0
        return _pause_if_stalled(job) if not pending and has_handed_back else JobStep(job)
    if not pending:
        why = f"every expected update is there ({received} of {assigned})"
    elif round_.is_overdue and received >= quorum:
        why = f"deadline passed with a quorum ({received} of {assigned}, {quorum} needed)"
    else:
        return _bound_round(job, round_) if received >= quorum else JobStep(job)
    cut = tuple(
        CancelShard(node, round_.number, participant.lease, f"round {round_.number} closed: {why}")
        for node, participant in round_.participants.items()
        if participant.work is WorkState.PENDING
    )
    job = _close_round(job, why)
    return JobStep(job, (*cut, aggregate(job)))


def _bound_round(job: Job, round_: Round) -> JobStep:
    """Give the round a deadline if its plan could not: a node that hangs does so for ever."""
    if round_.spec.strategy != "aware" or round_.deadline_at_ms:
        return JobStep(job)
    took_ms = max(participant.took_ms for participant in round_.participants.values())
    at_ms = Milliseconds(job.at_ms + max(LEAST_MS, (_QUORUM_TIMES - 1) * took_ms))
    job = replace(job, round=replace(round_, deadline_at_ms=at_ms))
    return JobStep(job, deadline(job))


def _pause_if_stalled(job: Job) -> JobStep:
    """Everybody who is here gave the shard back: trying again at once would only repeat it."""
    if not staff(job):
        return JobStep(job)
    return JobStep(
        replace(
            job,
            phase=Phase.PAUSED,
            resume_to=Phase.TRAINING,
            paused_at_ms=job.at_ms,
            reason="every participant handed its shard back; see the nodes' reasons",
        )
    )


def _close_round(job: Job, why: str) -> Job:
    """The closed round: shards without an update go back to their streams."""
    round_ = job.round
    if round_ is None:
        raise AssertionError("no round to close")
    streams = list(job.streams)
    cut: dict[NodeId, Participant] = {}
    for node, participant in round_.participants.items():
        if participant.work is WorkState.PENDING:
            cut[node] = replace(participant, work=WorkState.CUT)
            _return_shard(streams, participant.shard)
    for shard in round_.orphans:
        _return_shard(streams, shard)
    return replace(
        job,
        phase=Phase.AGGREGATING,
        reason=f"round {round_.number} closed: {why}",
        round=replace_participants(replace(round_, orphans=()), cut),
        streams=tuple(streams),
    )


def _return_shard(streams: list[Stream], shard: Shard) -> None:
    streams[shard.partition] = return_samples(streams[shard.partition], shard.ranges)


def without_node(job: Job, node: NodeId) -> dict[NodeId, Member]:
    """The members with ``node`` no longer present."""
    member = replace(job.members[node], is_present=False, is_leaving=False)
    return {**job.members, node: member}
