"""Assignments of the open round: commands for its participants, and shards that change hands."""

from collections.abc import Mapping
from typing import NamedTuple

from msgspec.structs import replace

from coordinator.core.job.commands import AssignShard, CancelShard, Command, SetDeadline
from coordinator.core.job.deltas import initial_of
from coordinator.core.job.state import Job, Participant, Phase, Round, Shard, WorkState
from coordinator.core.plan.decision import NodePlan
from coordinator.core.round.completion import available_nodes
from coordinator.core.round.shards import seed_for
from hypergpu.ids import NodeId
from hypergpu.statements.assignment import Assignment, InitialModel, Lease, Task
from hypergpu.units import Milliseconds


class JobStep(NamedTuple):
    """The effect of one event: the next state, and the commands to perform once it is persisted."""

    job: Job
    commands: tuple[Command, ...] = ()


def replace_participants(round_: Round, participants: Mapping[NodeId, Participant]) -> Round:
    """The round with these participants in place of their earlier state."""
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


def cancellations(round_: Round, reason: str) -> tuple[CancelShard, ...]:
    """Commands that void the leases of all pending participants."""
    return tuple(
        CancelShard(node, round_.number, participant.lease, reason)
        for node, participant in round_.pending.items()
    )


def assignment(job: Job, node: NodeId) -> AssignShard:
    """Give a pending participant its work. The same state gives the same command."""
    round_, model = job.open_round, job.newest_model
    participant, member = round_.participants[node], job.members[node]
    initial = initial_of(model)
    work = Assignment(
        lease=Lease(job.job_id, round_.number, participant.lease),
        slot=participant.slot,
        task=_task(job, round_, participant),
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


def _task(job: Job, round_: Round, participant: Participant) -> Task:
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
        model=job.newest_model.blob,
        layout=job.layout,
        manifest=job.manifest,
        prefetched=participant.prefetched,
    )


def vacate_shard(job: Job, node: NodeId, work: WorkState) -> JobStep:
    """Take a pending participant's shard away and give it to an idle node, if there is one."""
    round_ = job.round
    if round_ is None or (gone := round_.participants.get(node)) is None:
        return JobStep(job)
    if gone.work is WorkState.PENDING:
        round_ = replace(round_, orphans=(*round_.orphans, gone.shard))
    elif gone.work is not WorkState.HANDED_BACK:
        return JobStep(job)
    round_ = replace_participants(round_, {node: replace(gone, work=work)})
    return reassign_orphans(replace(job, round=round_))


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
    for node in _idle_nodes(job, round_):
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


def _idle_nodes(job: Job, round_: Round) -> list[NodeId]:
    """Nodes that may take an orphan over; resting ones only when nobody else is there at all."""
    idle = [
        node
        for node in available_nodes(job)
        if node not in round_.participants or round_.participants[node].work is WorkState.LOST
    ]
    awake = [node for node in idle if node not in round_.resting]
    is_staffed = any(round_.counts.get(work) for work in (WorkState.PENDING, WorkState.RECEIVED))
    return awake if awake or is_staffed else idle


def _inherited_plan(round_: Round, shard: Shard) -> NodePlan:
    """The plan of the participant that left the shard behind, without its forecast."""
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
