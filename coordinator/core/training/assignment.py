"""Which samples go to whom, and the commands that give shards out or move them.

A prefetch is a piece of a stream like a shard, kept with a member until the next round opens. There
it becomes the beginning of the member's shard, or goes back into the stream: nothing is dropped,
and nothing counts that no accepted update covers.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from blake3 import blake3
from msgspec.structs import replace

from coordinator.core.persistent_map import replace_items
from coordinator.core.training.available import available_nodes, fit_of
from coordinator.core.training.job.chain import initial_of
from coordinator.core.training.job.commands import AssignShard, CancelShard, Command, SetDeadline
from coordinator.core.training.job.state import (
    Job,
    LeaseBase,
    Member,
    Participant,
    Phase,
    Round,
    Shard,
    Stream,
)
from coordinator.core.training.plan.decision import (
    MemoryFit,
    NodePlan,
    NodeResult,
    PlanRequest,
    RoundPlan,
)
from coordinator.core.training.plan.memory_fit import fit_plan, fitted_rule
from coordinator.core.training.streams import return_samples, shard_samples, take_samples
from coordinator.core.training.waiting import (
    is_awaited,
    late_at_ms,
    members_on_trial,
    resting_members,
    standing_reason,
    waits_for_all,
)
from coordinator.core.work.leases import WorkState
from coordinator.core.work.pairs import without_pair
from hypergpu.ids import NodeId
from hypergpu.statements import Assignment, InitialModel, Lease, Prefetch, Task
from hypergpu.units import Milliseconds, Samples


class ShardDeal(NamedTuple):
    """Who has which samples once the round is open."""

    shards: dict[NodeId, Shard]
    prefetched: dict[NodeId, Prefetch]
    """The beginnings of shards that were prefetches of the round before."""
    members: dict[NodeId, Member]
    streams: tuple[Stream, ...]


def seed_for(job_seed: int, purpose: str, *keys: int) -> int:
    """A 63-bit seed that depends on nothing but its arguments."""
    text = "/".join((str(job_seed), purpose, *map(str, keys)))
    return int.from_bytes(blake3(text.encode()).digest(8), "big") >> 1


def due_prefetch(job: Job, node: NodeId) -> Prefetch | None:
    """A member's prefetch of the round after the newest model's; None without one."""
    prefetch = job.members[node].prefetch
    is_due = prefetch is not None and job.model is not None and prefetch.round == job.model.round
    return prefetch if is_due else None


def deal_shards(job: Job, plan: RoundPlan, total_samples: Samples) -> ShardDeal:
    """Give every node of the plan its shard and, unless the job is done then, its next prefetch.

    Args:
        job: The job before the round.
        plan: The plan of the round.
        total_samples: With so many the job is done, and schedules end there.
    """
    stated, streams = job.spec.training.batch_size, list(job.streams)
    members, prefetched = dict(job.members), {}
    for node, member in job.members.items():
        if (prefetch := member.prefetch) is None:
            continue
        members[node] = replace(member, prefetch=None)
        if _is_of_use(prefetch, plan.round, plan.nodes.get(node), stated):
            prefetched[node] = prefetch
        else:
            return_samples(streams, job.partition_of(node), prefetch.ranges)
    shards = {}
    places = _partitions(job, plan, streams, prefetched)
    for node, part in plan.nodes.items():
        first = prefetched[node].ranges if node in prefetched else ()
        samples = Samples(part.inner_steps * part.batch(stated) - shard_samples(first))
        place = places[node]
        rest, streams[place] = take_samples(streams[place], samples)
        shards[node] = Shard(place, (*first, *rest))
    done = job.tally.samples + sum(shard_samples(shard.ranges) for shard in shards.values())
    for node, part in plan.nodes.items() if done < total_samples else ():
        if not part.prefetch_steps:
            continue
        slot, number = members[node].slot, plan.round + 1
        place = job.partition_of(node)
        samples = Samples(part.prefetch_steps * part.batch(stated))
        ranges, streams[place] = take_samples(streams[place], samples)
        seed = seed_for(job.spec.training.seed, "prefetch", slot, number)
        prefetch = Prefetch(number, part.prefetch_steps, ranges, seed, Samples(done), total_samples)
        members[node] = replace(members[node], prefetch=prefetch)
    return ShardDeal(shards, prefetched, members, tuple(streams))


def _partitions(
    job: Job, plan: RoundPlan, streams: list[Stream], prefetched: Mapping[NodeId, Prefetch]
) -> dict[NodeId, int]:
    """The partition of each node: its own, or one that was left behind by nodes that have no part
    in the round; those who take one over are others from round to round. Where data stay on nodes
    there is nothing to take over.
    """
    places = {node: job.partition_of(node) for node in plan.nodes}
    if job.spec.data.stays_on_nodes:
        return places
    served = set(places.values())
    left = [n for n, stream in enumerate(streams) if stream.returned and n not in served]
    free = [node for node in places if node not in prefetched]
    for count, partition in enumerate(left[: len(free)]):
        places[free[(plan.round + count) % len(free)]] = partition
    return places


def _is_of_use(prefetch: Prefetch, number: int, part: NodePlan | None, stated: int) -> bool:
    """Whether the node takes part, with so many steps of that size at least."""
    if part is None or prefetch.round != number or part.inner_steps < prefetch.inner_steps:
        return False
    return shard_samples(prefetch.ranges) == prefetch.inner_steps * part.batch(stated)


def is_done(job: Job) -> bool:
    """Whether no further round is due: planned rounds differ in size, so their samples count."""
    if job.model is None:
        return False
    if job.spec.strategy == "aware":
        return job.tally.samples >= job.spec.stated_samples
    return job.model.round >= job.spec.training.rounds


def plan_request(job: Job) -> PlanRequest:
    """All that the plan of the next round may depend on. The same state gives the same request."""
    resting = resting_members(job, job.newest_model.round)
    nodes = [node for node in available_nodes(job) if node not in resting]
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
    kept = {node: each for node, each in round_.participants.items() if node not in nodes}
    return replace(round_, participants=kept, counts=counts)


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
    # Nodes draw it, unless it is of given weights.
    initial = initial_of(base.model) if job.weights is None else None
    work = Assignment(
        lease=Lease(job.job_id, base.round, participant.lease),
        slot=participant.slot,
        task=_task(job, base, participant),
        deltas=base.model.deltas,
        initial=None if initial is None else InitialModel(initial, base.spec.training.seed),
        last_accepted=member.last_accepted,
        upload_after_ms=participant.plan.upload_after_ms,
        connections=participant.plan.connections,
        terms=job.terms,
        epoch=base.epoch,
        prefetch=member.prefetch,
        reason=f"round {base.round}, slot {participant.slot}: {participant.plan.reason}",
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
        model=base.model.blob,
        layout=job.layout,
        manifest=job.manifest,
        data_name=spec.data.name,
        prefetched=participant.prefetched,
    )


def _seed_slot(participant: Participant) -> int:
    return participant.slot if participant.seed_slot is None else participant.seed_slot


def vacate_shard(job: Job, node: NodeId, work: WorkState) -> JobStep:
    """Take an open participant's shard away and give it to an idle node, if there is one. Of a
    duplicate the other one is left.
    """
    round_ = job.round
    if round_ is None or (gone := round_.participants.get(node)) is None:
        return JobStep(job)
    if gone.is_open and round_.partner(node) is not None:
        round_ = replace(round_, duplicates=without_pair(round_.duplicates, node))
    elif gone.is_open and gone.repeats is None:
        round_ = replace(round_, orphans=(*round_.orphans, gone.shard))
    elif not gone.is_open and gone.work is not WorkState.HANDED_BACK:
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
        member, plan = job.members[node], _inherited_plan(round_, shard)
        if job.spec.data.stays_on_nodes and not own:
            job, shard = _swap_shard(job, node, shard, plan)
        plan = fit_plan(plan, fit_of(job, node), round_.spec)
        started[node] = Participant(
            slot=member.slot,
            lease=lease,
            shard=shard,
            plan=plan,
            assigned_at_ms=job.at_ms,
            work=_first_work(round_, member),
        )
        lease += 1
    round_ = replace_participants(replace(round_, orphans=tuple(orphans)), started)
    job = replace(job, round=round_, next_lease=lease)
    return JobStep(job, tuple(assignment(job, node) for node in started))


def _swap_shard(job: Job, node: NodeId, left: Shard, plan: NodePlan) -> tuple[Job, Shard]:
    """Put a shard back into its stream, and take one of the node's own samples in its place."""
    streams, place = list(job.streams), job.partition_of(node)
    return_samples(streams, left.partition, left.ranges)
    samples = Samples(plan.inner_steps * plan.batch(job.spec.training.batch_size))
    ranges, streams[place] = take_samples(streams[place], samples)
    return replace(job, streams=tuple(streams)), Shard(place, ranges)


def _first_work(round_: Round, member: Member) -> WorkState:
    """Where a member begins that takes a shard over: nobody waits for one on trial, unless nobody
    else works.
    """
    is_staffed = any(round_.counts.get(work) for work in (WorkState.PENDING, WorkState.RECEIVED))
    is_on_trial = is_staffed and not is_awaited(round_.spec, member.standing)
    return WorkState.ON_TRIAL if is_on_trial else WorkState.PENDING


def mark_late(job: Job) -> Job:
    """The job with those late who are over their limits. While no update is in, nobody is."""
    round_ = job.open_round
    if not round_.longest_ms or waits_for_all(round_.spec):
        return job
    late = {
        node: replace(participant, work=WorkState.LATE)
        for node, participant in round_.participants.items()
        if participant.work is WorkState.PENDING and late_at_ms(job, node) <= job.at_ms
    }
    return replace(job, round=replace_participants(round_, late))


def relieve_silent(job: Job) -> JobStep:
    """While no update is in: give shards that are overdue, or that only nodes on trial have, to
    idle nodes. Else a round of silent nodes would keep later ones out for ever.
    """
    round_ = job.round
    if round_ is None or job.phase is not Phase.TRAINING or round_.longest_ms:
        return JobStep(job)
    idle = _idle_nodes(job, round_)
    spare = len(idle) - len(round_.orphans)
    if waits_for_all(round_.spec) or spare <= 0:
        return JobStep(job)
    is_unproven = not round_.counts.get(WorkState.PENDING)
    over = [
        node
        for node in round_.pending
        if late_at_ms(job, node) <= job.at_ms
        or (is_unproven and any(job.members[one].standing.is_proven for one in idle))
    ]
    step = JobStep(job)
    for node in sorted(over, key=lambda one: round_.participants[one].lease)[:spare]:
        reason = "its shard was given to a node that was idle: no update had come in"
        lease = round_.participants[node].lease
        vacancy = vacate_shard(step.job, node, WorkState.PASSED_OVER)
        cancelled = CancelShard(node, round_.number, lease, reason)
        step = JobStep(vacancy.job, (*step.commands, cancelled, *vacancy.commands))
    return step


def _idle_nodes(job: Job, round_: Round) -> list[NodeId]:
    """Nodes that may take an orphan over; those that rest or were passed over only when nobody
    else is there at all.
    """
    works = {node: part.work for node, part in round_.participants.items()}
    able = [node for node in available_nodes(job) if works.get(node, WorkState.LOST) in _IDLE]
    awake = [
        node
        for node in able
        if node not in round_.resting and works.get(node) is not WorkState.PASSED_OVER
    ]
    staff = (WorkState.PENDING, WorkState.ON_TRIAL, WorkState.RECEIVED)
    return awake if awake or any(round_.counts.get(work) for work in staff) else able


_IDLE = frozenset({WorkState.LOST, WorkState.PASSED_OVER})


def _inherited_plan(round_: Round, shard: Shard) -> NodePlan:
    """The plan of the participant that left the shard behind, without its forecast."""
    plan = next(each.plan for each in round_.participants.values() if each.shard == shard)
    return NodePlan(
        inner_steps=plan.inner_steps,
        codec=plan.codec,
        reason=f"H={plan.inner_steps}, {plan.codec}, taken over",
        connections=plan.connections,
        batch_size=plan.batch_size,
        learning_rate=plan.learning_rate,
    )


def plan_reason(job: Job, node: NodeId) -> str:
    """Reason of the node's part in the job's newest round: ``H=20, batch 10 of 32, ...``, or why
    it rests; empty: no plan named it, and it keeps up.
    """
    round_ = job.round or job.closed
    if round_ is None:
        return ""
    if node in round_.resting:
        return round_.resting[node]
    if (held := job.long_leases.get(node)) is not None:
        return held.plan.reason
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
