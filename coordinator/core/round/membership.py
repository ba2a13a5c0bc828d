"""What nodes do: join, leave, submit updates, hand shards back."""

from msgspec.structs import replace

from coordinator.core.job.commands import CancelShard, Command, ReleaseNode
from coordinator.core.job.events import (
    NodeDraining,
    NodeJoined,
    NodeLost,
    ShardHandedBack,
    UpdateReceived,
)
from coordinator.core.job.state import Job, Member, Phase, Round, WorkState
from coordinator.core.round.rounds import (
    JobStep,
    close_if_due,
    open_round,
    reassign_orphans,
    replace_participants,
    vacate_shard,
    without_node,
)
from coordinator.core.round.shards import shard_samples
from hypergpu.ids import NodeId, Slot
from hypergpu.units import Bytes, Milliseconds, Samples


def add_node(job: Job, event: NodeJoined) -> JobStep:
    """Give the node its slot, and work if there is some."""
    before = job.members.get(event.node)
    member = (
        Member(Slot(len(job.members)))
        if before is None
        else replace(before, is_present=True, is_leaving=False)
    )
    job = replace(job, members={**job.members, event.node: member})
    if job.phase is Phase.WAITING:
        return open_round(job)
    if job.phase is Phase.TRAINING:
        return _then_close_if_due(reassign_orphans(job))
    return JobStep(job)


def lose_node(job: Job, event: NodeLost) -> JobStep:
    """Take the node's shard away; the round goes on without it."""
    job = replace(job, members=without_node(job, event.node))
    if job.phase is Phase.WAITING:
        return open_round(job)
    if job.round is None or Phase.TRAINING not in (job.phase, job.resume_to):
        return JobStep(job)
    return _then_close_if_due(vacate_shard(job, event.node, WorkState.LOST))


def drain_node(job: Job, event: NodeDraining) -> JobStep:
    """Let the node finish what it holds, and no more."""
    if _is_pending(job.round, event.node):
        member = replace(job.members[event.node], is_leaving=True)
        return JobStep(replace(job, members={**job.members, event.node: member}))
    job = replace(job, members=without_node(job, event.node))
    job = open_round(job).job if job.phase is Phase.WAITING else job
    return JobStep(job, (ReleaseNode(event.node, event.reason),))


def receive_update(job: Job, event: UpdateReceived) -> JobStep:
    """Count the update in; it enters the mean when the round closes."""
    round_ = job.round
    if round_ is None:
        raise AssertionError("the fence lets no update through without a round")
    participant = round_.participants[event.node]
    samples = shard_samples(participant.shard.ranges)
    update = replace(
        event.update,
        samples=samples,
        inner_steps=participant.inner_steps,
        codec=participant.codec,
    )
    took_ms = Milliseconds(max(1, event.at_ms - participant.assigned_at_ms))
    participant = replace(participant, work=WorkState.RECEIVED, update=update, took_ms=took_ms)
    member = replace(
        job.members[event.node], last_accepted=update.blob.digest, accepted_lease=event.lease
    )
    tally = replace(
        job.tally,
        samples=Samples(job.tally.samples + samples),
        bytes_up=Bytes(job.tally.bytes_up + update.blob.size_bytes),
        updates_accepted=job.tally.updates_accepted + 1,
    )
    job = replace(
        job,
        round=replace_participants(round_, {event.node: participant}),
        members={**job.members, event.node: member},
        tally=tally,
    )
    return _then_close_if_due(_release_if_leaving(job, event.node))


def count_rejection(job: Job) -> JobStep:
    """Count a refusal for the tables."""
    refused = job.tally.updates_refused + 1
    return JobStep(replace(job, tally=replace(job.tally, updates_refused=refused)))


def take_back_shard(job: Job, event: ShardHandedBack) -> JobStep:
    """Give the shard to somebody else; a holder that stays gets none in this round.

    One that leaves is lost to the round like any other, and may take part again once it is back.
    """
    work = WorkState.LOST if job.members[event.node].is_leaving else WorkState.HANDED_BACK
    step = _release_if_leaving(_note_memory(job, event), event.node)
    vacancy = vacate_shard(step.job, event.node, work)
    return _then_close_if_due(JobStep(vacancy.job, (*step.commands, *vacancy.commands)))


def _note_memory(job: Job, event: ShardHandedBack) -> Job:
    """The job with the participant's lack of memory, by which the next plan chooses its batch."""
    if job.round is None or not event.is_out_of_memory:
        return job
    participant = replace(job.round.participants[event.node], is_out_of_memory=True)
    return replace(job, round=replace_participants(job.round, {event.node: participant}))


def _is_pending(round_: Round | None, node: NodeId) -> bool:
    participant = round_.participants.get(node) if round_ is not None else None
    return participant is not None and participant.work is WorkState.PENDING


def _release_if_leaving(job: Job, node: NodeId) -> JobStep:
    if not job.members[node].is_leaving:
        return JobStep(job)
    return JobStep(
        replace(job, members=without_node(job, node)),
        (ReleaseNode(node, "it has finished its work"),),
    )


def _then_close_if_due(step: JobStep) -> JobStep:
    after = close_if_due(step.job)
    return JobStep(after.job, (*step.commands, *after.commands))


def release_all(job: Job, reason: str) -> JobStep:
    """Take all work back and let every node go: the job has no use for them any more."""
    commands: list[Command] = []
    if job.round is not None:
        commands += [
            CancelShard(node, job.round.number, participant.lease, reason)
            for node, participant in job.round.participants.items()
            if participant.work is WorkState.PENDING
        ]
    present = [node for node, member in job.members.items() if member.is_present]
    commands += [ReleaseNode(node, reason) for node in present]
    members = {
        node: replace(member, is_present=False, is_leaving=False)
        for node, member in job.members.items()
    }
    return JobStep(replace(job, members=members), tuple(commands))
