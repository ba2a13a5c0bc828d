"""Events of nodes: they join, leave, submit updates and hand shards back."""

from msgspec.structs import replace

from coordinator.core.job import events
from coordinator.core.job.commands import ReleaseNode
from coordinator.core.job.state import Job, Member, Phase, WorkState
from coordinator.core.round.assigning import (
    JobStep,
    reassign_orphans,
    replace_participants,
    vacate_shard,
)
from coordinator.core.round.closing import close_if_due
from coordinator.core.round.opening import open_round
from coordinator.core.round.shards import shard_samples
from hypergpu.ids import NodeId, Slot
from hypergpu.units import Bytes, Milliseconds, Samples


def add_node(job: Job, event: events.NodeJoined) -> JobStep:
    """Give the node its slot, and work if there is some."""
    before = job.members.get(event.node) or Member(Slot(len(job.members)))
    member = replace(before, is_present=True, is_leaving=False)
    job = replace(job, members={**job.members, event.node: member})
    if job.phase is Phase.WAITING:
        return open_round(job)
    return close_if_due(reassign_orphans(job))


def lose_node(job: Job, event: events.NodeLost) -> JobStep:
    """Take the node's shard away; the round goes on without it."""
    job = _remove_node(job, event.node)
    if job.phase is Phase.WAITING:
        return open_round(job)
    if job.active_phase is not Phase.TRAINING:
        return JobStep(job)
    return close_if_due(vacate_shard(job, event.node, WorkState.LOST))


def drain_node(job: Job, event: events.NodeDraining) -> JobStep:
    """Let the node finish its current work, and no more."""
    if job.round is not None and event.node in job.round.pending:
        member = replace(job.members[event.node], is_leaving=True)
        return JobStep(replace(job, members={**job.members, event.node: member}))
    job = _remove_node(job, event.node)
    job = open_round(job).job if job.phase is Phase.WAITING else job
    return JobStep(job, (ReleaseNode(event.node, event.reason),))


def receive_update(job: Job, event: events.UpdateReceived) -> JobStep:
    """Count the update in; it enters the mean when the round closes."""
    round_ = job.open_round
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
    return close_if_due(_release_if_leaving(job, event.node))


def count_rejection(job: Job, _event: events.UpdateRejected) -> JobStep:
    """Count a rejected update for the tables."""
    rejected = job.tally.updates_refused + 1
    return JobStep(replace(job, tally=replace(job.tally, updates_refused=rejected)))


def take_back_shard(job: Job, event: events.ShardHandedBack) -> JobStep:
    """Give the shard to another node; a holder that stays gets none in this round.

    One that leaves is lost to the round like any other, and may take part again once it is back.
    """
    work = WorkState.LOST if job.members[event.node].is_leaving else WorkState.HANDED_BACK
    step = _release_if_leaving(_note_memory(job, event), event.node)
    vacancy = vacate_shard(step.job, event.node, work)
    return close_if_due(JobStep(vacancy.job, (*step.commands, *vacancy.commands)))


def _note_memory(job: Job, event: events.ShardHandedBack) -> Job:
    """The job with the participant's lack of memory, by which the next plan chooses its batch."""
    if job.round is None or not event.is_out_of_memory:
        return job
    participant = replace(job.round.participants[event.node], is_out_of_memory=True)
    return replace(job, round=replace_participants(job.round, {event.node: participant}))


def _release_if_leaving(job: Job, node: NodeId) -> JobStep:
    if not job.members[node].is_leaving:
        return JobStep(job)
    return JobStep(_remove_node(job, node), (ReleaseNode(node, "it has finished its work"),))


def _remove_node(job: Job, node: NodeId) -> Job:
    """The job with ``node`` no longer present."""
    member = replace(job.members[node], is_present=False, is_leaving=False)
    return replace(job, members={**job.members, node: member})
