"""What members of a round are assigned, and the steps that change who takes part."""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from coordinator.core.persistent_map import replace_items
from coordinator.core.training.available import available_nodes, fit_of
from coordinator.core.training.deal import due_prefetch, seed_for
from coordinator.core.training.experts import experts_text
from coordinator.core.training.job.chain import initial_of
from coordinator.core.training.job.commands import AssignShard, CancelShard, Command, SetDeadline
from coordinator.core.training.job.state import Job, LeaseBase, Participant, Round
from coordinator.core.training.plan.decision import MemoryFit, NodeResult, PlanRequest
from coordinator.core.training.plan.memory_fit import fitted_rule
from coordinator.core.training.waiting import members_on_trial, resting_members, standing_reason
from coordinator.core.work.leases import WorkState
from hypergpu.assignment import Assignment, InitialModel, Lease, Task
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds


def is_done(job: Job) -> bool:
    """Whether no further round is due: planned rounds differ in size, so their samples count."""
    if job.model is None:
        return False
    if job.spec.strategy == "aware":
        return job.tally.samples >= job.spec.stated_samples
    return job.model.round >= job.spec.training.rounds


def plan_request(job: Job) -> PlanRequest:
    """All that the plan of the next round may depend on. The same state gives the same request."""
    resting_reasons = resting_members(job, job.newest_model.round)
    nodes = [node for node in available_nodes(job) if node not in resting_reasons]
    due = {node: due_prefetch(job, node) for node in nodes}
    return PlanRequest(
        round=job.newest_model.round,
        at_ms=job.at_ms,
        spec=job.spec,
        candidates={node: job.members[node].slot for node in nodes},
        samples_done=job.tally.samples,
        samples_total=job.spec.stated_samples,
        previous=job.plan_memory,
        results=_results(job.closed),
        agreement=job.closed.agreement if job.closed is not None else None,
        prefetched={node: each.inner_steps for node, each in due.items() if each},
        on_trial=members_on_trial(job, nodes),
        fits={node: fit for node in nodes if (fit := fit_of(job, node)) != MemoryFit()},
        under_way=frozenset(job.long_leases),
    )


def _results(round_: Round | None) -> dict[NodeId, NodeResult]:
    """What became of a round's participants, for the plan after it."""
    if round_ is None:
        return {}
    return {
        node: NodeResult(
            participant.plan,
            participant.took_ms,
            _is_lapsed(participant),
            participant.update.compute_ms if participant.update else Milliseconds(0),
        )
        for node, participant in round_.participants.items()
        if participant.work is not WorkState.UNREADABLE
    }


def _is_lapsed(participant: Participant) -> bool:
    return participant.base is not None and participant.work is WorkState.CUT


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
    return replace(
        round_, participants=replace_items(round_.participants, participants), counts=counts
    )


def without_participants(round_: Round, nodes: Collection[NodeId]) -> Round:
    """The round without these participants."""
    counts = dict(round_.counts)
    for node in nodes:
        counts[round_.participants[node].work] -= 1
    kept_participants = {
        node: each for node, each in round_.participants.items() if node not in nodes
    }
    return replace(round_, participants=kept_participants, counts=counts)


def deadline(job: Job) -> tuple[SetDeadline, ...]:
    """The open round's timer, if it has one."""
    round_ = job.round
    if round_ is None or not round_.timer_at_ms:
        return ()
    return (SetDeadline(round_.number, round_.timer_at_ms),)


def cancellations(round_: Round, reason: str) -> tuple[CancelShard, ...]:
    """Commands that void the leases of all participants whose updates could still come in."""
    return tuple(
        CancelShard(node, round_.number, participant.lease, reason)
        for node, participant in round_.pending.items()
    )


def assignment(job: Job, node: NodeId) -> AssignShard:
    """Give a participant whose update may still come in its work. The same state gives the same
    command.
    """
    participant, member = job.participant(node), job.members[node]
    if participant is None:
        raise AssertionError(f"{node} has no work in {job.job_id}")
    base = participant.base or round_base(job)
    part = base.model.part(participant.experts)
    # Nodes draw it, unless it is of given weights, or a part of a model.
    initial = initial_of(base.model) if job.weights is None and part is None else None
    reasons = (participant.plan.reason, experts_text(job.mixture, participant.experts))
    work = Assignment(
        lease=Lease(job.job_id, base.round, participant.lease),
        slot=participant.slot,
        task=_task(job, base, participant),
        deltas=base.model.deltas if part is None else part.deltas,
        initial=None if initial is None else InitialModel(initial, base.spec.training.seed),
        last_accepted=member.last_accepted,
        upload_after_ms=participant.plan.upload_after_ms,
        connections=participant.plan.connections,
        terms=job.terms,
        epoch=base.epoch,
        prefetch=member.prefetch,
        reason=", ".join(filter(None, reasons)),
        judgement=member.judgement,
    )
    is_awaited = participant.base is None
    deadline_at_ms = job.open_round.deadline_at_ms if is_awaited else Milliseconds(0)
    return AssignShard(node, work, deadline_at_ms)


def round_base(job: Job) -> LeaseBase:
    """What leases of the open round are given out with."""
    round_ = job.open_round
    return LeaseBase(
        round=round_.number,
        last_round=round_.number,
        spec=round_.spec,
        model=job.newest_model,
        base_samples=round_.base_samples,
        total_samples=round_.total_samples,
    )


def _task(job: Job, base: LeaseBase, participant: Participant) -> Task:
    spec, plan, shard = base.spec, participant.plan, participant.shard
    part = base.model.part(participant.experts)
    seed, batch_size = spec.training.seed, spec.training.batch_size
    return Task(
        workload=spec.workload,
        workload_version=job.workload_version,
        options=spec.options,
        inner_steps=plan.inner_steps,
        batch_size=plan.batch(batch_size),
        stated_batch_size=batch_size,
        learning_rate=plan.learning_rate or spec.inner.learning_rate,
        optimizer=fitted_rule(plan, spec),
        warmup_steps=spec.inner.warmup_steps,
        schedule=spec.inner.schedule,
        codec=plan.codec,
        seed=seed_for(seed, "inner", _seed_slot(participant), base.round),
        global_samples=base.base_samples,
        total_samples=base.total_samples,
        partition=shard.partition,
        # Of nodes' own data there are as many as members, whose number must not change a task.
        partitions=1 if spec.data.stays_on_nodes else len(job.streams),
        skew_alpha=spec.data.alpha if spec.data.sharding == "dirichlet" else 0.0,
        data_seed=seed,
        ranges=shard.ranges,
        model=base.model.blob if part is None else part.blob,
        layout=job.layout if part is None else part.layout,
        experts=participant.experts or msgspec.UNSET,
        manifest=job.manifest,
        data_name=spec.data.name,
        prefetched=participant.prefetched,
    )


def _seed_slot(participant: Participant) -> int:
    return participant.slot if participant.seed_slot is None else participant.seed_slot


def plan_reason(job: Job, node: NodeId) -> str:
    """Reason of the node's part in the job's newest round: ``H=20, batch 10 of 32, ...``, or why
    it rests; empty: no plan named it, and it keeps up.
    """
    round_ = job.round or job.closed
    if round_ is None:
        return ""
    if node in round_.resting:
        return round_.resting[node]
    if (long_lease := job.long_leases.get(node)) is not None:
        return long_lease.plan.reason
    participant = round_.participants.get(node)
    if participant is None:
        return ""
    if reason := standing_reason(job.members[node], participant):
        return reason
    if round_.spec.strategy != "aware" and not participant.plan.micro_batch:
        return ""
    return participant.plan.reason


def newest_plan_reason(jobs: Iterable[Job], node: NodeId) -> str:
    """Reason of the part of a node without a job in the newest that it had a part in, which is
    named; empty: it had none. The newest job comes first.
    """
    for job in jobs:
        if node in job.members and (reason := plan_reason(job, node)):
            return f"in {job.job_id}: {reason}"
    return ""
