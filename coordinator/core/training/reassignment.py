"""Shards that move to another node while a round is open, and the participants that are late."""

from msgspec.structs import replace

from coordinator.core.training.assignment import JobStep, assignment, replace_participants
from coordinator.core.training.available import available_nodes, fit_of
from coordinator.core.training.experts import with_experts
from coordinator.core.training.job.commands import CancelShard
from coordinator.core.training.job.state import Job, Member, Participant, Phase, Round, Shard
from coordinator.core.training.plan.decision import NodePlan
from coordinator.core.training.plan.memory_fit import fit_plan
from coordinator.core.training.streams import return_samples, take_samples
from coordinator.core.training.waiting import is_awaited, late_at_ms, waits_for_all
from coordinator.core.work.leases import WorkState
from coordinator.core.work.pairs import without_pair
from hypergpu.ids import NodeId
from hypergpu.units import Samples


def vacate_shard(job: Job, node: NodeId, work: WorkState) -> JobStep:
    """Take an open participant's shard away and give it to an idle node, if there is one. Of a
    duplicate the other one is left.
    """
    round_ = job.round
    if round_ is None or (participant := round_.participants.get(node)) is None:
        return JobStep(job)
    if participant.is_open and round_.partner(node) is not None:
        round_ = replace(round_, duplicates=without_pair(round_.duplicates, node))
    elif participant.is_open and participant.repeats is None:
        round_ = replace(round_, orphans=(*round_.orphans, participant.shard))
    elif not participant.is_open and participant.work is not WorkState.HANDED_BACK:
        return JobStep(job)
    round_ = replace_participants(round_, {node: replace(participant, work=work)})
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
    idle = _idle_nodes(job, round_)
    job = with_experts(job, idle[: len(orphans)])
    new_participants: dict[NodeId, Participant] = {}
    for node in idle:
        if not orphans:
            break
        before = round_.participants.get(node)
        own = before is not None and before.shard in orphans
        shard = orphans.pop(orphans.index(before.shard) if own and before else 0)
        member, plan = job.members[node], _inherited_plan(round_, shard)
        if job.spec.data.stays_on_nodes and not own:
            job, shard = _swap_shard(job, node, shard, plan)
        plan = fit_plan(plan, fit_of(job, node), round_.spec)
        new_participants[node] = Participant(
            slot=member.slot,
            lease=lease,
            shard=shard,
            plan=plan,
            assigned_at_ms=job.at_ms,
            work=_first_work(round_, member),
            experts=member.experts,
        )
        lease += 1
    round_ = replace_participants(replace(round_, orphans=tuple(orphans)), new_participants)
    job = replace(job, round=round_, next_lease=lease)
    return JobStep(job, tuple(assignment(job, node) for node in new_participants))


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
        cancel = CancelShard(node, round_.number, lease, reason)
        step = JobStep(vacancy.job, (*step.commands, cancel, *vacancy.commands))
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
